"""Each name of JAX that jamp reads, looked up in the JAX that is installed.

Primitives, their parameters, private attributes and texts of messages differ between
releases, and a name that is gone may be missed in silence: `params.get` gives None.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import pkgutil
import sys

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

import jamp
from jamp import _compat, _jaxprs
from jamp._autocast import traits
from jamp._autocast.attention import ATTENTION
from jamp._autocast.name_stack import DIFFERENTIATION
from jamp._autocast.ops import PRIMITIVES
from jamp._autocast.trace import RULES
from jamp._debug import traits as of_reports

RELEASE = jax.__version_info__
X = np.ones((4, 4), np.float32)
KEY_DTYPE = jax.eval_shape(lambda: jax.random.key(0)).dtype
# Names of primitives that only some releases have: from one, or until before one.
FROM = {
    "log2": (0, 11, 2),
    "one_minus_square": (0, 11, 2),
    "stack": (0, 10, 1),
    "stage": (0, 10, 1),
    "unstack": (0, 10, 1),
    "vary_unreduced_cast": (0, 12, 0),
}
BEFORE = {"call": (0, 11, 1), "closed_call": (0, 11, 1)}
ELSEWHERE = {"triton_kernel_call", ATTENTION}  # in jamp or jax_triton


@jax.custom_jvp
def with_jvp(x):
    return x * 2


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return x * 2


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, cotangent: (cotangent,))


@jax.custom_batching.custom_vmap
def with_vmap(x):
    return x * 2


with_vmap.def_vmap(lambda size, batched, x: (x * 2, batched[0]))


def mapped(x):
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def scattered(by):
    return lambda x: getattr(x.at[jnp.array([0, 1])], by)(1.0)


def convolved(x):
    return lax.conv(x[None, None], x[None, None], (1, 1), "SAME")


# For each primitive a program that has it.
PROGRAMS = {
    "argmax": lambda x: jnp.argmax(x, 1),
    "argmin": lambda x: jnp.argmin(x, 1),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 4, 4), (1, 2)),
    "concatenate": lambda x: lax.concatenate([x, x], 0),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "conv_general_dilated": convolved,
    "convert_element_type": lambda x: x.astype(jnp.float16),
    "cumprod": lambda x: lax.cumprod(x, 0),
    "cumsum": lambda x: lax.cumsum(x, 0),
    "custom_jvp_call": with_jvp,
    "custom_vjp_call": with_vjp,
    "custom_vmap_call": with_vmap,
    "dot_general": lambda x: x @ x,
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, x[0, 0].astype(int)), (2, 2)),
    "gather": lambda x: x[jnp.array([0, 1])],
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "iota": lambda x: lax.iota(x.dtype, 4),
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "name": lambda x: checkpoint_name(x, "x"),
    "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.array([4])),
    "random_bits": lambda x: jax.random.bits(jax.random.key(0), (2,)),
    "reduce_prod": lambda x: lax.reduce_prod(x, (0,)),
    "reduce_sum": lambda x: lax.reduce_sum(x, (0,)),
    "remat2": jax.checkpoint(lambda x: jnp.sin(x) @ x),
    "reshape": lambda x: lax.reshape(x, (16,)),
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x),
    "scatter": scattered("set"),
    "scatter-add": scattered("add"),
    "scatter-mul": scattered("mul"),
    "scatter-sub": lambda x: lax.scatter_sub(
        x,
        jnp.array([[0], [1]]),
        x[:2],
        lax.ScatterDimensionNumbers((1,), (0,), (0,)),
    ),
    "shard_map": mapped,
    "sort": lambda x: lax.sort([x, x], num_keys=1),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "stack": lambda x: jnp.stack([x, x]),
    "top_k": lambda x: lax.top_k(x, 2),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x),
}


@functools.cache
def equation(name):
    found = _jaxprs.equations(jax.make_jaxpr(PROGRAMS[name])(X))
    return next(eqn for eqn in found if eqn.primitive.name == name)


@functools.cache
def primitives():
    """The names of all primitives in JAX's modules."""
    for module in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
        if module.name.split(".")[2] in ("cudnn", "lax", "state", "pallas"):
            with contextlib.suppress(ImportError):  # of a library that is not here
                importlib.import_module(module.name)
    others = "compute_on custom_partitioning fused scheduling_groups xla_metadata"
    for name in others.split():
        importlib.import_module(f"jax.experimental.{name}")
    modules = [m for name, m in [*sys.modules.items()] if name.startswith("jax.")]
    values = (value for module in modules for value in vars(module).values())
    return {value.name for value in values if isinstance(value, Primitive)}


