"""Whether a training step uses its loss scale rightly.

Two facts tell. **What a right step computes does not depend on a power of two**: it is
multiplied in and divided out, without rounding. And **a scale that overflows skips**:
a step that does not skip must still compute the same.

In float32 both can be seen at once. So the step is traced with its regions off, and
runs at a scale of 1 and at 2**40, then once more from there, at 2**-20: but for an
error, all of it is equal to the last bits. At a scale of inf it must skip. Each run is
as many calls as it takes until one steps, at one scale: sums of scaled gradients over
calls are right.

What a program casts to float16 itself stays so. If it depends on the loss scale, it
overflows at such scales, and below its normal range it rounds otherwise: a leaf whose
gradient is nothing but rounding, such as the bias of an attention's keys, may be twice
as large at half the scale. A mistake differs in kind: it changes the size of a leaf and
not its direction, and rounding changes both. Of a gradient and something of a size of
its own, the sum at one scale and that at half of it have a cosine of at least 2 sqrt(2)
/ 3 = 0.943, wherever they point. So two pairs of runs convict a leaf there, one near
the largest scale and one eight times below, where rounding is coarser: the changes of
each pair must be parallel, and the first have different sizes, either both pairs in the
same way, or by a power of two, which a clip makes that does not act below.

What a step writes over, such as a log in the state, does not count.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from .._jaxprs import equations, follow_loops, inside
from .._tree import PyTree, is_inexact
from .calls import Call
from .moved import FACTOR, Moved, equal, leaves_of, moves, parameters
from .trials import INFINITE, LOWEST, Exponents, Run, Trials

UP, DOWN = 40, -20  # the exponents of the scales at which it runs, and 0
SAME = 2.0**-16  # the largest difference of two runs that compute the same
STEPS = 64  # calls, at most, until one moves a parameter and asks a loss scale

DEPENDS = """{caller}: {cause} What the step computes depends on the loss scale{at}: \
at one {times} times as large, {leaf} moves {how}. A right step computes the same at \
each power of two."""

DIVIDED = """the gradients are divided by the scale once too often. Something else \
than scaled gradients meets them: a loss (also a second or an auxiliary one) that is \
not scaled, a clip, a norm, a threshold, jnp.nan_to_num, a penalty, noise, weight \
decay, an epsilon, or what jamp.unscale or a DynamicScale has divided. {cure}"""

IN_CHAIN = """Multiply each loss by the scale of the state that the step is given, by \
jamp.value_and_grad(loss_fn, opt_state) or jamp.scale_loss, and clip, normalize and \
penalize in the chain inside: \
jamp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer))."""

BY_SCALER = """Let the loss function return scaler.scale(loss) of each loss, and use \
what scaler.unscale_ returned: clip that, or clip in the optimizer's chain."""

MULTIPLIED = """the gradients are multiplied by the scale once too often: scaled twice \
(take one of jamp.value_and_grad, jamp.scale_loss and scaler.scale, once), or given to \
an optimizer without this loss scale, as if arguments are swapped, or if nothing uses \
what scaler.unscale_ returned. Or the state keeps scaled ones, a mean of them or a \
scaled loss: keep those of jamp.unscale(grads, opt_state)."""

KEPT = """{caller}: {leaf} depends on how the loss scale moved between two calls: the \
state keeps scaled gradients from one call to the next. Keep \
jamp.unscale(grads, opt_state)."""

STOPS = """{caller}: whether the step moves {leaf} depends on the size of scaled \
gradients: it does at a loss scale of 1, and not at one {times} times as large. A \
threshold, a clip or a norm meets them: put it into the chain inside of the loss \
scale, or compare jamp.unscale(grads, opt_state). Or the loss is not scaled. {cure}"""

HIDDEN = """{caller}: a loss scale of inf{at} does not skip the step, and {leaf} \
{what}. Something hides an inf or nan from the loss scale, such as jnp.nan_to_num, a \
clip by value, jnp.where(jnp.isfinite(...), ...) or optax.zero_nans: delete it, the \
loss scale skips these steps. Or the loss is not scaled. {cure}"""

