"""What the examples share. Nothing in here casts or scales.

An example gives `compare` a function that makes a `Training` for a precision and seed.
`compare` trains one for each, with a progress bar, checkpoints and TensorBoard logs in
`<out>/<precision>-seed<seed>/`. `report` shows the results side by side, and writes
them to `<out>/results.json`.
"""

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jamp

try:
    import orbax.checkpoint as ocp
    import rich
    from matplotlib.figure import Figure
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from tensorboardX import SummaryWriter
except ModuleNotFoundError as error:
    hint = 'pip install ".[examples]"'
    raise SystemExit(f"{error.name} is not installed. Run: {hint}") from None

FETCH_EVERY = 10  # steps whose metrics are copied to the host together
STYLES = {  # color and line width; the lines overlap
    "float32": ("#f0a33c", 3.5),
    "bfloat16": ("#4c9f70", 1.4),
    "float16": ("#1761b0", 1.4),
    "float8": ("#8e44ad", 1.4),
    "float8-rowwise": ("#d35400", 1.4),
    "float8-rowwise_with_gw_hp": ("#7f8c8d", 1.4),
}
PRECISIONS = "float32", "bfloat16", "float16"  # every example has these
RED = "#c8102e"
MAY_CHANGE = {"steps", "seeds", "precisions", "save_every", "out", "resume", "devices"}


class Training(NamedTuple):
    """What to train, and how. The state may be any pytree, such as NNX objects."""

    state: Any
    step: Callable[[Any, Any], tuple[Any, dict]]  # state, batch -> state, metrics
    batch: Callable[[int], Any]  # step number -> batch, the same when resumed
    evaluate: Callable[[Any], dict[str, Any]]  # state -> columns of the table


class Run(NamedTuple):
    """A finished training."""

    state: Any
    history: dict[str, np.ndarray]  # metric -> [steps]
    results: dict[str, float]
    seconds: float  # of this process, compilation included


def make_parser(
    doc: str | None,
    name: str,
    steps: int,
    precisions=("float32", "float16"),
    choices=PRECISIONS,
):
    """The flags that all examples have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(add_flag, parser)
    add("--steps", steps, "optimizer steps")
    add("--seeds", [0], "one run per seed; the table shows their spread", nargs="+")
    add("--precisions", precisions, "to compare", nargs="+", choices=choices)
    add("--growth-interval", 50, "finite steps until the loss scale grows")
    add("--save-every", 100, "steps between checkpoints")
    add("--out", Path("runs") / name, "folder for the picture, logs and checkpoints")
    text = "resume from the last checkpoints; otherwise runs with that name start over"
    parser.add_argument("--resume", action="store_true", help=text)
    return parser


def add_flag(parser, flag, default, text, **options):
    """Adds a flag with the default's type; the help shows the default."""
    many = options.get("nargs") == "+"
    first = default[0] if many else default
    kind = Path if isinstance(first, Path) else type(first)
    if isinstance(first, int) and first > 0:
        kind = positive
    shown = " ".join(map(str, default)) if many else default
    text = f"{text} (default: {shown})"
    parser.add_argument(flag, type=kind, default=default, help=text, **options)


