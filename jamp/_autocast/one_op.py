"""A function that is one op in torch is one op here: it reads half and rounds once.

torch computes gelu, or a quotient, in one kernel: in float32, of half precision, and
rounded once. Its derivative is a kernel too, of what the first one was given or, for
some, of its result. In JAX they are several ops that each round, and the derivative of
one may overflow in half precision where the gradient does not, as `y ** -2` in that of
`x / y`. So these ops and functions get a derivative of their own, in float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

from .._compat import array_dtype
from .._tree import HALVES
from .decision import FLOAT32_DTYPE, Op, Params, Values
from .numbers import fits, is_inexact, scalar
from .trace import AutocastTrace

Function = Callable[..., list[jax.Array]]
# The derivatives by the result, where torch keeps that.
SLOPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "exp2": lambda out: out * np.float32(np.log(2)),
    "logistic": lambda out: out * (1 - out),
    "sqrt": lambda out: 0.5 / out,
    "tanh": lambda out: (1 - out) * (1 + out),
}
# In half precision XLA makes exponentials of two, which overflow or lose digits, and a
# product of a quotient by a number or a row, whose inverse may overflow.
WIDE = frozenset({"exp2", "logistic", "div"})
# Of these, XLA would store on a GPU what the derivative shares with the function.
COMPUTED_ANEW = frozenset({"jax.nn.gelu", "jax.nn.mish"})
# What is remembered inside of gelu: its input, and whether it is the approximate one.
GIVEN = "given"
APPROXIMATE = {"tanh": True, "erfc": False}


def halves(args: Values) -> np.dtype | None:
    """The half precision that all floating inputs have, or None."""
    dtypes = {dtype for dtype in map(array_dtype, args) if is_inexact(dtype)}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {*HALVES} else None


def of_primitive(op: Op, args: Values, params: Params) -> Function | None:
    """A primitive of half precision with its derivative, or None if it needs none."""
    if (dtype := halves(args)) is None:
        return None
    if op.name == "div" and (number := scalar(args[1])) and fits(1 / number, dtype):
        return None  # XLA makes it a product
    return _of_primitive(op.primitive, tuple(params.items()), dtype)


@functools.lru_cache(maxsize=256)
def _of_primitive(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], dtype: np.dtype
) -> Function:
    wide = lambda *args: [primitive.bind(*args, **dict(params))]
    narrow = None if primitive.name in WIDE else wide
    return one_op(wide, (dtype,), SLOPES.get(primitive.name), narrow=narrow)


@functools.lru_cache(maxsize=256)
def of_jaxpr(jaxpr: ClosedJaxpr, dtypes: tuple[Any, ...], anew: bool) -> Function:
    return one_op(jaxpr_as_fun(jaxpr), dtypes, anew=anew)


@functools.cache
def of_gelu(dtype: np.dtype, approximate: bool, joins: bool) -> Function:
    """gelu. XLA may join it in half precision with cuBLAS's product before it."""
    gelu = functools.partial(jax.nn.gelu, approximate=approximate)
    once = lambda x: to(dtype, gelu(widened(x)))
    narrow = lambda x: [lax.platform_dependent(x, cuda=gelu, rocm=gelu, default=once)]
    narrow = narrow if joins else None
    return one_op(lambda x: [gelu(x)], (dtype,), anew=True, narrow=narrow)


def one_op(
    wide: Function,
    dtypes: tuple[Any, ...],
    slope: Callable[[jax.Array], jax.Array] | None = None,
    anew: bool = False,
    narrow: Function | None = None,
) -> Function:
    """A function of half precision, which it and its derivatives round once.

    Args:
      wide: the function in float32.
      dtypes: of its results.
      slope: its derivative by its one result, which is then kept for it.
      anew: whether a GPU computes the derivative from the inputs alone.
      narrow: the function in half precision, if that rounds once by itself.
    """
    run = narrow or (lambda *args: [*map(to, dtypes, wide(*map(widened, args)))])
    function = jax.custom_jvp(run)

    @functools.cache
    def tangent(moves: tuple[bool, ...]) -> Function:
        def rounded(kept: Sequence[jax.Array], dots: Sequence[jax.Array]) -> Any:
            at = [*map(widened, again(kept) if anew else kept)]
            # The gradient is rounded here. A GPU drops a cast whose result is cast
            # back, as in the gradient of a bias, and would store the float32 for both.
            dots = [-widened(-dot) for dot in dots]
            if slope is not None:
                return [to(dtypes[0], dots[0] * slope(at[0]))]

            def along(*moved: jax.Array) -> list[jax.Array]:
                new = iter(moved)
                pairs = zip(at, moves, strict=True)
                return wide(*(next(new) if moves else x for x, moves in pairs))

            moved = [x for x, moves in zip(at, moves, strict=True) if moves]
            return [*map(to, dtypes, jax.jvp(along, moved, dots)[1])]

        # Nothing but `kept` is kept for the backward pass: what JAX would save inside
        # is computed again, and policies of `jax.checkpoint` do not look into the
        # function with a derivative of its own.
        once = jax.checkpoint(rounded, prevent_cse=False)
        opaque = jax.custom_jvp(once)
        opaque.defjvp(lambda primals, tangents: jax.jvp(once, primals, tangents))
        return opaque

    def jvp(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
        out = function(*primals)
        moves = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        dots = [t for t in tangents if not isinstance(t, SymbolicZero)]
        return out, tangent(moves)([*primals] if slope is None else out, dots)

    function.defjvp(jvp, symbolic_zeros=True)
    return function


def widened(x: jax.Array) -> jax.Array:
    return to(FLOAT32_DTYPE, x) if array_dtype(x) in HALVES else x


def to(dtype: np.dtype, x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, dtype) if is_inexact(array_dtype(x)) else x


@jax.jit  # traced once for each shape, and transposed once
def again(args: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Values from which a GPU computes anew what it has computed from them before.

    Elsewhere XLA merges both, and chooses what to store: on a TPU, to compute them
    again would cost more cycles.
    """
    same = lambda x: x
    barrier = lax.optimization_barrier
    return lax.platform_dependent(args, cuda=barrier, rocm=barrier, default=same)


def run_gelu(trace: AutocastTrace, op: Op, args: Values, out: Any) -> Any:
    """The result of an op of gelu, the one such function that is not jitted.

    In the place of the last op, the function runs of what the first one was given.
    """
    arrays = [x for x in args if isinstance(x, jax.Array)]
    known = [trace.notes.copy(x, GIVEN) or (x, None) for x in arrays]
    sources = {id(source): source for source, _ in known}
    forms = {APPROXIMATE.get(op.name), *(form for _, form in known)} - {None}
    if (dtype := halves(args)) is None or len(sources) > 1 or len(forms) > 1:
        return out
    (source,), form = sources.values(), next(iter(forms), None)
    if op.name == "mul" and len(arrays) == 2 and form is not None:
        # A float8 product and gelu would be a kernel of cuBLAS's that does not exist.
        joins = not trace.settings.tells_weights
        return trace.call(of_gelu(dtype, form, joins), [source], {})[0]
    trace.notes.remember(out, GIVEN, (source, form))
    return out
