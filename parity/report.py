"""The written report and the picture."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from jamp._op_rules import DIFFERENCES, NO_COUNTERPART

from .cases import LONG_RUN, Case
from .ops import Result
from .trajectory import Comparison, Trajectory, floats

PANELS = {  # title: name of the case
    "torch's defaults": "default: seed=4",
    "growth 1.1, backoff 0.7, interval 3": "factors: init_scale=1000.1, "
    "growth_factor=1.1, backoff_factor=0.7, growth_interval=3, seed=20",
    "growth 3.7, backoff 0.1, interval 1": "factors: init_scale=65536, "
    "growth_factor=3.7, backoff_factor=0.1, growth_interval=1, seed=20",
    "close above 2**-126": "small scale: init_scale=1.9983404e-38, "
    "growth_factor=1.1, backoff_factor=0.9, growth_interval=3, seed=43",
    "update(new_scale)": "update(new_scale): growth_interval=3, seed=60",
}

_TEXT = """# Parity with torch.amp

Written by `python -m parity{arguments}`.

{cases} cases of {configurations} configurations, {steps:,} steps, went through torch's
own `GradScaler("{device}")` and through jamp, with the same streams of finite, inf,
-inf and nan gradients. After every step the bits of the scale, the growth tracker, the
skipped flags and the parameters were compared, and in a run of {long_steps:,} steps of
the scale alone the scale and the tracker. The cases are in `cases.py`; a run is a case
on one of jamp's sides.

**{mismatches:,} mismatches in {values:,} values.**

{by_kind}

{by_path}

The long run: {long_run}.

![The scale by step: torch's line thick and light, jamp's thin and dark]({picture})

{failures}{ops}Made with {versions}, in {seconds:.0f} seconds.
"""


_OPS = """## Autocast, op by op

The lists of `autocast_mode.h` have {listed} ops; {compared} have a counterpart in JAX.
Each runs under `jamp.autocast(dtype=jnp.float16)`, outside jit and inside, with inputs
of float32; of float16; and if it has several and JAX takes them, the first of float32
and the rest of float16, and the other way round. Where the results' dtypes differ they
stand in this order.

**{agree} of the {compared} ops agree with CUDA in every dtype;** {disagree}.
Of {unlisted} ops in none of the lists, {unlisted_agree} agree.

CUDA's dtypes are those of fake tensors under CUDA's autocast; no GPU was used. CPU is
`torch.autocast("cpu", dtype=torch.float16)`, really run. Its lists are shorter: an op
that they lack keeps its dtype there, and `-` is where torch refuses to run it. jamp
follows CUDA. ULPs are the largest distance between torch's values on the CPU and
jamp's, in the narrower of the two dtypes; they depend on the machine.

{table}

{notes}

Without a counterpart:

{missing}

