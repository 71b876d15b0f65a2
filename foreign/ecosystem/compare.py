"""Runs a call in float32 and in regions, and says how far the results are apart."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jamp

from .call import NATS, Call, layer

DTYPES = ("float16", "bfloat16")
WAYS = HALF, INNER = ("half", "inner jit")
# What may be wrong with a call. What it raises has a note of jamp's, or it has none.
# Of a call that counts, the two ways give two dtypes, or values that are apart.
# A loss or log-density that comes out in half precision has lost what it was for.
ERROR, GRADIENT, DTYPE, APART = "error", "gradient", "dtype", "apart"
RAISES, UNADVISED, HALVED = "raises", "raises without a note", "half precision"
FAULTS = (ERROR, GRADIENT, DTYPE, APART, RAISES, UNADVISED, HALVED)
ROUNDINGS = 8.0  # how many of its dtype's the two ways may be apart


class Result(NamedTuple):
    """What one way gave: errors relative to float32, the dtypes, or what it raised.

    Attributes:
      nats: the largest absolute error, which says what a log-density lost.
    """

    error: float = float("nan")
    gradient: float = float("nan")
    dtypes: str = ""
    raised: str = ""
    nats: float = float("nan")


class Row(NamedTuple):
    """A call's line of the table.

    Attributes:
      results: by dtype and way.
      faults: what is wrong, with the figure that shows it.
    """

    name: str
    results: dict[str, dict[str, Result]]
    faults: dict[str, str]


def compare(call: Call) -> Row:
    """Runs a call all five ways.

    Raises:
      Exception: what the call raises outside of regions, where it must not fail.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = program(call, None, False)(*call.inputs)
        results, faults = {}, {}
        for dtype in DTYPES:
            given, results[dtype] = {}, {}
            for way in WAYS:
                try:
                    given[way] = program(call, dtype, way == INNER)(*call.inputs)
                except Exception as error:  # of any library
                    results[dtype][way] = Result(raised=said(error))
                    fault = RAISES if advised(error) else UNADVISED
                    faults.setdefault(fault, f"{dtype}, {way}: {said(error)[:300]}")
                    continue
                results[dtype][way] = judge(plain, given[way])
            collect(call, dtype, results[dtype], difference(given), faults)
    return Row(call.name, results, faults)


def said(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}"


def advised(error: Exception) -> bool:
    """Whether the error says what to write: it is jamp's own, or has its note."""
    texts = [str(error), *getattr(error, "__notes__", ())]
    return any("autocast region" in text for text in texts)


def program(call: Call, dtype: str | None, inner: bool) -> Callable[..., Any]:
    """The call behind a layer, with its gradients, compiled.

    Args:
      dtype: of the region; None for none.
      inner: whether `jax.jit` is around layer and call, in the region.
    """

    def body(*inputs: jax.Array) -> Any:
        return jax.tree.map(jnp.asarray, call.function(*map(layer, inputs)))

    def run(*inputs: jax.Array) -> Any:
        if dtype is None:
            return body(*inputs)
        with jamp.autocast(dtype=jnp.dtype(dtype)):
            return (jax.jit(body) if inner else body)(*inputs)

    def both(*inputs: jax.Array) -> Any:
        def scalar(*inputs: jax.Array) -> Any:
            out = run(*inputs)
            return weighted(out), out

        every = tuple(range(len(inputs)))
        grad = jax.grad(scalar, argnums=every, has_aux=True)
        gradients, out = grad(*inputs)
        return out, gradients

    return jax.jit(both if call.gradient else lambda *inputs: (run(*inputs), ()))


def weighted(out: Any) -> jax.Array:
    """A scalar of all floating results, in float32."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(out):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            leaf = leaf.real + leaf.imag
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf.astype(jnp.float32).ravel()
            total += jnp.dot(leaf, jnp.cos(jnp.arange(leaf.size) * 0.7))
    return total


def judge(plain: Any, given: Any) -> Result:
    dtypes = [str(np.dtype(x.dtype)) for x in jax.tree.leaves(given[0])]
    error = relative(plain[0], given[0])
    gradient = relative(plain[1], given[1]) if plain[1] else float("nan")
    nats = relative(plain[0], given[0], absolute=True)
    return Result(error, gradient, " ".join(dict.fromkeys(dtypes)), nats=nats)


def difference(given: dict[str, Any]) -> float:
    """How far the values of the two ways are apart, or nan if one of them raised."""
    if given.keys() != {*WAYS}:
        return float("nan")
    return relative(given[HALF][0], given[INNER][0])


def relative(plain: Any, given: Any, absolute: bool = False) -> float:
    """The largest error of an array, relative to the largest value that it should have.

    With `absolute`, relative to 1. What is not finite must be the same; otherwise the
    error is infinite.
    """
    errors = [0.0]
    expected, found = jax.tree.leaves(plain), jax.tree.leaves(given)
    for a, b in zip(expected, found, strict=True):
        a, b = (np.asarray(x, complex if np.iscomplexobj(x) else float) for x in (a, b))
        finite = np.isfinite(a)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        if not finite.any():
            continue
        apart, size = np.abs(a[finite] - b[finite]).max(), np.abs(a[finite]).max()
        errors.append(float(apart / size) if size and not absolute else float(apart))
    return float(np.nan_to_num(np.max(errors), nan=np.inf, posinf=np.inf))


def collect(
    call: Call,
    dtype: str,
    results: dict[str, Result],
    apart: float,
    faults: dict[str, str],
) -> None:
    """Adds what is wrong in one dtype.

    Args:
      apart: how far the values of the two ways are from each other.
    """
    for way, result in results.items():
        if result.error > call.bound:
            faults.setdefault(ERROR, f"{dtype}, {way}: {result.error:.1e}")
        if call.is_density and result.nats > NATS:
            faults.setdefault(ERROR, f"{dtype}, {way}: {result.nats:.1e} nats")
        if call.is_loss and dtype in result.dtypes.split():
            faults.setdefault(HALVED, f"{dtype}, {way}")
        if result.gradient > call.bound:
            faults.setdefault(GRADIENT, f"{dtype}, {way}: {result.gradient:.1e}")
    if not call.counts:
        return
    half, inner = results[HALF], results[INNER]
    if half.dtypes and inner.dtypes and half.dtypes != inner.dtypes:
        faults.setdefault(DTYPE, f"{dtype}: {half.dtypes} and {inner.dtypes}")
    if apart > ROUNDINGS * float(jnp.finfo(dtype).eps):
        faults.setdefault(APART, f"{dtype}: {apart:.1e}")
