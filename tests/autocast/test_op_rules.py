"""The tables of `ops.py` against the installed libraries, and the dtypes of rows."""

import ast
import functools
import inspect
import sys
import types
from importlib import import_module
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from jax import lax

import jamp
from jamp._autocast import ops, traits
from jamp._autocast.attention import ATTENTION
from jamp._autocast.call_stack import resolve
from jamp._autocast.ops import EXEMPT, FUNCTIONS, PRIMITIVES, Kind
from jamp._autocast.trace import RULES
from jamp._debug import traits as of_reports
from jamp._jaxprs import CALLS
from shared.keras_on_jax import import_keras
from tests.marks import cover

# Modules that their library does not import by itself.
MODULES = """
    equinox.nn flax.linen flax.nnx jax.image optax.losses penzai.pz
    tensorflow_probability.substrates.jax
    """.split()


def call(function, *inputs):
    """The dtype of a result under autocast, which must be the same in jit."""
    region = jamp.autocast(dtype=jnp.float16)
    results = [
        jax.eval_shape(region(f), *inputs) for f in (function, jax.jit(function))
    ]
    assert results[0].dtype == results[1].dtype
    return results[0].dtype


def half(*shape):
    return jax.ShapeDtypeStruct(shape or (3,), jnp.float16)


def full(*shape):
    return jax.ShapeDtypeStruct(shape or (3,), jnp.float32)


def lax_function(name):
    return getattr(lax, name, None) or getattr(lax.linalg, name, None)


def gives_half(name, count):
    """Whether lax has the primitive as a function of so many arrays."""
    function = lax_function(name)
    if not callable(function) or not name.islower():
        return False
    array = jax.ShapeDtypeStruct((3,), jnp.float16)
    try:
        result = jax.eval_shape(function, *[array] * count)
    except Exception:  # it takes something else
        return False
    return isinstance(result, jax.ShapeDtypeStruct) and result.dtype == jnp.float16


@functools.cache
def of_one():
    return [name for name in PRIMITIVES if name != "stack" and gives_half(name, 1)]


@functools.cache
def of_two():
    others = [name for name in PRIMITIVES if name not in of_one()]
    return [name for name in others if gives_half(name, 2)]


def library(path):
    root = path.split(".")[0]
    if root == "keras" and find_spec(root) is not None:
        import_keras()
    import_module(root)
    for module in MODULES:
        if module.split(".")[0] == root:
            pytest.importorskip(module)  # its warnings are not errors here


ROWS = [*FUNCTIONS, *EXEMPT]
# Functions that are not in all releases of JAX, with the first that has them.
LATER = {
    "jax.scipy.special.dawsn": (0, 10, 2),
    "jax.scipy.special.erfcx": (0, 10, 1),
    "jax.scipy.special.owens_t": (0, 10, 1),
    "jax.scipy.special.wofz": (0, 10, 2),
}


ROOTS = [root for root in {path.split(".")[0] for path in ROWS} if find_spec(root)]
ROOTS.sort(key=lambda root: (root == "keras", root))  # which takes seconds to import


@cover(quick=len({*ROOTS} - {"keras"}))
@pytest.mark.parametrize("root", ROOTS)
def test_a_row_has_its_function(root: str):
    library(root)
    rows = {path for path in ROWS if path.split(".")[0] == root}
    here = frozenset(sys.modules)
    missing = {path for path in rows if resolve(path, here) is None}
    later = {path for path, release in LATER.items() if jax.__version_info__ < release}
    assert missing == later & rows


@pytest.mark.parametrize(
    "function",
    [lax.cumsum, lax.cumprod, lax.cumlogsumexp, jnp.nanmean, jnp.nanstd, jnp.nanvar],
)
def test_a_row_that_is_lost_is_missed(function):
    """The tests of all rows read the table, and would not."""
    assert call(function, half()) == jnp.float32


class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise AssertionError("a look for a row must not import a module")


def test_a_module_that_is_imported_when_it_is_used_is_not_used(monkeypatch):
    root = types.ModuleType("root")
    monkeypatch.setattr(root, "lazy", Lazy("root.lazy"), raising=False)
    monkeypatch.setitem(sys.modules, "root", root)
    assert resolve("root.lazy.function", frozenset({"root"})) is None


