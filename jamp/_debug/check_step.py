"""`check_step`: what a training step does with its loss scale, before a long run."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .._jaxprs import equations, param, variables
from .._scaling.find_scale import find
from .._scaling.styles import call_of
from .._scaling.trials import Trials
from .._scaling.watched import WATCHER
from .._tree import NUMBERS, PyTree, dtype_of, path_text
from .grad_numbers import numbers
from .report import Report, Table, percent

NO_HALF = """jamp.debug.check_step: no matrix product of the step is in half \
precision, so it needs no loss scale. Call the loss function inside of \
jamp.autocast(dtype=...): around its definition, that of a jitted function or of \
value_and_grad(...), a region casts nothing, and it never casts float64. Or give \
enabled=False to the loss scale."""

LISTED = 5
PRODUCTS = "conv_general_dilated", "dot_general", "jamp_attention", "ragged_dot_general"
COUNTED = "zeros", "flushed", "subnormal"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StepReport(Report):
    """What a step does with its loss scale. From `check_step`.

    Attributes:
      problems: what is wrong, in words; empty if nothing was found.
      scale: float32: the largest power of two at which the step is finite, or its own
        if the first call does not ask it. Of several states, or devices, a list. None
        if there is no such scale.
      gradients: by path, the shares of elements that are zero before float16 sees
        them, that float16 flushes to zero at this scale, and that are subnormal in it:
        `{"zeros": 0.0, "flushed": 0.0, "subnormal": 0.0}`.
      matmul_share: the share of its matrix products and convolutions that is in half
        precision or float8; None without any.
      no_gradient: paths of the gradients that are zero, all of them.
      still: paths of the floating leaves of the state that do not move.
      moved_by_skip: paths of the leaves that a skipped step moves; None if none was
        seen, because of a problem, in a loop of steps, or without a scale to ask.
      scaled_results: paths of what else the step returns that depends on the scale.
      not_asked: paths of the loss scales that the step does not ask: disabled ones, and
        those of an optimizer that does not step.
      compiles_again: paths of the leaves of the state whose type the step changes, so
        that a second call compiles again.
      kept: paths of the leaves of the state that the step does not donate; None if the
        step is not jitted.
      donates: whether it donates others.

    Raises:
      TypeError: it was read as a bool; ask for `problems`.

    Examples:
      >>> StepReport(problems=(), scale=65536.0, moved_by_skip=()).problems
      ()
    """

    _ask_for = "problems"

    problems: tuple[str, ...]
    scale: float | list[Any] | None = None
    gradients: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    matmul_share: float | None = None
    no_gradient: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    moved_by_skip: tuple[str, ...] | None = None
    scaled_results: tuple[str, ...] = ()
    not_asked: tuple[str, ...] = ()
    compiles_again: tuple[str, ...] = ()
    kept: tuple[str, ...] | None = None
    donates: bool = False

    def to_dict(self) -> dict[str, Any]:
        """All of it."""
        return dataclasses.asdict(self)

    def share(self, kind: str) -> float:
        """The mean share of a kind over all gradients: "zeros", "flushed" or
        "subnormal"."""
        shares = [row[kind] for row in self.gradients.values()]
        return float(np.mean(shares)) if shares else 0.0

    def _parts(self, table: Table) -> list[str]:
        count = len(self.problems)
        first = (
            f"{count} problem{'s' * (count > 1)} found" if count else "nothing wrong"
        )
        parts = [f"check_step: {first}", *self.problems]
        if self.scale is None:
            return parts
        half = [f"{percent(self.share(k))} {k}" for k in ("flushed", "subnormal")]
        skip = f"moves {_listed(self.moved_by_skip or ())}"
        if self.problems:
            skip = "not tried, because of the problem"
        elif self.moved_by_skip is None:
            whole = "none was seen: give one step, not a loop of several"
            skip = "none was seen: no scale is asked" if self.not_asked else whole
        elif not self.moved_by_skip:
            skip = "holds everything"
        share = self.matmul_share
        products = "none" if share is None else f"{percent(share)} in half precision"
        donated = "the step is not jitted" if self.kept is None else "all"
        if self.kept:
            donated = f"all but {_listed(self.kept)}" if self.donates else "nothing"
        rows = [
            ("loss scale", _powers(self.scale)),
            ("matrix products", products),
            ("gradients in float16 there", ", ".join(half)),
            ("gradients that are zero", _listed(self.no_gradient)),
            ("leaves that do not move", _listed(self.still)),
            ("a skipped step", skip),
            ("results that depend on the scale", _listed(self.scaled_results)),
            ("loss scales that it does not ask", _listed(self.not_asked)),
            ("types that a second call finds changed", _listed(self.compiles_again)),
            ("donated", donated),
        ]
        return [*parts, table(("of the step", "found"), rows)]


def check_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> StepReport:
    """Whether a training step uses its loss scale rightly, and what it does with it.

    It runs the step some ten times, on the same state and batch, and discards the
    results. If steps begin later, as after microbatches, a run is several calls. Two
    facts tell: what a right step computes does not depend on a power-of-two loss scale,
    and a scale that overflows skips. Both are seen in float32, with the step's regions
    off, at scales far apart: 1, 2**40, and once more from there at 2**-20, and inf.
    `find_loss_scale` runs the same checks, and raises an error for a step that is
    wrong. That no matrix product is in half precision is a problem here alone.

    Gradients that the step itself casts to float16 (a `Policy`, half parameters) stay
    so, and only near scales are compared there: a penalty or noise that is small beside
    scaled gradients does not show.

    Args:
      step: as for `find_loss_scale`, jitted or not. Nothing is donated, and nothing
        changes.
      *args: the step's arguments: a state that holds a loss scale and a batch, or NNX
        objects and a batch.
      **kwargs: the step's keyword arguments.

    Returns:
      A `StepReport`, which prints as a table. `report.problems` is empty if nothing is
      wrong.

    Raises:
      TypeError, ValueError: as `find_loss_scale`, for arguments that do not fit. A step
        that is wrong does not raise, and is in the report.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jamp
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.5))
      >>> def step(state, x):
      ...     params, opt_state = state
      ...     loss_fn = lambda params: jnp.sum((params * x).astype(jnp.float16))
      ...     loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
      ...     return jamp.step(tx, grads, opt_state, params), loss
      >>> params = jnp.ones(2)
      >>> state = params, tx.init(params)
      >>> jamp.debug.check_step(step, state, jnp.full(2, 1e-3))
      check_step: nothing wrong
      of the step                             found
      loss scale                              2**15
      matrix products                         none
      gradients in float16 there              0 % flushed, 0 % subnormal
      gradients that are zero                 none
      leaves that do not move                 none
      a skipped step                          holds everything
      results that depend on the scale        none
      loss scales that it does not ask        none
      types that a second call finds changed  none
      donated                                 the step is not jitted

    PyTorch: no counterpart.
    """
    if not callable(step):
        raise TypeError(f"step must be a function of a state; got {shown(step)}.")
    call = call_of("jamp.debug.check_step", step, args, kwargs)
    watcher = Watcher()
    with WATCHER(watcher):
        trials = Trials(call)
    left, donates = kept(trials)
    types: dict[str, Any] = {
        "compiles_again": compiles_again(trials),
        "kept": left,
        "donates": donates,
    }
    try:
        scales = find(trials)
    except ValueError as error:
        return StepReport((str(error),), **types)
    jax.effects_barrier()
    watcher.counts.clear()
    trials(scales.exponents)
    gradients, proof = watcher.shares(), scales.proof
    program = trials.once.closed
    dtypes = [
        dtype_of(eqn.invars[0].aval)
        for eqn in equations(program)
        if eqn.primitive.name in PRODUCTS
    ]
    low = [d for d in dtypes if jnp.issubdtype(d, jnp.floating) and d.itemsize < 4]
    share = len(low) / len(dtypes) if dtypes else None
    is_on = any(np.any(flag) for flag in scales.asked)
    no_half = (NO_HALF,) if share == 0 and is_on else ()
    factors = [np.exp2(np.float32(e)).tolist() for e in scales.exponents]
    return StepReport(
        problems=proof.problems + no_half,
        scale=factors[0] if len(factors) == 1 else factors,
        gradients=gradients,
        matmul_share=share,
        no_gradient=tuple(p for p, row in gradients.items() if row["zeros"] == 1),
        still=proof.still,
        moved_by_skip=proof.moved_by_skip,
        scaled_results=proof.scaled_results,
        not_asked=tuple(
            path
            for path, flag in zip(trials.paths, scales.asked, strict=True)
            if not np.any(flag)
        ),
        **types,
    )


class Watcher:
    """Counts what float16 loses of the gradients that reach loss scales."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {}

    def shares(self) -> dict[str, dict[str, float]]:
        """The shares by path. The counts of several devices are added."""
        jax.effects_barrier()
        return {
            path: dict(zip(COUNTED, (count[:-1] / count[-1]).tolist(), strict=True))
            for path, count in self.counts.items()
            if count[-1]
        }

    def __call__(self, grads: PyTree, scale: jax.Array) -> None:
        """Called with scaled gradients where a step is traced."""
        of = numbers("jamp.debug.check_step", grads, scale, None, *COUNTED)

        def add(*columns: jax.Array) -> None:
            rows = np.stack([*map(np.asarray, columns), np.array(of.real_sizes)])
            for path, row in zip(of.paths, rows.T, strict=True):
                self.counts[path] = self.counts.get(path, 0) + row

        jax.debug.callback(add, *of.columns)


