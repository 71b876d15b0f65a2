"""Whether jamp raised an exception, or other code did."""

import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import flax

import jamp

HERE = pathlib.Path(__file__).parent  # with the loss functions that jamp is given
INSIDE = pathlib.Path(jamp.__file__).parent


def refused(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    """Raises AssertionError unless the call raises an error with these words."""
    try:
        call()
    except kind as error:
        assert words in str(error), f"{error} instead of {words}"
        assert raised_in_jamp(error), f"{error} is not jamp's own"
    else:
        raise AssertionError(f"nothing instead of {words}")


def raised_in_jamp(error: Exception) -> bool:
    """Whether the innermost frame of an error is jamp's."""
    frames = traceback.extract_tb(error.__traceback__)
    return INSIDE in pathlib.Path(frames[-1].filename).parents


def raised_by_others(error: Exception) -> bool:
    """Whether other code that jamp called failed on what the caller gave it.

    This is the inner optimizer, the loss function, or NNX when a scaler changes in a
    trace that it was not passed into.
    """
    if isinstance(error, flax.errors.TraceContextError):
        return True
    files = [
        pathlib.Path(f.filename) for f in traceback.extract_tb(error.__traceback__)
    ]
    last = max(i for i, file in enumerate(files) if INSIDE in file.parents)
    after = files[last + 1 :]
    return any(
        file.parent == HERE or "optax" in file.parts or file.name == "optimizer.py"
        for file in after
        if file.name != "update.py"  # of optax: `apply_updates`, which jamp calls
    )
