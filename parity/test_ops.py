"""jamp's tables against the lists in torch's header, and the comparison of ops."""

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jamp._autocast.ops import FUNCTIONS, PRIMITIVES, Kind, Row
from parity import golden, ops
from parity.ops_jamp import JITTED
from parity.ops_table import (
    DIFFERENCES,
    HALVES,
    NO_COUNTERPART,
    OPS,
    UNLISTED_DIFFERENCES,
    Op,
    Side,
)
from parity.result import Result
from shared import cells

torch = pytest.importorskip("torch")
ops_torch = pytest.importorskip("parity.ops_torch")
torch_autocast = pytest.importorskip("parity.torch_autocast")

OVERLOADS = torch_autocast.lists()
LISTS = {name.split(".")[0]: kind for name, kind in OVERLOADS.items()}
# torch promotes the product of two vectors; so does jamp, by the number of dimensions.
DOT = {"dot", "vdot"}


def rows() -> Iterator[tuple[str, Row]]:
    for row in (PRIMITIVES | FUNCTIONS).values():
        yield from ((op, row) for op in row.torch.split())


def case(name: str) -> ops.Case:
    return next(c for n, c in ops.CASES.items() if n.startswith(name))


# The lists and the table.


def test_the_header_is_read_whole():
    # The header lists what the dispatcher has, except two cuDNN ops, which nobody
    # calls, and the one that autocast forbids.
    registered = torch_autocast.registered("CUDA")
    assert OVERLOADS.keys() <= registered
    assert registered - OVERLOADS.keys() == {
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        torch_autocast.FORBIDDEN,
    }


def test_a_header_without_a_list_is_an_error():
    with pytest.raises(ValueError, match="AT_FORALL_LOWER_PRECISION_FP is not in"):
        torch_autocast.read_list("", "LOWER_PRECISION_FP")


def test_each_op_of_the_lists_is_accounted_for_once():
    mirrored = {op for op, _ in rows()}
    parts = [mirrored, set(NO_COUNTERPART), set(DIFFERENCES)]
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert set.union(*parts) == LISTS.keys()


@pytest.mark.parametrize("op", sorted({op for op, _ in rows()}))
def test_rows_are_of_the_kind_of_the_list(op: str):
    kinds = {row.kind for name, row in rows() if name == op}
    assert kinds == {Kind.LOWER if op in DOT else LISTS[op]}


def test_the_cases_are_what_the_lists_have():
    names = {op.name for op in OPS.values() if op.listed}
    assert names == {o for o in OVERLOADS if o.split(".")[0] not in NO_COUNTERPART}
    for op in OPS.values():
        assert (op.name in OVERLOADS) == op.listed
    path = Path(ops.__file__).with_name("ops.txt")
    rows = [names for _, (names, *_) in cells.rows(path)]
    assert sum(len(names.split()) for names in rows) == len(OPS)
    assert len(ops.CASES) == len(HALVES) * len(OPS)


def test_differences_are_few():
    # And real, as `Result.as_expected` demands.
    assert len(DIFFERENCES) <= 3 and len(UNLISTED_DIFFERENCES) <= 1


def test_few_ops_are_without_values():
    assert len([op for op in OPS.values() if op.dtypes_only]) <= 3


# Counting.


def test_ulps():
    x, y = (np.array([v], np.float32) for v in (1.0, 1.0 + 2.0**-10))
    assert ops.ulps(x, y, np.float32) == 2**13
    assert ops.ulps(x, y, np.float16) == 1
    assert ops.ulps(x, x + 2.0**-7, jnp.bfloat16) == 1
    tiny = np.array([1e-45], np.float32)
    assert ops.ulps(-tiny, tiny, np.float32) == 2
    for other in (x * np.float32("inf"), np.ones(2, np.float32)):
        with pytest.raises(ValueError, match="not comparable"):
            ops.ulps(x, other, np.float32)


def test_ulps_of_the_largest_element():
    x = np.array([1.5, 2.0**-10], np.float32)
    y = x + np.array([0, 2.0**-22], np.float32)
    assert ops.ulps(x, y, np.float32).tolist() == [0, 2**11]
    assert ops.ulps(x, y, np.float32, cancels=True).tolist() == [0, 2]
    zero = np.zeros(2, np.float16)
    assert ops.ulps(zero, zero, np.float16, cancels=True).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda s: s._replace(results=[s.results[0].astype("float32")]), "dtype"),
        (lambda s: s._replace(results=[s.results[0] * 1.02]), "value"),
        (
            lambda s: s._replace(grads=[x.astype("float16") for x in s.grads]),
            "gradient dtype",
        ),
        (lambda s: s._replace(grads=[x * 1.02 for x in s.grads]), "gradient value"),
        (
            lambda s: s._replace(
                grads=[x * x.dtype.type(1 + 2.0**-20) for x in s.grads]
            ),
            "gradient value",
        ),
    ],
    ids=[*ops.FIELDS, "gradient value not rounded"],
)
def test_a_fault_is_counted(monkeypatch, change, field):
    matmul = case("matmul: x @ y, float16")
    sides = ops_torch.run(matmul.op, matmul.half, "cpu")
    right = {name: dict.fromkeys(JITTED, side) for name, side in sides.items()}
    wrong = {n: right[n] | {JITTED[1]: change(side)} for n, side in sides.items()}
    monkeypatch.setattr(ops.ops_jamp, "run", lambda pairs: [right])
    result = ops.run(matmul, "cpu")
    assert result.compared and not result.differs and result.as_expected
    monkeypatch.setattr(ops.ops_jamp, "run", lambda pairs: [wrong])
    result = ops.run(matmul, "cpu")
    assert {name for name, n in result.mismatches.items() if n} == {field}
    assert "jitted in the region" in result.where and not result.as_expected


