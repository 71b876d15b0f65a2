"""Whether a training step uses its loss scale rightly.

Two facts tell. **What a right step computes does not depend on a power of two**: it is
multiplied in and divided out, without rounding. And **a scale that overflows skips**:
a step that does not skip must still compute the same.

Half precision rounds otherwise below its normal range, so a right step may depend on
the scale: a leaf whose gradient is nothing but rounding, such as the bias of an
attention's keys, may be twice as large at half the scale. A mistake differs in kind:
it changes the size of a leaf and not its direction, and rounding changes both. Of a
gradient and something of a size of its own, the sum at one scale and that at half of it
have a cosine of at least 2 sqrt(2) / 3 = 0.943, wherever they point. So two pairs of
runs convict a leaf, one near the largest scale and one eight times below, where
rounding is coarser: the changes of each pair must be parallel, and the first have
different sizes, either both pairs in the same way, or by a power of two, which a clip
makes that does not act below.

What a step writes over, such as a log in the state, does not count.
"""

import functools
import math
import operator
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from .._jaxprs import equations, follow_loops, held, variables
from .._tree import is_inexact
from .calls import Call
from .labels import GIVEN, SCALED, UNSCALED, UNSCALED_, label_of
from .moved import Moved, leaves_of, moves, same
from .trials import LOWEST, Exponents, Outcome, Run, Trials

APART = 2.0**-3  # the largest difference of a step that does not skip
SAME = 2.0**-6  # the largest difference of two runs with the same arguments
OVERFLOWS = 126  # the exponent of a scale at which no half precision is finite

DEPENDS = """{caller}: {cause} What the step computes depends on the loss scale: at \
half the scale, {leaf} moves {factor:.4g} times as far. A right step computes the same \
at each power of two."""

DIVIDED = """the gradients are divided by the scale once too often, or were cut to a \
size of their own before: {found}. {cure}"""

IN_CHAIN = """Clip, normalize and penalize in the chain inside: \
jamp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer)). What \
jamp.unscale returns is for logs."""

BY_SCALER = """Clip what scaler.unscale_ returns, or in the optimizer's chain."""

MULTIPLIED = """the gradients are multiplied by the scale once too often: {found}. \
jamp.value_and_grad scales the loss itself. Take one of jamp.value_and_grad, \
jamp.scale_loss and scaler.scale, once."""

NO_OPTIMIZER = """this call gives them to no optimizer with a loss scale (if it only \
accumulates them, give a call that steps)"""

OF_A_SIZE = """something of a size of its own (a clip, a penalty, noise, an epsilon) \
meets scaled gradients. {cure}"""

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

GUARDED = """{caller}: whether the step moves {leaf} depends on the size of scaled \
gradients: it does at loss scales of 1 and 2, and not at the largest. A threshold on \
their norm meets them. Put it into the chain inside of the loss scale, or compare \
jamp.unscale(grads, opt_state)."""

SKIPS_BELOW = """{caller}: the step cannot be proved: it is finite at the largest loss \
scale, and skips at half of that or at a quarter. Something divides by gradients that \
half precision flushes to zero: add an epsilon."""

NOT_REPEATED = """{caller}: the step cannot be proved: run twice with the same \
arguments, it moves {leaf} otherwise. Keep what it draws or reads (a random key, a \
batch, an environment) in its arguments."""


class Proof(NamedTuple):
    """What the runs of a step at several loss scales showed: see `StepReport`."""

    problems: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    moved_by_skip: tuple[str, ...] | None = None
    scaled_results: tuple[str, ...] = ()


