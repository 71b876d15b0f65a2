"""Lowers many programs in one MLIR context, as JAX 0.12 does.

Older versions make a context for each program. That takes longer than all else in the
lowering of a small one, and the tests lower thousands.
"""

import sys
import threading

from jax.interpreters import mlir

REUSED = 100  # programs per context, because what a context interns is never freed


def reuse():
    if not hasattr(mlir, "make_ir_context"):
        return
    lowering = sys.modules[mlir.make_ir_context.__module__]
    if hasattr(lowering, "_thread_local_context"):
        return
    make = lowering.make_ir_context
    thread = threading.local()

    def make_ir_context():
        made, programs = getattr(thread, "context", (None, REUSED))
        if programs == REUSED:
            made, programs = make(), 0
        thread.context = made, programs + 1
        return made

    lowering.make_ir_context = make_ir_context
