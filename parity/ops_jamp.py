"""jamp's side of `ops`: results and gradients under `jamp.autocast`."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp

from .ops_table import Op, Side

# Otherwise XLA may drop a cast to bfloat16 and back.
_OPTIONS = {"xla_allow_excess_precision": False}
# LLVM's optimizations take a third of the time and gain nothing at these sizes.
_CPU_OPTIONS = {"xla_backend_optimization_level": 0}
JITTED = ("in jit", "jitted in the region")


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
        # JAX warns that it will one day refuse `x.at[i].set(y)` with a wider y.
        warnings.filterwarnings("ignore", "scatter inputs have incompatible types")
        yield


def _forward(op: Op, half: str, jit: bool) -> Callable[..., list[jax.Array]]:
    """The op in a region, jitted there or not."""

    def forward(*inputs):
        with jamp.autocast(dtype=half):
            return jax.tree.leaves((jax.jit(op.jax) if jit else op.jax)(*inputs))

    return forward


def _derivative(op: Op, half: str, jit: bool) -> Callable[..., Any]:
    """Results and gradients, with the derivative taken outside the region."""
    forward = _forward(op, half, jit)

    def derivative(*inputs):
        results, vjp = jax.vjp(forward, *inputs)
        given = op.cotangents([x.shape for x in results])
        cast = [jnp.asarray(g, x.dtype) for g, x in zip(given, results, strict=True)]
        return results, vjp(cast)

    return derivative


def _derivatives(op: Op, half: str) -> Callable[..., Any]:
    """The derivatives of the paths in `JITTED` for all inputs, to compile as one."""
    paths = {path: _derivative(op, half, path != "in jit") for path in JITTED}

    def derivatives(inputs):
        return {
            name: {path: derivative(*x) for path, derivative in paths.items()}
            for name, x in inputs.items()
        }

    return derivatives


def run(ops: Sequence[tuple[Op, str]]) -> list[dict[str, dict[str, Side]]]:
    """jamp's results and gradients of ops, by inputs and by path.

    Args:
      ops: each op with the region's dtype. All of them compile as one program.

    Outside jit each step compiles alone, which takes most of the time. So that path has
    no gradients, and it does not run in bfloat16, where the Python code is the same.
    """
    inputs = [{name: op.arrays(name, half) for name in op.inputs} for op, half in ops]
    inputs = jax.tree.map(jnp.asarray, inputs)
    functions = [_derivatives(*op) for op in ops]

    def derivatives(inputs):
        return [function(x) for function, x in zip(functions, inputs, strict=True)]

    with _settings():
        options = _OPTIONS | (_CPU_OPTIONS if jax.default_backend() == "cpu" else {})
        found = jax.jit(derivatives, compiler_options=options)(inputs)
        for (op, half), of_op, arrays in zip(ops, found, inputs, strict=True):
            for name, x in arrays.items():
                if half == "float16":
                    eager = _forward(op, half, jit=False)(*x)
                    of_op[name] = {"outside jit": (eager, ())} | of_op[name]
    return [
        {
            name: {path: _side(*side) for path, side in paths.items()}
            for name, paths in of_op.items()
        }
        for of_op in found
    ]


def _side(results: Iterable[jax.Array], grads: Iterable[jax.Array]) -> Side:
    return Side([np.asarray(x) for x in results], [np.asarray(x) for x in grads])
