"""A small GPT learns Python from the sources of the standard library, byte by byte.

The loop is that of a PyTorch AMP script: Flax NNX, `jamp.autocast`, `jamp.GradScaler`,
gradient accumulation and clipping. It trains in float32 and in float16 from the same
weights and with the same batches, prints a table and a sample, and draws
`runs/gpt/training.png`.

    python examples/gpt.py                        # a minute or two on a CPU
    python examples/gpt.py --seeds 0 1 2
    python examples/gpt.py --precisions bfloat16 float8 float8-rowwise
    python examples/gpt.py --experts 8 --precisions bfloat16 float8
    python examples/gpt.py --layers 12 --width 768 --heads 12 --length 1024 \\
        --batch-size 32 --accumulate 8 --steps 20000  # GPT-2's size, for a GPU

Needs `pip install ".[examples]"`.
"""

import functools
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import PRECISIONS, Training, add_flag, compare, make_parser, report

import jamp

FLOAT8 = {
    "float8": jamp.Float8(),  # or its name, "float8"
    "float8-rowwise": jamp.Float8("rowwise"),
    "float8-rowwise_with_gw_hp": jamp.Float8("rowwise_with_gw_hp"),
}


class MLP(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Experts(nnx.Module):
    """A mixture of MLPs: each token goes to one of them, as long as it has room."""

    def __init__(self, width, experts, rngs):
        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        shape = experts, width, 4 * width
        self.up = nnx.Param(init(rngs.params(), shape))
        self.down = nnx.Param(init(rngs.params(), (experts, *shape[:0:-1])))

    def __call__(self, x):  # [batch, length, width]
        tokens = x.reshape(-1, x.shape[-1])
        gates = jax.nn.softmax(self.router(tokens))
        experts = self.up.shape[0]
        chosen = jax.nn.one_hot(gates.argmax(-1), experts, dtype=int)
        room = 16 * -(-2 * len(tokens) // (16 * experts))  # twice each one's share
        place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1)
        sent = chosen[..., None] * jax.nn.one_hot(place, room)[:, None]
        h = jnp.einsum("ner,nd->erd", sent, tokens)
        h = nnx.gelu(jnp.einsum("erd,edf->erf", h, self.up[...]))
        h = jnp.einsum("erf,efd->erd", h, self.down[...])
        gated = sent * gates[..., None]
        return jnp.einsum("ner,erd->nd", gated, h).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, width, heads, experts, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.mlp = Experts(width, experts, rngs) if experts else MLP(width, rngs)
        self.heads = heads

    def __call__(self, x):  # [batch, length, width]
        heads = (*x.shape[:2], 3, self.heads, -1)
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(heads), 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nnx.Module):
    """A GPT without any code for mixed precision."""

    def __init__(self, args, rngs):
        self.tokens = nnx.Embed(256, args.width, rngs=rngs)
        self.positions = nnx.Embed(args.length, args.width, rngs=rngs)
        sizes = args.width, args.heads, args.experts
        self.blocks = nnx.List([Block(*sizes, rngs) for _ in range(args.layers)])
        self.norm = nnx.LayerNorm(args.width, rngs=rngs)
        self.head = nnx.Linear(args.width, 256, rngs=rngs)

    def __call__(self, tokens):  # [batch, length] -> logits [batch, length, 256]
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def autocast(precision):
    """The autocast region of a run, by its name in `--precisions`."""
    dtype = FLOAT8.get(precision, precision)
    return jamp.autocast(dtype=dtype, enabled=precision != "float32")


def loss_fn(model, text, precision):
    """Mean cross entropy of each next byte, in nats; text [batch, length + 1]."""
    with autocast(precision):
        logits = model(text[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return losses.mean()


@functools.partial(nnx.jit, static_argnames=("precision", "clip"))
def train_step(model, optimizer, scaler, microbatches, precision, clip):
    def scaled_loss(model, text):
        loss = loss_fn(model, text, precision) / len(microbatches)
        return scaler.scale(loss), loss

    grad_fn = nnx.grad(scaled_loss, has_aux=True)
    grads, loss = grad_fn(model, microbatches[0])
    for text in microbatches[1:]:  # accumulate at one scale, as in PyTorch
        more, more_loss = grad_fn(model, text)
        grads, loss = jax.tree.map(jnp.add, grads, more), loss + more_loss

    grads = scaler.unscale_(optimizer, grads)  # before measuring and clipping them
    norm = optax.tree.norm(nnx.as_pure(grads))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / norm), grads)
    scaler.step(optimizer, model, grads)
    scaler.update()
    return jamp.metrics(scaler) | {"loss": loss, "grad_norm": norm}


