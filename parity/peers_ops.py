"""How each of the other libraries is used: its loss scaler in a step, and its casting.

Each is set up to do its best: without a lower bound on the scale where that is
possible, and with a selection by hand where its documentation leaves skipping to the
user.
"""

import contextlib
import dataclasses
import functools
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training.dynamic_scale import DynamicScale
from jax import lax

import jamp
from shared.keras_on_jax import import_keras

from .cases import LEARNING_RATE, MOMENTUM, SIZE, Case
from .jamp_side import SGD
from .trajectory import bits

Function = Callable[..., Any]


class Input(NamedTuple):
    """What a step gets, for each optimizer: see `cases.streams`, `peers.Reference`."""

    base: Any
    poison: Any
    unscaled: Any


class Peer(NamedTuple):
    """A library, and how to run a case with it.

    Its state is `(scaler, train)`, where `train` has the parameters and the state of
    each optimizer.

    Attributes:
      module: the module to import.
      start: the state before the first step of a case.
      step: the state after a step, and whether each optimizer was skipped.
      read: the scaler's scale and growth tracker, if it has them.
      change: the scaler after a setter: `(scaler, method, value)`. The method `update`
        sets the scale.
      range: the smallest and largest scale that it takes.
      one_factor: whether it backs off by the inverse of the growth factor.
      one_optimizer: whether one flag holds for everything that it unscales.
      fused: whether it unscales and steps in one call.
    """

    module: str
    start: Callable[[Case], Any]
    step: Callable[[Any, Input], tuple[Any, list[jax.Array]]]
    read: Callable[[Any], dict[str, jax.Array]]
    change: Callable[[Any, str, float], Any]
    range: tuple[float, float] = (0.0, float("inf"))
    one_factor: bool = True
    one_optimizer: bool = True
    fused: bool = False

    def cannot(self, case: Case) -> str:
        """Why the library cannot express a case; empty if it can."""
        factors = (case.growth_factor, case.backoff_factor) != (2.0, 0.5)
        factors |= any(method.endswith("_factor") for _, method, _ in case.events)
        if not case.enabled:
            return "no `enabled`"
        if self.one_factor and factors:
            return "one factor for growth and backoff"
        if self.one_optimizer and case.n_optimizers > 1:
            return "cannot skip one of several optimizers"
        if self.fused and case.unscale_first:
            return "does not unscale without a step"
        return ""


@jax.custom_vjp
def _overflow(params, poison):
    """The parameters; the backward pass writes inf or nan over their gradient."""
    del poison
    return params


_overflow.defvjp(
    lambda params, poison: (params, poison),
    lambda poison, g: (jnp.where(poison == 0, g, poison), jnp.zeros_like(poison)),
)


def _loss(params: jax.Array, x: Input) -> jax.Array:
    """A loss whose gradient is `base`, poisoned."""
    return jnp.sum(_overflow(params, x.poison) * x.base)


def _sgd(grads: Any, train: Any) -> Any:
    """The next parameters and optimizer state, from those in `train`."""
    params, opt_state = train
    updates, opt_state = SGD.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _fresh(case: Case) -> list[Any]:
    """Parameters and state for each optimizer."""
    params = jnp.zeros(SIZE)
    return [(params, SGD.init(params)) for _ in range(case.n_optimizers)]


def _only(x: Input) -> Input:
    """The input of a case with one optimizer."""
    return Input(*(values[0] for values in x))


def _flax_start(case: Case) -> Any:
    names = ("growth_factor", "backoff_factor", "growth_interval")
    scaler = DynamicScale(
        fin_steps=jnp.int32(0),  # pyright: ignore[reportArgumentType]
        scale=jnp.float32(case.init_scale),  # pyright: ignore[reportArgumentType]
        minimum_scale=None,
        **{name: getattr(case, name) for name in names},
    )
    return scaler, _fresh(case)


def _flax_step(state: Any, x: Input) -> Any:
    scaler, [old] = state
    loss = functools.partial(_loss, x=_only(x))
    scaler, finite, _, grads = scaler.value_and_grad(loss)(old[0])
    new = _sgd(grads, old)
    train = [jax.tree.map(functools.partial(jnp.where, finite), new, old)]
    return (scaler, train), [~finite]


def _jmp_start(case: Case) -> Any:
    import jmp

    scaler = jmp.DynamicLossScale(
        jnp.float32(case.init_scale),
        jnp.int32(0),
        period=case.growth_interval,
        min_loss_scale=jnp.float32(0),
    )
    return scaler, _fresh(case)


