"""Where an op of a jaxpr is from, and its rule: line, module, forward or backward."""

import inspect
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .. import _compat
from .._autocast.call_stack import JAX, is_library
from .._autocast.decision import Reason, Source
from .._autocast.name_stack import is_jamps, reason_in, regions_in
from .._checks import JAMP, LIBRARIES, described


class Site(NamedTuple):
    """One op of a traced function, as it is printed."""

    primitive: str
    dtypes_in: tuple[str, ...]  # of its floating inputs
    dtypes_out: tuple[str, ...]
    line: str  # "model.py:45 in __call__", or ""
    path: str  # the modules around it, such as "GPT/block_3/attention"
    backward: bool  # whether it is part of a derivative's transposition
    region: str  # the dtype of the autocast region around it, "off", or ""
    rule: str  # what decided there, such as "float32 jax.nn.softmax", or ""

    @property
    def site(self) -> "Site":
        """Itself, as for a `Location`."""
        return self

    def __str__(self) -> str:
        dtypes = ", ".join(self.dtypes_in)
        outs = ", ".join(self.dtypes_out)
        text = f"{self.primitive} ({dtypes} -> {outs})" if outs else self.primitive
        text += " in the backward pass" if self.backward else ""
        text += f" at {self.line}" if self.line else ""
        return text + (f", module {self.path}" if self.path else "")


class Around(NamedTuple):
    """What holds a jaxpr: the function itself, or an equation of another one."""

    entries: tuple[tuple[bool, str], ...] = ()  # of the name stack around it
    call: JaxprEqn | None = None  # the call that it is a part of
    line: str = ""  # where it is called, for ops without a line of the user's

    def inside(self, eqn: JaxprEqn, jaxpr: Jaxpr) -> "Around":
        """The same for a jaxpr that an equation here holds.

        JAX traces its own jitted functions (`jnp.where`) once, and their ops keep the
        line of the first call: for them, the line comes from the call instead. The
        function that `jax.pmap` maps is a user's again.
        """
        name = eqn.primitive.name
        call = None if name == "shard_map" else self.call
        is_cached = is_library(_compat.source_name(jaxpr.debug_info))
        if call is None and name == "jit" and is_cached:
            call = eqn
        line = users_line(call or eqn) or self.line
        return Around(self.entries_of(eqn), call, line)

    def entries_of(self, eqn: JaxprEqn) -> tuple[tuple[bool, str], ...]:
        """The whole name stack: whether an entry is a transform, and its name."""
        return (*self.entries, *_compat.stack_entries(eqn.source_info.name_stack))


OUTERMOST = Around()


class Location(NamedTuple):
    """An equation and what is around it: where it is, before anybody asks."""

    eqn: JaxprEqn
    around: Around

    @property
    def site(self) -> Site:
        return site_of(self.eqn, self.around)

    def __reduce__(self):  # a pickle holds what is printed
        return Site, tuple(self.site)


def site_of(eqn: JaxprEqn, around: Around = OUTERMOST) -> Site:
    entries = around.entries_of(eqn)
    names = [name for is_transform, name in entries if not is_transform]
    regions = [dtype for _, dtype in regions_in(names)]
    modules = [n.removesuffix(".inside") for n in names if is_module(n)]
    return Site(
        primitive=eqn.primitive.name,
        dtypes_in=float_dtypes(eqn.invars),
        dtypes_out=float_dtypes(eqn.outvars),
        line=line_of(around.call or eqn, around.line),
        path="/".join(modules),
        backward=is_backward(entries),
        region=regions[-1] if regions else "",
        rule=str(reason_in(names)),
    )


def is_backward(entries: Iterable[tuple[bool, str]]) -> bool:
    """Whether an op with these entries of the name stack is of a backward pass."""
    return any(is_one and name == "transpose" for is_one, name in entries)


def reason_of(eqn: JaxprEqn, around: Around = OUTERMOST) -> Reason:
    """Why an op runs as it does, as its own jaxpr and what is around it note."""
    return reason_in(name for _, name in around.entries_of(eqn))


def name_of(eqn: JaxprEqn, around: Around) -> str:
    """A primitive, or the function that counts as one op and that an op is part of."""
    reason = reason_of(eqn, around)
    return reason.name if reason.source is Source.FUNCTION else eqn.primitive.name


def float_dtypes(atoms: Iterable[Var | Literal]) -> tuple[str, ...]:
    """The names of the atoms' floating and complex dtypes, each once."""
    dtypes = [getattr(atom.aval, "dtype", None) for atom in atoms]
    is_inexact = lambda d: d is not None and jax.numpy.issubdtype(d, jax.numpy.inexact)
    return tuple(dict.fromkeys(str(d) for d in dtypes if is_inexact(d)))


def is_module(name: str) -> bool:
    """Whether an entry of the name stack is a module's, or a user's scope.

    Other entries are from autocast or `jax.checkpoint`, or are formulas of einsums.
    """
    is_jax = "->" in name or name in ("checkpoint", "rematted_computation")
    return not (is_jax or is_jamps(name))


def line_of(eqn: JaxprEqn, called_at: str) -> str:
    """The line of an op: its own, that of the call around it, or a library's."""
    if line := users_line(eqn) or called_at:
        return line
    frames = [f for f in _compat.frames(eqn.source_info) if not f[0].startswith(JAMP)]
    return described(frames[0]) if frames else ""


def users_line(eqn: JaxprEqn) -> str:
    line = innermost_line(_compat.frames(eqn.source_info))
    return line + (", its custom_vjp" if line and in_custom_vjp(eqn) else "")


def innermost_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """The innermost line outside of all installed libraries, or ""."""
    outside = (frame for frame in frames if not frame[0].startswith(LIBRARIES))
    return next(map(described, outside), "")


def in_custom_vjp(eqn: JaxprEqn) -> bool:
    """Whether an op belongs to the backward rule of a custom_vjp.

    JAX does not record a line of the rule, only the line that called the function.
    """
    codes = _compat.codes_of(eqn.source_info.traceback)
    inner = itertools.takewhile(lambda code: code.co_filename.startswith(JAX), codes)
    return inspect.unwrap(jax.custom_vjp.__call__).__code__ in inner