def make_training(args, texts, precision, seed):
    train_text, test_text = texts
    model = GPT(args, nnx.Rngs(seed))
    warmup = min(50, args.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, warmup, args.steps
    )
    adamw = optax.adamw(schedule, weight_decay=0.1)
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    scaler = jamp.GradScaler(
        growth_interval=args.growth_interval, enabled=precision == "float16"
    )

    def step(state, microbatches):
        model, optimizer, scaler = state
        return state, train_step(
            model, optimizer, scaler, microbatches, precision, args.clip
        )

    def evaluate(state):
        rng = np.random.default_rng(0)
        text = pieces(test_text, rng, (8, args.batch_size), args.length)
        evaluate_one = nnx.jit(loss_fn, static_argnames="precision")
        losses = [evaluate_one(state[0], batch, precision) for batch in text]
        return {"test loss": np.mean(losses)}

    def batch(number):
        rng = np.random.default_rng((seed, number))
        shape = args.accumulate, args.batch_size // args.accumulate
        return pieces(train_text, rng, shape, args.length)

    return Training((model, optimizer, scaler), step, batch, evaluate)


def pieces(text, rng, shape, length):
    """Random places of the text: bytes [*shape, length + 1]."""
    starts = rng.integers(len(text) - length, size=(*shape, 1))
    return text[starts + np.arange(length + 1)]


def read_sources():
    """The standard library's modules; every tenth is for the test."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    test = texts[::10]
    del texts[::10]
    return np.concatenate(texts), np.concatenate(test)


@functools.partial(nnx.jit, static_argnames=("length", "precision"))
def sample(model, prompt, key, length, precision):
    """Continues the prompt [n], n <= length, to `length` bytes."""
    text = jnp.zeros((1, length), jnp.uint8).at[0, : len(prompt)].set(prompt)

    def write(position, text):
        with autocast(precision):
            logits = model(text)[0, position - 1]
        logits = logits.astype(jnp.float32) / 0.7  # noise is drawn in the logits' dtype
        draw = jax.random.categorical(jax.random.fold_in(key, position), logits)
        return text.at[0, position].set(draw.astype(jnp.uint8))

    return jax.lax.fori_loop(len(prompt), length, write, text)[0]


def main(argv=None):
    parser = make_parser(__doc__, "gpt", steps=300, choices=(*PRECISIONS, *FLOAT8))
    add = functools.partial(add_flag, parser)
    add("--layers", 3, "transformer blocks")
    add("--width", 128, "width of the residual stream")
    add("--heads", 4, "attention heads")
    add("--experts", 0, "MLPs of which each token takes one; 0: all take the same")
    add("--length", 96, "bytes that the model sees")
    add("--batch-size", 16, "pieces of text in a step")
    add("--accumulate", 2, "microbatches in a step")
    add("--learning-rate", 3e-3, "AdamW's learning rate after warm-up")
    add("--clip", 1.0, "largest norm of the gradient")
    args = parser.parse_args(argv)
    if args.width % args.heads or args.batch_size % args.accumulate:
        parser.error("--heads must divide --width, and --accumulate --batch-size")

    texts = read_sources()
    runs = compare(args, functools.partial(make_training, args, texts))
    report(args, runs, title="Training loss (nats per byte)")
    (precision, _), run = list(runs.items())[-1]
    prompt = np.frombuffer(b"def ", np.uint8)[: args.length]
    text = sample(run.state[0], prompt, jax.random.key(0), args.length, precision)
    print(f"A sample of the {precision} run:\n{bytes(np.array(text)).decode('latin1')}")
    return runs


if __name__ == "__main__":
    main()