def test_no_key_is_written_twice():
    # A second row would replace the first without a word.
    names: dict[str, list[str]] = {"PRIMITIVES": [], "FUNCTIONS": []}
    for node in ast.parse(inspect.getsource(ops)).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Name) or target.id not in names:
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Dict):
                keys = [k.value for k in part.keys if isinstance(k, ast.Constant)]
                names[target.id] += keys
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                if part.func.attr == "split":
                    assert isinstance(part.func.value, ast.Constant)
                    names[target.id] += part.func.value.value.split()
    for name, table in (("PRIMITIVES", PRIMITIVES), ("FUNCTIONS", FUNCTIONS)):
        assert sorted(names[name]) == sorted(table)


def test_a_trait_is_of_primitives_that_jamp_knows():
    assert PRIMITIVES.keys() <= RULES.keys()
    known = RULES.keys() | traits.LEFT_ALONE
    known |= {"reduce_precision"}  # rounding, which runs as it was traced
    both = vars(of_reports) | vars(traits)
    lists = {k: v for k, v in both.items() if isinstance(v, frozenset)}
    assert len(lists) >= 12
    for name, primitives in lists.items():
        assert primitives and primitives <= known, name
    lowered = {n for n, row in PRIMITIVES.items() if row.kind is Kind.LOWER}
    assert traits.PRODUCTS == lowered
    assert traits.FOLLOWED <= of_reports.MOVES
    promoting = {n for n, row in PRIMITIVES.items() if row.kind is Kind.PROMOTE}
    mixing = promoting & traits.ELEMENTWISE
    assert of_reports.MIXING == mixing - {"clamp", "nextafter"}
    others = RULES.keys() - PRIMITIVES.keys() - {"iota", "random_bits", ATTENTION}
    assert traits.NAMED == others - traits.PASSED_THROUGH
    assert traits.PASSED_THROUGH < others
    called = others - traits.REF_WRITES - {"cond", "scan", "while"}
    assert called == CALLS - traits.LEFT_ALONE


def test_rows_that_mirror_one_op_are_of_one_kind():
    kinds: dict[str, set[Kind]] = {}
    for row in (PRIMITIVES | FUNCTIONS).values():
        for op in row.torch.split():
            kinds.setdefault(op, set()).add(row.kind)
    assert all(len(found) == 1 for found in kinds.values()), kinds


def test_most_of_the_table_is_called_here():
    assert len(of_one()) >= 40 and len(of_two()) >= 12
    found = {PRIMITIVES[name].kind for name in of_one() + of_two()}
    assert found == {Kind.FLOAT32, Kind.KEEP, Kind.PROMOTE}


def wrong(names, count):
    """The primitives that give another dtype than their row says."""
    found = {}
    for name in names:
        function = lax_function(name)
        dtypes = [call(function, *[x] * count) for x in (full(), half())]
        in_float32 = PRIMITIVES[name].kind is Kind.FLOAT32
        if dtypes != [jnp.float32, jnp.float32 if in_float32 else jnp.float16]:
            found[name] = dtypes
    return found


def test_a_primitive_of_one_array():
    assert wrong(of_one(), 1) == {}


def test_a_primitive_of_two_arrays():
    assert wrong(of_two(), 2) == {}


def test_a_primitive_of_two_arrays_of_two_dtypes():
    # In jit, JAX itself refuses two dtypes before anything is cast.
    for name in of_two():
        for inputs in ((half(), full()), (full(), half())):
            region = jamp.autocast(dtype=jnp.float16)(lax_function(name))
            assert jax.eval_shape(region, *inputs).dtype == jnp.float32, name


@pytest.mark.slow
def test_primitives_that_run_give_the_same():
    """Called live, on arrays."""
    with jamp.autocast(dtype=jnp.float16):
        for count, names in ((1, of_one()), (2, of_two())):
            for name in names:
                in_float32 = PRIMITIVES[name].kind is Kind.FLOAT32
                for dtype in (jnp.float32, jnp.float16):
                    found = lax_function(name)(*[jnp.full(3, 0.5, dtype)] * count)
                    assert found.dtype == (jnp.float32 if in_float32 else dtype), name


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lax.dot, ((2, 3), (3, 4))),
        (lax.dot, ((2, 3), (3,))),
        (lambda x, w: lax.conv(x, w, (1,), "SAME"), ((2, 3, 5), (4, 3, 2))),
        (lambda x, w: lax.ragged_dot(x, w, jnp.array([2, 2])), ((4, 3), (2, 3, 5))),
    ],
    ids=["matrices", "matrix and vector", "convolution", "ragged"],
)
def test_products(function, shapes):
    for dtype in (half, full):
        assert call(function, *(dtype(*s) for s in shapes)) == jnp.float16