@pytest.mark.parametrize("name", _jaxprs.PARAMETERS)
def test_a_primitive_has_the_parameters_that_are_read(name):
    if name == "stack" and jax.__version_info__ < (0, 10, 1):
        pytest.skip("jnp.stack concatenates in JAX 0.10.0")
    eqn = equation(name)
    for parameter in _jaxprs.PARAMETERS[name]:
        _jaxprs.param(eqn, parameter)  # raises if it is missing


def test_a_parameter_that_is_missing_is_an_error():
    eqn = equation("integer_pow")
    assert _jaxprs.param(eqn, "y") == 3
    assert _jaxprs.param(eqn, "axes") is None
    with pytest.raises(NotImplementedError, match="'y' of the primitive 'integer_pow'"):
        _jaxprs.param(eqn.replace(params={}), "y")


def test_jax_has_each_primitive_that_is_named():
    traits_of = [
        names
        for names in (vars(traits) | vars(of_reports)).values()
        if isinstance(names, frozenset)
    ]
    known = RULES.keys() | PRIMITIVES | _jaxprs.CALLS | _jaxprs.PARAMETERS.keys()
    named = known.union(*traits_of) - ELSEWHERE
    missing = named - primitives()
    later = {name for name, release in FROM.items() if RELEASE < release}
    gone = {name for name, release in BEFORE.items() if RELEASE >= release}
    assert missing == later | gone


def test_each_parameter_that_is_asked_for_is_listed():
    listed = frozenset().union(*_jaxprs.PARAMETERS.values())
    for module in pkgutil.walk_packages(jamp.__path__, "jamp."):
        if module.name.endswith("__main__"):
            continue
        tree = ast.parse(inspect.getsource(importlib.import_module(module.name)))
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Name("param"), [_, ast.Constant(parameter)]):
                    assert parameter in listed, module.name


# JAX's private modules and what their objects have.


def private_names():
    """What `_compat.py` takes from JAX's private modules: the module, and a name."""
    tree = ast.parse(inspect.getsource(_compat))
    modules = {name: value for name, value in vars(_compat).items()}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(of), name) if inspect.ismodule(modules.get(of)):
                if modules[of].__name__.startswith("jax"):
                    yield modules[of], name


def test_jax_has_each_private_name():
    found = {*private_names()}
    assert len(found) > 30
    optional = {"Inline", "discharge_state", "discharge_state2"}
    missing = [(m.__name__, n) for m, n in found if not hasattr(m, n)]
    assert {name for _, name in missing} <= optional, missing


def traced(look, *args):
    """What a function sees while JAX traces it."""
    seen = []
    jax.make_jaxpr(lambda *args: seen.append(look(*args)) or args[0])(*(args or (X,)))
    return seen[0]


def differentiated(look):
    """What a function sees while JAX differentiates what it traces."""
    seen = []
    jax.make_jaxpr(jax.grad(lambda x: (seen.append(look()), jnp.sum(x))[1]))(X)
    return seen[0]


def closed_over():
    return jax.make_jaxpr(lambda x: x + X * 2)(X)