"""


def ops(results: Sequence[Result]) -> str:
    """The section "Autocast, op by op"."""
    listed = {r.op.base: True for r in results if r.kind}
    for result in results:
        if result.kind:
            listed[result.op.base] &= result.agrees
    differing = [name for name, agrees in listed.items() if not agrees]
    wrong = [name for name in differing if name not in DIFFERENCES]
    unlisted = {r.op.name: r.agrees for r in results if r.kind is None}
    notes = [f"- `{n}`, as jamp has it: {why}." for n, why in DIFFERENCES.items()]
    notes += [f"- `{r.op.name}`: {r.op.note}." for r in results if r.op.note]
    return _OPS.format(
        listed=len(listed) + len(NO_COUNTERPART),
        compared=len(listed),
        agree=len(listed) - len(differing),
        disagree=f"{len(differing)} do not"
        + (f", and jamp is wrong in {', '.join(wrong)}" if wrong else ""),
        unlisted=len(unlisted),
        unlisted_agree=sum(unlisted.values()),
        table=op_table(results),
        notes="\n".join(notes),
        missing="\n".join(f"- `{n}`: {why}." for n, why in NO_COUNTERPART.items()),
    )


def op_table(results: Iterable[Result]) -> str:
    """A row for each op."""
    head = ["op", "torch's list", "in JAX", "torch, CUDA", "torch, CPU", "jamp"]
    head += ["ULPs", "agrees with CUDA"]
    lines = [head, ["---"] * len(head)]
    for result in results:
        op, distances = result.op, sorted(result.ulps.items())
        eager, jitted = (_dtypes(d[i] for d in result.jamp.values()) for i in (0, 1))
        lines.append(
            [
                f"`{op.name}`",
                result.kind.value if result.kind else "none",
                f"`{op.written}`",
                _dtypes(result.cuda.values()),
                _dtypes(result.cpu.values())
                + ("" if result.on_cpu else " (not listed)"),
                eager if eager == jitted else f"{eager}; in jit {jitted}",
                ", ".join(f"{n} {dtype}" for dtype, n in distances) or "-",
                "yes" if result.agrees else "no",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _dtypes(dtypes: Iterable[str | None]) -> str:
    """One dtype if all are the same, else each, in the order of `Op.dtypes`."""
    names = [dtype or "-" for dtype in dtypes]
    return names[0] if len(set(names)) == 1 else ", ".join(names)


def _total(comparison: Comparison) -> int:
    return sum(comparison.mismatches.values())


def _table(heading: str, comparisons: Iterable[Comparison], key: Any) -> list[str]:
    """A row for each group; a case that several paths ran counts once for each."""
    groups: dict[str, list[Comparison]] = {}
    for item in comparisons:
        groups.setdefault(key(item), []).append(item)
    fields = Trajectory._fields
    head = [
        heading,
        "runs",
        "steps",
        "values compared",
        *(f"{f} differs" for f in fields),
    ]
    lines = [" | ".join(head), " | ".join(["---"] + ["---:"] * (len(head) - 1))]
    for name, items in groups.items():
        counts = [
            len(items),
            sum(item.case.steps for item in items),
            sum(item.values for item in items),
            *(sum(item.mismatches[field] for item in items) for field in fields),
        ]
        lines.append(" | ".join([name, *(f"{count:,}" for count in counts)]))
    return [f"| {line} |" for line in lines]


def _describe(scales: np.ndarray, trackers: np.ndarray) -> str:
    ratio = scales[1:] / scales[:-1]
    return (
        f"growth factor {LONG_RUN.growth_factor}, backoff factor "
        f"{LONG_RUN.backoff_factor}, interval {LONG_RUN.growth_interval}; the scale "
        f"grew {np.count_nonzero(ratio > 1):,} times, backed off "
        f"{np.count_nonzero(ratio < 1):,} times, and ranged from "
        f"{scales.min():.3g} to {scales.max():.3g}"
    )


def text(
    comparisons: Sequence[Comparison],
    long_torch: Sequence[np.ndarray],
    long_mismatches: Mapping[str, int],
    **facts: Any,
) -> str:
    """The report in Markdown; equal runs give equal text but for its last line.

    Args:
      comparisons: one for each case and path.
      long_torch: torch's scales and trackers of the long run.
      long_mismatches: of the long run, by field.
      **facts: the fields of the text that the caller knows.
    """
    cases = {item.case.name: item.case for item in comparisons}.values()
    configurations = {case.configuration for case in cases}
    long_total = sum(long_mismatches.values())
    long_row = f"| long run | 1 | {LONG_RUN.steps:,} | {2 * LONG_RUN.steps:,} | "
    long_row += (
        f"{long_mismatches['scale']:,} | {long_mismatches['tracker']:,} | - | - |"
    )
    failures = [f"- {item.where}\n" for item in comparisons if item.where]
    return _TEXT.format(
        cases=len(cases),
        steps=sum(case.steps for case in cases),
        configurations=len(configurations),
        long_steps=LONG_RUN.steps,
        mismatches=long_total + sum(map(_total, comparisons)),
        values=2 * LONG_RUN.steps + sum(item.values for item in comparisons),
        by_kind="\n".join(
            [*_table("kind", comparisons, lambda c: c.case.kind), long_row]
        ),
        by_path="\n".join(_table("jamp's side", comparisons, lambda c: c.path)),
        long_run=_describe(*long_torch),
        failures="".join(
            ["First differences:\n\n", *failures, "\n"] if failures else []
        ),
        **facts,
    )


def _lines(axis: Any, steps: np.ndarray, torch: np.ndarray, jamp: np.ndarray) -> None:
    style = {"drawstyle": "steps-post", "solid_joinstyle": "round"}
    axis.plot(steps, np.log2(torch), color="#f5b971", lw=4, label="torch", **style)
    axis.plot(steps, np.log2(jamp), color="#1b3a57", lw=0.9, label="jamp", **style)


def draw(
    path: pathlib.Path,
    runs: Mapping[str, tuple[Case, Trajectory, Trajectory]],
    long_scales: tuple[np.ndarray, np.ndarray],
) -> None:
    """Draws torch's and jamp's trajectories over each other.

    Args:
      path: the PNG file to write.
      runs: for each case in `PANELS`, by name, the case, torch's run and jamp's.
      long_scales: torch's and jamp's scales of the long run.
    """
    figure = Figure(figsize=(13, 6.5), layout="constrained")  # draws with Agg
    axes = figure.subplots(2, 3)
    for axis, (title, name) in zip(axes.flat, PANELS.items(), strict=False):
        case, torch_run, jamp_run = runs[name]
        steps = np.arange(case.steps)
        _lines(axis, steps, floats(torch_run.scale), floats(jamp_run.scale))
        skips = steps[torch_run.skipped[:, 0]]
        axis.plot(
            skips,
            np.full(skips.shape, 0.02),
            "|",
            color="#c0392b",
            markersize=7,
            markeredgewidth=0.6,
            transform=axis.get_xaxis_transform(),
            label="skipped step",
        )
        axis.set_title(title, fontsize=11)
    thinned = np.arange(0, LONG_RUN.steps, 500)
    _lines(axes.flat[-1], thinned, *(scales[thinned] for scales in long_scales))
    axes.flat[-1].set_title(
        f"{LONG_RUN.steps:,} steps, growth 1.1, backoff 0.7", fontsize=11
    )
    axes.flat[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes.flat:
        axis.margins(x=0.01, y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("log2 of the scale")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
