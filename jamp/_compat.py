"""What jamp takes from JAX's internals, and what differs between JAX's versions.

No other module imports `jax._src` or checks a version. `make versions` tests it on each
release of JAX from 0.10.0 on.
"""

import contextlib
import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config, core, dispatch, dtypes, source_info_util, traceback_util
from jax._src import linear_util as lu
from jax._src.interpreters import ad, batching, partial_eval
from jax._src.lax import linalg
from jax._src.state import discharge
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.ad import Zero
from jax.typing import ArrayLike

Trace = core.Trace
AbstractValue = core.AbstractValue
Primitive = core.Primitive
NOTHING = Primitive("nothing")
user_context = source_info_util.user_context
current_name_stack = source_info_util.current_name_stack

# Errors and profiles name the user's line, not the line in jamp that passed the op on.
REFUSING = "refused"  # errors that are raised there are jamp's own: see `advice.py`
_FOLDER = os.path.join(os.path.dirname(__file__), "_autocast")
_NAMES = [module.name for module in pkgutil.iter_modules([_FOLDER])]
_FILES = [os.path.join(_FOLDER, f"{name}.py") for name in _NAMES if name != REFUSING]
for _path in (__file__, *_FILES):
    source_info_util.register_exclusion(_path)
    traceback_util.register_exclusion(_path)


def current_trace() -> Trace:
    return core.trace_ctx.trace


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Keeps the current trace and name stack, whatever runs in this context."""
    trace, source = current_trace(), source_info_util._source_info_context.context
    yield
    core.trace_ctx.set_trace(trace)
    source_info_util._source_info_context.context = source


# How a jitted function leaves no `jit` in a jaxpr.
INLINE = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
# What `jnp.logaddexp` and `logaddexp2` are, of which a jaxpr has the inner function.
LOGADDEXPS = [f"jax._src.lax.other.{name}" for name in ("logaddexp", "logaddexp2")]


def is_differentiated_into_a_jaxpr(trace: Trace) -> bool:
    """Whether ops on a trace are differentiated, and written into a jaxpr."""
    differentiated, base = False, trace
    while isinstance(base, ad.JVPTrace | ad.LinearizeTrace | batching.BatchTrace):
        differentiated |= not isinstance(base, batching.BatchTrace)
        base = base.parent_trace
    return differentiated and isinstance(base, partial_eval.DynamicJaxprTrace)


def tracing_context() -> Hashable:
    """What JAX's caches of traced functions are keyed by, beside the arguments."""
    return config.trace_context()


class Linearized:
    """A function whose linearization is made once and written into traces again.

    `jax.jit` does the same, but goes a long way through Python at each call. This is
    the end of that way alone, where `jax.grad` differentiates once into a jaxpr.

    Args:
      function: takes and returns arrays.
      trace: on which it is traced.
      avals: the abstract values of its arguments.
    """

    NEEDED = (
        (ad, "linearize_jaxpr LinearizeTracer LinearizeTrace"),
        (partial_eval, "inline_jaxpr_into_trace DynamicJaxprTrace"),
        (partial_eval.DynamicJaxprTrace, "to_jaxpr_tracer"),
        (ad.LinearizeTrace, "to_primal_tangent_pair _name_stack_suffix"),
    )

    def __init__(self, function: Callable[..., Any], trace: Trace, avals: Sequence):
        with core.set_current_trace(trace):
            traced = jax.make_jaxpr(function, return_shape=True)
            self.jaxpr, shape = traced(*avals)
        self.tree = jax.tree.structure(shape)
        self.forms: dict[Hashable, Any] = {}  # by which arguments are differentiated

    @staticmethod
    def takes(trace: Any) -> bool:
        staged = partial_eval.DynamicJaxprTrace
        return (
            CAN_LINEARIZE
            and type(trace) is ad.LinearizeTrace
            and type(trace.parent_trace) is type(trace.tangent_trace) is staged
        )

    def __call__(self, trace: Any, args: Sequence[ArrayLike]) -> Any:
        given, tangents = zip(*map(trace.to_primal_tangent_pair, args), strict=True)
        canonical = dtypes.canonicalize_value  # takes no tracer before JAX 0.10.2
        given = [x if isinstance(x, core.Tracer) else canonical(x) for x in given]
        tangents = [None if type(t) is Zero else t for t in tangents]
        key = moves, is_vjp = tuple(t is not None for t in tangents), trace.is_vjp
        below, beside = trace.parent_trace, trace.tangent_trace
        here = source_info_util.current()
        if not any(moves):
            return self.tree.unflatten(self.written(below, here, self.jaxpr, given))
        if key not in self.forms:
            self.forms[key] = ad.linearize_jaxpr(self.jaxpr, moves, is_vjp=is_vjp)
        primal, _, moved, forwarded, linear = self.forms[key]
        outs = self.written(below, here, primal, given)
        outs, saved = outs[: len(moved)], iter(outs[len(moved) :])
        known = [*self.jaxpr.consts, *given]
        saved = [next(saved) if i is None else known[i] for i in forwarded]
        there = here.replace(name_stack=trace._name_stack_suffix())
        inputs = (*saved, *(t for t in tangents if t is not None))
        made = iter(self.written(beside, there, linear, inputs))
        with_tangent = lambda x: ad.LinearizeTracer(trace, x, next(made))
        pairs = zip(outs, moved, strict=True)
        return self.tree.unflatten(with_tangent(x) if m else x for x, m in pairs)

    @staticmethod
    def written(trace: Any, source: Any, closed: Any, args: Sequence) -> list[Any]:
        """The results of a jaxpr whose equations are added to those of a trace."""
        args = [trace.to_jaxpr_tracer(x, source) for x in args]
        write = partial_eval.inline_jaxpr_into_trace
        return write(trace, source, closed.jaxpr, closed.consts, *args)


