"""Whether a training step uses its loss scale rightly.

Two facts tell. **What a right step computes does not depend on a power of two**: it is
multiplied in and divided out, without rounding. And **a scale that overflows skips**:
a step that does not skip must still compute the same.

Half precision rounds otherwise below its normal range, so a right step may depend on
the scale a little. A mistake differs in kind: what depends on the scale is a power of
it, the same for all elements and at each scale, while rounding acts on single elements,
and less at a higher scale. So the change of a leaf must have another size at half the
scale, twice: near the largest scale, and eight times below that. At the largest scale,
rounding that changes the size of a leaf by `FACTOR` leaves at most a few units of the
smallest number in it, and eight times below that, nothing.
"""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from .._jaxprs import follow, held, is_loop, loop, variables
from .._tree import PyTree, dtype_of, is_inexact, path_text, widened
from .arrivals import GIVEN, SCALED, UNSCALED, UNSCALED_, mark_of
from .state import DynamicLossScaleState
from .trials import LOWEST, Exponents, Outcome, Run, Trials

FACTOR = 2.0**0.25  # between the sizes of a change at one scale and at half of it
ALONG = 2.0**-3  # the largest part of a change that is not a multiple of the other
SAME = 2.0**-6  # the largest difference of two runs with the same arguments
OVERFLOWS = 126  # the exponent of a scale at which no half precision is finite
ULP = 2.0**-20  # of the largest element: what is smaller may be rounding

DEPENDS = """{caller}: what the step computes depends on the loss scale. At half the \
scale, {leaf} moves {factor:.4g} times as far. A right step computes the same at each \
power of two. {cause}"""

DIVIDED = """It divides by the scale once too often, or what it divides was cut to a \
size of its own before: {found}. Clip, normalize and penalize in the chain inside: \
jamp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer)). What \
jamp.unscale returns is for logs. With a GradScaler, clip what scaler.unscale_ \
returns."""

MULTIPLIED = """It multiplies by the scale once too often: {found}. \
jamp.value_and_grad scales the loss itself. Take one of jamp.value_and_grad, \
jamp.scale_loss and scaler.scale, once."""

OF_A_SIZE = """Something of a size of its own (a clip, a penalty, noise, an epsilon) \
meets scaled gradients{found}. Put it into the chain inside of the loss scale."""

HIDDEN = """{caller}: a loss scale of 2**126 does not skip the step{at}, and the step \
computes something else there: {leaf} {what}. Something hides an inf or nan from the \
loss scale, such as jnp.nan_to_num, jnp.where(jnp.isfinite(...), ...) or \
optax.zero_nans. Delete it: the loss scale skips these steps."""

BROKEN = """{caller}: a skipped step writes inf or nan into {leaf}. A loss scale holds \
what its own optimizer changes. Hold the rest: skipped = \
jamp.metrics(opt_state)["found_inf"], and jnp.where(skipped, old, new)."""

DROPPED = """{caller}: nothing uses what scaler.unscale_ returned{line}, and so \
scaler.step applies scaled gradients, or what was made of them. In torch it writes \
into the gradients. Here, write grads = scaler.unscale_(optimizer, grads)."""

NOT_REPEATED = """{caller}: the step cannot be proved: run twice with the same \
arguments, it moves {leaf} otherwise. Keep what it draws or reads (a random key, a \
batch, an environment) in its arguments."""


