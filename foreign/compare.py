"""Runs a call of `calls.txt` in float32 and in regions, and says what is wrong with it.

Each call runs five ways: in float32 outside of any region, and in regions of float16
and bfloat16 both *half* (Python runs in the region, so the function sees half
precision) and *inner jit* (layer and call are in a `jax.jit` inside the region: JAX
traces them in float32, and autocast casts what was traced). The options of a row:

- `scale`, `shift`, `positive`: of normal numbers, or of uniform ones from 0 to 1.
  `above`, `between` and `chances` are ranges of positive numbers.
- `no-gradient`: only the result is compared.
- `counts`: it sums, counts or branches on a dtype, so where `jax.jit` stands must
  change neither the dtype of the result nor, by more than rounding, its value.
- `bound`: of the errors relative to float32, otherwise 5e-2. A log-density may be 5e-2
  apart, whatever its size: a relative bound would hide 150 nats of 3,000.
- the faults that it has, and no others, of `FAULTS`.
"""

import pathlib
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jamp
from shared import cells

DTYPES = ("float16", "bfloat16")
WAYS = HALF, INNER = ("half", "inner jit")
# What it raises has a note of jamp's, or is unadvised. Of a call that counts, the two
# ways give two dtypes, or values that are apart. A loss or log-density that comes out
# halved, in half precision, has lost what it was for.
FAULTS = ("error", "gradient", "dtype", "apart", "raises", "unadvised", "halved")
BOUND = 5e-2
NATS = 5e-2
ROUNDINGS = 8.0  # how many of its dtype's the two ways may be apart
DENSITY = re.compile(r"log_?(prob|c?df|pdf|pmf|sf|likelihood)")
LOSS = re.compile(r"loss|divergence|entropy|ntxent|squared_error|log_cosh")
RANGES = {"above": (3.0, 0.5), "between": (0.9, 0.05), "chances": (0.98, 0.01)}
ROUNDED: Any = {"xla_allow_excess_precision": False}
# Programs run once: XLA compiles in a third of the time without LLVM's optimizations.
QUICK: Any = ROUNDED | {"xla_backend_optimization_level": 0}


class Call(NamedTuple):
    """A row of `calls.txt`, with one of the words of each brace."""

    section: str
    cell: str
    inputs: str
    options: tuple[str, ...] = ()

    @property
    def faults(self) -> set[str]:
        return {*self.options} & {*FAULTS}

    def number(self, name: str, default: float) -> float:
        found = [x for x in self.options if x.startswith(f"{name}=")]
        return float(found[0].partition("=")[2]) if found else default

    def arrays(self, names: dict[str, Any]) -> list[np.ndarray]:
        """The inputs: float32, and exact in both half-precision dtypes."""
        random = np.random.default_rng(zlib.crc32(self.cell.encode()))
        ranges = [RANGES[x] for x in self.options if x in RANGES]
        scale, shift = ranges[0] if ranges else (1.0, 0.0)
        scale, shift = self.number("scale", scale), self.number("shift", shift)
        uniform = bool(ranges) or "positive" in self.options
        draw = random.uniform if uniform else random.standard_normal
        found = []
        for text in self.inputs.split():
            if re.fullmatch(r"\d+(x\d+)*", text):
                x = draw(size=tuple(map(int, text.split("x")))) * scale + shift
            else:
                x = eval(text, names)
            found.append(np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)))
        return found


def calls() -> Iterator[Call]:
    path = pathlib.Path(__file__).with_name("calls.txt")
    for section, (cell, inputs, *rest) in cells.rows(path):
        for each in cells.expanded(cell):
            yield Call(section, each, inputs, tuple(" ".join(rest).split()))


def layer(x: jax.Array) -> jax.Array:
    """A product with the identity: in a region `x` itself, in half precision."""
    width = next(n for n in (8, 6, 5, 4, 3, 2, x.size) if x.size % n == 0)
    return (x.reshape(-1, width) @ jnp.eye(width)).reshape(x.shape)


def compare(call: Call, names: dict[str, Any]) -> dict[str, str]:
    """The faults of a call, with the figure that shows each.

    Raises:
      Exception: what the call raises outside of regions, where it must not fail.
    """
    faults: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, inputs = cells.function(call.cell, names, "hg"), call.arrays(names)
        run = lambda *how: program(call, function, *how)(*inputs)
        plain = run(None, False)
        for dtype in DTYPES:
            given = {}
            for way in WAYS:
                try:
                    given[way] = run(dtype, way == INNER)
                except Exception as error:  # of any library
                    fault = "raises" if advised(error) else "unadvised"
                    said = f"{type(error).__name__}: {str(error).strip()[:300]}"
                    faults.setdefault(fault, f"{dtype}, {way}: {said}")
            for fault, said in judged(call, dtype, plain, given):
                faults.setdefault(fault, f"{dtype}, {said}")
    return faults


def advised(error: Exception) -> bool:
    """Whether the error says what to write: it is jamp's own, or has its note."""
    texts = [str(error), *getattr(error, "__notes__", ())]
    return any("autocast region" in text for text in texts)


def program(
    call: Call, function: Callable[..., Any], dtype: str | None, inner: bool
) -> Callable[..., Any]:
    """The call behind a layer, with its gradients, compiled.

    Args:
      dtype: of the region; None for none.
      inner: whether `jax.jit` is around layer and call, in the region.
    """

    def body(*inputs: jax.Array) -> Any:
        return jax.tree.map(jnp.asarray, function(*map(layer, inputs)))

    def run(*inputs: jax.Array) -> Any:
        if dtype is None:
            return body(*inputs)
        with jamp.autocast(dtype=jnp.dtype(dtype)):
            return (jax.jit(body) if inner else body)(*inputs)

    def both(*inputs: jax.Array) -> Any:
        def scalar(*inputs: jax.Array) -> Any:
            out = run(*inputs)
            return weighted(out), out

        grad = jax.grad(scalar, argnums=tuple(range(len(inputs))), has_aux=True)
        gradients, out = grad(*inputs)
        return out, gradients

    alone = "no-gradient" in call.options
    target = (lambda *inputs: (run(*inputs), ())) if alone else both
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(target, compiler_options=QUICK if on_cpu else ROUNDED)


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


def judged(
    call: Call, dtype: str, plain: Any, given: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """What is wrong in one dtype, of the ways that did not raise."""
    bound, is_density = call.number("bound", BOUND), DENSITY.search(call.cell)
    dtypes = {way: kinds(out) for way, (out, _) in given.items()}
    for way, (out, gradients) in given.items():
        if (error := relative(plain[0], out)) > bound:
            yield "error", f"{way}: {error:.1e}"
        if is_density and (nats := relative(plain[0], out, absolute=True)) > NATS:
            yield "error", f"{way}: {nats:.1e} nats"
        if (is_density or LOSS.search(call.cell)) and dtype in dtypes[way]:
            yield "halved", way
        if (error := relative(plain[1], gradients)) > bound:
            yield "gradient", f"{way}: {error:.1e}"
    if "counts" in call.options and given.keys() == {*WAYS}:
        if dtypes[HALF] != dtypes[INNER]:
            yield "dtype", f"{dtypes[HALF]} and {dtypes[INNER]}"
        apart = relative(given[HALF][0], given[INNER][0])
        if apart > ROUNDINGS * float(jnp.finfo(dtype).eps):
            yield "apart", f"{apart:.1e}"


def kinds(out: Any) -> Sequence[str]:
    return [*dict.fromkeys(str(x.dtype) for x in jax.tree.leaves(out))]


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
