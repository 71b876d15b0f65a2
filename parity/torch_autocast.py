"""torch's side of `ops`: the lists of autocast, and what it does with an op.

CUDA's dtypes need no GPU: fake tensors have a device, a shape and a dtype but no data,
and autocast casts them like others. On the CPU the op runs. The CPU has lists of its
own, which are shorter: what they lack keeps its dtype there.
"""

import contextlib
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode

from jamp._op_rules import Kind

HEADER = pathlib.Path(torch.__file__).parent / "include/ATen/autocast_mode.h"

LISTS = {  # the macros of the header
    "LOWER_PRECISION_FP": Kind.LOWER,
    "FP32": Kind.FLOAT32,
    "FP32_SET_OPT_DTYPE": Kind.FLOAT32,
    "DIFFERENT_REDISPATCH_SIGNATURE": Kind.FLOAT32,
    "PROMOTE": Kind.PROMOTE,
}
_ENTRY = re.compile(r'_\(\s*(?:ADD_NS\(\w+\),\s*"([\w.]+)"|(\w+)(?:, (\w+))?)')

# The one fused kernel without a shape function: it gives the new hidden state.
_FUSED_GRU = library.Library("aten", "IMPL", "Meta")
_FUSED_GRU.impl(
    "_thnn_fused_gru_cell",
    lambda gates, _, hidden, *biases: (torch.empty_like(hidden), gates),
)


def read_lists(header: str) -> dict[str, Kind]:
    """The kind of each overload that the header lists, such as "pow.Scalar"."""
    found: dict[str, Kind] = {}
    for name, kind in LISTS.items():
        macro = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)+.*)", header)
        if macro is None:
            raise ValueError(f"AT_FORALL_{name} is not in the header")
        for full, op, overload in _ENTRY.findall(macro[1].replace("\\\n", "")):
            found[full or ".".join(filter(None, [op, overload]))] = kind
    return found


def lists() -> dict[str, Kind]:
    """The kind of each overload in the lists of the installed torch."""
    return read_lists(HEADER.read_text(encoding="utf-8"))


def is_listed(op: str, device: str) -> bool:
    """Whether autocast on a device, "CPU" or "CUDA", does anything about an op."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(f"aten::{op}", f"Autocast{device}")


@contextlib.contextmanager
def _fake_cuda() -> Iterator[None]:
    # `torch.autocast("cuda")` turns itself off where there is no GPU.
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.float16)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


def _leaves(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _dtype(results: Iterable[torch.Tensor]) -> str:
    (dtype,) = {str(x.dtype).removeprefix("torch.") for x in results}
    return dtype


def cuda_dtype(op: Callable[..., Any], arrays: Iterable[np.ndarray]) -> str:
    """The dtype of an op's results under autocast on CUDA."""
    with _fake_cuda(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated ops, mixed dtypes and so on
        inputs = [
            torch.empty(a.shape, dtype=torch.from_numpy(a).dtype, device="cuda")
            for a in arrays
        ]
        return _dtype(_leaves(op(*inputs)))


def run_on_cpu(
    op: Callable[..., Any], arrays: Iterable[np.ndarray]
) -> list[np.ndarray] | None:
    """Results under autocast on the CPU, or None where torch cannot run it there.

    Ops that the CPU's lists lack may have no kernel for float16, or refuse inputs of
    several dtypes.
    """
    inputs = [torch.from_numpy(a.copy()) for a in arrays]
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.float16),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            results = _leaves(op(*inputs))
        except (RuntimeError, ValueError):
            return None
    _dtype(results)  # one for all
    return [x.numpy() for x in results]
