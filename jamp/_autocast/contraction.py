"""The dimensions of a matrix product: what it sums over, and what it keeps.

A `dot_general` of any shape is one product for each batch entry,

    (batch, rows, contracted) x (batch, contracted, columns) -> (batch, rows, columns)

when the dimensions of each kind are flattened into one. Both gradients are products of
this kind too.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np

from .._jaxprs import param
from .decision import Op


class Dims(NamedTuple):
    """The dimensions of one operand."""

    batch: tuple[int, ...]  # of both operands and of the result
    free: tuple[int, ...]  # of the result: rows of the left, columns of the right one
    contracted: tuple[int, ...]  # of both operands, in the same order

    @property
    def of_an_entry(self) -> tuple[int, ...] | None:
        """Those of one product of a batch; None, all of them, without a batch."""
        return tuple(sorted((*self.free, *self.contracted))) if self.batch else None


class Contraction(NamedTuple):
    """The dimensions of both operands. The result has those of the batch, then others.

    >>> experts = Contraction.of((((2,), (1,)), ((0,), (0,))), (3, 3))
    >>> experts.left
    Dims(batch=(0,), free=(1,), contracted=(2,))
    >>> experts.sizes((8, 32, 64), (8, 64, 16))
    (8, 32, 64, 16)
    """

    left: Dims
    right: Dims

    @classmethod
    def of(cls, numbers: Sequence, ndims: Iterable[int]) -> Self:
        """From the `dimension_numbers` of a `dot_general`, and the operands' ndims."""
        dims = []
        for contracted, batch, ndim in zip(*numbers, ndims, strict=True):
            free = [d for d in range(ndim) if d not in (*contracted, *batch)]
            dims.append(Dims(tuple(batch), tuple(free), tuple(contracted)))
        return cls(*dims)

    @classmethod
    def of_op(cls, op: Op) -> Self:
        return cls.of(param(op, "dimension_numbers"), map(np.ndim, op.args))

    @property
    def numbers(self):
        """What `dot_general` calls its `dimension_numbers`."""
        (batch, _, over), (other_batch, _, other_over) = self
        return (over, other_over), (batch, other_batch)

    def sizes(
        self, left: Sequence[int], right: Sequence[int]
    ) -> tuple[int, int, int, int]:
        """The sizes of batch, rows, contracted numbers and columns, of two shapes."""
        size = lambda shape, dims: math.prod(shape[d] for d in dims)
        batch, rows, contracted = (size(left, dims) for dims in self.left)
        return batch, rows, contracted, size(right, self.right.free)

    @property
    def batch_of_result(self) -> range:
        """The dimensions of the result that are those of the batch."""
        return range(len(self.left.batch))

    def result(self, left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
        rows = [left[d] for d in (*self.left.batch, *self.left.free)]
        return *rows, *(right[d] for d in self.right.free)

    def gradient(self, side: int) -> tuple["Contraction", np.ndarray]:
        """The product that is the gradient of one operand.

        The cotangent takes the place of that operand, beside the other one.

        Returns:
          Its dimensions, and the order into which those of its result are transposed.
        """
        this, other = self[side], self[1 - side]
        n_batch, n_left = len(this.batch), len(this.batch) + len(self.left.free)
        rows = tuple(range(n_batch, n_left))
        columns = tuple(range(n_left, n_left + len(self.right.free)))
        kept, summed = (rows, columns) if side == 0 else (columns, rows)
        cotangent = Dims(tuple(range(n_batch)), kept, summed)
        # The result has the contracted dimensions in the order of the other operand.
        given = Dims(other.batch, tuple(sorted(other.contracted)), other.free)
        matching = [this.contracted[other.contracted.index(d)] for d in given.free]
        if side == 0:
            pair, made = (cotangent, given), (*this.batch, *this.free, *matching)
        else:
            pair, made = (given, cotangent), (*this.batch, *matching, *this.free)
        return Contraction(*pair), np.argsort(made)
