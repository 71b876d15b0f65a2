"""Other loss scalers and casts for JAX on the same cases as jamp.

They do not promise to agree with torch, so a difference is counted and does not fail
the suite. Cases that a library cannot express are counted separately.
"""

import functools
import importlib.util
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jamp._autocast.ops import DIFFERENCES

from . import devices, jamp_side
from .cases import CASES as ALL_CASES
from .cases import Case, streams
from .ops_float32 import FLOAT32
from .ops_lower import LOWER
from .ops_promote import PROMOTE
from .ops_table import Op
from .peers_defects import DEFECTS, REFUSALS, Defect
from .peers_ops import CASTS, PEERS, Input, run_peer
from .result import Result, table
from .trajectory import Trajectory, floats

TITLE = "Other libraries on the same cases"
HALF = "float16"
LISTS = {"lower precision": LOWER, "float32": FLOAT32, "promote": PROMOTE}
CLOSE = 1e-6  # of a run's largest parameter; rounding stays below this
FIELDS = {
    "scale": "scale",
    "tracker": "tracker",
    "skipped": "skips",
    "params": "parameters",
}


def _choose() -> tuple[Case, ...]:
    """One stream per configuration, a few of them with factors other than 2 and 0.5."""
    chosen: dict[Case, Case] = {}
    for case in ALL_CASES:
        usual = case.growth_factor == 2.0, case.backoff_factor == 0.5
        few = (case.init_scale, case.growth_interval) == (2.0**16, 3) and any(usual)
        if all(usual) or few or case.kind != "factors":
            chosen.setdefault(case.configuration, case)
    return tuple(chosen.values())


SCALER_CASES = _choose()


class Reference(NamedTuple):
    """torch's run of a case.

    Attributes:
      run: the state after each step.
      unscaled: the gradients that the optimizers got, where they were not skipped.
      before: the scale that each step used.
    """

    run: Trajectory
    unscaled: np.ndarray
    before: np.ndarray


