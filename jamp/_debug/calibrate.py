"""`calibrate`: measures a model's products, and decides which tolerate float8."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._autocast.arguments import dtype_argument
from .._autocast.decision import Settings
from .._autocast.float8 import RECIPES, Float8, as_recipe
from .._autocast.paths import path_pattern
from .._autocast.region import enter
from .._autocast.trace import PROBE
from .._checks import FLOAT8_NAMES, brief, flag, is_traced, number
from .._tree import HALF_NAMES, HALVES, PyTree
from .calibration import FLOAT8_NAME, TENSORWISE, Calibration, ProductRow, called
from .flat_call import FlatCall, open_call, takes_a_function, with_params
from .probe import Probe, SeenProduct
from .product_errors import DIRECTIONS
from .report import percent

# If each number loses the most that rounding can take, a product loses 14 %: 1/8 in
# E5M2, the format of gradients, and 1/16 in E4M3. More is underflow.
TOLERANCE = 0.15
USUAL_LARGEST_SCALE = 2.0**24  # as far as a loss scale grows in most runs
# More and more careful.
CAREFUL = (FLOAT8_NAME, *RECIPES[1:], *HALF_NAMES, "float32")

Errors = dict[str, tuple[float, float]]  # direction -> whole, worst slice
ErrorsIn = dict[str, Errors]  # by dtype or recipe

BAD_CHOICE = """calibrate(dtype={}): the dtype must be "float8", a jamp.Float8 with \
one of its recipes ({}), float16 or bfloat16."""
NO_LOSS = """calibrate(loss_fn): {} must return a loss, a floating number of shape [], \
or a tuple that begins with one; got {}."""
NO_PARAMS = """calibrate(loss_fn)(*args): the first argument must hold floating \
arrays, the parameters, as for jax.grad; it holds none."""
NO_VALUES = """calibrate runs the function: {!r} must be an array; got {!r}. Call it \
outside of jax.jit, with a real batch."""


class Wanted(NamedTuple):
    """The dtype or recipe that a product should run in."""

    scope: str  # the module path as rules see it
    name: str
    qualifies: bool  # for float8, if that is asked for; if not, the region decides


@takes_a_function("calibrate", others=1)
def calibrate(
    loss_fn: Callable[..., object],
    dtype: DTypeLike | Float8 = "float8",
    *,
    tolerance: float = TOLERANCE,
    skip_small: bool = True,
) -> Callable[..., Calibration]:
    """Measures which matrix products of a model tolerate float8, and writes the rules.

    It runs the loss and its gradient in float32 on a real batch. For float16, it runs
    them once more with the loss scale that the gradients need. Each product that
    autocast lowers is also computed in each dtype, from the same inputs and the same
    cotangent: forward, the gradient of its input (dgrad) and that of its weight
    (wgrad). The weight is the right operand, or the left one in `eqx.nn.Linear`. Ragged
    products are listed, but not measured. Measure a model that has trained for a while:
    at the start, gradients are not yet typical.

    A product gets the first of float8, rowwise float8, bfloat16 and float32 whose error
    is at most `tolerance`, over the whole result and in each of its rows and columns.
    (In tensorwise float8, rows much smaller than others vanish, which the error of the
    whole does not show.) With `skip_small`, a product must also be large enough to be
    faster, by torchao's filters: tensorwise not for K <= 4096 and N <= 1024 (K numbers
    are contracted, N columns), rowwise for N > 2048 and K > 1024, but not N <= 4096 and
    K <= 2048.

    Args:
      loss_fn: as for `jax.grad`: it returns the loss, or a tuple that begins with it,
        and is differentiated by its first argument. It may open a region itself.
      dtype: "float8" or a `jamp.Float8`, bfloat16, or float16 to find the products that
        overflow or underflow there under a loss scale.
      tolerance: the largest relative error, above 0 and up to 1. The default is 15 %,
        slightly more than rounding alone takes from a row: rows of ordinary numbers
        lose 4 to 11 %, and rows in which numbers vanish lose more.
      skip_small: False to judge only the errors: float8 also saves memory, and a newer
        GPU may be faster at smaller sizes.

    Returns:
      A function with the arguments of `loss_fn` that returns a
      `jamp.debug.Calibration`. Its `rules` are for
      `jamp.autocast(jnp.bfloat16, rules=...)`; a float16 calibration's are for float16.
      It prints as a table, `plot()` draws it, and `to_json()` saves it.

    Raises:
      TypeError: `loss_fn` cannot be called or does not return a loss, or an argument
        has no values.
      ValueError: the dtype is not one of these, the tolerance is outside of (0, 1], or
        there are no parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> def loss_fn(params, x):
      ...     with jax.named_scope("up"):
      ...         h = x @ params["up"]
      ...     with jax.named_scope("down"):
      ...         return jnp.sum(h @ params["down"])
      >>> params = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
      >>> x = jnp.ones((16, 32)).at[0, 0].set(2.0**20)
      >>> report = jamp.calibrate(loss_fn, skip_small=False)(params, x)
      >>> report.rules
      {'(^|/)down$': 'float8', '(^|/)up$': Float8(recipe='rowwise')}
      >>> with jamp.autocast(jnp.bfloat16, rules=report.rules):
      ...     loss = loss_fn(params, x)

    PyTorch: `torchao.float8._auto_filter_for_recipe`, which looks only at sizes.
    """
    names = candidates_of(dtype)
    tolerance = tolerance_argument(tolerance)
    skip_small = flag("calibrate(skip_small=...)", skip_small)

    @functools.wraps(loss_fn, updated=())
    def calibrated(*args: Any, **kwargs: Any) -> Calibration:
        call = open_call("calibrate", loss_fn, args, kwargs)
        for name, array in zip(call.names, call.arrays, strict=True):
            if isinstance(array, jax.ShapeDtypeStruct) or is_traced(array):
                raise TypeError(NO_VALUES.format(name, array))
        probe = Probe(names)
        run_probed(call, probe)
        if names == ["float16"]:
            probe = Probe(names, loss_scale_for(probe.found.values()))
            run_probed(call, probe)
        rows, patterns = judged(probe, names, tolerance, skip_small)
        probe.found.clear()  # JAX's caches keep the probe
        return Calibration(
            call.function, names[0], tolerance, skip_small, probe.scale, rows, patterns
        )

    return calibrated


def candidates_of(dtype: object) -> list[str]:
    """What to try, beginning with the dtype or recipe that is asked for."""
    float8 = as_recipe(dtype)
    if not isinstance(float8, Float8):
        recipes = ", ".join(map(repr, RECIPES))
        message = BAD_CHOICE.format("{}", recipes)
        return [dtype_argument(dtype, HALVES, message, FLOAT8_NAMES).name]
    second = ["rowwise"] if float8.recipe == "tensorwise" else []
    return [float8.recipe, *second, "bfloat16"]


def tolerance_argument(tolerance: object) -> float:
    value = number("calibrate(tolerance=...)", tolerance, float)
    if is_traced(value) or not 0 < value <= 1:
        raise ValueError(
            "calibrate(tolerance=...) must be a relative error above 0 and up to 1, "
            f"such as {TOLERANCE}; got {brief(tolerance)}."
        )
    return value


def run_probed(call: FlatCall, probe: Probe) -> None:
    params = call.params()
    if not params:
        raise ValueError(NO_PARAMS)

    def loss(params: Mapping[int, jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
        with PROBE(probe), enter(Settings(jnp.dtype("float32"))):
            return loss_of(call.function, call.run(with_params(arrays, params)))

    # These would stop it if a candidate overflows, which is measured here.
    with jax.debug_nans(False), jax.debug_infs(False):
        jax.block_until_ready(jax.grad(loss)(params, call.arrays))
        jax.effects_barrier()


def loss_of(function: str, result: PyTree) -> jax.Array:
    loss: Any = result[0] if isinstance(result, tuple) and result else result
    is_array = isinstance(loss, jax.Array) and loss.shape == ()
    if not is_array or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(NO_LOSS.format(function, brief(loss)))
    return loss


def loss_scale_for(found: Iterable[Mapping[str, np.ndarray]]) -> float:
    """The power of two that a dynamic loss scale settles at, from float32 gradients.

    Products that overflow in the forward pass do not count: they will run in float32.
    """
    fit = [n for n in found if np.isfinite(n.get("float16 forward", 0.0)).all()]
    tops = [float(n.get("largest backward", 0.0)) for n in fit]
    top = max((top for top in tops if np.isfinite(top)), default=0.0)
    if top == 0:
        return USUAL_LARGEST_SCALE
    scale = float(2.0 ** np.floor(np.log2(65504 / top)))
    return min(max(scale, 1.0), USUAL_LARGEST_SCALE)


def judged(
    probe: Probe, names: Sequence[str], tolerance: float, skip_small: bool
) -> tuple[list[ProductRow], dict[str, str]]:
    """The rows of a report, and its rules: regular expressions, and what runs there."""
    rows, wanted = [], []
    for product, numbers in probe.found.items():
        errors = errors_in(numbers, names)
        choice, why = choose_dtype(errors, product.sizes, tolerance, skip_small)
        if not errors:  # ragged, or in a derivative: it runs as it was traced
            choice, why = names[-1], "not measured"
        qualifies = names[0] in RECIPES and not product.problem
        wanted.append(Wanted(product.scope, choice, qualifies))
        rows.append(
            ProductRow(
                product.path,
                product.line,
                product.primitive,
                spelled_sizes(product),
                errors,
                product.problem,
                choice,
                why,
            )
        )
    by_scope = agreed_dtypes(wanted)
    for place, (scope, name, qualifies) in enumerate(wanted):
        together = by_scope.get(scope, name)
        if together != name and (qualifies or together == "float32"):
            why = "as another product of this module"
            rows[place] = rows[place]._replace(choice=together, why=why)
    scopes = sorted({product.scope for product in probe.found})
    patterns = {
        scope_pattern(scope, scopes): name
        for scope, name in sorted(by_scope.items())
        # It would bring other ops there, which belong in float32, to half precision.
        if not (name in HALF_NAMES and scope in probe.in_float32)
    }
    return rows, patterns


def errors_in(numbers: Mapping[str, np.ndarray], names: Iterable[str]) -> ErrorsIn:
    """The errors by candidate and direction, of those that were measured."""
    errors: ErrorsIn = {}
    for name, direction in itertools.product(names, DIRECTIONS):
        if (pair := numbers.get(f"{name} {direction}")) is not None:
            whole, worst = pair.tolist()
            errors.setdefault(name, {})[direction] = whole, worst
    return errors


def spelled_sizes(product: SeenProduct) -> str:
    sizes = f"{product.batch} of " if product.batch > 1 else ""
    return sizes + (
        "x".join(map(str, product.sizes))
        or " ".join(f"[{','.join(map(str, shape))}]" for shape in product.shapes)
    )


def pays(recipe: str, k: int, n: int) -> bool:
    """Whether a product is large enough to be faster in float8: torchao's filters.

    >>> pays("tensorwise", 4096, 1024), pays("tensorwise", 1024, 4096)
    (False, True)
    >>> pays("rowwise", 1024, 4096), pays("rowwise", 4096, 14336)
    (False, True)
    """
    if recipe == TENSORWISE:
        return not (k <= 4096 and n <= 1024)
    return n > 2048 and k > 1024 and not (n <= 4096 and k <= 2048)


def choose_dtype(
    errors: ErrorsIn,
    sizes: Sequence[int],
    tolerance: float,
    skip_small: bool,
) -> tuple[str, str]:
    """The first dtype or recipe whose errors are tolerated, and why no earlier one.

    Args:
      errors: by dtype or recipe, beginning with the one that is asked for. The last one
        before float32 is a half-precision dtype.
      sizes: rows, contracted numbers, columns.
    """
    why = []
    for name, of_name in errors.items():
        if name in RECIPES and skip_small and not pays(name, *sizes[1:]):
            why.append(f"{called(name)}: too small to pay")
        elif problem := beyond(of_name, tolerance):
            why.append(f"{called(name)}: {problem}")
        else:
            return called(name), "; ".join(why)
    return "float32", "; ".join(why)


def beyond(errors: Errors, tolerance: float) -> str:
    """The error that exceeds the tolerance, as text, or ""."""
    for direction in DIRECTIONS:
        if direction in errors and not max(errors[direction]) <= tolerance:
            whole, worst = errors[direction]
            if not math.isfinite(worst):
                return f"{direction} overflows"
            if whole > tolerance:
                return f"{direction} loses {percent(round(whole, 3))}"
            lost = percent(round(worst, 3))
            return f"{direction} loses {lost} in the worst row or column"
    return ""


def agreed_dtypes(wanted: Iterable[Wanted]) -> dict[str, str]:
    """For each scope, the most careful dtype that one of its products needs.

    Scopes whose products all run in the region's own dtypes have none.

    >>> agreed_dtypes([Wanted("a", "float8", True), Wanted("a", "rowwise", True)])
    {'a': 'rowwise'}
    """
    names: dict[str, str] = {}
    for scope, name, qualifies in wanted:
        if scope and (qualifies or name == "float32"):
            names[scope] = max(names.get(scope, name), name, key=CAREFUL.index)
    return names


def scope_pattern(scope: str, scopes: Sequence[str]) -> str:
    """A regular expression that finds one scope of several, wherever the model is.

    >>> scope_pattern("Net/Dense_1", ["Net/Dense_1", "Net/Dense_10"])
    '(^|/)Net/Dense_1$'
    >>> scope_pattern("head", ["head", "Net/head"])
    '^head$'
    """
    text = f"(^|/){re.escape(scope)}$"
    others = [other for other in scopes if path_pattern(text).search(other)]
    return text if others == [scope] else f"^{re.escape(scope)}$"
