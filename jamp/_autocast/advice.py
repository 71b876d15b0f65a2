"""Notes on errors that a region causes in JAX and other libraries: what to write."""

import re
import traceback

import numpy as np

from .sources import JAMP

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

BEGIN_AND_END = re.compile(r"carry|branches|same structure")


def advise(error: TypeError | ValueError, dtype: np.dtype) -> None:
    """Adds a note to an error that leaves a region of half precision."""
    text = str(error)
    if text.startswith("autocast(") or raised_by_jamp(error):
        return
    short = "bf16" if dtype.name == "bfloat16" else r"(?<!b)f16"
    long = "bfloat16" if dtype.name == "bfloat16" else r"(?<!b)float16"
    note = None
    if "set_mesh" in text:
        note = MESH
    elif re.search(rf"{long}|{short}\b", text):
        note = HALF_CARRY if BEGIN_AND_END.search(text) else HALF
    elif "same structure" in text:
        note = HALF_CARRY
    if note is not None:
        note = note.format(dtype=dtype.name)
        if note not in getattr(error, "__notes__", ()):  # an inner region's
            error.add_note(note)


def raised_by_jamp(error: BaseException) -> bool:
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_code.co_filename.startswith(JAMP)
