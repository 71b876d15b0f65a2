"""What the name stack says of an op: regions around it, module path, derivatives.

Each region leaves an entry there, so that an outer one knows what an inner one has
decided. A region that is observed adds why each op runs as it does, by a number that
stays valid: JAX keeps the programs that it is in.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .. import _compat
from .._tree import HALVES
from .decision import NO_REASON, Reason, Settings

# A region, with its depth if it is in another one.
REGION = re.compile(r"jamp\.autocast(?:\[(\d+)\])?\((\w+)\)")
REASON = "jamp.rule "
REASONS: dict[str, Reason] = {}  # by their entries: as many as differ in a process
NUMBERS = itertools.count()


def region_entry(dtype: str, depth: int) -> str:
    """A region in the name stack: its depth, and a dtype's name or "off"."""
    return f"jamp.autocast[{depth}]({dtype})" if depth else f"jamp.autocast({dtype})"


def regions_in(names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Depth and dtype of the regions in a name stack, the outermost first."""
    for match in filter(None, map(REGION.fullmatch, names)):
        yield int(match[1] or 0), match[2]


@functools.cache
def written(reason: Reason) -> str:
    """The entry of a reason in a name stack."""
    entry = f"{REASON}{next(NUMBERS)}"
    REASONS[entry] = reason
    return entry


def reason_in(names: Iterable[str]) -> Reason:
    """The innermost reason in a name stack."""
    return next(filter(None, map(REASONS.get, reversed([*names]))), NO_REASON)


def is_jamps(name: str) -> bool:
    """Whether a region wrote an entry of a name stack."""
    return REGION.fullmatch(name) is not None or name.startswith(REASON)


DIFFERENTIATION = ("jvp", "transpose", "linearize")


class Scope(NamedTuple):
    """Where an op is called."""

    foreign: bool  # an inner region decides about it
    differentiated: bool  # a derivative is being taken


class Place:
    """Where the code of one trace runs.

    Args:
      settings: of the trace's region.
      prefix: the module path at which a jaxpr's own paths begin.
    """

    def __init__(self, settings: Settings, prefix: str):
        self.depth, self.dtype = settings.depth, settings.dtype
        self.prefix = prefix
        by_path = any(isinstance(r.test, re.Pattern) for r in settings.rules)
        self.uses_paths = by_path or settings.probe is not None
        self.scopes = _compat.scopes()  # those around the code
        self.last_stack, self.last_scope = None, Scope(False, False)

    def path(self) -> str:
        """The module path, such as "GPT/block_3/attention"; "" if no rule asks."""
        if not self.uses_paths:
            return ""
        names = [name for transform, name in _compat.scopes() if not transform]
        names = [name for name in names if not is_jamps(name)]
        return "/".join([self.prefix, *names] if self.prefix else names)

    def scope(self) -> Scope:
        stack = _compat.current_name_stack()
        if stack is not self.last_stack:  # the same for op after op
            self.last_stack, self.last_scope = stack, self.read_scope()
        return self.last_scope

    def read_scope(self) -> Scope:
        entries, depth = _compat.scopes(), len(self.scopes)
        is_part = entries[:depth] != self.scopes  # of what JAX differentiates
        if not is_part:
            entries = entries[depth:]
        regions = regions_in(name for transform, name in entries if not transform)
        # At the same depth and with another dtype: the region has ended, and what it
        # has left, such as its backward pass, is called here.
        ended, dtype = self.dtype in HALVES, self.dtype.name
        foreign = any(
            at > self.depth or (ended and at == self.depth and d != dtype)
            for at, d in regions
        )
        differentiated = any(t and name in DIFFERENTIATION for t, name in entries)
        return Scope(foreign, is_part or differentiated)
