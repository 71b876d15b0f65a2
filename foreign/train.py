"""`python -m foreign.train --source DIR`: other projects' models and trainers.

Trains each model in float32, in a float16 region and with a float16 policy, 20 steps
each, and compares the runs. Then it does the same with copies of whole trainers, which
it edits, in float16, bfloat16 and float8. DIR holds the checkouts that `SOURCES` of
`models` and `trainers` list. A result is kept in runs/foreign_models until `--again`.
Once all results of a kind exist, its part of docs/parity/foreign-models.md is written.
More packages are needed: `pip install clu einops jraph ml_collections wrapt` for the
models, and those that `trainers/__init__.py` names. Packages that only read data are
replaced by stand-ins (`models/source.py`).
"""

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .models import MODELS, SOURCES, Checkouts
from .models.training import STEPS, WAYS, Failed, Run, cosines, train
from .trainers import TRAINERS, compare

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "foreign_models"
PAGE = ROOT / "docs" / "parity" / "foreign-models.md"
LOSS, COSINE = 5e-4, 0.9999  # how near a run must be to float32's

HEAD = """# Models of other projects

After this page you know how models that other people wrote train under jamp. They come
from checkouts of their repositories, in small sizes and on made-up data. Each trains
for {steps} steps of Adam in float32, in `jamp.autocast(jnp.float16)` with loss scaling,
and with the policy "mixed_float16" (`with_policy`, in Equinox `Policy.wrap`). There are
two bounds. The loss of the first step differs from float32's by at most {loss:g} of it.
The cosine between the gradients of the first step and float32's, all parameters
together, is at least {cosine}. If a configuration names a dtype, it is set to `None`
or, where that is not possible, to float32.

- *half* is the share of the work in the matrix products of the forward pass that is
  done in float16.
- *skipped* is the number of steps that were skipped and repeated on the same batch.

`python -m foreign.train --source DIR` made the table on {date}, with
{versions}. The checkouts are:

{checkouts}

| model | from | way | half | first loss, apart | cosine | skipped | last loss | note |
|---|---|---|---:|---:|---:|---:|---:|---|
"""


def compared(runs: dict[str, Run | Failed]) -> dict[str, Any]:
    """The results of a model's runs, for its file."""
    plain, result = runs["float32"], {}
    for way, run in runs.items():
        if isinstance(run, Failed):
            result[way] = run._asdict() | {"ok": False}
            continue
        row: dict[str, Any] = {
            "share": run.share,
            "skipped": run.skipped,
            "losses": run.losses,
        }
        if way != "float32" and isinstance(plain, Run):
            first = plain.losses[0]
            cosine, worst = cosines(plain.gradients, run.gradients)
            row["apart"] = abs(run.losses[0] - first) / abs(first)
            row["cosine"], row["worst"] = cosine, worst
            row["ok"] = row["apart"] <= LOSS and cosine >= COSINE
        result[way] = row
    return result


def lines(name: str, result: dict[str, Any]) -> str:
    project = MODELS[name].project
    text, plain = "", result["float32"]
    for way in WAYS:
        row = result[way]
        if "error" in row:
            said = " ".join([row["error"], *row["notes"]]).replace("|", "/").split()
            text += f"| {name} | {project} | {way} | | | | | | {' '.join(said)} |\n"
        elif way == "float32":
            last = f"{plain['losses'][-1]:.4f}"
            text += f"| {name} | {project} | {way} | | | | | {last} | |\n"
        else:
            share = "" if row["share"] is None else f"{row['share']:.0%}"
            apart, cosine = (
                f"{row.get('apart', float('nan')):.1e}",
                row.get("cosine", 0),
            )
            verdict = "" if row.get("ok") else "**outside** "
            text += (
                f"| {name} | {project} | {way} | {share} | {apart} | {cosine:.6f} | "
                f"{row['skipped']} | {row['losses'][-1]:.4f} | {verdict}|\n"
            )
    return text


def page(results: dict[str, Any], checkouts: Checkouts) -> str:
    names = ("jax", "flax", "optax", "equinox")
    versions = ", ".join(f"{n} {version(n)}" for n in names)
    commits = "\n".join(
        f"- {where} {checkouts.commit(project)}" for project, where in SOURCES.items()
    )
    head = HEAD.format(
        steps=STEPS,
        loss=LOSS,
        cosine=COSINE,
        date=datetime.date.today(),
        versions=f"{versions}, Python {platform.python_version()}",
        checkouts=commits,
    )
    return head + "".join(lines(name, result) for name, result in results.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what does not have a result yet. 1 if something is outside the bounds."""
    parser = argparse.ArgumentParser(prog="python -m foreign.train")
    parser.add_argument("--source", type=Path, required=True, help="of the checkouts")
    known = (*MODELS, *TRAINERS)
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME")
    parser.add_argument("--again", action="store_true", help="run all of them again")
    options = parser.parse_args(arguments)
    checkouts = Checkouts(options.source.resolve())
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in options.only or known:
        file = file_of(name)
        if file.exists() and not (options.again or options.only):
            continue
        began = time.perf_counter()
        if name in TRAINERS:
            result = compare.results(name, checkouts)
            text = compare.lines(name, result)
        else:
            model = MODELS[name].make(checkouts)
            result = compared({way: train(model, way) for way in WAYS})
            text = lines(name, result)
        file.write_text(json.dumps(result, indent=1))
        print(f"{text}  {time.perf_counter() - began:.0f} s", flush=True)
    old, _, trainers = PAGE.read_text().partition(compare.TITLE)
    models, good = old, True
    if results := kept(MODELS):
        models = page(results, checkouts) + "\n"
        good = all(row.get("ok", True) for r in results.values() for row in r.values())
    if results := kept(TRAINERS):
        trainers = compare.part(results)
        good = good and not any(compare.wrong(r) for r in results.values())
    PAGE.write_text(models + compare.TITLE + trainers)
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(not good)


def file_of(name: str) -> Path:
    return RESULTS / f"{name.replace(' ', '_')}.json"


def kept(names: Iterable[str]) -> dict[str, Any]:
    """The results of all of them. If one is missing, it says so and gives nothing."""
    if missing := [name for name in names if not file_of(name).exists()]:
        print(f"this part of the page stays; missing results: {', '.join(missing)}")
        return {}
    return {name: json.loads(file_of(name).read_text()) for name in names}


if __name__ == "__main__":
    sys.exit(main())
