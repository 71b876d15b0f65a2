"""`torch.autocast` for JAX: unmodified code runs each op in the dtype that suits it.

    with jamp.autocast(dtype=jnp.float16):
        h = model.apply(params, x)           # matrix products and convolutions: float16
        loss = jax.nn.log_softmax(h).mean()  # exp, sums, norms, losses: float32

`docs/how-it-works.md` says how that is done and which rule wins, and
`docs/sharp-edges.md` what to expect at the edges.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.extend.core import set_current_trace
from jax.typing import DTypeLike

from .. import _compat
from .._checks import PROVES, Given, flag, shown, without_device
from .._targets import default_dtype, warn_if_missing
from .._tree import HALVES, cast_floating
from . import custom, nested, primitives  # noqa: F401 - they register their rules
from .advice import advise
from .arguments import (
    BAD_INPUTS,
    NO_DEVICE,
    Rules,
    check_all_used,
    compile_rules,
    dtype_argument,
    region_dtype,
)
from .decision import CASTABLE, FLOAT32_DTYPE, Out, Recipe, Settings
from .name_stack import region_entry
from .products import default_precision
from .trace import OBSERVED, PROBE, REGION, AutocastTrace

# Functions whose body runs after the region has ended.
RUNS_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)

NOT_A_DECORATOR = """autocast(cast_inputs=...) decorates a function and casts its \
inputs; it cannot be entered with `with`."""

NOT_INNERMOST = """autocast: a region is closed that is not the innermost one of this \
thread. A region belongs to one thread and to one function that JAX traces, and \
regions close in the reverse order. Write the whole `with jamp.autocast(...):` in a \
function that has no `yield` and no `await`, and call that."""

NOT_A_FUNCTION = """autocast(...) decorates a function; got {}. For a class, decorate \
the method that computes. A generator or coroutine would leave the region open while \
other code runs: decorate the function that it calls."""


def is_autocast_enabled() -> bool:
    """Whether ops are cast here: a Python bool, known when the code is traced.

    Returns:
      True in a region. False outside, and if the innermost region is not enabled.

    Examples:
      >>> import jamp, jax.numpy as jnp
      >>> with jamp.autocast(dtype=jnp.float16):
      ...     jamp.is_autocast_enabled()
      True

    PyTorch: `torch.is_autocast_enabled(device_type)`.
    """
    return bool(REGION.value) and not REGION.value.is_policy


def get_autocast_dtype() -> np.dtype:
    """The dtype of the innermost region, or what `autocast()` would take by default.

    Returns:
      A NumPy dtype. By default float16 on a GPU, bfloat16 elsewhere.

    Examples:
      >>> import jamp, jax.numpy as jnp
      >>> with jamp.autocast(dtype=jnp.float16):
      ...     jamp.get_autocast_dtype()
      dtype('float16')

    PyTorch: `torch.get_autocast_dtype(device_type)`.
    """
    return REGION.value.dtype if is_autocast_enabled() else default_dtype()


class Opened(threading.local):
    """The regions that one thread has entered, and the objects that it did so with."""

    def __init__(self) -> None:
        # How to leave each, and the trace that is the current one until then.
        self.regions: list[tuple[contextlib.ExitStack, _compat.Trace]] = []
        self.objects: list[tuple[autocast, Any, AutocastTrace | None]] = []


OPENED = Opened()


@contextlib.contextmanager
def enter(
    settings: Settings | None, hits: set[int] | None = None
) -> Iterator[AutocastTrace | None]:
    """A region with these settings; with None, one in which nothing is cast."""
    if PROVES.value and settings is not None and not settings.is_policy:
        settings = None
    outer, trace = REGION.value, None
    depth = outer.depth + 1 if outer else 0
    name = "off" if settings is None else settings.dtype.name
    if settings is not None:
        warn_if_missing((settings.recipe or settings.dtype).name)
        _compat.trace_linalg_in(HALVES, is_autocast_enabled)
        settings = settings._replace(depth=depth, observed=OBSERVED.value)
        if settings.precision is ...:
            settings = settings._replace(precision=default_precision())
        if PROBE.value is not None and not settings.is_policy:
            settings = settings._replace(dtype=FLOAT32_DTYPE, probe=PROBE.value)
            name = settings.dtype.name
    with contextlib.ExitStack() as contexts:
        # Not None inside of another one, whose trace sees all that runs: for None, JAX
        # would run what it has compiled outside.
        contexts.enter_context(REGION(settings or (None if outer is None else False)))
        contexts.enter_context(jax.named_scope(region_entry(name, depth)))
        if settings is not None:
            below = _compat.current_trace()
            trace = AutocastTrace(below, settings, set() if hits is None else hits)
            contexts.enter_context(set_current_trace(trace))
            contexts.callback(trace.notes.clear)
        OPENED.regions.append((contexts, _compat.current_trace()))
        is_error = False
        try:
            yield trace
        except Exception as error:
            is_error = True
            if settings is not None:
                advise(error, settings)
            raise
        finally:
            if not leave(contexts):
                if trace is not None:  # JAX may make it the current one again
                    trace.apply = trace.left_to_another
                if not is_error:
                    raise RuntimeError(NOT_INNERMOST)


def leave(contexts: contextlib.ExitStack) -> bool:
    """Leaves a region, and those that were entered since: whether there are none.

    Where JAX has begun or ended a trace since, the current one stays.
    """
    regions = OPENED.regions
    is_innermost = bool(regions) and regions[-1][0] is contexts
    while any(opened is contexts for opened, _ in regions):
        opened, trace = regions.pop()
        if _compat.current_trace() is trace:
            opened.close()
        else:
            is_innermost = False
            with _compat.staying():
                opened.close()
    return is_innermost


def ambient() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """The current region, to be entered where code is traced apart from the code
    around it. A rule that decides there counts as used."""
    settings, trace = REGION.value, _compat.current_trace()
    if not settings:
        return contextlib.nullcontext
    hits = trace.hits if isinstance(trace, AutocastTrace) else None
    return lambda: enter(settings, hits)


class autocast:
    """A region in which matrix products run in half precision: `torch.autocast`.

    Ops on torch's list run in half precision, ops that need float32 run in float32, and
    mixed inputs are promoted. All other ops run in the dtype that they get. Parameters
    keep their dtypes, and gradients have the same dtypes. Put the forward pass and the
    loss in the region, and the differentiation around it. Use it as a context manager
    or as a decorator. Regions nest, and one object may be used again and by several
    threads.

    Args:
      dtype: float16 or bfloat16, or float32 if not enabled. By default float16 on a
        GPU, bfloat16 elsewhere. Or a recipe: "float8" or a `jamp.Float8` means
        bfloat16, and float8 for the matrix products that qualify. A
        `jamp.ScaledFloat16` means float16 without a loss scale.
      enabled: with False, nothing is cast, even inside another region.
      rules: the user's own table, looked up before jamp's. A key is a JAX primitive, a
        Python function (no closure, lambda or partial, which share their code with
        others), a module class, also for its subclasses, or a regular expression that
        is searched for in the module path (the name stack that Flax Linen, Haiku and
        `jax.named_scope` write; a number at an end is whole, so that "block_1" does not
        match "block_10"). A value is the dtype that its ops run in (float16, bfloat16,
        float32), `jax.lax.Precision.HIGHEST` for float32 products with all their
        digits, a recipe for the matrix products that qualify (other ops that match
        follow the tables), or None to leave them. The first rule that matches an op
        decides. A class that inherits its `__call__` gets one of its own, which calls
        that, and keeps it for the rest of the process.
      cast_inputs: for a decorated function that needs one dtype: in a region, its
        floating inputs are cast to it and it runs with autocast off. Outside of
        regions it does nothing. This is torch's `custom_fwd(cast_inputs=...)`.
      cache_enabled: with False, each op casts its inputs anew, and the gradient of a
        weight that is used many times in one region is summed in float32. By default,
        as in torch, its uses share a copy, and the sum is in half precision.

    Raises:
      TypeError: `enabled` or `cache_enabled` is not a bool, `rules` is not a dict,
        `cast_inputs` is used in a `with`, or what is decorated is wrong.
      ValueError: the dtype or a rule is wrong. At the end of the region: a
        rule decided about no op.
      NotImplementedError: a primitive of JAX holds a function and has no rule.

    Examples:
      >>> import jamp, jax, jax.numpy as jnp
      >>> x, w, b = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.zeros(4)
      >>> with jamp.autocast(dtype=jnp.float16):
      ...     h = x @ w + b
      ...     p = jax.nn.softmax(h)
      >>> h.dtype, p.dtype
      (dtype('float16'), dtype('float32'))

      >>> @jax.jit
      ... def loss(w):
      ...     with jamp.autocast(dtype=jnp.float16, rules={"head": jnp.float32}):
      ...         with jax.named_scope("head"):
      ...             return jnp.sum((x @ w + b) ** 2)
      >>> jax.grad(loss)(w).dtype
      dtype('float32')

      >>> @jamp.autocast(cast_inputs=jnp.float32)
      ... def precise(x):
      ...     return x.dtype
      >>> with jamp.autocast(dtype=jnp.float16):
      ...     precise(x @ w)
      dtype('float32')

    PyTorch: `torch.autocast(device_type, dtype, enabled, cache_enabled)`. jamp takes no
    device. `rules` and recipes are new. The op lists are those of CUDA;
    `parity/report.md` compares them op by op.
    """

    @without_device("dtype", NO_DEVICE)
    def __init__(
        self,
        dtype: DTypeLike | Recipe | None = None,
        enabled: bool = True,
        *,
        rules: Rules | None = None,
        cast_inputs: DTypeLike | None = None,
        cache_enabled: bool = True,
    ):
        half, recipe = region_dtype(dtype, enabled)
        if cast_inputs is not None:
            cast_inputs = dtype_argument(cast_inputs, CASTABLE, BAD_INPUTS)
        cached = flag("autocast(cache_enabled=...)", cache_enabled)
        self.settings = Settings(half, recipe, compile_rules(rules), cached=cached)
        self.enabled = flag("autocast(enabled=...)", enabled)
        self.cast_inputs = cast_inputs
        self._rules = dict(rules or {})

    def __reduce__(self) -> tuple[object, ...]:
        rules = {_compat.Named.of(key): value for key, value in self._rules.items()}
        dtype, cached = (
            self.settings.recipe or self.settings.dtype,
            self.settings.cached,
        )
        return reopened, (dtype, self.enabled, rules, self.cast_inputs, cached)

    def __enter__(self) -> Self:
        if self.cast_inputs is not None:
            raise TypeError(NOT_A_DECORATOR)
        region = enter(self.settings if self.enabled else None)
        OPENED.objects.append((self, region, region.__enter__()))
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        objects = OPENED.objects
        places = [i for i, (opened, *_) in enumerate(objects) if opened is self]
        if not places:
            raise RuntimeError(NOT_INNERMOST)
        _, region, trace = objects.pop(places[-1])
        region.__exit__(error_type, error, traceback)
        if trace is not None and error_type is None:
            check_all_used(self.settings.rules, trace.hits)

    def __call__(self, function: Callable[Given, Out]) -> Callable[Given, Out]:
        later = any(is_kind(function) for is_kind in RUNS_LATER)
        if later or isinstance(function, type) or not callable(function):
            raise TypeError(NOT_A_FUNCTION.format(shown(function)))

        @functools.wraps(function)
        def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> Out:
            if self.cast_inputs is None:
                with self:
                    return function(*args, **kwargs)
            if not is_autocast_enabled():
                return function(*args, **kwargs)
            inputs = args, kwargs
            args, kwargs = cast_floating(inputs, self.cast_inputs, of=CASTABLE)
            with autocast(enabled=False):
                return function(*args, **kwargs)

        return wrapped


def reopened(
    dtype: np.dtype | Recipe,
    enabled: bool,
    rules: dict[object, object],
    cast_inputs: np.dtype | None,
    cached: bool = True,
) -> autocast:
    """A region that was pickled, without what was entered with it."""
    rules = {_compat.Named.find(key): value for key, value in rules.items()}
    wishes = {"rules": rules, "cast_inputs": cast_inputs, "cache_enabled": cached}
    return autocast(dtype, enabled, **wishes)