def compiles_again(trials: Trials) -> tuple[str, ...]:
    """The leaves of the state that come back with another type."""
    given = jax.tree_util.tree_leaves_with_path(trials.call.state)
    program = trials.once.closed
    made = program.jaxpr.outvars[: len(given)]
    is_weak = lambda x: isinstance(x, NUMBERS) or getattr(x, "weak_type", False)
    return tuple(
        path_text(path)
        for (path, leaf), atom in zip(given, made, strict=True)
        if is_weak(leaf) != is_weak(atom.aval)
    )


def kept(trials: Trials) -> tuple[tuple[str, ...] | None, bool]:
    """The leaves of the state that a jitted step keeps, and whether it donates others.

    They are None if the step is not jitted. A leaf that it does not use is neither.
    """
    program = trials.once.closed.jaxpr
    given = jax.tree_util.tree_leaves_with_path(trials.call.state)
    first = len(jax.tree.leaves(trials.scales))  # the place of the state's first leaf
    places = {
        v: path_text(path)
        for (path, _), v in zip(given, program.invars[first:], strict=False)
    }
    donated: set[Any] = set()
    is_jitted = False
    for eqn in program.eqns:
        flags = param(eqn, "donated_invars")
        if flags is not None and len(eqn.outvars) > len(program.outvars) // 2:
            is_jitted = True
            donated |= {v for v, flag in zip(eqn.invars, flags, strict=True) if flag}
    used = {v for eqn in program.eqns for v in variables(eqn.invars)}
    left = tuple(path for v, path in places.items() if v in used - donated)
    return left if is_jitted else None, not donated.isdisjoint(places)


def _powers(scale: Any) -> str:
    if isinstance(scale, list):
        return ", ".join(dict.fromkeys(map(_powers, scale)))
    return f"2**{round(math.log2(scale))}"


def _listed(paths: tuple[str, ...]) -> str:
    more = f", and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
    return ", ".join(paths[:LISTED]) + more if paths else "none"