BROKEN = """{caller}: a skipped step writes inf or nan into {leaf}. A loss scale holds \
what its own optimizer changes. Hold the rest: skipped = \
jamp.metrics(opt_state)["found_inf"], and jnp.where(skipped, old, new)."""

STILL = """{caller}: nothing is proved, since in {calls} no parameter moves that a \
skip would hold. Use what jamp.step or the optimizer returned, and change NNX objects \
under nnx.jit, because jax.jit loses that. Or all gradients are zero, as \
jnp.nan_to_num makes those that overflow. If parameters move later, give the state \
before that."""

UNASKED = """{caller}: nothing is proved, since {calls} leaves the loss scale as it \
is: gradients reach no optimizer or GradScaler that has it, or the state that this \
returned is dropped. {cure} If steps begin later, give the state before that."""

UNPROVED = """{caller}: the step cannot be proved: it is finite at the largest loss \
scale, and skips at others. There is something in it that overflows in float32, or \
that divides by gradients which half precision flushes to zero: add an epsilon."""

NOT_REPEATED = """{caller}: the step cannot be proved: run twice with the same \
arguments, it moves {leaf} otherwise. Keep what it draws or reads (a random key, a \
batch, an environment) in its arguments."""


class Proof(NamedTuple):
    """What the runs of a step at several loss scales showed: see `StepReport`."""

    problems: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    moved_by_skip: tuple[str, ...] | None = None
    scaled_results: tuple[str, ...] = ()


def proof_of(call: Call, highest: Exponents) -> Proof:
    """Runs the step at other scales, and judges.

    Args:
      highest: the largest exponents at which the step itself is finite.
    """
    prover, skipped = Prover(call, highest), None
    problems = [*prover.problems()]
    if not problems:
        problems, skipped = prover.overflown()
    still, results = map(tuple, (prover.still, prover.results))
    return Proof(tuple(problems), still, skipped, results)


