"""The matrix products and convolutions of a program, by the dtype of their operands."""

import re
from collections import Counter

import numpy as np

from . import hlo
from .jaxprs import equations

PRIMITIVES = {"dot_general", "conv_general_dilated"}
# Calls of cuBLAS and cuDNN. Attention kernels are not counted, here or in a jaxpr.
CALL = re.compile(r'custom_call_target="__(?:cublas\$|cudnn\$conv)')
ARRAY = re.compile(r"\b(pred|bf16|[a-z]+\d+\w*)\[")
KINDS = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c"}


def traced(jaxpr) -> Counter[str]:
    """The products that a program asks for: dtype or dtypes -> how many."""
    return Counter(
        named([short(variable.aval.dtype) for variable in eqn.invars[:2]])
        for eqn in equations(jaxpr)
        if eqn.primitive.name in PRIMITIVES
    )


def compiled(text: str) -> Counter[str]:
    """The products in optimized HLO for a GPU or a TPU: calls of libraries, and those
    in XLA's own kernels."""
    found = Counter()
    for name, instructions in hlo.parse(text).items():
        if name == "ENTRY":
            continue  # also listed under its own name
        shapes = {i.name: i.shape for i in instructions}
        for i in instructions:
            is_call = i.op == "custom-call" and CALL.search(i.text)
            if is_call or i.op in ("dot", "convolution"):
                dtypes = [ARRAY.match(shapes[name]).group(1) for name in i.operands[:2]]
                found[named([d[:2] if d[:2] == "f8" else d for d in dtypes])] += 1
    return found


def casts(jaxpr) -> int:
    """How many arrays are cast to float8."""
    return sum(
        eqn.primitive.name == "convert_element_type"
        and short(eqn.outvars[0].aval.dtype) == "f8"
        for eqn in equations(jaxpr)
    )


def short(dtype) -> str:
    """A dtype as HLO writes it, but "f8" for every float8."""
    name = np.dtype(dtype).name
    if name.startswith("float8"):
        return "f8"
    kind, bits = re.fullmatch(r"([a-z]+)(\d*)", name).groups()
    return KINDS[kind] + bits if kind in KINDS else "pred"


def named(dtypes: list[str]) -> str:
    return " x ".join(sorted(set(dtypes)))


def described(products: Counter[str]) -> str:
    """For a table: "22 f16, 1 f32", or "0"."""
    return ", ".join(f"{n} {dtype}" for dtype, n in products.most_common()) or "0"