class Moved(NamedTuple):
    """How far one leaf of a state moved in two runs, a and b. Sizes are norms."""

    path: str
    size: int  # in elements
    a: float
    b: float
    apart: float  # of a - b
    along: float  # how much of a is a multiple of b: the cosine of their angle
    largest: float  # of the elements of the change in a, beside that of the leaf
    broken: bool  # whether b has an inf or nan where there was none

    @property
    def factor(self) -> float:
        """How much farther it moved in b; 1 if it did not move in one of them."""
        return self.b / self.a if self.a and self.b else 1.0

    @property
    def difference(self) -> float:
        return self.apart / max(self.a, self.b) if self.apart else 0.0

    def is_scaled(self) -> bool:
        return not 1 / FACTOR < self.factor < FACTOR

    def is_multiple(self) -> bool:
        """Whether the one change is a multiple of the other, but for rounding."""
        return self.size > 1 and self.along > 1 - ALONG**2 / 2


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the runs of a step at several loss scales showed.

    Attributes:
      problems: what is wrong, in words; empty if nothing is.
      still: paths of the floating leaves of the state that do not move in a step.
      moved_by_skip: paths of the leaves that a skipped step moves, without the loss
        scale; None if no scale skips.
      scaled_results: paths of what else the step returns that depends on the scale.
    """

    problems: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    moved_by_skip: tuple[str, ...] | None = None
    scaled_results: tuple[str, ...] = ()


def proof_of(trials: Trials, found: Exponents, asked: Sequence[jax.Array]) -> Proof:
    """Runs the step at other scales, and judges.

    Args:
      found: the largest exponents at which the step is finite.
      asked: whether the step checks for an overflow, for each scale.
    """
    caller, old = trials.call.caller, trials.call.state
    # A scale that the step does not ask may be one that it uses wrongly.
    found = [jnp.where(flag, e, 0) for flag, e in zip(asked, found, strict=True)]
    dropped = tuple(DROPPED.format(caller=caller, line=x) for x in unused(trials))

    def below(times: int) -> Run:
        lower = lambda e: jnp.clip(e - times, LOWEST, OVERFLOWS)
        return trials([*map(lower, found)])

    def pair(times: int) -> tuple[Run, list[Moved]] | None:
        first, second = below(times), below(times + 1)
        if skips(first.outcome) or skips(second.outcome):
            return None  # of several steps, or not in the order of the scales
        return first, [*moves(old, first.state, second.state)]

    def depends(leaf: Moved, factor: float) -> str:
        cause = cause_of(trials, leaf.factor, asked)
        given = {"caller": caller, "leaf": leaf.path, "cause": cause}
        return DEPENDS.format(factor=factor, **given)

    if (near := pair(1)) is None:
        return Proof(dropped)
    first, high = near
    still = tuple(leaf.path for leaf in high if not leaf.a and not leaf.b)
    results = (zeros_of(first.aux), first.aux, below(2).aux)
    scaled_results = tuple(m.path for m in moves(*results) if m.is_scaled())
    proof = Proof(dropped, still, None, scaled_results)
    again = below(1)
    changes = moves(old, first.state, again.state)
    other = max(changes, key=operator.attrgetter("difference"), default=None)
    if other is not None and other.difference > SAME:
        text = NOT_REPEATED.format(caller=caller, leaf=other.path)
        return dataclasses.replace(proof, problems=(*dropped, text))
    if any(leaf.is_scaled() for leaf in high):
        far = pair(4)
        low = far[1] if far else high
        wrong = [
            leaf
            for leaf, lower in zip(high, low, strict=True)
            if leaf.is_scaled()
            and (leaf.is_multiple() or same_way(leaf.factor, lower.factor))
        ]
        if wrong:
            worst = max(wrong, key=lambda leaf: abs(math.log(leaf.factor)))
            text = depends(worst, worst.factor)
            return dataclasses.replace(proof, problems=(*dropped, text))
    skipped, problems = overflown(trials, first, found, asked)
    if still and not problems and (leaf := woken(trials, first.state, found)):
        if skipped is None:
            given = {"at": "", "leaf": leaf.path, "what": "moves otherwise"}
            problems = [HIDDEN.format(caller=caller, **given)]
        else:
            problems = [depends(leaf._replace(a=1.0, b=2.0), math.inf)]
    return dataclasses.replace(
        proof, problems=(*dropped, *problems), moved_by_skip=skipped
    )


def same_way(one: float, other: float) -> bool:
    """Whether two factors are both well above 1, or both well below."""
    return min(one, other) > FACTOR or max(one, other) < 1 / FACTOR


def woken(trials: Trials, old: PyTree, found: Exponents) -> Moved | None:
    """A leaf that stands still at the highest scale, and moves at a scale of 1."""
    low = trials([jnp.minimum(exponent - 1, 0) for exponent in found])
    if skips(low.outcome):
        return None
    start = trials.call.state
    for leaf in moves(start, low.state, old):
        if leaf.a and not leaf.b and leaf.largest > ULP:
            return leaf
    return None


def overflown(
    trials: Trials, first: Run, found: Exponents, asked: Sequence[jax.Array]
) -> tuple[tuple[str, ...] | None, list[str]]:
    """What a skipped step moves, and what is wrong with it.

    One scale after the other overflows, and the others are as in the first run: then a
    step that does not skip must compute what it computed there.
    """
    caller, start = trials.call.caller, trials.call.state
    problems: list[str] = []
    moved: list[str] = []
    skipped = False
    for place, path in enumerate(trials.paths):
        if not np.any(asked[place]):
            continue
        tried = [jnp.maximum(exponent - 1, LOWEST) for exponent in found]
        tried[place] = jnp.full_like(found[place], OVERFLOWS)
        run = trials(tried)
        changes = [*moves(first.state, start, run.state)]
        broken = [leaf.path for leaf in changes if leaf.broken]
        if np.any(run.outcome.skipped[place]):
            skipped = True
            if broken:
                problems.append(BROKEN.format(caller=caller, leaf=broken[0]))
            if len(trials.paths) == 1:
                moved += changed(start, run.state)
            continue
        again = [*moves(start, first.state, run.state)]
        worst = max(again, key=operator.attrgetter("difference"), default=None)
        leaf = broken[0] if broken else worst.path if worst else ""
        if broken or (worst is not None and worst.difference > ALONG):
            what = "becomes inf or nan" if broken else "moves otherwise"
            at = f" at {path}" if len(trials.paths) > 1 else ""
            given = {"caller": caller, "at": at, "leaf": leaf, "what": what}
            problems.append(HIDDEN.format(**given))
    return (tuple(moved) if skipped else None), problems


def skips(outcome: Outcome) -> bool:
    return any(np.any(np.asarray(count)) for count in outcome.skipped)


# What moved.


def leaves_of(tree: PyTree) -> Iterator[tuple[str, ArrayLike]]:
    """The leaves of a state, with their paths, without those of loss scales."""
    is_scale = lambda node: isinstance(node, DynamicLossScaleState)
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scale)
    for path, node in nodes:
        if is_scale(node):
            for inner, leaf in leaves_of(node.inner_state):
                at = path_text(path) if path else ""
                yield f"{at}.inner_state{'' if inner == 'the root' else inner}", leaf
        else:
            yield path_text(path), node


def moves(old: PyTree, a: PyTree, b: PyTree) -> Iterator[Moved]:
    """How far the floating leaves of a state moved in two runs."""
    rows = zip(leaves_of(old), leaves_of(a), leaves_of(b), strict=True)
    floating = [
        (path, jnp.size(start), measured(start, first, second))
        for (path, start), (_, first), (_, second) in rows
        if is_inexact(start) and jnp.size(start)
    ]
    for path, size, numbers in jax.device_get(floating):
        one, two, apart, inner, largest, broken = map(float, numbers)
        along = inner / (one * two) if one and two else 0.0
        yield Moved(path, size, one, two, apart, along, largest, bool(broken))


@jax.jit
def measured(old: jax.Array, a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """The numbers of a `Moved`, in units of the largest element of both changes."""

    def change(new: jax.Array) -> jax.Array:
        is_known = jnp.isfinite(new) & jnp.isfinite(old)
        wide = widened(dtype_of(old))
        return jnp.where(is_known, new.astype(wide) - old.astype(wide), 0)

    one, two = change(a), change(b)
    top = jnp.maximum(jnp.max(jnp.abs(one)), jnp.max(jnp.abs(two)))
    unit = jnp.where(top > 0, top, 1)
    one, two = one / unit, two / unit
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.abs(x) ** 2))
    inner = jnp.sum(jnp.real(jnp.conj(one) * two))
    finite = jnp.where(jnp.isfinite(old), jnp.abs(old), 0)
    largest = jnp.max(jnp.abs(one)) * unit / (jnp.max(finite) + unit)
    broken = jnp.any(~jnp.isfinite(b) & jnp.isfinite(old))
    return [norm(one), norm(two), norm(one - two), inner, largest, broken]


def changed(old: PyTree, new: PyTree) -> list[str]:
    """The paths of the leaves that differ."""
    rows = zip(leaves_of(old), leaves_of(new), strict=True)
    return [path for (path, a), (_, b) in rows if not bool(same(a, b))]


@jax.jit
def same(a: jax.Array, b: jax.Array) -> jax.Array:
    is_nan = (a != a) & (b != b) if is_inexact(a) else False
    return jnp.all((a == b) | is_nan)


def zeros_of(tree: PyTree) -> PyTree:
    """Arrays of zeros, so that a result counts as a change."""
    return jax.tree.map(jnp.zeros_like, tree)


# Why: what is scaled and unscaled in the program, and reaches a loss scale.

Marks = frozenset[tuple[str, str]]  # each a kind of mark, and the line that made it
NONE: Marks = frozenset()


def cause_of(trials: Trials, factor: float, asked: Sequence[jax.Array]) -> str:
    """What makes a change `factor` times as large at half the scale."""
    power = math.log2(factor)
    met = meetings(trials.once.closed)
    if power > 0.9:
        lines = [line for at, (kind, line) in met if (at, kind) == (GIVEN, UNSCALED)]
        found = "clipped or normalized before it was unscaled"
        if lines:
            found = f"jamp.unscale divides{lines[0]}, and the loss scale divides again"
        return DIVIDED.format(found=found)
    if power < -0.9:
        lines = [line for at, (kind, line) in met if at == kind == SCALED]
        found = f"the loss is scaled{lines[0]}, and again" if lines else "scaled twice"
        if not any(np.any(flag) for flag in asked):
            found = "no optimizer with a loss scale gets the gradients"
        return MULTIPLIED.format(found=found)
    return OF_A_SIZE.format(found="")


def meetings(program: ClosedJaxpr) -> list[tuple[str, tuple[str, str]]]:
    """Which marked values reach which marks: the kind of the latter, and the former."""
    met: list[tuple[str, tuple[str, str]]] = []

    def results(eqn: JaxprEqn, given: list[Marks]) -> list[Marks]:
        if is_loop(eqn):
            return looped(eqn, given)
        marks = joined(given)
        if (mark := mark_of(eqn)) is not None:
            met.extend((mark[0], of) for of in sorted(marks))
            marks = frozenset({mark})
        # A flag, such as whether all are finite, is not scaled.
        avals: list[Any] = [variable.aval for variable in eqn.outvars]
        return [marks if is_inexact(aval) else NONE for aval in avals]

    def looped(eqn: JaxprEqn, given: list[Marks]) -> list[Marks]:
        inside = loop(eqn)
        _, consts, carry, slices = inside.split(given)
        while True:
            found = outputs(inside.body, [*consts, *carry, *slices])
            new = [*map(operator.or_, carry, found)]
            if new == carry:
                return found
            carry = new

    def outputs(jaxpr: ClosedJaxpr, inputs: Sequence[Marks]) -> list[Marks]:
        return follow(jaxpr, inputs, results, joined, NONE)

    outputs(program, [NONE] * len(program.in_avals))
    return met


def joined(marks: Sequence[Marks]) -> Marks:
    return frozenset().union(*marks)


def unused(trials: Trials) -> list[str]:
    """The lines of each `unscale_` of which nothing uses a result."""
    lines: dict[str, bool] = {}

    def look(jaxpr: Jaxpr) -> None:
        used: set[Var] = set(variables(jaxpr.outvars))
        used.update(*(variables(eqn.invars) for eqn in jaxpr.eqns))
        for eqn in jaxpr.eqns:
            for _, inner in held(eqn):
                look(inner.jaxpr)
            mark = mark_of(eqn)
            if mark is not None and mark[0] == UNSCALED_:
                is_used = not used.isdisjoint(eqn.outvars)
                lines[mark[1]] = lines.get(mark[1], False) or is_used

    look(trials.once.closed.jaxpr)
    return [line for line, is_used in lines.items() if not is_used]
