"""Runs a trainer in each way, and compares the runs with float32's."""

import os
import pickle
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..models.source import Checkouts
from ..models.training import cosines
from . import SOURCES, TRAINERS, WAYS
from .record import STEPS, Record

# How near a run must be to float32's: the first loss and all losses, relative to the
# largest; the cosine of the first gradients.
BOUNDS = {
    "float16": (5e-4, 1e-2, 0.9999),
    "bfloat16": (4e-3, 8e-2, 0.999),
    "float8": (2e-2, 2e-1, 0.98),
}
NORM = 0.05  # how much the norm of the first gradients may differ from float32's
SHARE = 0.5  # of the work in matrix products that must be in the way's dtype
TITLE = "## Whole trainers\n"
HEAD = """
The training loops of other projects run as a whole too, with their optimizer, schedule,
accumulation, rollouts and evaluation, for {steps} steps on made-up data. Each is a copy
of the project's source in which a few lines are edited. The losses are those that the
loop itself reports.

- *lines* counts what the edits add and remove, as `git diff --stat` does. Edits that
  feed made-up data or fix the source for today's JAX are made in float32 too and do
  not count.
- *share* is the share of the work in the matrix products of the compiled program that
  is done in the row's dtype. In float8 most of the rest runs in bfloat16.
- *first loss, apart* and *losses, apart* are the first and the largest difference from
  float32's losses in {steps} steps, relative to the largest loss.
- *cosine* is that of the gradients of the first step.
- *float16* starts at a loss scale of 2^8, so that no step is skipped and all losses
  compare. *from 2^16*, the default, shows how many steps are skipped until the scale
  fits. *from 2^100* overflows in each step: all are skipped, and the parameters keep
  their bits.

A run is outside the bounds if less than {share:.0%} of the work is in the row's dtype,
the norm of the first gradients differs by more than {norm:.0%}, or one of these does
by more. One run is: the first loss of tunix's GRPO is 1e-8 in float32, where the policy
is the reference. The region has only the policy in it; in float8 the loss starts at
0.0008, of 0.011 at most.

| | first loss | losses | cosine, at least |
|---|---|---|---|
{bounds}

{sources}

| trainer | from | way | lines | share | first loss, apart | losses, apart | \
cosine | skipped | last loss | |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def results(name: str, checkouts: Checkouts) -> dict[str, Any]:
    records = {way: run(name, way, checkouts.folder) for way in WAYS}
    rows = {way: row(way, records["float32"], records[way]) for way in WAYS}
    names = ("jax", "flax", "optax")
    versions = [f"{name} {version(name)}" for name in names]
    versions.append(f"Python {platform.python_version()}")
    commit = checkouts.commit(TRAINERS[name].project)
    return {"ways": rows, "versions": versions, "commit": commit}


def run(name: str, way: str, source: Path) -> Record:
    """A run in a process of its own.

    Raises:
      RuntimeError: it failed; the message is the end of what it wrote to stderr.
    """
    devices = TRAINERS[name].devices
    flags = f"--xla_force_host_platform_device_count={devices}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "record")
        command = [sys.executable, "-m", "foreign.trainers", name, way]
        command += ["--source", str(source), "--to", str(file)]
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}, {way}:\n{done.stderr[-4000:]}")
        return pickle.loads(file.read_bytes())


def row(way: str, plain: Record, other: Record) -> dict[str, Any]:
    """The numbers of a run, and "wrong": what is outside of the bounds.

    Args:
      way: how `other` ran.
      plain: the run in float32.
      other: the run.
    """
    total = sum(other.products.values())
    shares = {name: work / total for name, work in other.products.items() if work}
    result: dict[str, Any] = {
        "lines": other.lines,
        "shares": shares,
        "skipped": other.skipped,
        "losses": other.losses,
        "distance": other.distance,
    }
    wrong = result["wrong"] = []
    if len(other.losses) != STEPS or not np.all(np.isfinite(other.losses)):
        wrong.append(f"{STEPS} finite losses")
    if other.applied + other.skipped != STEPS:
        wrong.append(f"{other.applied} updates")
    if way == "from 2^100":
        if other.skipped != STEPS or not other.held:
            wrong.append("parameters held in all steps")
        return result
    if other.held:
        wrong.append("no parameter changed")
    if way not in BOUNDS or len(other.losses) != STEPS:
        return result
    if other.skipped:
        wrong.append("skipped steps, so that the losses do not compare")
    losses, reference = np.asarray(other.losses), np.asarray(plain.losses)
    apart = np.abs(losses - reference) / np.max(np.abs(reference))
    result["first"] = float(apart[0])
    result["apart"] = float(np.max(apart))
    result["cosine"], result["worst"] = cosines(plain.gradients, other.gradients)
    first, all_losses, cosine = BOUNDS[way]
    wrong += [] if abs(norm(other) / norm(plain) - 1) <= NORM else ["norm"]
    wrong += ["first loss"] if not result["first"] <= first else []
    wrong += ["losses"] if not result["apart"] <= all_losses else []
    wrong += ["cosine"] if not result["cosine"] >= cosine else []
    lower = sum(part for name, part in shares.items() if name.startswith(way))
    wrong += ["share"] if lower < SHARE else []
    return result


def norm(run: Record) -> float:
    """The norm of the first gradients, all parameters together."""
    parts = [np.sum(g.astype(np.float64) ** 2) for g in run.gradients.values()]
    return float(np.sqrt(sum(parts)))


def wrong(result: dict[str, Any]) -> list[str]:
    return [f"{way}: {w}" for way, r in result["ways"].items() for w in r["wrong"]]


def lines(name: str, result: dict[str, Any]) -> str:
    text = ""
    for way, r in result["ways"].items():
        added, removed = r["lines"]
        own = sum(part for kind, part in r["shares"].items() if kind.startswith(way))
        cells = [name, TRAINERS[name].project, way]
        cells += [f"+{added} -{removed}" if added else ""]
        if "first" in r:
            cells += [f"{own:.0%}", f"{r['first']:.1e}", f"{r['apart']:.1e}"]
            cells += [f"{r['cosine']:.6f}"]
        else:
            cells += [""] * 4
        cells += [str(r["skipped"]), f"{r['losses'][-1]:.4f}"]
        cells += [f"**outside: {', '.join(r['wrong'])}**" if r["wrong"] else ""]
        text += "| " + " | ".join(cells).rstrip() + " |\n"
    return text


def part(results: dict[str, Any]) -> str:
    bounds = [
        f"| {way} | {first:g} | {apart:g} | {cosine:g} |"
        for way, (first, apart, cosine) in BOUNDS.items()
    ]
    sources = [
        f"- {name}: {SOURCES[TRAINERS[name].project]} {result['commit']}, with "
        + ", ".join(result["versions"])
        for name, result in results.items()
    ]
    head = HEAD.format(
        steps=STEPS,
        norm=NORM,
        bounds="\n".join(bounds),
        share=SHARE,
        sources="\n".join(sources),
    )
    return head + "".join(lines(name, result) for name, result in results.items())
