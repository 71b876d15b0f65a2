"""Fully sharded training: each device keeps only its part of model and optimizer.

A byte-level transformer (Flax Linen) learns Python from the standard library's sources.
Parameters, moments and batches are split over a mesh of devices, as PyTorch's
`fully_shard` does; the training step is the same as for one device. After training, it
plants an overflow on one device, which makes all devices skip, and repeats the first
steps on a single device. It prints a table and draws `runs/fsdp/training.png`.

    python examples/fsdp.py  # a CPU pretends to be eight devices: a minute or two
    python examples/fsdp.py --steps 400 --resume --devices 4  # resumes on another mesh
    python examples/fsdp.py --reduce int8  # gradients in a quarter of float32's bytes
    python examples/fsdp.py --layers 12 --width 1024 --length 1024 --batch-size 64 \\
        --steps 20000 --learning-rate 3e-4  # for eight GPUs

Sums over devices round in another order. With three seeds, the 200 losses on one device
and on eight fake ones were equal within 1.1e-5 in float32 and 2.4e-3 in float16.

Needs `pip install ".[examples]"`.
"""

import contextlib
import functools
import os
import sysconfig
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Training, add_flag, compare, make_parser, report
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

REDUCE = "xla", "float32", "float16", "bfloat16", "int8", "float8"


class Transformer(nn.Module):
    """A transformer without any code for mixed precision or devices."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, tokens):  # [batch, length] -> logits [batch, length, 256]
        x = nn.Embed(256, self.width)(tokens)
        x = x + nn.Embed(tokens.shape[1], self.width)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(self.width // 32)
            x = x + attention(nn.LayerNorm()(x), mask=mask)
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(hidden)
        return nn.Dense(256)(nn.LayerNorm()(x))


def loss_fn(params, batch, model, precision):
    """Mean cross entropy of each next byte, in nats."""
    text, weights = batch  # [batch, length + 1], [batch]
    with jamp.autocast(dtype=precision, enabled=precision != "float32"):
        logits = model.apply(params, text[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return (losses.mean(1) * weights).mean()


def train_step(state, batch, tx, loss_of, reduce, places):
    """Does not mention devices: XLA sees how the arguments are split."""
    params, opt_state = state
    if reduce == "xla":
        loss, grads = jamp.value_and_grad(loss_of, opt_state)(params, batch)
    else:
        loss, grads = reduced_by_hand(params, opt_state, batch, loss_of, reduce, places)
    norm = optax.tree.norm(jamp.unscale(grads, opt_state))  # over all devices
    state = params, opt_state = jamp.step(tx, grads, opt_state, params)
    return state, jamp.metrics(opt_state) | {"loss": loss, "grad_norm": norm}


def reduced_by_hand(params, opt_state, batch, loss_of, reduce, places):
    """Loss and gradients, which devices exchange in the requested dtype."""
    specs = jax.tree.map(lambda place: place.spec, places)
    scale = opt_state._replace(inner_state=())

    def on_a_device(params, scale, batch):
        def own_loss(params):
            dtype = jnp.float8_e4m3fn if reduce == "float8" else reduce
            whole = jamp.sharding.gather(params, "data", specs, reduce_dtype=dtype)
            return loss_of(whole, batch)

        loss, grads = jamp.value_and_grad(own_loss, scale)(params)
        return jax.lax.pmean(loss, "data"), grads

    return jax.shard_map(
        on_a_device,
        mesh=jax.tree.leaves(places)[0].mesh,
        in_specs=(specs, P(), P("data")),
        out_specs=(P(), specs),
    )(params, scale, batch)


def make_mesh(count):
    """The first devices available; a CPU can pretend to be several."""
    if "device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX already has its devices
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()[:count]
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def split(mesh, array):
    """How to place an array: split along its longest dimension, or on all devices."""
    longest = int(np.argmax(array.shape))
    parts = [None] * longest + ["data"] * (array.shape[longest] % mesh.size == 0)
    return NamedSharding(mesh, P(*parts))


def make_training(args, texts, mesh, precision, seed):
    model = Transformer(args.layers, args.width)
    schedule = optax.warmup_constant_schedule(0.0, args.learning_rate, 50)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    interval, enabled = args.growth_interval, precision == "float16"
    tx = jamp.dynamic_loss_scale(adamw, growth_interval=interval, enabled=enabled)

    init = functools.partial(model.init, tokens=jnp.zeros((1, args.length), jnp.uint8))
    key = jax.random.key(seed)
    places = jax.tree.map(functools.partial(split, mesh), jax.eval_shape(init, key))
    params = jax.jit(init, out_shardings=places)(key)  # made in parts, never whole
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    opt_state = jax.tree.map(  # moments as their parameters, scalars everywhere
        lambda a: a if a.ndim else jax.device_put(a, everywhere), tx.init(params)
    )
    state = params, opt_state
    loss_of = functools.partial(loss_fn, model=model, precision=precision)
    jitted_step = jax.jit(
        functools.partial(
            train_step, tx=tx, loss_of=loss_of, reduce=args.reduce, places=places
        ),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda a: a.sharding, state), everywhere),
    )

    def step(state, batch):
        result = jitted_step(state, batch)
        if jax.default_backend() == "cpu":  # fake devices share threads, which two
            jax.block_until_ready(result)  # steps at a time would take from each other
        return result

    def batch(number, text=texts[0]):
        text = pieces(text, (seed, number), args)
        return jax.device_put((text, np.ones(len(text), np.float32)), rows)

    def evaluate(state):
        jitted_loss = jax.jit(loss_of)
        losses = [float(jitted_loss(state[0], batch(n, texts[1]))) for n in range(8)]
        whole = jax.tree.leaves(state)
        held = [array.addressable_shards[0].data for array in whole]
        size = lambda arrays: sum(array.nbytes for array in arrays) / 1e6
        sizes = {"MB of state": size(whole), "MB a device": size(held)}
        return {"test loss": np.mean(losses)} | sizes

    return Training(state, step, batch, evaluate)


def pieces(text, seed, args):
    """Random places of the text: bytes [batch, length + 1]."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(len(text) - args.length, size=(args.batch_size, 1))
    return text[starts + np.arange(args.length + 1)]


