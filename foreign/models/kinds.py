"""The form in which each library's models are given."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Linen(NamedTuple):
    """A model of Flax Linen.

    Attributes:
      module: the model.
      variables: as `init` gives them, "params" and perhaps more.
      loss: (module, variables, key) to the loss, and the collections that changed.
    """

    module: Any
    variables: dict[str, Any]
    loss: Callable[[Any, dict[str, Any], Any], tuple[Any, dict[str, Any]]]


class Nnx(NamedTuple):
    """A model of Flax NNX: the model, and (model, key) to the loss."""

    module: Any
    loss: Callable[[Any, Any], Any]


class Equinox(NamedTuple):
    """A model of Equinox: the model, and (model, key) to the loss."""

    module: Any
    loss: Callable[[Any, Any], Any]
