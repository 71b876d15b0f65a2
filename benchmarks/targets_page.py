"""The tables of `results/targets.md`, and a picture, from the committed figures.

    python -m benchmarks.targets_page

It reads `benchmarks/results/targets-*.json`, which `benchmarks.targets` writes, and
`newest-*.json`, which it writes with a newer JAX. The picture needs matplotlib.
"""

import json
from pathlib import Path

from benchmarks._harness import markdown
from benchmarks.devices import GPUS
from benchmarks.targets import TARGETS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "targets.md"
PICTURE = ROOT / "docs" / "images" / "targets.png"
NAMES = {"t4": "T4", "l4": "L4", "v5e": "TPU v5e", "v6e": "TPU v6e", "tpu7x": "TPU7x"}
TITLES = {
    "mlp": "MLP",
    "gpt2": "GPT-2",
    "resnet50": "ResNet",
    "vit": "ViT",
    "llama": "Llama",
    "moe": "mixture of experts",
}
DRAWN = ("float32", "bfloat16", "float16 + loss scale", "float8")
BY_HAND, SCALED = "float16 by hand", "float16 + loss scale"


def load(files="targets-*.json"):
    """The runs, the figures of each "target model", and those of each "N x target"."""
    runs, models, meshes = [], {}, {}
    for file in sorted(RESULTS.glob(files)):
        document = json.loads(file.read_text())
        runs.append(document["run"])
        for title, found in document["results"].items():
            (meshes if " x " in title else models)[title] = found
    return runs, models, meshes


def name_of(target):
    return NAMES.get(target, target.upper())


def names_of(title):
    target, model = title.split()
    return name_of(target), TITLES[model]


def targets_with(models, model):
    return [target for target in TARGETS if f"{target} {model}" in models]


def others(figures):
    """The products that did not get a dtype that was asked for."""
    return {d: n for d, n in figures["compiled"].items() if d not in figures["asked"]}


def cell(figures, value):
    """A figure, with the dtypes of the products that are not as asked for."""
    if "error" in figures:
        return "does not compile"
    listed = ", ".join(f"{count} {dtype}" for dtype, count in others(figures).items())
    return value(figures) + (f" ({listed})" if listed else "")


def by_target(models, model, value, among):
    """The table of a figure of a model: a row for each target, a column for each row
    of `benchmarks.targets`."""
    there = [target for target in targets_with(models, model) if target in among]
    if not there:
        return ""
    found = {target: models[f"{target} {model}"] for target in there}
    columns = list(next(iter(found.values()))["rows"])
    rows = [
        [name_of(t), *(cell(found[t]["rows"][c], value) for c in columns)]
        for t in there
    ]
    size = next(iter(found.values()))["size"]
    return f"`{size}`\n\n" + markdown([TITLES[model], *columns], rows)


def reads(models):
    """Bytes that loss scaling adds, in reads of the gradients: targets x models."""
    columns = [m for m in TITLES if targets_with(models, m)]
    rows = []
    for target in TARGETS:
        found = [models.get(f"{target} {model}") for model in columns]
        if any(found):
            rows.append([name_of(target), *(added(f) if f else "" for f in found)])
    return markdown(["reads", *(TITLES[m] for m in columns)], rows)


def added(found):
    scaled, plain = (found["rows"].get(row, {}) for row in (SCALED, "float16"))
    if "bytes" not in scaled or "bytes" not in plain:
        return ""
    return f"{(scaled['bytes'] - plain['bytes']) / found['gradient_bytes']:.2f}"


def meshes_tables(meshes):
    """A table for each kind of device."""
    kinds = dict.fromkeys(title.split(" x ")[1] for title in meshes)
    return "\n\n".join(
        meshes_table({t: rows for t, rows in meshes.items() if t.endswith(f" {kind}")})
        for kind in kinds
    )


def meshes_table(meshes):
    """A row for the ways to step that exchange the same, with their instructions."""
    by_count = sorted(meshes, key=lambda title: int(title.split()[0]))
    alike = {}
    for row in next(iter(meshes.values()), {}):
        there = [meshes[title][row] for title in by_count if row in meshes[title]]
        plains, scaleds = zip(*(pair.values() for pair in there), strict=True)
        dtypes = dict.fromkeys(d for plain in plains for d in plain["by_dtype"])
        pairs = list(zip(plains, scaleds, strict=True))
        cells = [
            listed(plain["count"] for plain in plains),
            ", ".join(f"{dtype} {megabytes(dtype, plains)}" for dtype in dtypes),
            listed(s["count"] - p["count"] for p, s in pairs),
            listed(s["bytes"] - p["bytes"] for p, s in pairs),
        ]
        layout, _, way = row.rpartition(", ")
        alike.setdefault((layout, *cells), []).append((way, scaleds))
    rows = [[*cells, *steps(ways)] for cells, ways in alike.items()]
    columns = ("collectives", "MB", "scaling adds", "bytes", "instructions", "CPU s")
    return markdown([" / ".join(by_count), *columns], rows)


