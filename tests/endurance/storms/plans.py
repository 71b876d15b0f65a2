"""Random trees, optimizers, nestings and settings, and their random gradients."""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import assume
from hypothesis import strategies as st

import jamp

from .oracle import FACTORS, STEPS, as_real, draw_steps


class Pair(NamedTuple):
    first: Any
    second: Any


@flax.struct.dataclass
class Struct:
    a: Any
    b: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


@jax.tree_util.register_pytree_node_class
class Node:
    """A custom node without key paths."""

    def __init__(self, children: tuple[Any, ...], aux: str):
        self.children, self.aux = children, aux

    def tree_flatten(self):
        return self.children, self.aux

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(tuple(children), aux)


CONTAINERS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: {"a": a, "b": b},
    lambda a, b: collections.OrderedDict(z=a, a=b),
    lambda a, b: [a, b],
    lambda a, b: (a, b),
    Pair,
    Struct,
    lambda a, b: Node((a, b), "aux"),
    lambda a, b: {"a": a, "none": None, "hole": optax.MaskedNode(), "b": {"c": b}},
]


SHAPES = [(), (1,), (3,), (2, 3), (0,), (0, 2)]
NARROW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
DTYPES = ["float32", *NARROW[:2], *NARROW, "complex64", "int32", "bool"]
WIDE = ["float64", "complex128"]
SCHEDULE = optax.piecewise_constant_schedule(0.1, {3: 0.5})
INNERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(SCHEDULE, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "lion": lambda: optax.lion(0.01),
    "lamb": lambda: optax.lamb(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "injected": lambda: optax.inject_hyperparams(
        optax.sgd, hyperparam_dtype=jnp.float32
    )(SCHEDULE),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 2),
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
    "master": lambda: jamp.master_weights(optax.adam(1e-3)),
}


PARTED = "masked", "multi"  # of which one part is not trained
OUTERS = ["alone", "alone", "chain", "masked", "multi", "injected", "static", "off"]


@dataclasses.dataclass
class Plan:
    """What is compiled once: a tree, an optimizer that jamp wraps, and settings."""

    specs: Any  # a tree of jax.ShapeDtypeStruct: the parameters
    trained: Any  # the same tree of bool: whether the optimizer trains a leaf
    inner: str
    outer: str
    numbers: dict[str, Any]
    steps: int
    wide_grads: bool  # float32 gradients of half-precision parameters
    zero_grads: bool  # float0 gradients of integers, as jax.grad makes them
    x64: bool
    strict: bool
    debug_nans: bool
    checks: bool
    replay: str  # of the first case: "eager", "donated" or ""

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        promotion = "strict" if self.strict else "standard"
        ranks = "raise" if self.strict else "allow"
        with (
            jax.enable_x64(self.x64),
            jax.numpy_dtype_promotion(promotion),
            jax.numpy_rank_promotion(ranks),
            jax.debug_nans(self.debug_nans),
            jax.enable_checks(self.checks),
        ):
            yield

    def transformation(self) -> Any:
        inner, numbers = self.inner_transformation(), self.numbers
        if self.outer == "injected":
            factory = optax.inject_hyperparams(
                jamp.dynamic_loss_scale, ("inner",), hyperparam_dtype=jnp.float32
            )
            return factory(inner, **numbers)
        if self.outer == "static":
            return jamp.static_loss_scale(inner, numbers["init_scale"])
        enabled = self.outer != "off"
        tx = jamp.dynamic_loss_scale(inner, enabled=enabled, **numbers)
        return self.behind(tx)

    def behind(self, tx: Any) -> Any:
        return optax.chain(tx, optax.scale(1.0)) if self.outer == "chain" else tx

    def inner_transformation(self) -> Any:
        """The inner optimizer, which skips the leaves that it cannot take."""
        inner = INNERS[self.inner]()
        if all(jax.tree.leaves(self.trained)) and self.outer not in PARTED:
            return inner
        if isinstance(inner, optax.MultiSteps):
            inner = inner.gradient_transformation()
        if self.outer == "multi":
            labels = jax.tree.map(lambda t: "train" if t else "rest", self.trained)
            parts = {"train": inner, "rest": optax.set_to_zero()}
            return optax.multi_transform(parts, labels)
        inner = optax.masked(inner, self.trained)
        if self.outer == "masked":
            frozen = jax.tree.map(lambda t: not t, self.trained)
            inner = optax.chain(inner, optax.masked(optax.set_to_zero(), frozen))
        return inner

    def bare(self) -> Any:
        """The optimizer without jamp's scaling: what the oracle runs."""
        inner = self.inner_transformation()
        if isinstance(inner, optax.MultiSteps):
            inner = inner.gradient_transformation()
        inner = optax.with_extra_args_support(inner)
        if self.outer == "off" or self.inner == "master":
            return self.behind(inner)

        def update(grads, state, params):
            updates, state = inner.update(grads, state, widened(params))
            return jax.tree.map(as_param, updates, params), state

        init = lambda params: inner.init(widened(params))
        return self.behind(optax.GradientTransformationExtraArgs(init, update))

    def wrap(self, tree: Any) -> Any:
        """Parameters in the form that the optimizer takes."""
        if self.inner == "lookahead":
            return optax.LookaheadParams(tree, jax.tree.map(lambda x: x, tree))
        return tree


