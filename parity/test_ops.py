"""jamp's tables against the lists in torch's header, and each op's dtype and value."""

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from jamp._op_rules import (
    DIFFERENCES,
    FUNCTIONS,
    NO_COUNTERPART,
    PRIMITIVES,
    Kind,
    Row,
)

torch = pytest.importorskip("torch")
ops = pytest.importorskip("parity.ops")
torch_autocast = pytest.importorskip("parity.torch_autocast")

OVERLOADS = torch_autocast.lists()
LISTS = {name.split(".")[0]: kind for name, kind in OVERLOADS.items()}
# torch promotes the product of two vectors; so does jamp, by the number of dimensions.
DOT = {"dot", "vdot"}
MOST_ULPS = 8  # unless a note in the table says why

compare = functools.cache(ops.compare)


def rows() -> Iterator[tuple[str, Row]]:
    for row in (PRIMITIVES | FUNCTIONS).values():
        yield from ((op, row) for op in row.torch.split())


CASES = [
    pytest.param(op, id=f"{op.name}: {op.written}") for op in ops.LISTED + ops.UNLISTED
]


def test_the_header_is_read_whole():
    registered = {op for op in OVERLOADS if torch_autocast.is_listed(op, "CUDA")}
    assert registered == OVERLOADS.keys()
    # What the header lists is what the dispatcher has, but for two ops of cuDNN, which
    # nobody calls, and the one that autocast forbids.
    suffix = "[kernel]"
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    found = {name.removesuffix(suffix).removeprefix("aten::") for name in names}
    assert found - OVERLOADS.keys() == {
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "binary_cross_entropy",
    }


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
    names = {op.name for op in ops.LISTED}
    assert names == {o for o in OVERLOADS if o.split(".")[0] not in NO_COUNTERPART}
    for op in ops.UNLISTED:
        assert not torch_autocast.is_listed(op.name, "CUDA")


@pytest.mark.parametrize("op", CASES)
def test_dtypes(op):
    result = compare(op)
    if op.base not in DIFFERENCES:
        expected = {k: (dtype, dtype) for k, dtype in result.cuda.items()}
        assert result.jamp == expected


@pytest.mark.parametrize("op", CASES)
def test_values(op):
    distances = compare(op).ulps
    if op.values:
        assert distances
        assert op.note or max(distances.values()) <= MOST_ULPS, distances


def test_differences_are_few_and_real():
    assert len(DIFFERENCES) <= 3
    for name in DIFFERENCES:
        results = [compare(op) for op in ops.LISTED if op.base == name]
        assert results and not any(result.agrees for result in results)


@pytest.mark.parametrize("op", ops.LISTED, ids=lambda op: f"{op.name}: {op.written}")
def test_fake_tensors_follow_the_lists(op):
    inputs = [ops.arrays(op, dtypes) for dtypes in op.dtypes]
    found = {torch_autocast.cuda_dtype(op.torch, x) for x in inputs}
    assert (
        found
        == {
            Kind.LOWER: {"float16"},
            Kind.FLOAT32: {"float32"},
            Kind.PROMOTE: {"float16", "float32"},
        }[LISTS[op.base]]
    )


def test_autocast_is_off_again_after_a_fake_run():
    op = ops.LISTED[0]
    torch_autocast.cuda_dtype(op.torch, ops.arrays(op, "float32"))
    assert not torch.is_autocast_enabled("cuda")


def test_a_header_without_a_list_is_an_error():
    with pytest.raises(ValueError, match="AT_FORALL_LOWER_PRECISION_FP is not in"):
        torch_autocast.read_lists("")


def test_ulps():
    x, y = (np.array([v], np.float32) for v in (1.0, 1.0 + 2.0**-10))
    assert ops.ulps(x, y) == ("float32", 2**13)
    assert ops.ulps(x.astype("float16"), y) == ("float16", 1)
    tiny = np.array([1e-45], np.float32)
    assert ops.ulps(-tiny, tiny) == ("float32", 2)
    with pytest.raises(ValueError, match="not comparable"):
        ops.ulps(x, x * np.float32("inf"))