def proof_of(trials: Trials, highest: Exponents, asked: Sequence[jax.Array]) -> Proof:
    """Runs the step at other scales, and judges.

    Args:
      highest: the largest exponents at which the step is finite.
      asked: whether the step checks for an overflow, for each scale.
    """
    caller, old = trials.call.caller, trials.call.state
    # A scale that the step does not ask may be one that it uses wrongly.
    highest = [jnp.where(flag, e, 0) for flag, e in zip(asked, highest, strict=True)]
    dropped = tuple(DROPPED.format(caller=caller, line=x) for x in unused(trials))

    def below(times: int) -> Run:
        lower = lambda e: jnp.clip(e - times, LOWEST, OVERFLOWS)
        return trials([*map(lower, highest)])

    def pair(times: int) -> tuple[Run, Run, list[Moved]] | None:
        first, second = below(times), below(times + 1)
        if skips(first.outcome) or skips(second.outcome):
            return None
        return first, second, [*moves(old, first.state, second.state)]

    def depends(leaf: Moved) -> str:
        factor, cause = leaf.factor, cause_of(trials, leaf.factor, asked)
        return DEPENDS.format(caller=caller, cause=cause, leaf=leaf.path, factor=factor)

    if (near := pair(1)) is None:
        return Proof((*dropped, SKIPS_BELOW.format(caller=caller)))
    first, second, high = near
    rows = zip(asked, first.outcome.asked, strict=True)
    if any(np.any(np.asarray(now) & ~np.asarray(flag)) for flag, now in rows):
        return Proof((*dropped, GUARDED.format(caller=caller, leaf="its state")))
    still = tuple(leaf.path for leaf in high if not leaf.a and not leaf.b)
    kept = kept_leaves(trials)
    only = lambda aux: aux[0] if isinstance(aux, list) and len(aux) == 1 else aux
    one, two = only(first.aux), only(second.aux)
    del second, near
    results = [*moves(jax.tree.map(jnp.zeros_like, one), one, two)]
    results += [leaf for leaf in high if leaf.path not in kept]
    scaled_results = tuple(leaf.path for leaf in results if leaf.is_scaled())

    def proof(*problems: str, skipped: tuple[str, ...] | None = None) -> Proof:
        return Proof((*dropped, *problems), still, skipped, scaled_results)

    if any("callback" in eqn.primitive.name for eqn in equations(trials.once.closed)):
        changes = moves(old, first.state, below(1).state)
        other = max(changes, key=operator.attrgetter("difference"), default=None)
        if other is not None and other.difference > SAME:
            return proof(NOT_REPEATED.format(caller=caller, leaf=other.path))
    evidence = [leaf for leaf in high if leaf.path in kept and leaf.cosine]
    if any(leaf.is_scaled() for leaf in evidence) and (far := pair(4)):
        low = {leaf.path: leaf for leaf in far[2]}
        some = any(leaf.size > 1 for leaf in evidence)  # of one number, all is parallel
        wrong = [
            leaf
            for leaf in evidence
            if (leaf.size > 1 or not some) and convicts(leaf, low[leaf.path])
        ]
        if wrong:
            return proof(depends(max(wrong, key=lambda m: abs(math.log(m.factor)))))
    skipped, problems = overflown(trials, first, highest, asked, kept)
    if not problems and (leaf := woken(trials, highest, still)) and leaf.path in kept:
        if leaf.is_scaled():
            problems = [depends(leaf)]
        elif skipped is not None:
            problems = [GUARDED.format(caller=caller, leaf=leaf.path)]
        else:
            of = {"caller": caller, "at": "", "leaf": leaf.path}
            problems = [HIDDEN.format(what="moves otherwise", **of)]
    return proof(*problems, skipped=skipped)


def convicts(high: Moved, low: Moved) -> bool:
    if not (high.is_scaled() and high.is_parallel() and low.is_parallel()):
        return False
    same_way = (high.factor > 1) is (low.factor > 1)
    return high.is_power() or (same_way and low.is_scaled())


def woken(trials: Trials, highest: Exponents, still: Sequence[str]) -> Moved | None:
    """A leaf that stands still at the highest scale, and moves at scales of 2 and 1."""
    if not still:
        return None
    runs = [trials([jnp.minimum(e - 1, n) for e in highest]) for n in (1, 0)]
    if any(skips(run.outcome) for run in runs):
        return None
    changes = moves(trials.call.state, *(run.state for run in runs))
    awake = (leaf for leaf in changes if leaf.path in still and leaf.is_parallel())
    return next((leaf for leaf in awake if leaf.size > 1), None)


def overflown(
    trials: Trials,
    first: Run,
    highest: Exponents,
    asked: Sequence[jax.Array],
    kept: Set[str],
) -> tuple[tuple[str, ...] | None, list[str]]:
    """What a skipped step moves, and what is wrong with it.

    One scale after the other overflows, and the others are as in the first run: then a
    step that does not skip must compute what it computed there.
    """
    caller, start = trials.call.caller, trials.call.state
    problems: list[str] = []
    moved: tuple[str, ...] | None = None
    several, run = len(trials.paths) > 1, None
    for place, path in enumerate(trials.paths):
        if not np.any(asked[place]):
            continue
        tried = [jnp.maximum(exponent - 1, LOWEST) for exponent in highest]
        tried[place] = jnp.full_like(highest[place], OVERFLOWS)
        run = trials(tried)
        changes = [*moves(first.state, start, run.state)]
        broken = [leaf.path for leaf in changes if leaf.broken and leaf.path in kept]
        if np.any(run.outcome.skipped[place]):
            if broken:
                problems.append(BROKEN.format(caller=caller, leaf=broken[0]))
            continue
        again = [m for m in moves(start, first.state, run.state) if m.path in kept]
        worst = max(again, key=operator.attrgetter("difference"), default=None)
        leaf = broken[0] if broken else worst.path if worst else ""
        if broken or (worst is not None and worst.difference > APART):
            what = "becomes inf or nan" if broken else "moves otherwise"
            at = f" at {path}" if several else ""
            problems.append(HIDDEN.format(caller=caller, at=at, leaf=leaf, what=what))
    if several:
        rows = zip(asked, highest, strict=True)
        run = trials([jnp.where(flag, OVERFLOWS, e) for flag, e in rows])
    if run is not None and all(map(np.all, run.outcome.skipped)):
        rows = zip(leaves_of(start), leaves_of(run.state), strict=True)
        moved = tuple(path for (path, a), (_, b) in rows if not bool(same(a, b)))
    return moved, problems


