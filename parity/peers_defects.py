"""Defects of the other libraries: figures from the run, beside jamp's."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from jax import lax

import jamp

from . import jamp_side
from .cases import SIZE, Case, streams
from .jamp_side import SGD
from .peers_ops import CASTS, PEERS, Input, run_peer
from .trajectory import floats

# What a library raises for something that it cannot do.
REFUSALS = (AttributeError, ImportError, NotImplementedError, TypeError)


class Defect(NamedTuple):
    """A defect that this run showed: the same figure on both sides."""

    what: str
    there: str
    jamp: str


def _attempt(function: Callable[[], Any]) -> str:
    """A result in words, or the name of what it raises."""
    try:
        return f"{function():.6g}"
    except REFUSALS as error:
        return type(error).__name__


def _both(name: str, case: Case, figure: Callable[[Any], float]) -> tuple[str, str]:
    """The same figure from a library's run of a case and from jamp's."""
    base, poison = streams(case)
    there = run_peer(PEERS[name], case, Input(base, poison, base))
    runs = there, jamp_side.run_optax(case)._asdict()
    there, here = (f"{figure(fields):.6g}" for fields in runs)
    return there, here


def _jamp_scale(steps: int, gradient: float, **kwargs: Any) -> float:
    """jamp's scale after some steps with the same gradient."""
    tx = jamp.dynamic_loss_scale(SGD, **kwargs)
    params = jnp.zeros(SIZE)
    opt_state = tx.init(params)
    for _ in range(steps):
        grads = jnp.full(SIZE, gradient)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
    return float(jamp.loss_scale(opt_state))


def _jamp_grad(loss: Any, params: Any, **kwargs: Any) -> tuple[Any, Any]:
    """jamp's loss and unscaled gradient."""
    opt_state = jamp.dynamic_loss_scale(SGD, **kwargs).init(params)
    value, grads = jamp.value_and_grad(loss, opt_state)(params)
    return value, jamp.unscale(grads, opt_state)


def _flax_defects() -> Iterator[Defect]:
    case = Case("growth", "", growth_interval=3, overflow=0.0, steps=8)
    grown = lambda fields: int(np.argmax(fields["scale"] != fields["scale"][0])) + 1
    yield Defect(
        "growth interval 3, all finite: the step after which the scale first grows",
        *_both("flax DynamicScale", case, grown),
    )
    loss, params = lambda p: (p * (4 + 8j)).real, jnp.complex64(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of the lost imaginary part
        grad = DynamicScale().value_and_grad(loss)(params).grad
    found = (complex(x) for x in (grad, _jamp_grad(loss, params)[1]))
    yield Defect("a complex parameter: its gradient", *(f"{x:g}" for x in found))


def _jmp_defects() -> Iterator[Defect]:
    import jmp

    scaler = jmp.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.float32(4))
    overflow = jax.jit(lambda scaler: scaler.adjust(jnp.array(False)))
    for _ in range(5):
        scaler = overflow(scaler)
    yield Defect(
        "smallest scale set to 4, under `jax.jit`: a scale of 8 after 5 overflows",
        f"{float(scaler.loss_scale):g}",
        f"{_jamp_scale(5, np.inf, init_scale=8.0, min_scale=4.0):g}",
    )
    half = jnp.float16(1024)
    adjust = jmp.DynamicLossScale(half).adjust
    yield Defect(
        "an initial scale of 1024 in float16: the scale after a finite step",
        _attempt(lambda: float(adjust(jnp.array(True)).loss_scale)),
        f"{_jamp_scale(1, 1.0, init_scale=half):g}",
    )
    large = jmp.DynamicLossScale(jnp.float32(2.0**127))
    same = lambda p: p
    yield Defect(
        "a scale of 2^127, whose inverse XLA flushes to 0 on a CPU: a gradient of 1",
        f"{large.unscale(jax.grad(lambda p: large.scale(p))(jnp.float32(1))):g}",
        f"{_jamp_grad(same, jnp.float32(1), init_scale=2.0**127)[1]:g}",
    )


def _mpx_defects() -> Iterator[Defect]:
    import mpx

    def run(scale, **kwargs):
        scaler = mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(1), **kwargs)
        loss, params = lambda p: 3 * p, jnp.float32(1)
        value, _, _, grad = mpx.filter_value_and_grad(loss, scaler)(params)
        here = _jamp_grad(loss, params, init_scale=scale)
        return [(f"{x:g}", f"{y:g}") for x, y in zip((value, grad), here, strict=True)]

    yield Defect(
        "the step at which the scale grows: a gradient of 3",
        *run(1024.0, period=1)[1],
    )
    largest = float(np.finfo(np.float16).max)  # the initial scale that it recommends
    yield Defect("an initial scale of 65504: a loss of 3", *run(largest)[0])


def _keras_defects() -> Iterator[Defect]:
    case = Case("growth", "", init_scale=2.0**120, growth_interval=1, overflow=0.0)
    case = dataclasses.replace(case, steps=100)
    last = lambda fields: float(np.log2(floats(fields["scale"])[-1]))
    yield Defect(
        "growth at every finite step from 2^120: log2 of the scale after 100 steps",
        *_both("Keras LossScaleOptimizer", case, last),
    )


def _if_finite_defects() -> Iterator[Defect]:
    def run(tx):
        params: Any = jnp.zeros(SIZE)
        opt_state = tx.init(params)
        for _ in range(10):
            grads = jnp.full(SIZE, np.nan)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return int(jnp.isnan(params).sum())

    peer = optax.apply_if_finite(SGD, max_consecutive_errors=5)
    there, here = run(peer), run(jamp.dynamic_loss_scale(SGD))
    yield Defect(
        f"10 overflows in a row, 5 allowed: how many of {SIZE} parameters are nan",
        str(there),
        str(here),
    )


def _grampax_defects() -> Iterator[Defect]:
    twice = jax.custom_vjp(lambda x: 2 * x)
    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    scan = lambda x: lax.scan(lambda carry, _: (carry * x, None), x, length=2)[0]
    for what, function in {
        "2 to the third power by `lax.scan`": scan,
        "2 doubled by a `jax.custom_vjp` function": twice,
    }.items():
        casts = [CASTS[name][1](function) for name in ("grampax", "jamp")]
        found = [_attempt(lambda f=f: float(f(jnp.float32(2)))) for f in casts]
        yield Defect(what, *found)


DEFECTS: Mapping[str, Callable[[], Iterator[Defect]]] = {
    "flax DynamicScale": _flax_defects,
    "jmp": _jmp_defects,
    "mpx": _mpx_defects,
    "Keras LossScaleOptimizer": _keras_defects,
    "optax apply_if_finite": _if_finite_defects,
    "grampax": _grampax_defects,
}