def megabytes(dtype, plains):
    return listed(f"{plain['by_dtype'].get(dtype, 0) / 1e6:.2f}" for plain in plains)


def steps(ways):
    """The instructions of each way to step, and the most seconds of any."""
    alone = len(ways) == 1
    found = [
        (f"{way}: " if alone else "") + listed(x["instructions"] for x in scaleds)
        for way, scaleds in ways
    ]
    columns = zip(*(scaleds for _, scaleds in ways), strict=True)
    most = listed(f"{max(x['seconds'] for x in column):.0f}" for column in columns)
    return [", ".join(found), most]


def listed(values):
    """A figure for each number of chips, or one if all are the same."""
    values = list(map(str, values))
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def differs(old, new):
    """Whether a row moves other bytes, by more than 1 %, or has other products."""
    if "error" in old or "error" in new:
        return True
    return abs(new["bytes"] / old["bytes"] - 1) > 0.01 or others(new) != others(old)


def newest(runs, models):
    """What a newer JAX makes of some of the models."""
    newer_runs, newer, newer_meshes = load("newest-*.json")
    if not newer:
        return ""
    old, new = (f"JAX {found[0]['jax']}" for found in (runs, newer_runs))
    pairs = {
        (title, row): (models[title]["rows"][row], figures)
        for title, found in newer.items()
        for row, figures in found["rows"].items()
    }
    changed = [(key, pair) for key, pair in pairs.items() if differs(*pair)]
    alike = {}  # the precisions that move from the same to the same
    for (title, row), pair in changed:
        cells = tuple(cell(figures, moved) for figures in pair)
        alike.setdefault((names_of(title), cells), []).append(row)
    rows = [[*names, ", ".join(of), *cells] for (names, cells), of in alike.items()]
    parts = [
        f"### On {new}",
        f"With Flax {newer_runs[0]['flax']} and optax {newer_runs[0]['optax']}, of "
        f"{len(pairs)} rows, {len(changed)} move other bytes, by more than 1 %, or "
        "have other products:",
        markdown(["GB", "model", "precision", old, new], rows, text=3),
        meshes_tables(newer_meshes),
    ]
    return "\n\n".join(filter(None, parts))


def moved(figures):
    return f"{figures['bytes'] / 1e9:.2f}"


def small_gpt2(models):
    """The example in the text of the page."""
    rows = []
    for target in ("t4", "a100"):
        found = [models[f"{target} gpt2"]["rows"][row] for row in DRAWN[:3]]
        for title, key in (("memory at its peak", "peak_bytes"), ("moved", "bytes")):
            cells = [f"{figures[key] / 1e9:.1f} GB" for figures in found]
            rows.append([f"{name_of(target)}, {title}", *cells])
    return markdown(["a training step of a small GPT-2", *DRAWN[:3]], rows)


def text(runs, models, meshes):
    """All tables, as Markdown."""
    cycles = lambda figures: f"{figures['cycles'] / 1e6:.3f}"
    first = runs[0]
    dates = sorted({run["date"] for run in runs})
    parts = [
        f"Compiled {' and '.join(dates)} with JAX {first['jax']}, Flax {first['flax']} "
        f"and optax {first['optax']}. Each file of `benchmarks/results` has its "
        "command.",
        "### GB moved on GPUs",
        *(by_target(models, model, moved, GPUS) for model in TITLES),
        "### Millions of estimated cycles on TPUs",
        *(
            by_target(models, model, cycles, set(TARGETS) - set(GPUS))
            for model in TITLES
        ),
        "### What loss scaling adds",
        reads(models),
    ]
    if meshes:
        parts += ["### Many chips", meshes_tables(meshes)]
    parts.append(newest(runs, models))
    return "\n\n".join(part for part in parts if part)


def draw(models):
    """The MLP's bytes by target and precision."""
    from matplotlib.figure import Figure

    targets = [t for t in targets_with(models, "mlp") if t in GPUS]
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    colors = ("#b0bec5", "#5c6bc0", "#e65100", "#2e7d32")
    for index, (row, color) in enumerate(zip(DRAWN, colors, strict=True)):
        heights = [
            models[f"{target} mlp"]["rows"][row]["bytes"] / 1e9 for target in targets
        ]
        places = [place + 0.2 * (index - 1.5) for place in range(len(targets))]
        axes.bar(places, heights, 0.18, label=row, color=color)
    axes.set_xticks(range(len(targets)), map(name_of, targets))
    axes.set_ylabel("GB moved by a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


START, END = "<!-- made by benchmarks.targets_page -->\n", "<!-- end -->\n"


def written():
    """The page with its tables."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{text(*load())}\n\n{END}{after}"


def main():
    PAGE.write_text(written())
    draw(load()[1])


if __name__ == "__main__":
    main()
