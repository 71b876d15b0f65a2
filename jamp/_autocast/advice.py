"""Notes on errors that a region causes in JAX and other libraries: what to write."""

import contextlib
import re
import traceback

import jax
import numpy as np

from .._checks import JAMP
from .call_stack import raised_in

HALF_CARRY = """In an autocast region one of these is in half precision and the other \
in float32. JAX compares them before autocast sees the function. Start from float32 \
(`x.astype(jnp.float32)`), or return `y.astype(x.dtype)`, or put `jax.jit` around the \
model, inside the region."""

HALF = """In this autocast region, matrix products and convolutions return {dtype}. \
This function does not accept {dtype}, or does not mix it with float32. Cast its \
input: `x.astype(jnp.float32)`. Inside a function that `jax.jit`, `jax.checkpoint` or \
`scan` traces in float32, matrix products still run in {dtype}."""

MESH = """JAX treats an autocast region as a trace, like `jax.jit`. Set the mesh \
first: `with jax.set_mesh(mesh), jamp.autocast(...):`."""

FLOAT16 = r"(?<!b)f16", r"(?<!b)float16"
BEGIN_AND_END = re.compile(r"carry|branches|same structure")
# Libraries that compare dtypes themselves may not say which: lineax calls structures
# what has shapes and dtypes.
MISFIT = re.compile(r"\bd-?types?\b|operator structures", re.IGNORECASE)
FRAMES = 4  # of the library, from where the error was raised


def named(dtype: np.dtype) -> str:
    """A regular expression for the names of a dtype of half precision in messages."""
    short, long = ("bf16", "bfloat16") if dtype.name == "bfloat16" else FLOAT16
    return rf"{long}|{short}\b"


def advise(error: Exception, dtype: np.dtype) -> None:
    """Adds a note to an error that leaves a region of half precision.

    Looking for the cause runs methods of the user's values. If one raises an error,
    there is no note, and the user's own error is what comes out.
    """
    with contextlib.suppress(Exception):
        add_note(error, dtype)


def add_note(error: Exception, dtype: np.dtype) -> None:
    text = str(error)
    if text.startswith("autocast(") or raised_in(JAMP, error):
        return
    if not text and isinstance(error, AssertionError):
        text = traceback.extract_tb(error.__traceback__)[-1].line or ""
    note = None
    if "set_mesh" in text:
        note = MESH
    elif re.search(named(dtype), text) and known_to_name(error, dtype):
        note = HALF_CARRY if BEGIN_AND_END.search(text) else HALF
    elif "same structure" in text:
        note = HALF_CARRY
    elif MISFIT.search(text) and involves(error, dtype, FRAMES):
        note = HALF
    if note is not None:
        note = note.format(dtype=dtype.name)
        if note not in getattr(error, "__notes__", ()):  # an inner region's
            error.add_note(note)


def known_to_name(error: Exception, dtype: np.dtype) -> bool:
    """Whether an error that names a dtype is one of those that refuse it."""
    if isinstance(error, OSError):  # the name of a file
        return False
    is_usual = isinstance(error, TypeError | ValueError | NotImplementedError)
    return is_usual or involves(error, dtype)


def involves(error: Exception, dtype: np.dtype, innermost: int | None = None) -> bool:
    """Whether code that an error came through holds a value of a dtype.

    Args:
      innermost: how many of its calls are looked at; None: all.
    """
    # A frame that is still running would keep what its `f_locals` shows.
    running = {frame for frame, _ in traceback.walk_stack(None)}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame not in running]
    for frame in frames[-innermost:] if innermost else frames:
        held = leaves([*frame.f_locals.values()])
        if any(getattr(leaf, "dtype", None) == dtype for leaf in held):
            return True
    return False


def leaves(values: list[object]) -> list[object]:
    try:
        return jax.tree.leaves(values)
    except (TypeError, ValueError):  # keys that cannot be sorted
        return values
