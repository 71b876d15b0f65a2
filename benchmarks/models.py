"""GPT-2, ResNet-50, ViT-B/16, an MLP and blocks of Llama in Flax NNX, and their loss.

`dtype` casts by hand: every Linear, Conv and Embed computes in it, while norms compute
in float32 and their results are cast. With None the model sets no dtypes: it is
float32, or whatever autocast or a policy makes of it. The models have no dropout.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jamp

from .model_sizes import GPT2, MLP, SEED, Llama, ResNet50, ViT


def cast(x, dtype):
    return x if dtype is None else x.astype(dtype)


def norm_dtype(dtype):
    return None if dtype is None else jnp.float32


class LayerNorm(nnx.Module):
    def __init__(self, width, dtype, rngs):
        self.dtype = dtype
        self.norm = nnx.LayerNorm(width, dtype=norm_dtype(dtype), rngs=rngs)

    def __call__(self, x):
        return cast(self.norm(x), self.dtype)


def plain_attention(q, k, v, causal):
    """Attention with a float32 softmax; `jax.nn`'s does not take float16 on a CPU."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def gpu_attention(q, k, v, causal):
    """Attention in half precision by cuDNN's flash kernel, which rejects float32."""
    half = q.dtype in (jnp.float16, jnp.bfloat16)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation="cudnn" if half else "xla"
    )


def jamp_attention(q, k, v, causal):
    return jamp.dot_product_attention(q, k, v, is_causal=causal)


class Attention(nnx.Module):
    """Self-attention; uses `flash` on a GPU."""

    def __init__(self, width, heads, causal, flash, dtype, rngs):
        self.heads, self.causal = heads, causal
        self.attend = gpu_attention if flash else plain_attention
        self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.reshape(shape) for t in jnp.split(self.qkv(x), 3, axis=-1))
        x = self.attend(q, k, v, self.causal)
        return self.out(x.reshape(batch, length, width))


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, width, heads, causal, flash, dtype, rngs):
        self.norm1 = LayerNorm(width, dtype, rngs)
        self.attention = Attention(width, heads, causal, flash, dtype, rngs)
        self.norm2 = LayerNorm(width, dtype, rngs)
        self.gelu = jax.nn.gelu
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, size: GPT2, flash, dtype, stream, rngs):
        self.dtype = dtype
        init = nnx.initializers.normal(0.02)
        embed = functools.partial(
            nnx.Embed, features=size.width, dtype=stream, embedding_init=init, rngs=rngs
        )
        self.tokens = embed(size.vocabulary)
        self.positions = embed(size.sequence)
        self.blocks = nnx.List(
            Block(size.width, size.heads, True, flash, dtype, rngs)
            for _ in range(size.layers)
        )
        self.norm = LayerNorm(size.width, dtype, rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ cast(self.tokens.embedding[...], self.dtype).T


class VisionTransformer(nnx.Module):
    """ViT without a class token: as JAX calls it, cuDNN's kernel needs even lengths."""

    def __init__(self, size: ViT, flash, dtype, stream, rngs):
        self.stream = stream
        patch = (size.patch, size.patch)
        self.patches = nnx.Conv(
            3, size.width, patch, strides=patch, dtype=dtype, rngs=rngs
        )
        length = (size.pixels // size.patch) ** 2
        normal = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(normal(rngs.params(), (1, length, size.width)))
        self.blocks = nnx.List(
            Block(size.width, size.heads, False, flash, dtype, rngs)
            for _ in range(size.layers)
        )
        self.norm = LayerNorm(size.width, dtype, rngs)
        self.head = nnx.Linear(size.width, size.classes, dtype=dtype, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + cast(self.positions[...], self.stream)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1))


class ConvNorm(nnx.Module):
    def __init__(self, inputs, outputs, kernel, stride, dtype, rngs, zero=False):
        self.dtype = dtype
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (kernel, kernel),
            strides=stride,
            padding=kernel // 2,
            use_bias=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            outputs,
            momentum=0.9,
            scale_init=nnx.initializers.constant(0.0 if zero else 1.0),
            dtype=norm_dtype(dtype),
            rngs=rngs,
        )

    def __call__(self, x):
        return cast(self.norm(self.conv(x)), self.dtype)


class Bottleneck(nnx.Module):
    def __init__(self, inputs, width, stride, dtype, rngs):
        self.reduce = ConvNorm(inputs, width, 1, 1, dtype, rngs)
        self.middle = ConvNorm(width, width, 3, stride, dtype, rngs)
        self.expand = ConvNorm(width, 4 * width, 1, 1, dtype, rngs, zero=True)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nnx.data(
            None if same else ConvNorm(inputs, 4 * width, 1, stride, dtype, rngs)
        )

    def __call__(self, x):
        y = jax.nn.relu(self.reduce(x))
        y = self.expand(jax.nn.relu(self.middle(y)))
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    def __init__(self, size: ResNet50, flash, dtype, stream, rngs):
        del flash, stream
        self.stem = ConvNorm(3, size.width, 7, 2, dtype, rngs)
        blocks, inputs = [], size.width
        for stage, depth in enumerate(size.stages):
            width = size.width * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Bottleneck(inputs, width, stride, dtype, rngs))
                inputs = 4 * width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, size.classes, dtype=dtype, rngs=rngs)

    def __call__(self, images):
        x = jax.nn.relu(self.stem(images))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


class Layers(nnx.Module):
    """Layers of equal width, each with a bias and a GELU."""

    def __init__(self, size: MLP, flash, dtype, stream, rngs):
        del flash, stream
        self.gelu = jax.nn.gelu
        self.layers = nnx.List(
            nnx.Linear(size.width, size.width, dtype=dtype, rngs=rngs)
            for _ in range(size.layers)
        )

    def __call__(self, x):
        for layer in self.layers:
            x = self.gelu(layer(x))
        return x


