"""Wrong arguments: jamp accepts each one, or refuses it with its own message."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st

import jamp

from .calls import Net
from .refusals import raised_by_others, raised_in_jamp


class Traced:
    """Stands for a value that is known only when the function runs."""


JUNK: list[Any] = [
    *(None, "x", "", 3, -1, 0, 2.5, math.nan, math.inf, -math.inf, 1e300, True),
    *(1j, b"w", object(), min, int, range(3), [], {}, (), {"w": "x"}, {"w": None}),
    *({"w": object()}, [None], np.array(["a"]), np.array([None])),
    *(np.ones((2, 2)), np.ones(3, int), np.float16(3), np.array(2.0), np.zeros((0,))),
    *(optax.EmptyState(), optax.MaskedNode(), optax.sgd(0.1), Traced, Traced),
]


OWN_KINDS = (ValueError, TypeError, RuntimeError, FloatingPointError)
SETTINGS = [
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval"),
    *("min_scale", "max_scale", "hysteresis", "axis_name"),
]


@st.composite
def spoiled(draw: st.DrawFn, good: Any) -> Any:
    """Junk, or the good value with something wrong in it."""
    junk = st.sampled_from(JUNK)
    leaves, tree = jax.tree.flatten(good)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        return draw(junk)
    at = draw(st.integers(0, len(leaves) - 1))
    leaf = np.asarray(leaves[at])
    with np.errstate(over="ignore"):
        cast = [leaf.astype(d) for d in ("int32", "bool", "float16", "complex64")]
    shapes = leaf.reshape((*leaf.shape, 1)), np.tile(leaf.ravel(), 2)
    wrong = st.sampled_from([*cast, *shapes, leaf.ravel().tolist()])
    leaves[at] = draw(junk | wrong)
    return draw(junk | st.just(tree.unflatten(leaves)))


@functools.cache
class Target:
    """Good arguments for each public function; the storm spoils one of them."""

    def __init__(self):
        self.params = {"w": jnp.ones(3), "b": {"c": jnp.ones((2, 2), jnp.float16)}}
        self.grads = jax.tree.map(jnp.ones_like, self.params)
        self.tx = jamp.dynamic_loss_scale(optax.sgd(0.1, momentum=0.5))
        self.master = jamp.master_weights(optax.sgd(0.1, momentum=0.5))
        self.state = self.tx.init(self.params)
        self.kept = self.master.init(self.params)
        self.net = Net(np.ones(3, np.float32))
        self.optimizer = nnx.Optimizer(self.net, optax.sgd(0.1), wrt=nnx.Param)
        self.own = nnx.state(self.net, nnx.Param)
        self.saved = jamp.GradScaler().state_dict()

    def calls(self) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
        loss = lambda params: jnp.sum(params["w"] ** 2)
        grad = lambda loss, state, params: jamp.value_and_grad(loss, state)(params)
        scaler = jamp.GradScaler()
        table: dict[str, tuple[Callable[..., Any], list[Any]]] = {
            "update": (self.tx.update, [self.grads, self.state, self.params]),
            "master": (self.master.update, [self.grads, self.kept, self.params]),
            "step": (jamp.step, [self.tx, self.grads, self.state, self.params]),
            "init": (self.tx.init, [self.params]),
            "master init": (self.master.init, [self.params]),
            "value_and_grad": (grad, [loss, self.state, self.params]),
            "loss_scale": (jamp.loss_scale, [self.state]),
            "scale_loss": (jamp.scale_loss, [jnp.ones([]), self.state]),
            "unscale": (jamp.unscale, [self.grads, self.state]),
            "metrics": (jamp.metrics, [self.state]),
            "check": (jamp.debug.check, [self.state]),
            "wrap": (jamp.dynamic_loss_scale, [optax.sgd(0.1)]),
            "static": (jamp.static_loss_scale, [optax.sgd(0.1), 2.0]),
            "master_weights": (jamp.master_weights, [optax.sgd(0.1)]),
            "scaler.scale": (scaler.scale, [self.grads]),
            "scaler.unscale_": (scaler.unscale_, [self.optimizer, self.own]),
            "scaler.step": (scaler.step, [self.optimizer, self.net, self.own]),
            "scaler.update": (scaler.update, [2.0]),
            "scaler.load": (scaler.load_state_dict, [self.saved]),
        }
        for name in SETTINGS:
            for maker in (jamp.dynamic_loss_scale, jamp.GradScaler):
                first = () if maker is jamp.GradScaler else (optax.sgd(0.1),)
                call = lambda v, m=maker, n=name, f=first: m(*f, **{n: v})
                table[f"{maker.__name__} {name}"] = call, [2.0]
        for name in ("floor_steps", "window", "skipped_share"):
            call = lambda v, n=name: jamp.metrics(self.state, **{n: v})
            table[f"metrics {name}"] = call, [2]
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            table[f"set_{name}"] = getattr(scaler, f"set_{name}"), [2]
        for key in self.saved:
            call = lambda v, k=key: scaler.load_state_dict({**self.saved, k: v})
            table[f"load {key}"] = call, [2]
        return table


def check_garbage(data: st.DataObject) -> None:
    """Spoils an argument of a public function: jamp accepts it, or names it."""
    table = Target().calls()
    name = data.draw(st.sampled_from(sorted(table)))
    function, args = table[name]
    at = data.draw(st.integers(0, len(args) - 1))
    args = [*args[:at], data.draw(spoiled(args[at])), *args[at + 1 :]]
    try:
        with np.errstate(over="ignore"):  # NumPy's warning of 1e300 in float32
            give(function, args)
    except Exception as error:
        own = isinstance(error, OWN_KINDS) and raised_in_jamp(error)
        if not (own and str(error)) and not raised_by_others(error):
            raise


def give(function: Callable[..., Any], args: list[Any]) -> None:
    """Calls the function, inside a trace if an argument is to be traced."""
    leaves, tree = jax.tree.flatten(args)
    if Traced not in [leaf for leaf in leaves if isinstance(leaf, type)]:
        function(*args)
        return

    def call(value):
        given = [value if leaf is Traced else leaf for leaf in leaves]
        function(*tree.unflatten(given))

    jax.eval_shape(call, 1.0)
