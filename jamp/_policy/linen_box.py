"""Boxes around Linen's parameters that cast them when they are read.

Flax uses such boxes for sharding annotations: a module that reads its parameter opens
the box, and opening it casts the parameter.
"""

import dataclasses

import jax
from flax.core import meta

from .._tree import PyTree, cast_floating
from .float32_region import COMPUTE_DTYPE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CastOnUse(meta.AxisMetadata):
    """A parameter, perhaps with a sharding annotation, that is cast when it is read."""

    value: jax.Array | meta.AxisMetadata

    def unbox(self):
        dtype = COMPUTE_DTYPE.value
        value = meta.unbox(self.value)
        return value if dtype is None else cast_floating(value, dtype)

    def replace_boxed(self, val):
        return CastOnUse(meta.replace_boxed(self.value, val))

    def add_axis(self, index, params):
        return CastOnUse(meta.add_axis(self.value, index, params))

    def remove_axis(self, index, params):
        return CastOnUse(meta.remove_axis(self.value, index, params))

    # For code that reads self.variables["params"] instead of self.param(...).

    def __jax_array__(self):
        return self.unbox()

    def __getattr__(self, name):
        if name.startswith("__") or name == "value":
            raise AttributeError(name)
        return getattr(self.unbox(), name)

    def __getitem__(self, index):
        return self.unbox()[index]


def is_box(x: object) -> bool:
    return isinstance(x, CastOnUse)


def boxed(variables: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: x if is_box(x) else CastOnUse(x),
        variables,
        is_leaf=lambda x: isinstance(x, meta.AxisMetadata),  # a sharding annotation
    )


def without_boxes(variables: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: x.value if is_box(x) else x, variables, is_leaf=is_box
    )
