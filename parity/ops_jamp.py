"""jamp's side of `ops`: results and gradients under `jamp.autocast`."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp

from .ops_table import Function, Side

# Otherwise XLA may drop a cast to bfloat16 and back.
_OPTIONS = {"xla_allow_excess_precision": False}
# LLVM's optimizations take a third of the time and gain nothing at these sizes.
_CPU_OPTIONS = {"xla_backend_optimization_level": 0}
JITTED = ("in jit", "jitted in the region")


@contextlib.contextmanager
def settings() -> Iterator[None]:
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
        # JAX warns that it will one day refuse `x.at[i].set(y)` with a wider y.
        warnings.filterwarnings("ignore", "scatter inputs have incompatible types")
        yield


def _forward(op: Function, half: str, jit: bool) -> Callable[..., list[jax.Array]]:
    """The op in a region, jitted there or not."""

    def forward(*inputs):
        with jamp.autocast(dtype=half):
            return jax.tree.leaves((jax.jit(op.jax) if jit else op.jax)(*inputs))

    return forward


def derivative_of(op: Function, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Results and gradients of the list of results that a function returns."""

    def derivative(*inputs):
        results, vjp = jax.vjp(forward, *inputs)
        given = op.cotangents([x.shape for x in results])
        cast = [jnp.asarray(g, x.dtype) for g, x in zip(given, results, strict=True)]
        return results, vjp(cast)

    return derivative


def _derivatives(op: Function, half: str) -> Callable[..., Any]:
    """The derivatives of the paths in `JITTED` for all inputs, to compile as one.

    They are taken outside the region.
    """
    paths = {
        path: derivative_of(op, _forward(op, half, path != "in jit")) for path in JITTED
    }

    def derivatives(inputs):
        return {
            name: {path: derivative(*x) for path, derivative in paths.items()}
            for name, x in inputs.items()
        }

    return derivatives


def compiled(function: Callable[..., Any], *inputs: Any) -> Any:
    """What a function gives as one program, rounded wherever it casts."""
    options = _OPTIONS | (_CPU_OPTIONS if jax.default_backend() == "cpu" else {})
    return jax.jit(function, compiler_options=options)(*inputs)


def run(
    ops: Sequence[tuple[Function, str]], outside_jit: bool = True
) -> list[dict[str, dict[str, Side]]]:
    """jamp's results and gradients of ops, by inputs and by path.

    Args:
      ops: each op with the region's dtype. All of them compile as one program.
      outside_jit: whether float16 also runs there.

    Outside jit each step compiles alone, which takes most of the time. So that path has
    no gradients, and it does not run in bfloat16, where the Python code is the same.
    """
    inputs = [{name: op.arrays(name, half) for name in op.inputs} for op, half in ops]
    inputs = jax.tree.map(jnp.asarray, inputs)
    functions = [_derivatives(*op) for op in ops]

    def derivatives(inputs):
        return [function(x) for function, x in zip(functions, inputs, strict=True)]

    with settings():
        found = compiled(derivatives, inputs)
        for (op, half), of_op, arrays in zip(ops, found, inputs, strict=True):
            for name, x in arrays.items():
                if half == "float16" and outside_jit:
                    eager = _forward(op, half, jit=False)(*x)
                    of_op[name] = {"outside jit": (eager, ())} | of_op[name]
    return [
        {
            name: {path: side_of(*side) for path, side in paths.items()}
            for name, paths in of_op.items()
        }
        for of_op in found
    ]


def side_of(results: Iterable[jax.Array], grads: Iterable[jax.Array]) -> Side:
    return Side([np.asarray(x) for x in results], [np.asarray(x) for x in grads])