def positive(text):
    """An integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def compare(args, make: Callable[[str, int], Training]) -> dict[tuple[str, int], Run]:
    """Trains once for each precision and seed."""
    args.seeds, args.precisions = map(
        list, map(dict.fromkeys, (args.seeds, args.precisions))
    )
    if args.resume and not [*args.out.glob("*-seed*/checkpoints/*/")]:
        raise SystemExit(f"--resume: there is no checkpoint in {args.out}.")
    text, live = TextColumn("{task.description}"), TextColumn("{task.fields[live]}")
    runs = {}
    with Progress(text, BarColumn(12), MofNCompleteColumn(), live) as progress:
        tasks = {
            (precision, seed): progress.add_task(
                f"{precision} seed {seed}", total=args.steps, live=""
            )
            for precision, seed in itertools.product(args.precisions, args.seeds)
        }
        for (precision, seed), task in tasks.items():
            folder = args.out.absolute() / f"{precision}-seed{seed}"
            show = functools.partial(progress.update, task)
            check_flags(folder, args)
            try:
                training = make(precision, seed)
                runs[precision, seed] = train(training, folder, args, show)
            except KeyboardInterrupt:
                raise SystemExit("Stopped. To continue, add --resume.") from None
    return runs


def check_flags(folder, args):
    """Refuses to resume a run with other flags; without `--resume`, starts over."""
    flags = {k: v for k, v in vars(args).items() if k not in MAY_CHANGE}
    flags = json.loads(json.dumps(flags, default=str))
    path = folder / "flags.json"
    if not args.resume:
        shutil.rmtree(folder, ignore_errors=True)
    elif path.exists():
        for key, value in json.loads(path.read_text()).items():
            if flags[key] != value:
                flag = "--" + key.replace("_", "-")
                raise SystemExit(
                    f"--resume: {folder} began with {flag} {value}; got {flags[key]}."
                )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(flags))


def train(training: Training, folder: Path, args, show) -> Run:
    """Trains to the last step, from the first or from the latest checkpoint."""
    start = time.perf_counter()
    leaves, treedef = jax.tree.flatten(training.state)
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        first, earlier = manager.latest_step() or 0, {}
        if first > args.steps:
            raise SystemExit(f"--resume: {folder} is at step {first}; raise --steps.")
        if first:
            target = ocp.args.Composite(
                state=ocp.args.StandardRestore(leaves), history=ocp.args.JsonRestore()
            )
            restored = manager.restore(first, args=target)
            leaves, earlier = restored["state"], restored["history"]
            show(completed=first)
        state = jax.tree.unflatten(treedef, leaves)

        writer = SummaryWriter(str(folder), purge_step=first)
        on_row = functools.partial(log_row, writer, show)
        history = jamp.debug.History(every=FETCH_EVERY, on_row=on_row, start=first)
        try:
            for step in range(first, args.steps):
                state, metrics = training.step(state, training.batch(step))
                history.append(metrics)
                if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                    save(manager, step + 1, state, joined(earlier, history))
        finally:  # after Ctrl-C as well: log what the device has computed
            history.fetch()
            writer.close()

    results = {key: float(x) for key, x in training.evaluate(state).items()}
    seconds = time.perf_counter() - start
    return Run(state, joined(earlier, history), results, seconds)


def log_row(writer, show, step, row):
    """Logs to TensorBoard, which cannot show the infinite norm of a skipped step."""
    for key, value in row.items():
        if math.isfinite(value):
            writer.add_scalar(f"train/{key}", value, step)
    scale = f"2^{math.log2(row['loss_scale']):.0f}"
    live = f"loss {row['loss']:.3f} scale {scale} skipped {row['skipped_steps']}"
    show(completed=step + 1, live=live)


def save(manager, step, state, history):
    """Saves the state and all metrics so far, while training continues."""
    lists = {key: values.tolist() for key, values in history.items()}
    parts = ocp.args.Composite(
        state=ocp.args.StandardSave(jax.tree.leaves(state)),
        history=ocp.args.JsonSave(lists),
    )
    manager.save(step, args=parts)


def joined(earlier, history):
    """Joins the metrics from before and after the run was resumed."""
    later = dict(history)
    return {
        key: np.array([*earlier.get(key, ()), *later.get(key, ())])
        for key in earlier | later
    }


def report(args, runs, metric="loss", title="Training loss", log_scale=False):
    """Prints a table, mean ± standard deviation over the seeds, and draws a picture."""
    results = {precision: by_seed(runs, precision) for precision in args.precisions}
    table = Table(caption="Times include compilation.")
    for column in ("run", *next(iter(results.values())), "seconds"):
        table.add_column(column, justify="right")
    for precision, row in results.items():
        seconds = [run.seconds for (name, _), run in runs.items() if name == precision]
        table.add_row(precision, *map(mean_and_deviation, [*row.values(), seconds]))
    rich.print(table)
    path = args.out / "training.png"
    draw(runs, path, metric, title, log_scale)
    about = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "processor": platform.processor() or platform.machine(),
        "cpus": str(os.cpu_count()),
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
        "steps": args.steps,
    }
    document = json.dumps({"run": about, "results": results}, indent=2)
    (args.out / "results.json").write_text(document + "\n")
    print(f"Curves: {path}. Logs: tensorboard --logdir {args.out}")


def by_seed(runs, precision):
    """Column -> the value of each seed."""
    group = [run for (name, _), run in runs.items() if name == precision]
    columns = {
        key: [float(run.results[key]) for run in group] for key in group[0].results
    }
    skipped = [int(run.history["found_inf"].sum()) for run in group]
    return columns | {"skipped steps": skipped}


def mean_and_deviation(values):
    mean = f"{np.mean(values):.4g}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.2g}"


def draw(runs, path, metric, title, log_scale):
    """Draws a metric of all runs, and below it the loss scale of the float16 runs."""
    figure = Figure(figsize=(9, 6), layout="constrained")  # Agg: needs no display
    top, bottom = figure.subplots(2, sharex=True)
    for (precision, seed), run in runs.items():
        color, width = STYLES[precision]
        values = run.history[metric]
        window = max(1, min(25, len(values) // 10))
        smooth = np.convolve(values, np.ones(window) / window, "valid")
        centers = np.arange(len(smooth)) + (window - 1) / 2
        first = seed == min(s for p, s in runs if p == precision)
        label = precision if first else None
        top.plot(centers, smooth, color=color, linewidth=width, label=label)
        if precision == "float16":
            scale = run.history["loss_scale"]
            skips = run.history["found_inf"].astype(bool).nonzero()[0]
            bottom.step(range(len(scale)), scale, where="post", color=color)
            bottom.plot(skips, scale[skips], "x", color=RED)
    top.set(title=title, yscale="log" if log_scale else "linear")
    bottom.set(title="Float16 loss scale; x: a skipped step", xlabel="step")
    bottom.set_yscale("log", base=2)
    top.legend(frameon=False)
    for axes in (top, bottom):
        axes.margins(x=0.01)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