def read_sources():
    """The standard library's modules: nine tenths for training, the rest to test."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(map(Path.read_bytes, paths)), np.uint8)
    return np.split(text, [len(text) * 9 // 10])


def try_overflow(training, state):
    """Plants an inf in the last device's part of a batch."""
    arrays = lambda state: jax.tree.leaves((state[0], state[1].inner_state))
    shards = lambda state: [x for a in arrays(state) for x in a.addressable_shards]
    text, weights = training.batch(0)
    device = weights.addressable_shards[-1].device.id
    for planted in (1.0, np.inf):
        batch = text, jax.device_put(np.append(weights[:-1], planted), weights.sharding)
        after, _ = training.step(jax.tree.map(jnp.copy, state), batch)
        pairs = zip(shards(state), shards(after), strict=True)
        changed = {a.device.id for a, b in pairs if not np.array_equal(a.data, b.data)}
        scales = [float(x.data) for x in jamp.loss_scale(after[1]).addressable_shards]
        print(f"{planted} in the batch of device {device}: loss scales {scales},")
        print(f"  parameters and moments change on devices {sorted(changed)}")


def compare_with_one_device(training, losses):
    """Repeats the first steps from the same weights and with the same batches."""
    state, own = training.state, []
    for step in range(min(20, len(losses))):
        state, metrics = training.step(state, training.batch(step))
        own.append(float(metrics["loss"]))
    difference = np.max(np.abs(losses[: len(own)] / own - 1))
    print(f"First {len(own)} losses on one device: the same within {difference:.1e}")


def main(argv=None):
    parser = make_parser(__doc__, "fsdp", steps=200)
    add = functools.partial(add_flag, parser)
    add("--devices", 8, "devices in the mesh, at most those available")
    add("--layers", 2, "transformer blocks")
    add("--width", 128, "width of the residual stream; an attention head has 32")
    add("--length", 64, "bytes that the model sees")
    add("--batch-size", 16, "pieces of text in a step, over all devices")
    add("--learning-rate", 3e-3, "AdamW's learning rate after warm-up")
    said = "dtype in which devices exchange gradients; xla: that of the ops under jit"
    add("--reduce", "xla", said, choices=REDUCE)
    args = parser.parse_args(argv)
    make = functools.partial(make_training, args, read_sources())
    mesh = make_mesh(args.devices)
    if args.batch_size % mesh.size or args.width % 32:
        parser.error(f"--batch-size must be a multiple of {mesh.size}, --width of 32")
    runs = compare(args, functools.partial(make, mesh))
    report(args, runs, title="Training loss (nats per byte)")
    (precision, seed), run = list(runs.items())[-1]
    if precision == "float16":
        try_overflow(make(mesh, precision, seed), run.state)
    compare_with_one_device(make(make_mesh(1), precision, seed), run.history["loss"])
    return runs


if __name__ == "__main__":
    main()