def skips(outcome: Outcome) -> bool:
    return any(np.any(np.asarray(count)) for count in outcome.skipped)


Labels = frozenset[tuple[str, str]]  # each a kind of label, and the line that made it
NONE: Labels = frozenset()


def kept_leaves(trials: Trials) -> Set[str]:
    """The leaves of the state whose new value depends on the old one.

    Parameters, moments and averages do, and what is written over does not.
    """
    program, state = trials.once.closed, trials.call.state
    first = len(jax.tree.leaves(trials.scales))  # the place of the state's first leaf
    leaves, structure = jax.tree.flatten(state)
    inputs = [1 << place for place in range(len(program.in_avals))]
    both = lambda sets: functools.reduce(operator.or_, sets, 0)
    results = lambda eqn, given: [both(given)] * len(eqn.outvars)
    found = follow_loops(program, inputs, results, both, 0)
    kept = [bool(found[place] >> (first + place) & 1) for place in range(len(leaves))]
    return {path for path, flag in leaves_of(structure.unflatten(kept)) if flag}


def cause_of(trials: Trials, factor: float, asked: Sequence[jax.Array]) -> str:
    power = math.log2(factor)
    cure = IN_CHAIN if type(trials.call) is Call else BY_SCALER
    met = meetings(trials.once.closed)
    if power > 0.9:
        lines = [line for at, (kind, line) in met if (at, kind) == (GIVEN, UNSCALED)]
        found = "clipped, normalized or given to jnp.nan_to_num before the loss scale"
        if lines:
            found = f"jamp.unscale divides{lines[0]}, and the loss scale divides again"
        return DIVIDED.format(found=found, cure=cure)
    if power < -0.9:
        lines = [line for at, (kind, line) in met if at == kind == SCALED]
        found = "scaled twice, or kept in the state before they are unscaled"
        if lines:
            found = f"the loss is scaled{lines[0]}, and again"
        if not any(np.any(flag) for flag in asked):
            found = NO_OPTIMIZER
        return MULTIPLIED.format(found=found)
    return OF_A_SIZE.format(cure=cure)


def meetings(program: ClosedJaxpr) -> list[tuple[str, tuple[str, str]]]:
    """Which values with a label reach which other label: its kind, and theirs."""
    met: list[tuple[str, tuple[str, str]]] = []

    def results(eqn: JaxprEqn, given: list[Labels]) -> list[Labels]:
        labels = joined(given)
        if (label := label_of(eqn)) is not None:
            met.extend((label[0], of) for of in sorted(labels))
            labels = frozenset({label})
        # A flag, such as whether all are finite, is not scaled.
        avals: list[Any] = [variable.aval for variable in eqn.outvars]
        return [labels if is_inexact(aval) else NONE for aval in avals]

    follow_loops(program, [NONE] * len(program.in_avals), results, joined, NONE)
    return met


def joined(labels: Sequence[Labels]) -> Labels:
    return frozenset().union(*labels)


def unused(trials: Trials) -> list[str]:
    """The lines of each `unscale_` of which nothing uses a result."""
    lines: dict[str, bool] = {}

    def look(jaxpr: Jaxpr) -> None:
        used: set[Var] = set(variables(jaxpr.outvars))
        used.update(*(variables(eqn.invars) for eqn in jaxpr.eqns))
        for eqn in jaxpr.eqns:
            for _, inner in held(eqn):
                look(inner.jaxpr)
            label = label_of(eqn)
            if label is not None and label[0] == UNSCALED_:
                is_used = not used.isdisjoint(eqn.outvars)
                lines[label[1]] = lines.get(label[1], False) or is_used

    look(trials.once.closed.jaxpr)
    return [line for line, is_used in lines.items() if not is_used]
