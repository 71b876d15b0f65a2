"""Where an op of a jaxpr comes from: line, module, forward or backward."""

import inspect
import itertools
import os
import sysconfig
from typing import Any, NamedTuple

import jax

from .. import _compat
from .._autocast.sources import JAMP, JAX, is_library
from .._autocast.stack import is_jamps, marks_in, reason_in

# Ops whose result is their first input, moved about or cast.
MOVES = frozenset(
    """
    broadcast_in_dim convert_element_type copy expand_dims reshape sharding_constraint
    slice squeeze stop_gradient transpose
    """.split()
)
LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")}
    | {os.path.dirname(os.path.dirname(jax.__file__)) + os.sep}
    | {JAMP}
)


class Site(NamedTuple):
    """One op of a traced function."""

    primitive: str
    dtypes_in: tuple[str, ...]  # of its floating inputs
    dtypes_out: tuple[str, ...]
    line: str  # "model.py:45 in __call__", or ""
    path: str  # the modules around it, such as "GPT/block_3/attention"
    backward: bool  # whether it is part of a derivative's transposition
    region: str  # the dtype of the autocast region around it, "off", or ""
    rule: str  # what decided there, such as "float32 jax.nn.softmax", or ""

    def __str__(self) -> str:
        dtypes = ", ".join(self.dtypes_in)
        outs = ", ".join(self.dtypes_out)
        text = f"{self.primitive} ({dtypes} -> {outs})" if outs else self.primitive
        text += " in the backward pass" if self.backward else ""
        text += f" at {self.line}" if self.line else ""
        return text + (f", module {self.path}" if self.path else "")


class Around(NamedTuple):
    """What holds a jaxpr: the function itself, or an equation of another one."""

    stack: Any = None  # the name stack around it
    call: Any = None  # the source of the call that it is a part of
    line: str = ""  # where it is called, for ops that do not know better

    def inside(self, eqn: Any, jaxpr: Any) -> "Around":
        """The same for a jaxpr that an equation here holds.

        JAX traces its own jitted functions (`jnp.where`) once, and keeps with their ops
        the line that called them first: those come from the call.
        """
        name, call = eqn.primitive.name, self.call
        is_cached = is_library(_compat.source_name(jaxpr.debug_info))
        if call is None and name == "jit" and is_cached:
            call = eqn.source_info
        line = own_line(call or eqn.source_info) or self.line
        return Around(self.stack_of(eqn), call, line)

    def stack_of(self, eqn: Any) -> Any:
        stack = eqn.source_info.name_stack
        return stack if self.stack is None else self.stack + stack


def site_of(eqn: Any, around: Around) -> Site:
    """Describes an equation."""
    entries = _compat.stack_entries(around.stack_of(eqn))
    names = [name for is_transform, name in entries if not is_transform]
    regions = [dtype for _, dtype in marks_in(names)]
    own = [n.removesuffix(".inside") for n in names if is_module(n)]
    return Site(
        primitive=eqn.primitive.name,
        dtypes_in=floating(eqn.invars),
        dtypes_out=floating(eqn.outvars),
        line=line_of(around.call or eqn.source_info, around.line),
        path="/".join(own),
        backward=any(is_one and name == "transpose" for is_one, name in entries),
        region=regions[-1] if regions else "",
        rule=reason_in(names),
    )


def rule_of(eqn: Any) -> str:
    """The rule that decided about an equation, of those noted in its own jaxpr."""
    entries = _compat.stack_entries(eqn.source_info.name_stack)
    return reason_in([name for _, name in entries])


def floating(variables: Any) -> tuple[str, ...]:
    dtypes = [getattr(v.aval, "dtype", None) for v in variables]
    is_float = lambda d: d is not None and jax.numpy.issubdtype(d, jax.numpy.inexact)
    return tuple(dict.fromkeys(str(d) for d in dtypes if is_float(d)))


def is_module(name: str) -> bool:
    """Whether an entry of the name stack is a module's, or a user's scope.

    Others are of autocast, of `jax.checkpoint`, and the formulas of einsums.
    """
    is_jax = "->" in name or name in ("checkpoint", "rematted_computation")
    return not (is_jax or is_jamps(name))


def line_of(source_info: Any, called_at: str) -> str:
    """The line of an op: its own, that of the call around it, or a library's."""
    if line := own_line(source_info):
        return line
    if called_at:
        return called_at
    frames = [f for f in _compat.frames(source_info) if not f[0].startswith(JAMP)]
    return described(frames[0]) if frames else ""


def own_line(source_info: Any) -> str:
    """The innermost line that belongs to no installed library, or ""."""
    frames = _compat.frames(source_info)
    own = (frame for frame in frames if not frame[0].startswith(LIBRARIES))
    frame = next(own, None)
    if frame is None:
        return ""
    return described(frame) + (", its custom_vjp" if in_custom_vjp(source_info) else "")


def described(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    return f"{os.path.basename(file)}:{line} in {function.split('.')[-1]}"


def in_custom_vjp(source_info: Any) -> bool:
    """Whether an op is of the backward rule of a custom_vjp.

    JAX records with it no line of the rule, only the line that called the function.
    """
    codes = _compat.codes_of(source_info)
    own = itertools.takewhile(lambda code: code.co_filename.startswith(JAX), codes)
    return inspect.unwrap(jax.custom_vjp.__call__).__code__ in own