@functools.cache
def reference(case: Case, device: str) -> Reference:
    """torch's run of a case."""
    from . import torch_side

    run = torch_side.run(case, devices.of_torch(device))
    base, poison = streams(case)
    first = np.float32(case.init_scale if case.enabled else 1.0)
    before = np.concatenate([[first], floats(run.scale)[:-1]])
    by_step = before[:, None, None]
    inverse = (1 / by_step.astype(np.float64)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        unscaled = np.where(poison == 0, base * by_step, poison) * inverse
    return Reference(run, unscaled, before)


def run_library(name: str, case: Case, torch: Reference) -> dict[str, np.ndarray]:
    """A library's run of a case; jamp's uses its optax wrapper where that fits."""
    if name in PEERS:
        inputs = Input(*streams(case), torch.unscaled)
        return run_peer(PEERS[name], case, inputs)
    fits = jamp_side.fits_optax(case)
    return (jamp_side.run_optax if fits else jamp_side.run_nnx)(case)._asdict()


class Outcome(NamedTuple):
    """A library's runs of one or more cases beside torch's.

    Attributes:
      values: how many values were compared.
      mismatches: how many differ, by field, for the fields that the library has. `far`
        counts the parameters that differ by more than rounding.
      where: the first difference in words; empty if there is none.
      cases: how many cases the library ran.
      cannot: how many cases it cannot express, by reason.
    """

    values: int
    mismatches: Mapping[str, int]
    where: str
    cases: int = 1
    cannot: Mapping[str, int] | None = None


def _steps_in_range(name: str, torch: Reference) -> int:
    """The number of steps until torch's scale leaves the library's range."""
    lowest, highest = PEERS[name].range if name in PEERS else (0.0, np.inf)
    in_use = np.stack([torch.before, floats(torch.run.scale)])
    outside = np.any((in_use < lowest) | (in_use > highest), axis=0)
    return int(np.argmax(outside)) if outside.any() else outside.size


def compare(
    case: Case, torch: Reference, found: Mapping[str, np.ndarray], steps: int
) -> Outcome:
    """Compares the first steps of two runs, value by value."""
    expected = {name: getattr(torch.run, name)[:steps] for name in FIELDS}
    found = {name: found[name][:steps] for name in FIELDS if name in found}
    differ = {name: values != expected[name] for name, values in found.items()}
    here, there = (x["params"].view(np.float32) for x in (found, expected))
    largest = np.abs(there).max(initial=0.0)
    with np.errstate(invalid="ignore"):  # nan where the scaler is off
        far = differ["params"] & ~(np.abs(here - there) <= CLOSE * largest)
    counts = {name: int(np.count_nonzero(d)) for name, d in differ.items()}
    where = ""
    if any(counts.values()):
        first = {name: np.argwhere(d)[0] for name, d in differ.items() if d.any()}
        name = min(first, key=lambda name: first[name][0])  # the first of several
        pair = (_show(name, x[name][tuple(first[name])]) for x in (found, expected))
        where = "{}; step {}: {} {}, torch {}".format(
            case.name, first[name][0] + 1, FIELDS[name], *pair
        )
    counts["far"] = int(np.count_nonzero(far))
    return Outcome(sum(x.size for x in found.values()), counts, where)


def _show(name: str, value: Any) -> str:
    if name in ("scale", "params"):
        return f"{value.view(np.float32):.9g}"
    return str(value).lower()


def scaling(name: str, device: str) -> Outcome:
    """Runs all cases that a library can express."""
    cannot, outcomes = Counter(), []
    for case in SCALER_CASES:
        reason = PEERS[name].cannot(case) if name in PEERS else ""
        torch = None if reason else reference(case, device)
        steps = _steps_in_range(name, torch) if torch else 0
        if torch is None or not steps:
            cannot[reason or "scale out of its range"] += 1
            continue
        found = run_library(name, case, torch)
        outcomes.append(compare(case, torch, found, steps))
    mismatches = Counter()
    for outcome in outcomes:
        mismatches.update(outcome.mismatches)
    where = next((outcome.where for outcome in outcomes if outcome.where), "")
    values = sum(outcome.values for outcome in outcomes)
    return Outcome(values, dict(mismatches), where, len(outcomes), dict(cannot))


@functools.cache
def _torch_dtypes() -> list[tuple[str, Op, str, list[str]]]:
    """Every op with its list, its inputs and torch's dtypes under autocast on CUDA."""
    from . import ops_torch

    return [
        (kind, op, inputs, dtypes)
        for kind, ops in LISTS.items()
        for op in ops
        for inputs, dtypes in ops_torch.fake_dtypes(op, HALF).items()
    ]


def casting(name: str) -> dict[str, tuple[int, int]]:
    """How many results have torch's dtype, out of how many, by torch's list.

    An op for which a library raises one of `REFUSALS` does not count as agreeing.
    """
    cast = CASTS[name][1]
    counts: dict[str, tuple[int, int]] = dict.fromkeys(LISTS, (0, 0))
    for kind, op, inputs, expected in _torch_dtypes():
        with warnings.catch_warnings():
            # JAX warns that it will one day refuse `x.at[i].set(y)` with a wider y.
            warnings.filterwarnings("ignore", "scatter inputs have incompatible types")
            try:
                found = jax.eval_shape(cast(op.jax), *op.arrays(inputs, HALF))
            except REFUSALS:
                found = None
        agrees = [x.dtype.name for x in jax.tree.leaves(found)] == expected
        counts[kind] = counts[kind][0] + agrees, counts[kind][1] + 1
    return counts


MODULES = {"jamp": "jamp", "plain JAX": "jax"}
MODULES |= {name: peer.module for name, peer in PEERS.items()}
MODULES |= {name: module for name, (module, _) in CASTS.items()}
CASES = {name: name for name in MODULES}


class Data(NamedTuple):
    """What the run found for a library; None where it offers nothing to run."""

    installed: bool
    scaling: Outcome | None = None
    defects: tuple[Defect, ...] = ()
    casting: Mapping[str, tuple[int, int]] | None = None


def run(case: str, device: str) -> Result:
    """Runs a library on all cases; `device` is for torch."""
    if importlib.util.find_spec(MODULES[case]) is None:
        return Result(case, 0, {}, data=Data(installed=False))
    scaled = scaling(case, device) if case in PEERS or case == "jamp" else None
    cast = casting(case) if case in CASTS else None
    defects = tuple(DEFECTS[case]()) if case in DEFECTS else ()
    compared = scaled.values if scaled else 0
    # Other libraries may differ; jamp may not.
    wrong = scaled.mismatches if scaled and case == "jamp" else {}
    wrong = {name: count for name, count in wrong.items() if count}
    where = scaled.where if scaled and wrong else ""
    return Result(case, compared, wrong, where, data=Data(True, scaled, defects, cast))


_SECTION = """\
{chosen} of the streams, one for each configuration, went through other loss scalers for
JAX, each used as its documentation says. A library skips the cases that it cannot
express. After every step the bits of the scale, the growth tracker, the skipped flag
and the parameters were compared with torch's. Many parameters differ only by the
rounding of a division; "far off" counts those that differ by more than a millionth of
the largest.

{scaling}

The trackers are flax's `fin_steps`, jmp's and mpx's `counter` and Keras's
`step_counter`. `apply_if_finite` has no scale, so it got the gradients that torch had
unscaled, and was set never to accept a bad update. torch does not count a gradient as
an overflow if it becomes inf only when unscaled; flax, jmp and `apply_if_finite` do.
mpx multiplies by the scale in float16. Its runs were compared for as long as torch's
scale fits into float16, with its casts of arrays turned off. Cases that were left out,
and why:

{cannot}

Defects that this run showed:

{defects}

The ops on autocast's lists ran with inputs in float32, float16 and both. The table
counts the results that have the dtype that torch's autocast gives them on CUDA in a
float16 region. jmp and mpx cast a module's inputs, here those of the op, and nothing
inside it.

{casting}

jamp differs on purpose in {differences}."""


def section(results: Sequence[Result]) -> str:
    """Tables of the scalers' differences, of defects, and of dtypes."""
    data: dict[str, Data] = {result.case: result.data for result in results}
    counted = [*FIELDS, "far"]
    fields = (f"{name}:" for name in (*FIELDS.values(), "far off"))
    scalers, casts, defects, cannot = [], [], [], []
    for name, found in data.items():
        scaled, cast = found.scaling, found.casting
        if scaled:
            counts = [scaled.cases, scaled.values, *map(scaled.mismatches.get, counted)]
            cells = ["-" if count is None else count for count in counts]
            scalers.append([name, *cells, scaled.where or "none"])
        if scaled and scaled.cannot:
            reasons = [f"{why} ({n})" for why, n in scaled.cannot.items()]
            cannot.append(f"- {name}: {', '.join(reasons)}.")
        if cast:
            pairs = [*cast.values(), map(sum, zip(*cast.values(), strict=True))]
            casts.append([name, *("{} of {}".format(*pair) for pair in pairs)])
        if not found.installed:
            scalers += [[name, "not installed", *[""] * 7]] * (name in PEERS)
            casts += [[name, "not installed", *[""] * 3]] * (name in CASTS)
        defects += [[name, *defect] for defect in found.defects]
    return _SECTION.format(
        chosen=len(SCALER_CASES),
        scaling=table(
            ["library", "cases:", "values:", *fields, "first mismatch"], scalers
        ),
        cannot="\n".join(cannot) or "none.",
        defects=table(["library", "case", "its result", "jamp"], defects),
        casting=table(["cast by", *(f"{of}:" for of in (*LISTS, "all"))], casts),
        differences=", ".join(f"`{name}`" for name in sorted(DIFFERENCES)),
    )
