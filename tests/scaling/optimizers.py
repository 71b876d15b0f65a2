"""The table of optimizers: all of optax's top-level exports, and some from contrib."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax
from optax import contrib

_ALIASES = "optax._src.alias"  # the module that holds optax's ready-made optimizers

_DEPRECATED = {"optimistic_adam"}  # warns, and calls optimistic_adam_v2

# Arguments of optimizers that need more than a learning rate.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "adadelta": {"learning_rate": 0.1},
    "adafactor": {"learning_rate": 0.1, "min_dim_size_to_factor": 4},
    "lbfgs": {"learning_rate": 0.1, "linesearch": None},
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "polyak_sgd": {"max_learning_rate": 0.1},
}

_CONTRIB: dict[str, dict[str, Any]] = {
    "acprop": {"learning_rate": 0.1},
    "ademamix": {"learning_rate": 0.1},
    "adopt": {"learning_rate": 0.1},
    "dog": {},
    "dowg": {},
    "madgrad": {"learning_rate": 0.1},
    "muon": {"learning_rate": 0.1},
    "prodigy": {},
    "schedule_free_adamw": {"learning_rate": 0.1},
    "schedule_free_sgd": {"learning_rate": 0.1},
    "simplified_ademamix": {"learning_rate": 0.1},
}

# Optimizers whose update needs the loss.
NEEDS_VALUE = {"polyak_sgd"}


def exported_names() -> list[str]:
    """optax's top-level exports, read from optax itself, without deprecated ones."""
    names = []
    for name in sorted(set(dir(optax)) - _DEPRECATED):
        value = getattr(optax, name)
        function = value.func if isinstance(value, functools.partial) else value
        if inspect.isfunction(function) and function.__module__ == _ALIASES:
            names.append(name)
    return names


def _factories() -> dict[str, Callable[[], Any]]:
    table = {}
    for name in exported_names():
        arguments = _ARGUMENTS.get(name, {"learning_rate": 0.1})
        table[name] = functools.partial(getattr(optax, name), **arguments)
    for name, arguments in _CONTRIB.items():
        table[f"contrib.{name}"] = functools.partial(
            getattr(contrib, name), **arguments
        )
    return table


OPTIMIZERS = _factories()