def test_the_table_needs_no_torch():
    script = (
        "import sys, parity.ops as o; assert o.CASES; print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"


# CUDA's lists on the CPU.


@contextlib.contextmanager
def region(dtype=torch.float16) -> Iterator[None]:
    with (
        torch_autocast.cuda_lists(),
        warnings.catch_warnings(),
        torch.autocast("cpu", dtype=dtype),
    ):
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.title)
def test_the_cpu_has_the_dtypes_of_cuda(op: Op, half: str):
    cuda = ops_torch.fake_dtypes(op, half)
    sides: dict[str, Side] = ops_torch.run(op, half, "cpu")
    for name, side in sides.items():
        assert cuda[name] == [x.dtype.name for x in side.results]
        inputs = [x.dtype for x in op.arrays(name, half)]
        assert inputs == [x.dtype for x in side.grads]  # as autograd promises
    if op.listed:
        kind = OVERLOADS[op.name]
        expected = {half, "float32"} if kind is Kind.PROMOTE else {"float32"}
        expected = {half} if kind is Kind.LOWER else expected
        assert {dtype for dtypes in cuda.values() for dtype in dtypes} == expected


def test_the_lists_of_the_cpu_come_back():
    before = torch_autocast.registered("CPU")
    x = torch.ones(2, 2, dtype=torch.float16)

    def own():
        with torch.autocast("cpu", dtype=torch.float16):
            mixed = torch.cat([x, x.float()])
            return x.exp().dtype, torch.mm(x.float(), x).dtype, mixed.dtype

    dtypes = own()
    assert dtypes[:2] == (torch.float16, torch.float16)
    clear = torch.clear_autocast_cache
    with pytest.raises(ZeroDivisionError), region():
        assert x.exp().dtype is torch.float32
        raise ZeroDivisionError
    assert own() == dtypes
    assert torch_autocast.registered("CPU") == before
    assert torch.clear_autocast_cache is clear