def _jmp_step(state: Any, x: Input) -> Any:
    import jmp

    scaler, train = state

    def scaled_loss(params):
        inputs = [Input(*parts) for parts in zip(*x, strict=True)]
        return scaler.scale(sum(map(_loss, params, inputs)))

    grads = scaler.unscale(jax.grad(scaled_loss)([params for params, _ in train]))
    finite = [jmp.all_finite(g) for g in grads]
    train = [
        jmp.select_tree(ok, _sgd(g, old), old)
        for ok, g, old in zip(finite, grads, train, strict=True)
    ]
    scaler = scaler.adjust(jnp.all(jnp.stack(finite)))
    return (scaler, train), [~ok for ok in finite]


def _mpx_start(case: Case) -> Any:
    import mpx

    scaler = mpx.DynamicLossScaling(
        jnp.float32(case.init_scale), jnp.float32(0), period=case.growth_interval
    )
    return scaler, _fresh(case)


def _mpx_step(state: Any, x: Input) -> Any:
    import mpx

    scaler, [(params, opt_state)] = state
    loss = functools.partial(_loss, x=_only(x))
    # mpx differentiates in half precision; here only its scaling is compared.
    with mock.patch("mpx._dtypes.HALF_PRECISION_DATATYPE", jnp.float32):
        _, scaler, finite, grads = mpx.filter_value_and_grad(loss, scaler)(params)
    train = [mpx.optimizer_update(params, SGD, opt_state, grads, finite)]
    return (scaler, train), [~finite]


class KerasScaler(struct.PyTreeNode):
    """The wrapper's own variables, and its constructor arguments."""

    variables: list[Any]
    interval: int = struct.field(pytree_node=False)


@functools.cache
def _keras_optimizer(interval: int) -> Any:
    keras = import_keras()
    inner = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, dynamic_growth_steps=interval
    )
    optimizer.build([keras.Variable(jnp.zeros(SIZE))])
    return optimizer


def _own(scaler: KerasScaler, name: str) -> int:
    """The index of one of the wrapper's own variables."""
    optimizer = _keras_optimizer(scaler.interval)
    return [v is getattr(optimizer, name) for v in optimizer.variables].index(True)


def _keras_start(case: Case) -> Any:
    optimizer = _keras_optimizer(case.growth_interval)
    inner = [v.value for v in optimizer.inner_optimizer.variables]
    own = [v.value for v in optimizer.variables[: -len(inner)]]
    scaler = KerasScaler(own, case.growth_interval)
    return _keras_change(scaler, "update", case.init_scale), [(jnp.zeros(SIZE), inner)]


def _keras_step(state: Any, x: Input) -> Any:
    keras = import_keras()
    scaler, [(params, inner)] = state
    optimizer = _keras_optimizer(scaler.interval)
    variables = scaler.variables + inner
    # Inside the scope, `scale_loss` reads the scale of this step.
    pairs = list(zip(optimizer.variables, variables, strict=True))
    with keras.StatelessScope(state_mapping=pairs):
        grads = jax.grad(lambda p: optimizer.scale_loss(_loss(p, _only(x))))(params)
    [params], variables = optimizer.stateless_apply(variables, [grads], [params])
    own, new = variables[: -len(inner)], variables[-len(inner) :]
    steps = [v is optimizer.iterations for v in optimizer.inner_optimizer.variables]
    done = steps.index(True)  # counts the steps that were not skipped
    return (scaler.replace(variables=own), [(params, new)]), [new[done] == inner[done]]


def _keras_read(scaler: KerasScaler) -> dict[str, jax.Array]:
    names = {"scale": "dynamic_scale", "tracker": "step_counter"}
    return {k: scaler.variables[_own(scaler, name)] for k, name in names.items()}


def _keras_change(scaler: KerasScaler, method: str, value: float) -> KerasScaler:
    if method == "set_growth_interval":
        return scaler.replace(interval=int(value))
    variables = [*scaler.variables]
    variables[_own(scaler, "dynamic_scale")] = jnp.float32(value)
    return scaler.replace(variables=variables)


_NEVER = 2**31 - 1  # errors in a row, more than ever happen
_IF_FINITE = optax.apply_if_finite(SGD, max_consecutive_errors=_NEVER)


def _if_finite_start(case: Case) -> Any:
    params = jnp.zeros(SIZE)
    return None, [(params, _IF_FINITE.init(params)) for _ in range(case.n_optimizers)]


def _if_finite_step(state: Any, x: Input) -> Any:
    train = []
    for (params, opt_state), grads in zip(state[1], x.unscaled, strict=True):
        updates, opt_state = _IF_FINITE.update(grads, opt_state, params)
        train.append((optax.apply_updates(params, updates), opt_state))
    return (None, train), [~opt_state.last_finite for _, opt_state in train]


