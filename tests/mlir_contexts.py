"""Lowers many programs in one MLIR context, as JAX 0.12 does.

Older versions make a context for each program. That takes longer than all else in the
lowering of a small one, and the tests lower thousands.
"""

import sys
import threading

from jax.interpreters import mlir
from jaxlib.mlir import ir

REUSED = 100  # programs per context, because what a context interns is never freed


def lowering():
    """The module of JAX that makes contexts, or None if they are reused without us."""
    if not hasattr(mlir, "make_ir_context"):
        return None
    module = sys.modules[mlir.make_ir_context.__module__]
    return None if hasattr(module, "_thread_local_context") else module


def reuse():
    if (module := lowering()) is None:
        return
    make = module.make_ir_context
    thread = threading.local()

    def make_ir_context():
        # A program that is compiled while another one is lowered has its own context:
        # in a shared one, the copy that JAX 0.10 hashes for its cache of compiled
        # programs would become a part of the other program.
        if ir.Context.current is not None:
            return make()
        made, programs = getattr(thread, "context", (None, REUSED))
        if programs == REUSED:
            made, programs = make(), 0
        thread.context = made, programs + 1
        return made

    module.make_ir_context = make_ir_context