class Prover:
    """The runs of a step with its regions off, from one state, and what they tell."""

    def __init__(self, call: Call, highest: Exponents):
        self.call, self.state, self.highest = call, call.state, highest
        self.trials = Trials(call, in_float32=True)
        self.kept, self.remembers, self.is_exact = kept_leaves(self.trials)
        names = [eqn.primitive.name for eqn in equations(self.trials.once.closed)]
        self.draws = any("callback" in name for name in names)
        lower = self.below(8)
        self.base = (
            [np.minimum(e, 0) for e in lower] if self.is_exact else self.below(1)
        )
        self.still: list[str] = []  # leaves that have not moved in any run
        self.results: list[str] = []  # what else depends on the scale

    def below(self, times: int) -> Exponents:
        return [np.clip(e - times, LOWEST, INFINITE - 2) for e in self.highest]

    def run(self, exponents: Exponents, state: PyTree = None) -> Run:
        """As many calls as it takes to step, at these scales."""
        run = Run(self.state if state is None else state, None, self.one.outcome)
        for _ in range(self.calls):
            run = self.trials(exponents, run.state)
        return run

    def base_but(self, place: int, exponent: ArrayLike) -> Exponents:
        new = np.full_like(self.base[place], exponent)
        return [*self.base[:place], new, *self.base[place + 1 :]]

    def says(self, problem: str, **of: object) -> str:
        cure = IN_CHAIN if type(self.call) is Call else BY_SCALER
        return problem.format(caller=self.call.caller, cure=cure, **of)

    def problems(self) -> Iterator[str]:
        """The first thing that is wrong with a step that does not skip, if any."""
        if problem := self.first_calls():
            calls = f"each of {self.calls} calls" if self.calls > 1 else "this call"
            yield self.says(problem, calls=calls)
        elif self.draws and (leaf := self.drawn()):
            yield self.says(NOT_REPEATED, leaf=leaf)
        else:
            judge = self.exact_problems if self.is_exact else self.coarse_problems
            yield from itertools.islice(judge(), 1)

    def drawn(self) -> str:
        """A leaf that moves otherwise if the step runs again."""
        leaves = self.wrong(self.changes(self.one, self.run(self.base)))
        return leaves[0].path if leaves else ""

    def first_calls(self) -> str:
        """Calls until one steps: it asks a loss scale, and a parameter moves, which it
        does not if it is skipped. Or why none does."""
        infinite = [np.full_like(e, INFINITE) for e in self.base]
        state, is_moved, asks = self.state, False, False
        for self.calls in range(1, STEPS + 1):
            self.one = self.trials(self.base, state)
            new, asks = parameters(self.one.state), some(self.one.outcome.asked)
            is_moved = not equal(new, parameters(self.state))
            if some(self.one.outcome.skipped):
                return UNPROVED
            if is_moved and not asks and self.call.is_off():
                return ""
            if is_moved and asks:
                self.over = self.trials(infinite, state)
                if not equal(new, parameters(self.over.state)):
                    return ""
            if equal(self.one.state, state):
                break
            state = self.one.state
        return UNASKED if is_moved and not asks else STILL

    def exact_problems(self) -> Iterator[str]:
        """One scale after the other is far higher. From there, all are far lower, if
        the state has something of one call that the next one reads."""
        up = self.one
        for place, highest in enumerate(self.highest):
            for exponent in (UP, highest):
                up = self.run(self.base_but(place, exponent))
                if not some(up.outcome.skipped):
                    break
            else:
                yield self.says(UNPROVED)
            if wrong := self.wrong(self.changes(self.one, up)):
                at = f" at {self.trials.paths[place]}" if len(self.base) > 1 else ""
                yield self.depends(wrong, np.max(exponent - self.base[place]), at)
        if not self.remembers:
            return
        two = self.run(self.base, self.one.state)
        low = self.run([e + DOWN for e in self.base], up.state)
        if not some(two.outcome.skipped) and not some(low.outcome.skipped):
            for leaf in self.wrong(moves(self.state, two.state, low.state)):
                yield self.says(KEPT, leaf=leaf.path)

    def coarse_problems(self) -> Iterator[str]:
        """All scales near the largest, and at half of that; then eight times below."""
        near = self.changes(self.run(self.below(2)), self.one)
        evidence = [leaf for leaf in near if leaf.path in self.kept and leaf.cosine]
        if not any(leaf.is_scaled() for leaf in evidence):
            return
        far = moves(self.state, *(self.run(self.below(n)).state for n in (5, 4)))
        low = {leaf.path: leaf for leaf in far}
        # Of one number, all is parallel.
        least = min(2, max(leaf.size for leaf in evidence))
        evidence = [leaf for leaf in evidence if leaf.size >= least]
        if wrong := [leaf for leaf in evidence if convicts(leaf, low[leaf.path])]:
            yield self.depends(wrong, 1)

    def changes(self, low: Run, high: Run) -> list[Moved]:
        """How far each leaf moves at a lower scale, and at a higher one."""
        leaves = [*moves(self.state, low.state, high.state)]
        self.still = [leaf.path for leaf in leaves if not leaf.a and not leaf.b]
        is_one = lambda aux: type(aux) is dict and len(aux) == 1
        only = lambda aux: next(iter(aux.values())) if is_one(aux) else aux
        one, two = only(low.aux), only(high.aux)
        zeros = lambda x: np.zeros(x.shape, x.dtype) if is_inexact(x) else x
        others = [*moves(jax.tree.map(zeros, one), one, two)]
        others += [leaf for leaf in leaves if leaf.path not in self.kept]
        self.results = [leaf.path for leaf in others if leaf.is_scaled()]
        return leaves

    def wrong(self, changes: Iterable[Moved]) -> list[Moved]:
        """The leaves of which two exact runs make two things, the worst first."""
        found = [m for m in changes if m.path in self.kept and m.difference > SAME]
        return sorted(found, key=lambda m: -abs(math.log(m.factor)) - m.difference)

    def depends(self, wrong: Sequence[Moved], power: int, at: str = "") -> str:
        leaf, times = wrong[0], f"2**{power}" if power > 1 else "2"
        if not leaf.b:
            return self.says(STOPS, leaf=leaf.path, times=times)
        cause = MULTIPLIED if leaf.factor > FACTOR**power else DIVIDED
        how = f"{leaf.factor:.4g} times as far" if leaf.is_scaled() else "otherwise"
        of = {"leaf": leaf.path, "how": how, "times": times, "at": at}
        return self.says(DEPENDS, cause=self.says(cause), **of)

    def overflown(self) -> tuple[list[str], tuple[str, ...] | None]:
        """What is wrong with a step that skips, and which leaves such a step moves.

        One scale after the other overflows, and the others are as in the first run:
        then a step that does not skip must compute what it computed there.
        """
        problems: list[str] = []
        asked, paths = self.one.outcome.asked, self.trials.paths
        places = [place for place, flag in enumerate(asked) if np.any(flag)]
        run = self.one
        for place in places:
            is_known = self.calls == len(paths) == 1
            run = self.over if is_known else self.run(self.base_but(place, INFINITE))
            changes = [*moves(self.state, self.one.state, run.state)]
            changes = [leaf for leaf in changes if leaf.path in self.kept]
            broken = next((leaf.path for leaf in changes if leaf.broken), "")
            if np.any(run.outcome.skipped[place]):
                problems += [self.says(BROKEN, leaf=broken)] if broken else []
            elif leaf := broken or next((m.path for m in self.wrong(changes)), ""):
                at = f" at {paths[place]}" if len(paths) > 1 else ""
                what = "becomes inf or nan" if broken else "moves otherwise"
                problems.append(self.says(HIDDEN, at=at, leaf=leaf, what=what))
        if problems or not places:
            return problems, None
        if len(places) > 1:
            rows = zip(asked, self.base, strict=True)
            run = self.run([np.where(flag, INFINITE, e) for flag, e in rows])
        rows = zip(run.outcome.skipped, asked, strict=True)
        if any(np.any(skipped != steps) for skipped, steps in rows):
            return [], None  # after its first step, a loop is at a finite scale
        rows = zip(leaves_of(self.state), leaves_of(run.state), strict=True)
        return [], tuple(path for (path, a), (_, b) in rows if not equal(a, b))