def _fields(scale: str, tracker: str) -> Callable[[Any], dict[str, jax.Array]]:
    names = {"scale": scale, "tracker": tracker}
    return lambda scaler: {k: getattr(scaler, name) for k, name in names.items()}


def _setting(scale: str, interval: str = "growth_interval") -> Callable[..., Any]:
    """Setters of a dataclass with these names."""
    names = {"update": scale, "set_growth_interval": interval}

    def change(scaler: Any, method: str, value: float) -> Any:
        name = names.get(method, method.removeprefix("set_"))
        new = {scale: jnp.float32, interval: int}.get(name, float)(value)
        return dataclasses.replace(scaler, **{name: new})

    return change


_FLOAT16 = jnp.finfo(jnp.float16)  # mpx multiplies by the scale in float16

PEERS: Mapping[str, Peer] = {
    "flax DynamicScale": Peer(
        "flax",
        _flax_start,
        _flax_step,
        _fields("scale", "fin_steps"),
        _setting("scale"),
        one_factor=False,
    ),
    "jmp": Peer(
        "jmp",
        _jmp_start,
        _jmp_step,
        _fields("loss_scale", "counter"),
        _setting("loss_scale", "period"),
        one_optimizer=False,
    ),
    "mpx": Peer(
        "mpx",
        _mpx_start,
        _mpx_step,
        _fields("loss_scaling", "counter"),
        _setting("loss_scaling", "period"),
        range=(float(_FLOAT16.smallest_normal), float(_FLOAT16.max)),
    ),
    "Keras LossScaleOptimizer": Peer(
        "keras", _keras_start, _keras_step, _keras_read, _keras_change, fused=True
    ),
    # It has no scale, so it gets the gradients that torch unscaled.
    "optax apply_if_finite": Peer(
        "optax",
        _if_finite_start,
        _if_finite_step,
        lambda scaler: {},
        lambda scaler, method, value: scaler,
        one_factor=False,
        one_optimizer=False,
    ),
}


@functools.cache
def _scan(peer: Peer) -> Any:
    def step(state, x):
        (scaler, train), skipped = peer.step(state, x)
        rest = jnp.stack(skipped), jnp.stack([params for params, _ in train])
        record = peer.read(scaler) | dict(zip(("skipped", "params"), rest, strict=True))
        return (scaler, train), record

    return jax.jit(lambda state, inputs: lax.scan(step, state, inputs))


def run_peer(peer: Peer, case: Case, inputs: Input) -> dict[str, np.ndarray]:
    """A library's run of a case: the fields of `trajectory.Trajectory` that it has."""
    (scaler, train), records = peer.start(case), []
    for start, stop in case.segments(case.steps):
        for method, value in case.setters(start):
            scaler = peer.change(scaler, method, value)
        before, part = scaler, Input(*(x[start:stop] for x in inputs))
        (scaler, train), record = _scan(peer)((scaler, train), part)
        new_scale = case.new_scale(start)
        if new_scale is not None:  # replaces what the step did to the scaler
            scaler = peer.change(before, "update", new_scale)
            record |= {k: value[None] for k, value in peer.read(scaler).items()}
        records.append({name: np.asarray(values) for name, values in record.items()})
    fields = {k: np.concatenate([r[k] for r in records]) for k in records[0]}
    floating = {"scale", "params"} & fields.keys()
    return fields | {name: bits(fields[name]) for name in floating}


def _grampax(function: Function) -> Function:
    import grampax

    # It casts only its first argument, so all arrays go into that.
    cast = grampax.autocast(lambda inputs: function(*inputs), dtype=jnp.float16)

    def run(*inputs):
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", DeprecationWarning)
            return cast(inputs)  # prints its operands

    return run


def _jmp_half(function: Function) -> Function:
    import jmp

    cast = jmp.get_policy("params=float32,compute=float16,output=float32")
    return lambda *inputs: function(*cast.cast_to_compute(inputs))


def _mpx_half(function: Function) -> Function:
    import mpx

    return lambda *inputs: function(*mpx.cast_to_float16(inputs))


# How each library casts to float16: a wrapper of functions of arrays, with its module.
CASTS: Mapping[str, tuple[str, Callable[[Function], Function]]] = {
    "jamp": ("jamp", jamp.autocast(dtype=jnp.float16)),
    "plain JAX": ("jax", lambda function: function),
    "jmp": ("jmp", _jmp_half),
    "mpx": ("mpx", _mpx_half),
    "grampax": ("grampax", _grampax),
}