class SwiGLU(nnx.Module):
    def __init__(self, width, dtype, rngs):
        # As in Llama: 8/3 of the width, as a multiple of 256.
        hidden = -(-8 * width // (3 * 256)) * 256
        dense = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate, self.up = dense(width, hidden), dense(width, hidden)
        self.down = dense(hidden, width)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """Of several SwiGLUs, the one that a router chooses for each token.

    As in the Switch Transformer, each takes an equal share of a sequence's tokens, and
    those beyond that are dropped.
    """

    def __init__(self, width, count, dtype, rngs):
        self.count = count
        self.router = nnx.Linear(width, count, use_bias=False, rngs=rngs)
        make = nnx.vmap(lambda rngs: SwiGLU(width, dtype, rngs), in_axes=0, out_axes=0)
        self.experts = make(rngs.fork(split=count))

    def __call__(self, x):
        share = x.shape[1] // self.count
        weights = jax.nn.softmax(self.router(x).astype(jnp.float32))
        chosen = jax.nn.one_hot(jnp.argmax(weights, -1), self.count)
        place = jnp.cumsum(chosen, axis=1) * chosen - 1
        sent = jax.nn.one_hot(place.astype(int), share, dtype=x.dtype)
        inputs = jnp.einsum("bsec,bsd->ebcd", sent, x)
        run = nnx.vmap(lambda expert, x: expert(x), in_axes=0, out_axes=0)
        sent = sent * jnp.max(weights, -1)[..., None, None].astype(x.dtype)
        return jnp.einsum("bsec,ebcd->bsd", sent, run(self.experts, inputs))


class LlamaBlock(nnx.Module):
    """A block of Llama without rotary positions: RMSNorm, attention, SwiGLU."""

    def __init__(self, size: Llama, flash, dtype, rngs):
        self.dtype, self.head = dtype, min(size.head, size.width)
        self.attend = gpu_attention if flash else plain_attention
        norm = functools.partial(
            nnx.RMSNorm, size.width, dtype=norm_dtype(dtype), rngs=rngs
        )
        dense = functools.partial(
            nnx.Linear, size.width, size.width, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.norm1, self.norm2 = norm(), norm()
        self.q, self.k, self.v, self.out = (dense() for _ in "qkvo")
        self.feed = (
            Experts(size.width, size.experts, dtype, rngs)
            if size.experts > 1
            else SwiGLU(size.width, dtype, rngs)
        )

    def __call__(self, x):
        y = cast(self.norm1(x), self.dtype)
        shape = (*x.shape[:2], -1, self.head)
        q, k, v = (layer(y).reshape(shape) for layer in (self.q, self.k, self.v))
        x = x + self.out(self.attend(q, k, v, True).reshape(x.shape))
        return x + self.feed(cast(self.norm2(x), self.dtype))


class LlamaBlocks(nnx.Module):
    def __init__(self, size: Llama, flash, dtype, stream, rngs):
        self.stream = stream
        self.blocks = nnx.List(
            LlamaBlock(size, flash, dtype, rngs) for _ in range(size.layers)
        )

    def __call__(self, x):
        x = cast(x, self.stream)
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {
    GPT2: GPT,
    ResNet50: ResNet,
    ViT: VisionTransformer,
    MLP: Layers,
    Llama: LlamaBlocks,
}


def make(size, flash, dtype=None, stream=None):
    """The model, always with the same float32 parameters.

    Args:
      flash: whether attention uses a GPU's flash kernel.
      stream: the dtype of a transformer's residual stream, if it is not `dtype`.
    """
    return MODELS[type(size)](size, flash, dtype, stream or dtype, nnx.Rngs(SEED))


def with_jamp_attention(model):
    """The model, which calls one attention function in any dtype."""
    for _, module in nnx.iter_graph(model):
        if hasattr(module, "attend"):
            module.attend = jamp_attention
    return model


def saving_once(model):
    """The model, which keeps for its backward pass the input of each gelu alone."""
    for _, module in nnx.iter_graph(model):
        if hasattr(module, "gelu"):
            module.gelu = jax.checkpoint(jax.nn.gelu)
    return model


def make_batch(size):
    """Inputs, and labels or numbers to make of them, the same at every step."""
    keys = jax.random.split(jax.random.key(SEED))
    if isinstance(size, MLP | Llama):
        rows = (size.batch, size.sequence) if isinstance(size, Llama) else (size.batch,)
        return tuple(jax.random.normal(key, (*rows, size.width)) for key in keys)
    if isinstance(size, GPT2):
        shape = (size.batch, size.sequence + 1)
        tokens = jax.random.randint(keys[0], shape, 0, size.vocabulary)
        return tokens[:, :-1], tokens[:, 1:]
    images = jax.random.normal(keys[0], (size.batch, size.pixels, size.pixels, 3))
    return images, jax.random.randint(keys[1], (size.batch,), 0, size.classes)


def loss(out, target):
    """Cross entropy with labels, or the mean square, in float32 whatever `out` is."""
    out = out.astype(jnp.float32)
    if jnp.issubdtype(target.dtype, jnp.floating):
        return jnp.mean((out - target) ** 2)
    losses = optax.softmax_cross_entropy_with_integer_labels(out, target)
    return jnp.mean(losses)


def masked_loss(out, target):
    """The same. The derivative of a label's logit is a mask, and no scatter."""
    if jnp.issubdtype(target.dtype, jnp.floating):
        return loss(out, target)
    out = out.astype(jnp.float32)
    is_label = jnp.arange(out.shape[-1]) == target[..., None]
    picked = jnp.sum(jnp.where(is_label, out, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(out, axis=-1) - picked)