def test_nothing_is_registered_by_an_import():
    script = """
import torch
keys = ("AutocastCPU", "AutocastCUDA", "Meta", "CPU", "CompositeImplicitAutograd")
names = torch._C._dispatch_get_registrations_for_dispatch_key
before = [set(names(key)) for key in keys]
import parity.torch_autocast, parity.ops_torch
assert before == [set(names(key)) for key in keys]
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_fake_autocast_is_off_again():
    with torch_autocast.fake_cuda(torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") is torch.float16


def test_which_float32_ops_are_given_a_dtype():
    header = torch_autocast.HEADER.read_text(encoding="utf-8")
    assert {
        name
        for name, kind in OVERLOADS.items()
        if kind is Kind.FLOAT32
        and torch_autocast.sets_dtype(torch_autocast.overload(name))
    } == set(torch_autocast.read_list(header, "FP32_SET_OPT_DTYPE"))


def test_a_dtype_that_is_given_is_kept():
    x = torch.ones(3, dtype=torch.float16)
    with region():
        assert torch.softmax(x, 0).dtype is torch.float32
        assert torch.softmax(x, 0, dtype=torch.float16).dtype is torch.float16
        assert x.sum(0, dtype=torch.float64).dtype is torch.float64


def test_other_dtypes_are_left_alone():
    double, integer = torch.ones(3, 3, dtype=torch.float64), torch.ones(3).long()
    half = torch.ones(3, dtype=torch.float16)
    with region():
        assert torch.mm(double, double).dtype is torch.float64
        assert double.exp().dtype is torch.float64
        assert double.sum().dtype is torch.float64
        assert integer.sum().dtype is torch.int64
        assert integer.exp().dtype is torch.float32
        # Promotion ignores float64, which the op then refuses.
        with pytest.raises(RuntimeError, match="dtype"):
            torch.dot(half, double[0])
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.dot(half, half.bfloat16())


def test_lists_of_tensors_are_cast():
    x = torch.ones(2, 2)
    with region():
        assert torch.linalg.multi_dot([x, x.half(), x]).dtype is torch.float16
        put = torch.index_put(x.half(), (torch.tensor([0]),), x[:1])
        assert put.dtype is torch.float32


def test_what_cuda_does_not_list_is_not_cast():
    x = torch.ones(2, 2, dtype=torch.float16)
    own = torch_autocast.registered("CPU") - OVERLOADS.keys()
    assert {"cat", "stack"} <= own
    with region():
        assert torch.cat([x, x]).dtype is torch.float16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(x, x)


@pytest.mark.parametrize("lists", [contextlib.nullcontext, torch_autocast.cuda_lists])
def test_a_weight_is_cast_once_in_a_region(lists):
    # The control: the same with torch's own lists for the CPU.
    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    own = lambda: torch.autocast("cpu", dtype=torch.float16)

    def cast_of(result):
        return result.grad_fn.next_functions[-1][0]

    with lists():
        with own():
            with torch.no_grad():
                assert not torch.mm(x, w).requires_grad
            first = cast_of(torch.mm(x, w))
            with own():
                assert cast_of(torch.mm(x, w)) is first
            assert cast_of(torch.mm(x, w)) is first
            torch.set_autocast_cache_enabled(False)
            assert cast_of(torch.mm(x, w)) is not first
            torch.set_autocast_cache_enabled(True)
        with own():
            assert cast_of(torch.mm(x, w)) is not first
            w.data.zero_()
            assert torch.mm(x, w).sum() == 8  # stale, as in torch
        with own():
            assert torch.mm(x, w).sum() == 0


# The golden file.


def test_a_record_has_all_that_torch_gave():
    addmm = case("addmm: y @ z + x, bfloat16")
    sides = ops_torch.run(addmm.op, addmm.half, "cpu")
    found = ops.unpack(ops.pack(sides))
    assert list(found) == list(sides)
    for inputs, side in sides.items():
        for part, arrays in side._asdict().items():
            others = getattr(found[inputs], part)
            for x, y in zip(arrays, others, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)


def scaled(x: np.ndarray, ulps: int) -> np.ndarray:
    """Numbers that are one to two times as many units in the last place away."""
    return x * x.dtype.type(1 + ulps * jnp.finfo(x.dtype).eps)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s, False),
        (lambda s: s._replace(results=[scaled(x, 1) for x in s.results]), False),
        (lambda s: s._replace(results=[scaled(x, 20) for x in s.results]), True),
        (lambda s: s._replace(grads=[scaled(x, 20) for x in s.grads]), True),
        (lambda s: s._replace(results=[x.astype("float32") for x in s.results]), True),
        (lambda s: s._replace(grads=s.grads[1:]), True),
    ],
    ids=["none", "last bits", "values", "gradients", "dtype", "one gradient less"],
)
def test_the_golden_file_tells_a_difference(monkeypatch, tmp_path, change, told):
    matmul, file = case("matmul: x @ y, float16"), golden.load()
    name = f"ops/{matmul.name}"
    sides = ops_torch.run(matmul.op, matmul.half, "cpu")
    sides = {inputs: change(side) for inputs, side in sides.items()}
    results = {ops: [Result(matmul.name, 0, {}, data=sides)]}
    differ = {f"ops/{other}" for other in ops.CASES} - {name}
    differ |= {name} if told else set()
    assert set(golden.check(results)) == differ
    monkeypatch.setattr(golden, "PATH", tmp_path / "golden.npz")
    golden.save(file)
    assert not golden.check(results, write=True)
    # What agrees stays as it is, or each processor would write another file.
    expected, written = ops.pack(sides) if told else file[name], golden.load()[name]
    assert written.dtype == expected.dtype and written == expected


@pytest.mark.parametrize("name", ["linear", "conv1d"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_rounds_every_bias_and_its_gradient_as_a_cast_does(name, dtype):
    """What tests/autocast/test_biases.py expects of jamp."""
    wide = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype)).astype(np.float32)
    # Both flush what is subnormal in float32, which bfloat16's subnormals are.
    wide = wide[np.isfinite(wide) & ~(np.abs(wide) < np.finfo(np.float32).tiny)]
    bias = torch.tensor(wide, requires_grad=True)
    x, weight = torch.zeros(1, 2), torch.ones(len(wide), 2)
    with torch.autocast("cpu", getattr(torch, dtype)):
        if name == "linear":
            out = torch.nn.functional.linear(x, weight, bias)
        else:
            out = torch.nn.functional.conv1d(x[..., None], weight[..., None], bias)
    out.backward(torch.tensor(wide).to(out.dtype).reshape(out.shape))
    np.testing.assert_array_equal(out.detach().float().numpy().ravel(), wide)
    np.testing.assert_array_equal(bias.grad.numpy(), wide)
