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
import pytest
from jax import lax
from jax.extend.core import Primitive

import jamp
from jamp import _compat, _jaxprs
from jamp._autocast import sampling, traits
from jamp._autocast.ops import PRIMITIVES
from jamp._autocast.trace import DIFFERENTIATION, RULES

RELEASE = jax.__version_info__
X, KEY = jnp.ones((4, 4)), jax.random.key(0)
# Names of primitives that only some releases have: from one, or until before one.
FROM = {
    "log2": (0, 11, 2),
    "one_minus_square": (0, 11, 2),
    "stack": (0, 10, 1),
    "stage": (0, 10, 1),
    "unstack": (0, 10, 1),
    "vary_unreduced_cast": (0, 12, 0),
    "xla_metadata_call": (0, 11, 0),
}
BEFORE = {"call": (0, 11, 1), "closed_call": (0, 11, 1)}
ELSEWHERE = {"reverse_mode", "triton_kernel_call"}  # in jamp, and in jax_triton


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
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "name": lambda x: jax.ad_checkpoint.checkpoint_name(x, "x"),
    "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.array([4])),
    "random_bits": lambda x: jax.random.bits(KEY, (2,)),
    "reduce_prod": lambda x: lax.reduce_prod(x, (0,)),
    "reduce_sum": lambda x: lax.reduce_sum(x, (0,)),
    "remat2": jax.checkpoint(lambda x: jnp.sin(x) @ x),
    "reshape": lambda x: lax.reshape(x, (16,)),
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x),
    "scatter": scattered("set"),
    "scatter-add": scattered("add"),
    "scatter-max": scattered("max"),
    "scatter-min": scattered("min"),
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
    for name in ("compute_on", "custom_partitioning", "fused", "xla_metadata"):
        importlib.import_module(f"jax.experimental.{name}")
    modules = [m for name, m in [*sys.modules.items()] if name.startswith("jax.")]
    values = (value for module in modules for value in vars(module).values())
    return {value.name for value in values if isinstance(value, Primitive)}


@pytest.mark.parametrize("name", _jaxprs.PARAMETERS)
def test_a_primitive_has_the_parameters_that_are_read(name):
    eqn = equation(name)
    for parameter in _jaxprs.PARAMETERS[name].split():
        _jaxprs.param(eqn, parameter)  # raises if it is missing


def test_a_parameter_that_is_missing_is_an_error():
    eqn = equation("integer_pow")
    assert _jaxprs.param(eqn, "y") == 3
    assert _jaxprs.param(eqn, "axes") is None
    with pytest.raises(NotImplementedError, match="'y' of the primitive 'integer_pow'"):
        _jaxprs.param(eqn.replace(params={}), "y")


def test_jax_has_each_primitive_that_is_named():
    traits_of = [names for names in vars(traits).values() if isinstance(names, frozenset)]
    known = RULES.keys() | PRIMITIVES | _jaxprs.CALLS | _jaxprs.PARAMETERS.keys()
    named = known.union(*traits_of) - ELSEWHERE
    missing = named - primitives()
    later = {name for name, release in FROM.items() if RELEASE < release}
    gone = {name for name, release in BEFORE.items() if RELEASE >= release}
    assert missing == later | gone


def test_each_parameter_that_is_asked_for_is_listed():
    listed = {p for row in _jaxprs.PARAMETERS.values() for p in row.split()}
    for module in pkgutil.walk_packages(jamp.__path__, "jamp."):
        if module.name.endswith("__main__"):
            continue
        tree = ast.parse(inspect.getsource(importlib.import_module(module.name)))
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Name("param"), [_, ast.Constant(parameter)]):
                    assert parameter in listed, module.name
