"""NNX's column in the table of `test_with_policy`: models, and how to run them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jamp

from .linen_models import OPTIONS, X

package, layer = nnx, nnx.Linear
with_policy = jamp.nnx.with_policy
TOKENS = np.arange(8, dtype=np.int32)[None]


def functional(model, x=X, abstract=False):
    """Parameters, state, and a function of these and an input."""
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def predict(params, state, x):
        model = nnx.merge(graph, params, state, copy=True)
        return model(x), nnx.split(model, nnx.Param, ...)[2]

    return params, state, predict


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.linear(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.embed = nnx.Embed(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.blocks = nnx.List([Block(16, rngs) for _ in range(2)])

        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def stack(rngs):
            return Block(16, rngs)

        self.stack = stack(rngs)
        self.attention = nnx.MultiHeadAttention(
            2, 16, decode=False, dropout_rate=0.1, rngs=rngs
        )
        self.w = nnx.Param(jnp.eye(16), tag="mine")
        self.head = nnx.Linear(16, 16, rngs=rngs)
        self.calls = nnx.Variable(jnp.float32(0))

    def __call__(self, tokens):
        self.calls[...] += 1
        x = self.norm(self.embed(tokens))
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def scan(block, x):
            return block(x)

        x = scan(self.stack, x)
        x = self.attention(x, deterministic=False)
        x = self.project(x) @ self.w
        return self.embed.attend(self.head(x))

    def project(self, x):
        return x @ self.w[...]


# Two blocks, the stack, four of attention's layers and its two products, w twice, the
# head, and the embedding.
PRODUCTS = 2 + 1 + 4 + 2 + 2 + 1 + 1


class Layers(nnx.Module):
    def __init__(self, numbers=(1, 2, 10), dtype=None, policy=None):
        self.numbers = numbers
        for i in numbers:
            own = dtype if i == 1 else None
            layer = nnx.Linear(4, 4, dtype=own, rngs=nnx.Rngs(0))
            if policy and i == 1:
                layer = jamp.nnx.with_policy(layer, policy)
            setattr(self, f"layer_{i}", layer)

    def __call__(self, x):
        for i in self.numbers:
            x = getattr(self, f"layer_{i}")(inputs=x)
        return x


class Around(nnx.Module):
    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        return self.part(x)


def model(**arguments):
    return Around(Layers(**arguments))


class Normed(nnx.Module):
    def __init__(self, norm):
        rngs, options = nnx.Rngs(0), OPTIONS.get(norm, {})
        self.norm = getattr(nnx, norm)(4, **options, rngs=rngs)
        self.layer = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        return jax.nn.softmax(self.layer(h)), 1 * h


def rnn(cell):
    cell = getattr(nnx, cell)(4, 4, rngs=nnx.Rngs(0))
    return nnx.RNN(cell, return_carry=True)
