"""The comparison over the range of half precision, and its table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

from . import edges, golden, ops, ops_jamp, runner
from .edges import EDGES, OF_OPS, SHAPE, numbers, partners
from .ops_jamp import JITTED
from .ops_table import HALVES, OPS, Op, Side

torch = pytest.importorskip("torch")
ops_torch = pytest.importorskip("parity.ops_torch")

QUOTIENT = edges.CASES["x / y, float16"]


# The table.


@pytest.mark.parametrize("half", HALVES)
def test_the_numbers_cover_the_range(half: str):
    info, x, y = jnp.finfo(jnp.dtype(half)), numbers(half), partners(half)
    least = info.smallest_subnormal if half == "float16" else info.smallest_normal
    sizes = np.abs(x)
    assert x.shape == y.shape == SHAPE and np.isfinite(x).all()
    assert (sizes.min(), sizes.max()) == (float(least), float(info.max))
    assert {-1.0, 1.0, 2.0**11, 2.0**-12} <= {*x.ravel()}
    assert 50 < (x < 0).sum() < 78
    assert (np.diff(sizes.ravel()) >= 0).all()
    within = np.abs(np.log2(sizes)) <= 20
    assert within.mean() > 0.75
    assert np.unique(np.floor(np.log2(sizes[within]))).size > 30
    np.testing.assert_array_equal(x.astype(info.dtype).astype(np.float64), x)
    assert (x == y).sum() >= 8 and (x == -y).sum() >= 8


def test_the_table_has_each_op_of_autocast_s_that_is_a_function_of_each_element():
    candidates = [op for op in OPS.values() if {*op.shapes} == {op.shapes[0]}]
    inputs = [op.arrays("float32", "float16") for op in candidates]

    def both(inputs):
        return [
            [op.jax(*x), op.jax(x[0].at[(0,) * x[0].ndim].add(0.125), *x[1:])]
            for op, x in zip(candidates, inputs, strict=True)
        ]

    with ops_jamp.settings():
        found = ops_jamp.compiled(both, [[*map(jnp.asarray, x)] for x in inputs])

    def is_elementwise(op: Op, before: jax.Array, after: jax.Array) -> bool:
        apart = ~np.isclose(before, after, 1e-5)  # the last bits may differ
        at = {*map(tuple, np.argwhere(apart))}
        return before.shape == op.shapes[0] and at <= {(0,) * before.ndim}

    elementwise = [
        op
        for op, sides in zip(candidates, found, strict=True)
        if is_elementwise(op, *sides)
    ]
    shown = {edge.title for edge in EDGES if edge.section == OF_OPS}
    assert {op.written for op in elementwise} == shown


def test_each_row_is_another():
    titles = [edge.title for edge in EDGES]
    assert len({*titles}) == len(titles) >= 60
    assert len(edges.CASES) == len(HALVES) * len(titles)


# The judgement.


def test_the_reference_is_no_function_of_jamp(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("the reference asked jamp")

    monkeypatch.setattr(jamp, "autocast", forbidden)
    names = ["jnp.tanh", "x / y", "jax.nn.softmax"]
    cases = [edges.CASES[f"{name}, float16"] for name in names]
    tanh, quotient, softmax = edges.reference(cases)
    for side in (tanh, quotient, softmax):
        assert {x.dtype.name for x in side.results + side.grads} == {"float64"}
    x, y = (a.astype(np.float64) for a in QUOTIENT.edge.arrays("half", "float16"))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    close(tanh.results[0], np.tanh(x))
    close(tanh.grads[0], 1 / np.cosh(np.clip(x, -300, 300)) ** 2)
    close(quotient.results[0], x / y)
    close(quotient.grads[0], 1 / y)
    close(quotient.grads[1], -x / y**2)
    exp = np.exp(x - x.max(-1, keepdims=True))
    close(softmax.results[0], exp / exp.sum(-1, keepdims=True))
    assert jnp.ones(1, float).dtype == jnp.float32  # float64 is off again


def judged(found: float, right: float, torch: float, dtype: str = "float16") -> bool:
    """Whether a number is right."""

    def side(x: float, dtype: str) -> Side:
        return Side([np.full(1, x, dtype)], [])

    sides = side(torch, dtype), {"in jit": side(found, dtype)}
    return not edges.compared(QUOTIENT, *sides, side(right, "float64")).differs


@pytest.mark.parametrize(
    ("found", "right", "torch", "is_right"),
    [
        (1.01, 1.0, 1.0, True),
        (1.03, 1.0, 1.0, False),
        (1.03, 1.0, 1.01, True),
        (1.05, 1.0, 1.01, False),
        (9e-6, 0.0, 0.0, True),
        (2e-5, 0.0, 0.0, False),
        (np.nan, 1.0, 1.0, False),
        (np.nan, 1.0, np.nan, True),
        (np.inf, 1.0, 1.0, False),
        (np.inf, 1.0, np.inf, True),
        # beyond the largest number
        (np.inf, 1e6, np.inf, True),
        (np.inf, np.inf, 65504, True),
        (65504, 1e6, np.inf, True),
        (0.0, 1e6, np.inf, False),
        (-np.inf, 1e6, np.inf, False),
        (np.nan, 1e6, np.inf, False),
        (0.0, 1e6, 0.0, True),
    ],
)
def test_what_is_right(found, right, torch, is_right):
    assert judged(found, right, torch) is is_right


def test_the_largest_number_is_that_of_torch_s_dtype():
    assert judged(np.inf, 1e6, np.inf)
    assert not judged(np.inf, 1e6, 1e6, "float32")


def run(monkeypatch, change):
    """The result of a quotient of which one path has changed numbers."""
    side = ops_torch.run(QUOTIENT.edge, QUOTIENT.half, "cpu")
    sides = {JITTED[0]: side["half"], JITTED[1]: change(side["half"])}
    monkeypatch.setattr(
        edges.ops_jamp, "run", lambda pairs, outside_jit: [{"half": sides}]
    )
    return edges.run(QUOTIENT, "cpu")


def test_a_wrong_derivative_is_counted_and_named(monkeypatch):
    size = int(np.prod(SHAPE))
    result = run(monkeypatch, lambda side: side)
    assert result.as_expected and result.compared == 2 * 3 * size
    small = {"float16, torch": "< 1%", "float16, jamp": "< 1%"}
    assert result.figures == small

    def wrong(side: Side) -> Side:
        x, y = side.grads
        return side._replace(grads=[x, np.where(y == 1.0, np.float16(1.05), y)])

    result = run(monkeypatch, wrong)
    n = int(
        (ops_torch.run(QUOTIENT.edge, "float16", "cpu")["half"].grads[1] == 1).sum()
    )
    assert n and result.mismatches == {"value": 0, "gradient": n}
    assert not result.as_expected
    assert result.where.startswith(
        "x / y, float16, jitted in the region: gradient by y at "
    )
    assert " is 1.04" in result.where and "torch has 1" in result.where
    assert result.figures == small | {"float16, jamp": "< 10%"}


def test_a_wrong_value_is_counted(monkeypatch):
    result = run(
        monkeypatch, lambda s: s._replace(results=[np.zeros_like(x) for x in s.results])
    )
    assert result.mismatches["value"] > 50 and not result.mismatches["gradient"]
    assert "jitted in the region: value at " in result.where


def test_all_rows_of_a_dtype_share_a_program():
    for device in ("cpu", "cuda"):
        groups = runner.groups(edges, list(edges.CASES), device)
        assert [len(group) for group in groups] == [len(EDGES)] * len(HALVES)


# The golden file.


@pytest.mark.parametrize(
    ("change", "agrees"),
    [
        (lambda side: side, True),
        (lambda s: s._replace(grads=[x * x.dtype.type(1.002) for x in s.grads]), True),
        (lambda s: s._replace(grads=[x * x.dtype.type(1.02) for x in s.grads]), False),
        (lambda s: s._replace(results=[-x for x in s.results]), False),
        (lambda s: s._replace(grads=s.grads[1:]), False),
    ],
    ids=["none", "last bits", "gradients", "values", "one gradient less"],
)
def test_the_golden_file_tells_a_difference(change, agrees):
    name, file = f"{edges.PREFIX}float16", golden.load()
    sides = edges.unpack(file[name])
    with np.errstate(over="ignore"):
        sides[QUOTIENT.title] = change(sides[QUOTIENT.title])
    differ = golden.differences(file, {name: ops.pack(sides)})
    other = f"{edges.PREFIX}bfloat16"
    assert differ == [other] + [name] * (not agrees)
