"""Notes on errors that a region causes in JAX and other libraries: what to write."""

import re

import numpy as np

from .._checks import JAMP
from .call_stack import raised_in
from .decision import Settings

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


def named(dtype: np.dtype) -> str:
    """A regular expression for the names of a dtype of half precision in messages."""
    short, long = ("bf16", "bfloat16") if dtype.name == "bfloat16" else FLOAT16
    return rf"{long}|{short}\b"


def advise(error: Exception, settings: Settings) -> None:
    """Adds a note to an error that leaves a region of half precision, and names it.

    A policy has a note of its own.
    """
    text, dtype = str(error), settings.dtype
    if settings.is_policy or text.startswith("autocast(") or raised_in(JAMP, error):
        return
    is_refusal = isinstance(error, TypeError | ValueError | NotImplementedError)
    note = None
    if "set_mesh" in text:
        note = MESH
    elif is_refusal and re.search(named(dtype), text):
        note = HALF_CARRY if BEGIN_AND_END.search(text) else HALF
    elif "same structure" in text:
        note = HALF_CARRY
    if note is not None:
        note = note.format(dtype=dtype.name)
        if note not in getattr(error, "__notes__", ()):  # an inner region's
            error.add_note(note)
