"""How many matrix products of a training step run in float8, traced and compiled."""

import re
from typing import NamedTuple

from . import hlo
from .jaxprs import equations

CUBLAS = re.compile(r'custom_call_target="__cublas\$(\S*)"')


class Products(NamedTuple):
    """Counts of a program's matrix products, without those in attention kernels."""

    float8: int
    all: int


def is_float8(dtype: object) -> bool:
    """In a jaxpr or in HLO: `float8_e4m3fn`, `f8e4m3fn`."""
    return str(dtype).startswith(("float8", "f8"))


def traced_products(jaxpr) -> Products:
    """The products that jamp asks for."""
    found = [
        [v.aval.dtype for v in eqn.invars]
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    return Products(sum(all(map(is_float8, d)) for d in found), len(found))


def casts(jaxpr) -> int:
    """How many arrays are cast to float8."""
    return sum(
        eqn.primitive.name == "convert_element_type"
        and is_float8(eqn.outvars[0].aval.dtype)
        for eqn in equations(jaxpr)
    )


def compiled_products(text: str) -> Products:
    """The products in optimized HLO for a GPU: cuBLAS calls, and products in kernels
    that XLA makes with Triton."""
    found = []
    for name, instructions in hlo.parse(text).items():
        if name == "ENTRY":
            continue  # also listed under its own name
        shapes = {i.name: i.shape for i in instructions}
        for i in instructions:
            if i.op == "dot":
                found.append(all(is_float8(shapes[n]) for n in i.operands))
            elif i.op == "custom-call" and (call := CUBLAS.search(i.text)):
                found.append(call.group(1) == "lt$matmul$f8")
    return Products(sum(found), len(found))