def opened_and_run():
    opened, consts = _compat.open_jaxpr(closed_over())
    (out,) = jax.core.eval_jaxpr(opened, (), *consts, X)
    return bool((out == X + X * 2).all())


def bound_shard_map():
    eqn = equation("shard_map")
    body = lambda x: ([x + 1], [jnp.sum(x)])
    (out,), (more,) = _compat.bind_shard_map(eqn, body, [X])
    return float(out[0, 0]), more.shape


def explicit_sharding():
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        return _compat.cotangent_sharding(X).spec


def stayed():
    before = _compat.current_trace()
    with _compat.staying(), jax.extend.core.set_current_trace(None):
        pass
    with jax.named_scope("a"), _compat.staying():
        pass
    return _compat.current_trace() is before, _compat.scopes()


def linalg_of_half():
    with jamp.autocast(jnp.float16):
        return jax.eval_shape(jnp.linalg.eigh, X.astype(jnp.float16))[0].dtype


def reference():
    trace = _compat.current_trace()
    return _compat.reference_of(trace)() is trace


def mutable(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return ref[...]


SIN = jax.make_jaxpr(lambda x: jnp.sin(x))(X)


# Each function of `_compat.py`: a call, and what it gives.
def contexts():
    here = _compat.tracing_context()
    with jax.default_matmul_precision("highest"):
        return here, _compat.tracing_context()


COMPAT = {
    "current_trace": (lambda: traced(lambda x: _compat.current_trace()) is None, False),
    "is_differentiated_into_a_jaxpr": (
        lambda: differentiated(
            lambda: _compat.is_differentiated_into_a_jaxpr(_compat.current_trace())
        ),
        True,
    ),
    "reference_of": (reference, True),
    "is_eager": (lambda: _compat.is_eager(_compat.current_trace()), True),
    "requires_devices": (lambda: _compat.requires_devices(_compat.NOTHING), None),
    "cotangent_sharding": (explicit_sharding, jax.P(None, None)),
    "explicit": (lambda: _compat.explicit(jax.typeof(X).sharding), None),
    "equation_context": (
        lambda: traced(lambda x: _compat.equation_context()) == SIN.eqns[0].ctx,
        True,
    ),
    "trace_linalg_in": (linalg_of_half, jnp.float16),
    "staying": (stayed, (True, [])),
    "current_traceback": (lambda: _compat.current_traceback() is None, False),
    "frames": (lambda: _compat.frames(SIN.eqns[0].source_info)[0][0], __file__),
    "current_frames": (lambda: _compat.current_frames()[0][0], __file__),
    "codes_of": (
        lambda: [
            len(_compat.codes_of(SIN.eqns[0].source_info.traceback)) > 0,
            COMPAT["codes_of"][0].__code__
            in _compat.codes_of(_compat.current_traceback()),
        ],
        [True, True],
    ),
    "stack_entries": (
        lambda: [
            name
            for eqn in jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jnp.sin(x))))(X).eqns
            for entry in _compat.stack_entries(eqn.source_info.name_stack)
            for name in [entry[1]]
        ][:1],
        ["jvp"],
    ),
    "names_of": (
        lambda: ("jax.lax", "sin_p") in [*_compat.names_of(lax.sin_p)],
        True,
    ),
    "is_jax_primitive": (
        lambda: (
            _compat.is_jax_primitive(lax.sin_p),
            _compat.is_jax_primitive(_compat.NOTHING),
        ),
        (True, False),
    ),
    "bind_eqn": (lambda: float(_compat.bind_eqn(SIN.eqns[0], [X * 0])[0][0, 0]), 0.0),
    "scopes": (lambda: jax.named_scope("a")(_compat.scopes)(), [(False, "a")]),
    "is_batched": (
        lambda: bool(jax.vmap(lambda x: jnp.asarray(_compat.is_batched(x)))(X).all()),
        True,
    ),
    "inlined_early": (lambda: _compat.inlined_early(equation("jit").params), False),
    "source_name": (
        lambda: _compat.source_name(SIN.jaxpr.debug_info).split(" at ")[0],
        "<lambda>",
    ),
    "wrap": (
        lambda: _compat.wrap(lambda x: [x], SIN.jaxpr.debug_info).call_wrapped(1),
        [1],
    ),
    "trace_to_jaxpr": (
        lambda: len(
            _compat.trace_to_jaxpr(
                lambda x: [jnp.sin(x)], [jax.typeof(X)], SIN.jaxpr.debug_info
            ).eqns
        ),
        1,
    ),
    "without_refs": (
        lambda: len(_compat.without_refs(jax.make_jaxpr(mutable)(X)).out_avals),
        1,
    ),
    "open_jaxpr": (opened_and_run, True),
    "split_bwd": (lambda: _compat.split_bwd([1.0])[0], [1.0]),
    "bind_shard_map": (bound_shard_map, (float(X[0, 0]) + 1, (1,))),
    "array_dtype": (
        lambda: (_compat.array_dtype(X), _compat.array_dtype(jax.random.key(0))),
        (jnp.float32, KEY_DTYPE),
    ),
    "tracing_context": (
        lambda: [_compat.tracing_context() == kept for kept in contexts()],
        [True, False],
    ),
    "widest": (
        lambda: _compat.widest(frozenset(map(jnp.dtype, ("float16", "float32")))),
        jnp.float32,
    ),
}