def is_half(leaf: Any) -> bool:
    return str(leaf.dtype) in NARROW


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def widened(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if is_half(leaf) else leaf, tree
    )


def as_param(update: Any, param: Any) -> Any:
    if update.dtype == jax.dtypes.float0:
        return jnp.zeros_like(param)
    return update.astype(param.dtype)


def apply(param: Any, update: Any) -> Any:
    """`optax.apply_updates` of one leaf, where master weights' updates are float32."""
    if update.dtype == jax.dtypes.float0:
        return param
    if is_half(param) and update.dtype == jnp.float32:
        return (param.astype(jnp.float32) + update).astype(param.dtype)
    return optax.apply_updates(param, update)


@st.composite
def draw_numbers(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of a dynamic loss scale."""
    numbers: dict[str, Any] = {k: draw(st.sampled_from(v)) for k, v in FACTORS.items()}
    low, high = sorted(2.0**n for n in draw(st.tuples(*[st.integers(-4, 23)] * 2)))
    return numbers | {
        "growth_interval": draw(st.integers(1, 5)),
        "hysteresis": draw(st.sampled_from([1, 1, 2, 3])),
        "min_scale": draw(st.sampled_from([0.0, low])),
        "max_scale": draw(st.sampled_from([math.inf, high])),
        "init_scale": draw(st.floats(low, high, width=32)),
    }


def trees(dtypes: list[str]) -> st.SearchStrategy[Any]:
    """Trees of shapes, at most three containers deep."""
    leaves = st.builds(
        jax.ShapeDtypeStruct, st.sampled_from(SHAPES), st.sampled_from(dtypes)
    )
    join = lambda container, pair: container(*pair)
    containers = st.sampled_from(CONTAINERS)
    nodes = lambda inner: st.builds(join, containers, st.tuples(inner, inner))
    return st.recursive(leaves, nodes, max_leaves=6)


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual, usual, *others])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans whose bare optimizer runs, since optax does not take every tree."""
    x64, outer = draw(mostly(False, True)), draw(st.sampled_from(OUTERS))
    dtypes = st.sampled_from(DTYPES + WIDE * x64)
    pool = draw(st.lists(dtypes, min_size=1, max_size=4))
    w = jax.ShapeDtypeStruct((3,), jnp.float32)
    specs = {"w": w, "tree": draw(trees(pool))}
    debug_nans = outer != "off" and draw(mostly(False, True))
    numbers = draw(draw_numbers())
    if debug_nans:  # no overflow of the optimizer's own
        numbers |= {"min_scale": 1.0, "init_scale": 2.0**10, "max_scale": math.inf}
    drops = outer in PARTED and draw(mostly(False, True))
    kept = lambda: not drops or draw(st.booleans())
    plan = Plan(
        specs=specs,
        trained=jax.tree.map(lambda spec: is_float(spec) and kept(), specs),
        inner=draw(st.sampled_from(sorted(INNERS))),
        outer=outer,
        numbers=numbers,
        steps=draw(st.sampled_from(STEPS)),
        wide_grads=draw(mostly(False, True)),
        zero_grads=draw(st.booleans()),
        x64=x64,
        strict=draw(mostly(False, True)),
        debug_nans=debug_nans,
        checks=draw(mostly(False, False, True)),
        replay=draw(mostly("", "eager", "donated")),
    )
    assume(runs(plan))
    return plan


def runs(plan: Plan) -> bool:
    with plan.settings():
        params, tx = plan.wrap(plan.specs), plan.bare()
        try:
            state = jax.eval_shape(tx.init, params)
            step = functools.partial(bare_step, plan)
            jax.eval_shape(step, bare_grads(plan), state, params)
        except (TypeError, ValueError, NotImplementedError, DeprecationWarning):
            return False
    return True


def bare_grads(plan: Plan) -> Any:
    """Shapes of the gradients that the bare optimizer gets."""

    def spec(s):
        if not is_float(s) and plan.zero_grads:
            return jax.ShapeDtypeStruct(s.shape, jax.dtypes.float0)
        wide = is_half(s) and (plan.outer != "off" or plan.wide_grads)
        return jax.ShapeDtypeStruct(s.shape, jnp.float32 if wide else s.dtype)

    return jax.tree.map(spec, plan.specs)


def bare_step(plan: Plan, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, state = plan.bare().update(grads, state, params)
    return jax.tree.map(apply, params, updates), state


def draw_grads(
    plan: Plan, rng: np.random.Generator, cases: int
) -> tuple[Any, np.ndarray]:
    """Scaled gradients of every case and step, and which steps hold an inf or nan.

    A bad step has it in one element of one leaf. If that leaf is empty, an integer or
    not the optimizer's, the step counts as good.
    """
    size = (cases, plan.steps)
    leaves, tree = jax.tree.flatten(plan.specs)
    trained = jax.tree.leaves(plan.trained)
    seen = [t or plan.outer not in PARTED for t in trained]
    grads = []
    for spec in leaves:
        dtype = np.dtype(jnp.float32) if wide_grad(plan, spec) else spec.dtype
        values = rng.normal(size=size + spec.shape) * 8
        if np.issubdtype(dtype, np.complexfloating):
            values = values + 1j * rng.normal(size=size + spec.shape)
        grads.append(values.astype(dtype))
    found = np.zeros(size, bool)
    for case, step in np.argwhere(draw_steps(rng, plan.steps, cases)):
        chosen = rng.integers(len(grads))
        grad = grads[chosen][case, step]
        if grad.size == 0 or not is_float(grad):
            continue
        value = rng.choice([np.inf, -np.inf, np.nan])
        if np.iscomplexobj(grad) and rng.random() < 0.5:
            value = complex(1.0, value)
        index = tuple(rng.integers(n) for n in grad.shape)
        grads[chosen][(case, step, *index)] = value
        found[case, step] |= seen[chosen] and plan.outer != "off"
    return tree.unflatten(grads), found


def wide_grad(plan: Plan, spec: Any) -> bool:
    return is_half(spec) and plan.wide_grads


def with_float0(plan: Plan, grads: Any) -> Any:
    """Gradients as `jax.grad` makes them: compiled loops cannot carry float0."""

    def leaf(grad):
        if is_float(grad) or not plan.zero_grads:
            return grad
        return np.zeros(jnp.shape(grad), jax.dtypes.float0)

    return jax.tree.map(leaf, grads)


def unscaled(plan: Plan, grads: Any, scales: np.ndarray) -> Any:
    """Unscales gradients as torch does, in NumPy."""
    if plan.outer == "off":
        return grads
    inverse = (1 / scales.astype(np.float64)).astype(np.float32)

    def leaf(grad):
        if not is_float(grad):
            return grad
        grad = grad.astype(np.float32) if is_half(grad) else grad
        real = as_real(grad)
        shape = inverse.shape + (1,) * (real.ndim - inverse.ndim)
        with np.errstate(invalid="ignore"):
            real = real * inverse.reshape(shape).astype(real.dtype)
        return real.view(grad.dtype).reshape(grad.shape)

    return jax.tree.map(leaf, grads)


def bare_state(plan: Plan, state: Any) -> Any:
    """The state of the bare optimizer: that of jamp's wrapper without the wrapper."""
    if plan.outer == "injected":
        return state.inner_state.inner_state
    is_scaled = lambda node: isinstance(node, jamp.DynamicLossScaleState)
    return jax.tree.map(
        lambda node: node.inner_state if is_scaled(node) else node,
        state,
        is_leaf=is_scaled,
    )


def scaled_state(state: Any) -> jamp.DynamicLossScaleState:
    is_scaled = lambda node: isinstance(node, jamp.DynamicLossScaleState)
    nodes = jax.tree.leaves(state, is_leaf=is_scaled)
    (found,) = (node for node in nodes if is_scaled(node))
    return found
