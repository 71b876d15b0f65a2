"""Looks at each product of a region while it runs, and collects the measurements.

A region with a probe calls it with each op (`Settings.probe`). A product is tapped: its
result passes through a function that measures it in the forward pass, and its cotangent
in the backward pass. The numbers go to the host, which keeps only the worst of a loop's
iterations and of equal products.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._autocast.contraction import Contraction
from .._autocast.decision import CASTABLE, Kind, Op
from .._autocast.float8 import RECIPES, unfit, weight_of
from .._autocast.trace import AutocastTrace
from .._autocast.traits import PRODUCTS
from .op_location import innermost_line, is_module
from .product_errors import Measured, Probed, backward_numbers, forward_numbers

IN_FLOAT32 = Kind.FLOAT32, Kind.FLOAT32_INSIDE, Kind.STATISTIC
MEASURED = ("dot_general", "conv_general_dilated")


class SeenProduct(NamedTuple):
    """A product of a program, before its numbers are known."""

    scope: str  # the module path as rules see it
    line: str
    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    batch: int  # how many products it is
    sizes: tuple[int, ...]  # of each: rows, contracted numbers, columns; () if ragged
    problem: str  # why it cannot run in float8
    weight: int  # which input is the weight: 0 or 1

    @property
    def path(self) -> str:
        """The modules around it, as `explain` names them."""
        return "/".join(filter(is_module, self.scope.split("/")))


class Probe:
    """A function that a region calls with each op. It is hashed by its identity."""

    def __init__(self, names: Sequence[str], scale: float = 1.0):
        self.names, self.scale = names, scale
        self.found: dict[SeenProduct, dict[str, np.ndarray]] = {}
        self.in_float32: set[str] = set()  # the paths that have ops in float32
        self._lock = threading.Lock()  # callbacks come from several threads

    def __call__(self, trace: AutocastTrace, op: Op, out: Any) -> Any:
        if (decision := op.decision) is None:
            return out
        if decision.row in IN_FLOAT32:
            self.in_float32.add(trace.place.path())
        if decision.row is not Kind.LOWER or op.name not in PRODUCTS:
            return out
        if any(_compat.array_dtype(x) not in CASTABLE for x in op.args[:2]):
            return out
        product = seen_at(trace.place.path(), op)
        self.found.setdefault(product, {})
        if op.is_baked or op.name not in MEASURED:
            return out
        return trace.call(self.tap(product, op), [*op.args, out], {})

    def tap(self, product: SeenProduct, op: Op) -> Callable[..., jax.Array]:
        """A function of both inputs and the result, which returns the result."""
        left_out = RECIPES if product.problem else ()
        names = [name for name in self.names if name not in left_out]
        probed = Probed.of(op, names, self.scale, product.weight)
        send = functools.partial(self.add, product)

        @jax.custom_vjp
        def tapped(left, right, out):
            jax.debug.callback(send, forward_numbers(probed, left, right))
            return out

        def fwd(left, right, out):
            return tapped(left, right, out), (left, right)

        def bwd(inputs, cotangent):
            left, right = inputs
            numbers = backward_numbers(probed, left, right, cotangent)
            jax.debug.callback(send, numbers)
            return jnp.zeros_like(left), jnp.zeros_like(right), cotangent

        tapped.defvjp(fwd, bwd)
        return tapped

    def add(self, product: SeenProduct, numbers: Measured) -> None:
        with self._lock:
            kept = self.found[product]
            for name, value in numbers.items():
                new = np.asarray(value, np.float64)
                kept[name] = np.maximum(kept.get(name, new), new)


def seen_at(scope: str, op: Op) -> SeenProduct:
    shapes, weight = tuple(np.shape(x) for x in op.args), weight_of(op)
    batch, sizes, problem = 1, (), unfit(op, activations=False)
    if op.name == "dot_general":
        batch, *sizes = Contraction.of_op(op).sizes(*shapes)
    sizes = tuple(sizes) if weight else tuple(sizes[::-1])
    line = innermost_line(_compat.current_frames())
    return SeenProduct(scope, line, op.name, shapes, batch, sizes, problem, weight)
