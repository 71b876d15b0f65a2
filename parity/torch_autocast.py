"""CUDA's autocast without a GPU: its lists, its dtypes, and its casts on the CPU.

Fake tensors have a device, a shape and a dtype but no data, and autocast on CUDA casts
them like any others. To get values as well, `cuda_lists` gives autocast on the CPU,
whose own lists are shorter, CUDA's lists.
"""

import contextlib
import functools
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import library
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._subclasses.fake_tensor import FakeTensorMode

from jamp._autocast.ops import Kind

HEADER = pathlib.Path(torch.__file__).parent / "include/ATen/autocast_mode.h"

LISTS = {  # the macros of the header
    "LOWER_PRECISION_FP": Kind.LOWER,
    "FP32": Kind.FLOAT32,
    "FP32_SET_OPT_DTYPE": Kind.FLOAT32,
    "DIFFERENT_REDISPATCH_SIGNATURE": Kind.FLOAT32,
    "PROMOTE": Kind.PROMOTE,
}
FORBIDDEN = "binary_cross_entropy"  # autocast on CUDA refuses it
_ENTRY = re.compile(r'_\(\s*(?:ADD_NS\(\w+\),\s*"([\w.]+)"|(\w+)(?:, (\w+))?)')


def read_list(header: str, name: str) -> list[str]:
    """The overloads in a list of the header, such as "pow.Scalar"."""
    macro = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)+.*)", header)
    if macro is None:
        raise ValueError(f"AT_FORALL_{name} is not in the header")
    entries = _ENTRY.findall(macro[1].replace("\\\n", ""))
    return [full or ".".join(filter(None, op)) for full, *op in entries]


@functools.cache
def lists() -> dict[str, Kind]:
    """The kind of each overload in the lists of the installed torch."""
    header = HEADER.read_text(encoding="utf-8")
    return {name: k for macro, k in LISTS.items() for name in read_list(header, macro)}


def overload(name: str) -> Any:
    """The op that a name in the lists stands for."""
    packet, _, rest = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), rest or "default")


def registered(device: str) -> set[str]:
    """The ops for which autocast on a device, "CPU" or "CUDA", has a kernel."""
    key = f"Autocast{device}"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removesuffix("[kernel]").removeprefix("aten::") for name in names}


def sets_dtype(op: Any) -> bool:
    """Whether autocast gives a float32 op a `dtype` and leaves its inputs alone."""
    return any(argument.name == "dtype" for argument in op._schema.arguments)


def _is_eligible(x: Any) -> bool:
    """`is_eligible` of the header."""
    return (
        isinstance(x, torch.Tensor)
        and x.is_cpu
        and x.is_floating_point()
        and x.dtype is not torch.float64
    )


def _promote_type(args: Sequence[Any]) -> torch.dtype:
    """`promote_type` of the header: float32 if any input has it, else the region's."""
    dtype = torch.get_autocast_dtype("cpu")
    items = (y for x in args for y in (x if isinstance(x, list | tuple) else [x]))
    for x in filter(_is_eligible, items):
        if x.dtype not in (torch.float32, torch.get_autocast_dtype("cpu")):
            raise RuntimeError("Unexpected floating ScalarType in prioritize")
        dtype = torch.float32 if torch.float32 in (dtype, x.dtype) else dtype
    return dtype


class _Casts:
    """`cached_cast` of the header, which casts a weight once for a whole region."""

    def __init__(self):
        self.cache: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        self._clear = torch.clear_autocast_cache

    def clear(self) -> None:
        """Replaces `torch.clear_autocast_cache`, which torch calls as a region ends."""
        self.cache.clear()
        self._clear()

    def __call__(self, x: Any, dtype: torch.dtype) -> Any:
        if isinstance(x, list | tuple):
            return [self(y, dtype) for y in x]
        if not _is_eligible(x) or x.dtype is dtype:
            return x
        if not self._is_weight(x) or dtype is not torch.get_autocast_dtype("cpu"):
            return x.to(dtype)
        key = id(x), dtype
        if key not in self.cache:
            self.cache[key] = x, x.to(dtype)  # while x lives, its id is not reused
        return self.cache[key][1]

    @staticmethod
    def _is_weight(x: torch.Tensor) -> bool:
        is_leaf = x.requires_grad and x.is_leaf and not x._is_view()
        caches = torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
        return is_leaf and caches and x.dtype is torch.float32


def _kernel(op: Any, kind: Kind, cast: _Casts) -> Callable[..., Any]:
    """What autocast on CUDA does with an op: `WrapFunction_` of the header."""
    keys = DispatchKeySet(DispatchKey.AutocastCPU)
    names = [argument.name for argument in op._schema.arguments]

    def set_dtype(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(keys):
            kwargs |= dict(zip(names, args, strict=False))
            if _is_eligible(args[0]) and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return op(**kwargs)

    def cast_inputs(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(keys):
            if kind is Kind.PROMOTE:
                dtype = _promote_type([*args, *kwargs.values()])
            elif kind is Kind.LOWER:
                dtype = torch.get_autocast_dtype("cpu")
            else:
                dtype = torch.float32
            kwargs = {name: cast(x, dtype) for name, x in kwargs.items()}
            return op(*(cast(x, dtype) for x in args), **kwargs)

    return set_dtype if kind is Kind.FLOAT32 and sets_dtype(op) else cast_inputs


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(f"{FORBIDDEN} is unsafe to autocast")


@contextlib.contextmanager
def cuda_lists() -> Iterator[None]:
    """Gives `torch.autocast("cpu")` the lists of CUDA inside the context."""
    cast = _Casts()
    added = library.Library("aten", "IMPL", "AutocastCPU")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that are registered already
            on_cpu = registered("CPU")
            for name in on_cpu - lists().keys() - {FORBIDDEN}:
                added.impl(f"aten::{name}", library.fallthrough_kernel)
            for name, kind in lists().items():
                if kind is Kind.LOWER and name in on_cpu:
                    continue  # the CPU's own kernel does the same, and faster
                op = overload(name)
                added.impl(op.name(), _kernel(op, kind, cast))
            added.impl(f"aten::{FORBIDDEN}", _refuse)
        with mock.patch.object(torch, "clear_autocast_cache", cast.clear):
            yield
    finally:
        added._destroy()


@contextlib.contextmanager
def fake_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Autocast on CUDA, for tensors that are made inside and have no data.

    They have no gradients either: without a GPU, torch would abort.
    """
    # The only fused kernel without a shape function. It returns the new hidden state.
    added = library.Library("aten", "IMPL", "Meta")
    added.impl(
        "_thnn_fused_gru_cell",
        lambda gates, _, hidden, *biases: (torch.empty_like(hidden), gates),
    )
    # `torch.autocast("cuda")` turns itself off where there is no GPU.
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        added._destroy()