def convicts(near: Moved, far: Moved) -> bool:
    if not (near.is_scaled() and near.is_parallel() and far.is_parallel()):
        return False
    same_way = (near.factor > 1) is (far.factor > 1)
    return near.is_power() or (same_way and far.is_scaled())


def some(flags: Sequence[ArrayLike]) -> bool:
    return any(np.any(np.asarray(flag)) for flag in flags)


def is_narrow(aval: Any) -> bool:
    """Whether a value has a dtype with fewer exponents than float32."""
    dtype = getattr(aval, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_float and jnp.finfo(dtype).minexp > LOWEST


def kept_leaves(trials: Trials) -> tuple[Set[str], bool, bool]:
    """The leaves of the state whose new value depends on the old one.

    Parameters, moments and averages do, and what is written over does not. And whether
    one of them depends on the old value of what is written over. And whether nothing
    narrow depends on a loss scale, as frozen parts and a batch in float16 do not.
    """
    program, state = trials.once.closed, trials.call.state
    first = len(jax.tree.leaves(trials.scales))  # the place of the state's first leaf
    leaves, structure = jax.tree.flatten(state)
    inputs = [1 << place for place in range(len(program.in_avals))]
    both = lambda sets: functools.reduce(operator.or_, sets, 0)
    narrow: list[Any] = []

    def results(eqn: JaxprEqn, given: list[int]) -> list[int]:
        if both(given) % (1 << first):
            made = [v.aval for e in (eqn, *inside(eqn)) for v in e.outvars]
            narrow.extend(filter(is_narrow, made))
        return [both(given)] * len(eqn.outvars)

    found = follow_loops(program, inputs, results, both, 0)
    kept = [bool(found[place] >> (first + place) & 1) for place in range(len(leaves))]
    named = dict(leaves_of(structure.unflatten(kept)))
    written_over = sum(
        1 << first + place for place, flag in enumerate(kept) if not flag
    )
    remembers = any(found[p] & written_over for p, flag in enumerate(kept) if flag)
    return {path for path, flag in named.items() if flag}, remembers, not narrow