def test_a_product_of_two_vectors_promotes():
    assert call(lax.dot, half(), half()) == jnp.float16
    assert call(lax.dot, full(), full()) == jnp.float32


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("reduce_sum", lambda x: lax.reduce_sum(x, (0,))),
        ("reduce_prod", lambda x: lax.reduce_prod(x, (0,))),
        ("integer_pow", lambda x: lax.integer_pow(x, 3)),
        ("reduce_max", lambda x: lax.reduce_max(x, (0,))),
        ("reduce_min", lambda x: lax.reduce_min(x, (0,))),
        ("slice", lambda x: lax.slice(x, (0,), (2,))),
        ("reshape", lambda x: lax.reshape(x, (3, 1))),
        ("transpose", lambda x: lax.transpose(x[None], (1, 0))),
        ("rev", lambda x: lax.rev(x, (0,))),
        ("squeeze", lambda x: lax.squeeze(x[None], (0,))),
    ],
)
def test_a_primitive_with_parameters(name: str, function):
    in_float32 = PRIMITIVES[name].kind is Kind.FLOAT32
    expected = jnp.float32 if in_float32 else jnp.float16
    assert call(function, half()) == expected
    assert call(function, full()) == jnp.float32


def test_linear_algebra_gets_float32():
    # In jit, JAX itself may refuse float16 before anything is cast.
    with jamp.autocast(dtype=jnp.float16):
        assert lax.linalg.cholesky(jnp.ones((1, 1), "float16")).dtype == jnp.float32
        assert lax.linalg.svd(jnp.ones((1, 3), "float16"))[1].dtype == jnp.float32


def test_other_dtypes_are_left_alone():
    with jamp.autocast(dtype=jnp.float16):
        assert lax.exp(jnp.ones(3, jnp.complex64)).dtype == jnp.complex64
        assert lax.add(jnp.ones(3, jnp.int8), jnp.ones(3, jnp.int8)).dtype == jnp.int8
        eighth = jnp.ones(3, jnp.float8_e4m3fn)
        assert lax.neg(eighth).dtype == jnp.float8_e4m3fn


@cover()
@pytest.mark.parametrize("jit", [True, False])
def test_products_of_float8_are_left_alone(jit):
    x = jnp.asarray([[1.0, 0.3], [-2.0, 7.0]], jnp.float8_e4m3fn)
    w = jnp.asarray([[0.1, 4.0], [0.5, -1.0]], jnp.float8_e5m2)

    def product(x, w):
        dimensions = ((1,), (0,)), ((), ())
        return [
            lax.dot_general(a, b, dimensions, preferred_element_type=dtype)
            for a, b in ((x, w), (w, x), (x, x))
            for dtype in (jnp.float32, jnp.bfloat16, None)[: 3 if a is b else 2]
        ]

    for dtype in (jnp.float16, "float8"):
        found = jamp.autocast(dtype)(jax.jit(product) if jit else product)(x, w)
        for one, expected in zip(found, product(x, w), strict=True):
            assert one.dtype == expected.dtype
            assert (one == expected).all()


def test_a_layer_in_float8_is_left_alone(standard_promotion):
    layer = nn.Dense(16, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    variables = jax.jit(layer.init)(jax.random.key(1), x)

    def loss(params, region):
        with region:
            y = layer.apply(variables | {"params": params}, x)
            return jnp.sum(y.astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    found, expected = (
        gradient(variables["params"], jamp.autocast(dtype=jnp.float16, enabled=enabled))
        for enabled in (True, False)
    )
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert one.dtype == other.dtype
        assert jnp.linalg.norm(one - other) < 0.01 * jnp.linalg.norm(other)