# Or each function is jitted.
CAN_LINEARIZE = all(
    hasattr(owner, name) for owner, names in Linearized.NEEDED for name in names.split()
)


def reference_of(trace: Trace) -> Any:
    """The weak reference by which JAX and Flax compare traces."""
    return trace._weakref


def is_eager(trace: Trace) -> bool:
    """Whether ops on a trace are computed at once."""
    return isinstance(trace, core.EvalTrace)


def requires_devices(primitive: core.Primitive) -> None:
    """Has JAX say for which devices it lowers a primitive."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def cotangent_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """The sharding that JAX asks of a cotangent, on a mesh of explicit axes.

    That of an array that is not on the mesh is replicated.
    """
    sharding: Any = core.typeof(x).to_ct_aval().sharding
    if sharding.mesh.empty:
        sharding = core.get_cur_mesh_sharding(jax.P(*[None] * np.ndim(x)))
    return explicit(sharding)


def explicit(sharding: Any) -> jax.sharding.NamedSharding | None:
    """The sharding of an abstract value, on a mesh of explicit axes."""
    return sharding if sharding.mesh._any_axis_explicit else None


def equation_context() -> "core.JaxprEqnContext":
    """The context of an equation that is made now."""
    return core.new_jaxpr_eqn([], [], NOTHING, {}, set()).ctx


@functools.cache
def trace_linalg_in(dtypes: Collection[np.dtype], is_cast: Callable[[], bool]) -> None:
    """Lets JAX trace its linear algebra in half precision, where that is cast later.

    From 0.11.1 on, JAX refuses half precision when it traces a function of its own,
    such as `jnp.linalg.eigh`, before a region sees the op. Until 0.11.0 it traced it,
    and refused where no region had cast it to float32.

    Args:
      dtypes: those of half precision.
      is_cast: whether a region will cast what is traced now.
    """

    def in_half(evaluate: Callable[..., Any], *avals: Any, **params: Any) -> Any:
        dtype, *others = {getattr(aval, "dtype", None) for aval in avals}
        if others or dtype not in dtypes or not is_cast():
            return evaluate(*avals, **params)
        wide, narrow = {"dtype": np.dtype("float32")}, {"dtype": dtype}
        outs, effects = evaluate(*(aval.update(**wide) for aval in avals), **params)
        given = lambda out: out.update(**narrow) if out.dtype == wide["dtype"] else out
        return jax.tree.map(given, outs), effects

    found = vars(linalg).values() if jax.__version_info__ >= (0, 11, 1) else ()
    for primitive in found:
        if isinstance(primitive, Primitive):
            evaluate = functools.partial(in_half, primitive.abstract_eval)
            primitive.def_effectful_abstract_eval(evaluate)


def current_traceback() -> Any:
    return source_info_util.current().traceback


def frames(source_info: "source_info_util.SourceInfo") -> list[tuple[str, int, str]]:
    """Where an equation comes from: file, line and function, innermost first.

    Frames in JAX and in the casting modules of jamp are left out.
    """
    user_frames = source_info_util.user_frames(source_info.traceback)
    return [(f.file_name, f.start_line, f.function_name) for f in user_frames]


def current_frames() -> list[tuple[str, int, str]]:
    """The same for the current op."""
    return frames(source_info_util.current())


@functools.lru_cache(maxsize=1024)  # the layers of a loop have equal tracebacks
def codes_of(traceback: Any) -> tuple[CodeType, ...]:
    """The Python functions, innermost first, that an op comes from.

    JAX records them for every op, and keeps the record in jaxprs. They reach up to the
    function that is being traced.
    """
    return () if traceback is None else tuple(traceback.raw_frames()[0])


def stack_entries(name_stack: "source_info_util.NameStack") -> list[tuple[bool, str]]:
    """Entries of a name stack: whether it is a transform (`jvp`), and its name."""
    is_transform = source_info_util.Transform
    return [(isinstance(e, is_transform), e.name) for e in name_stack.stack]


def names_of(primitive: Primitive) -> Iterator[tuple[str, str]]:
    """Modules of JAX that hold a primitive, and its names there."""
    for module, contents in list(sys.modules.items()):
        if module.startswith("jax."):
            for name, value in list(vars(contents).items()):
                if value is primitive:
                    yield module, name


@functools.lru_cache(maxsize=4096)
def is_jax_primitive(primitive: Primitive) -> bool:
    """Whether a primitive is JAX's own.

    A primitive does not say where it was made, and its rules may be JAX's helpers.
    """
    return next(names_of(primitive), None) is not None


class Named(NamedTuple):
    """A primitive of JAX, which cannot be pickled, by its name."""

    module: str
    name: str

    @classmethod
    def of(cls, key: object) -> object:
        """What to pickle for a value."""
        if not isinstance(key, Primitive) or not is_jax_primitive(key):
            return key
        is_private = lambda named: "._" in named[0]
        return cls(*min(names_of(key), key=is_private))

    @classmethod
    def find(cls, key: object) -> object:
        if not isinstance(key, cls):
            return key
        return getattr(importlib.import_module(key.module), key.name)


def bind_eqn(eqn: JaxprEqn, args: Sequence[object]) -> list[jax.Array]:
    """Runs one equation of a jaxpr on other values."""
    params = eqn.primitive.get_bind_params(eqn.params)
    name_stack = current_name_stack() + eqn.source_info.name_stack
    with (
        user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def scopes() -> list[tuple[bool, str]]:
    """Entries of the name stack: whether it is a transform (`jvp`), and its name."""
    return stack_entries(current_name_stack())


def is_batched(x: object) -> bool:
    """Whether `vmap` added a dimension to `x` that its shape does not show."""
    while isinstance(x, ad.JVPTracer | ad.LinearizeTracer):
        x = x.primal
    return isinstance(x, batching.BatchTracer) and x.batch_dim is not None


def inlined_early(params: Mapping[str, object]) -> bool:
    """Whether a `jit` equation is inlined into the function that called it."""
    inline = params.get("inline")
    return inline is True or getattr(inline, "name", None) == "JAX_EARLY"


def source_name(debug_info: "core.DebugInfo") -> str:
    """ "name at file:line" of the function that a jaxpr was made from."""
    return debug_info.func_src_info or ""


def wrap(fun: Callable, debug_info: "core.DebugInfo") -> "lu.WrappedFun":
    return lu.wrap_init(fun, debug_info=debug_info.with_unknown_names())


def trace_to_jaxpr(
    fun: Callable, avals: Sequence[AbstractValue], debug_info: "core.DebugInfo"
) -> ClosedJaxpr:
    """The jaxpr of a function of a flat list of arguments to a flat list."""
    # JAX 0.10.0 adds to the names of a loop's condition.
    names = debug_info.with_unknown_names()._replace(arg_names=("",) * len(avals))
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(
        lu.wrap_init(fun, debug_info=names), tuple(avals)
    )
    return ClosedJaxpr(jaxpr, consts)


def without_refs(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr that makes references, as a jaxpr of values only."""
    if core.internal_mutable_array_effect not in jaxpr.effects:
        return jaxpr
    if hasattr(discharge, "discharge_state2"):  # before JAX 0.10.2
        return discharge.discharge_state2(jaxpr)  # pyright: ignore
    return discharge.discharge_state(jaxpr, lower=False)


