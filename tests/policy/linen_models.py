"""Linen's column in the table of `test_with_policy`: models, and how to run them."""

from functools import partial, partialmethod

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jamp

package, layer = nn, nn.Dense
with_policy = jamp.linen.with_policy
# What `jax.random.key` makes of 0 and 1, without a program to run on import.
RNGS = {"params": np.array([0, 0], np.uint32), "dropout": np.array([0, 1], np.uint32)}
X = np.ones((2, 4), np.float32)
MUTABLE = ["batch_stats", "intermediates"]
OPTIONS = {"GroupNorm": {"num_groups": 2}, "BatchNorm": {"use_running_average": False}}


def functional(model, x=X, abstract=False):
    """Parameters, state, and a function of these and an input."""
    init = partial(jax.eval_shape, model.init) if abstract else jax.jit(model.init)
    state = dict(init(RNGS, x))
    params = state.pop("params")

    def predict(params, state, x):
        variables = {"params": params, **state}
        return model.apply(variables, x, rngs=RNGS, mutable=MUTABLE)

    return params, state, predict


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(8)(nn.LayerNorm()(x)), None


class Own(nn.Module):
    """Reads its parameter in setup, and calls its own method."""

    def setup(self):
        self.w = self.param("w", nn.initializers.normal(), (8, 8))

    def __call__(self, x):
        return self.helper(x)

    def helper(self, x):
        return x @ self.w


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x, _ = nn.remat(Block)()(x)
        split = {"params": True}
        x, _ = nn.scan(Block, {"params": 0}, split_rngs=split, length=3)()(x, None)
        x, _ = nn.jit(Block)(name="jitted")(x)
        vmapped = nn.vmap(nn.Dense, {"params": 0}, split_rngs=split)
        x = vmapped(8)(x)
        x = Own()(x)
        self.sow("intermediates", "h", x)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(3, kernel_init=init)(x)


class Setup(nn.Module):
    def setup(self):
        self.own = Own()
        self.head = nn.Dense(2)
        self.w = self.param("w", nn.initializers.normal(), (8, 8))

    def __call__(self, x, train=True):
        return self.head(self.own(x) @ self.w)

    def encode(self, x, times=1):
        return times * self.own(x)

    twice = partialmethod(encode, times=2)

    def _private(self, x):
        return self.own(x)

    @nn.nowrap
    def describe(self):
        return "a model"


def under(policy, model):
    return jamp.linen.with_policy(model, policy) if policy else model


class Parent(nn.Module):
    """A float32 module, one part of which may have a policy."""

    inner: type = Compact
    policy: object = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(under(self.policy, self.inner())(x))


class SetupParent(Parent):
    def setup(self):
        self.part, self.head = under(self.policy, self.inner()), nn.Dense(2)

    def __call__(self, x):
        return self.head(self.part(x))


class Layers(nn.Module):
    numbers: tuple = (1, 2, 10)
    dtype: jnp.dtype | None = None
    policy: str | None = None

    @nn.compact
    def __call__(self, x):
        for i in self.numbers:
            own = self.dtype if i == 1 else None
            layer = nn.Dense(4, name=f"layer_{i}", dtype=own)
            if self.policy and i == 1:
                layer = jamp.linen.with_policy(layer, self.policy)
            x = layer(inputs=x)
        return x


class Around(nn.Module):
    part: nn.Module

    def __call__(self, x):
        return self.part(x)


def model(**arguments):
    return Around(Layers(**arguments))


class Normed(nn.Module):
    norm: str

    @nn.compact
    def __call__(self, x):
        norm = getattr(nn, self.norm)
        h = norm(**OPTIONS.get(self.norm, {}), name="norm")(x)
        return jax.nn.softmax(nn.Dense(4, name="layer")(h)), 1 * h


def rnn(cell):
    return nn.RNN(getattr(nn, cell)(4), return_carry=True)