@pytest.mark.parametrize("name", COMPAT)
def test_what_is_private_does_what_it_did(name):
    call, expected = COMPAT[name]
    assert call() == expected


def test_each_private_function_is_called_here():
    own = inspect.getmembers(_compat, inspect.isfunction)
    own = {name for name, f in own if f.__module__ == _compat.__name__}
    cached = {"codes_of", "is_jax_primitive", "trace_linalg_in", "widest"}
    assert own | cached == COMPAT.keys()


def test_a_linearization_can_be_kept():
    """Or each op of a step is jitted, and tracing costs more."""
    takes = []

    def loss(x):
        takes.append(_compat.Linearized.takes(_compat.current_trace()))
        return jnp.sum(x)

    jax.jit(jax.grad(loss)).trace(X)
    jax.jit(jax.grad(lambda x: jax.vmap(loss)(x).sum())).trace(X)
    jax.grad(loss)(X)
    assert takes == [True, False, False]


# Texts, and names of functions.


def test_what_a_backward_pass_logs_is_kept():
    assert _compat.split_bwd(([1.0], "logs"))[1]([2.0]) == ([2.0], "logs")
    if not hasattr(jax.custom_vjp, "defvjp_with_logs"):  # before JAX 0.11.1
        return

    @jax.custom_vjp
    def logged(x):
        return x * 2

    logged.defvjp_with_logs(
        lambda x: (logged(x), None), lambda _, cotangent: ((cotangent * 2,), {"n": 1.0})
    )
    _, vjp = jax.vjp(jamp.autocast(jnp.float16)(lambda x: logged(x)), X)
    assert vjp.with_logs(X)[1]


def test_a_function_that_is_inlined_leaves_no_call():
    inner = jax.jit(jnp.sin, inline=_compat.INLINE)
    names = [e.primitive.name for e in jax.make_jaxpr(lambda x: inner(x))(X).eqns]
    assert names == ["sin"]


def test_jax_writes_the_names_of_transforms_that_are_read():
    def layer(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x) * x)(x))

    program = jax.make_jaxpr(jax.grad(jax.jit(layer)))(X)
    entries = {
        entry
        for eqn in _jaxprs.equations(program)
        for entry in _compat.stack_entries(eqn.source_info.name_stack)
    }
    assert {(True, "jvp"), (True, "transpose")} <= entries
    assert (False, "rematted_computation") in entries
    assert {"jvp", "transpose"} < {*DIFFERENTIATION}