def open_jaxpr(closed: ClosedJaxpr) -> tuple[Jaxpr, list[ArrayLike]]:
    """A jaxpr without constants, and the values of its new first arguments."""
    return partial_eval.convert_constvars_jaxpr(closed.jaxpr), list(closed.consts)


def split_bwd(
    results: Any,
) -> tuple[list[ArrayLike], Callable[[list[ArrayLike]], object]]:
    """The cotangents that a custom_vjp's bwd returned, and how to return others.

    From 0.11.1 on, JAX returns a second value with them.
    """
    if results and isinstance(results[0], list | tuple):
        cotangents, *rest = results
        return list(cotangents), lambda new: (new, *rest)
    return list(results), lambda new: new


def bind_shard_map(
    eqn: JaxprEqn,
    function: Callable[..., tuple[Sequence[Any], Any]],
    args: Sequence[Any],
) -> tuple[list[jax.Array], Any]:
    """Runs a function in the place of that of a `shard_map` equation.

    Args:
      function: returns the results of the equation, and a tree of more arrays. These
        come back with an axis in front for the devices.
    """
    params = eqn.params
    key = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
    names = params[key]  # the second key is that of JAX 0.10.0 and 0.10.1
    split = jax.P(tuple(names)) if names else jax.P(None)

    def body(*args):
        outs, more = function(*args)
        return [*outs], jax.tree.map(lambda x: jnp.asarray(x)[None], more)

    with eqn.ctx.manager:
        return jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=([*params["out_specs"]], split),
            check_vma=params["check_vma"],
            axis_names=set(names),
        )(*map(jnp.asarray, args))


def array_dtype(x: object) -> Any:
    """The dtype of an array, and None for keys, references and other things."""
    aval = jax.typeof(x)
    return aval.dtype if isinstance(aval, core.ShapedArray) else None


@functools.lru_cache
def widest(dtypes: frozenset[np.dtype]) -> Any:
    """JAX's usual promotion, also where the user has made it strict.

    It is None with numbers of 8 bits or less, which are never promoted.
    """
    if any(dtype.itemsize < 2 for dtype in dtypes):
        return None
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)
