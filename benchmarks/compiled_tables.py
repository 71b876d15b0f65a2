"""Tables of steps that are compiled for devices, and not run.

`benchmarks.tables` writes them into the pages. The figures are in the files of
`benchmarks/results` that `benchmarks.targets` writes: `full-*`, `targets-*`, and with a
newer JAX `newest-*`.

    python -m benchmarks.compiled_tables

draws the picture of the page on targets, which needs matplotlib.
"""

import json
from pathlib import Path

from benchmarks._harness import about, grid, markdown
from benchmarks.devices import GPUS
from benchmarks.targets import TARGETS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "targets.png"
BY_HAND, SCALED = "float16 by hand", "float16 + loss scale"
MODELS = {"gpt2": "GPT-2", "resnet50": "ResNet-50", "vit": "ViT-B/16"}
# The page on targets has smaller ones.
SMALLER = {"mlp": "MLP", "gpt2": "GPT-2", "resnet50": "ResNet", "vit": "ViT"}
SMALLER |= {"llama": "Llama", "moe": "mixture of experts"}
NAMES = {"t4": "T4", "l4": "L4", "v5e": "TPU v5e", "v6e": "TPU v6e", "tpu7x": "TPU7x"}
DRAWN = ("float32", "bfloat16", SCALED, "float8")
STEPS = {  # of a full size; the row that ratios are to
    **dict.fromkeys(("gpt2", "gpt2-triton", "resnet50", "vit"), BY_HAND),
    **dict.fromkeys(("mlp", "mlp-triton", "llama"), "bfloat16"),
}


# --- full sizes, for an H100


def step(results, base):
    """What a step of a full size becomes."""
    (found,) = results.values()
    first, lines = found["rows"][base], []
    for name, row in found["rows"].items():
        cells = [f"{row['bytes'] / 1e9:.2f}", f"{row['bytes'] / first['bytes']:.3f}"]
        for key in ("temporary_bytes", "peak_bytes"):
            cells += [f"{row[key] / 1e9:.2f}", f"{row[key] / first[key]:.3f}"]
        lines.append([name, str(row["kernels"]), *cells])
    sizes = ("GB moved", "ratio", "temporaries, GB", "ratio", "peak, GB", "ratio")
    return markdown([f"`{found['size']}`", "kernels", *sizes], lines)


def rows_of(documents, part):
    (found,) = documents[part]["results"].values()
    return found["rows"]


def summary(documents):
    """What jamp adds to the steps of three models, and what they save over float32."""
    parts = {said: f"full-h100-{name}" for name, said in MODELS.items()}
    if not documents.keys() >= {*parts.values()}:
        return ""
    ways = {"a policy": "jamp Policy", "autocast": "jamp.autocast"}
    ways = {said: f"{name} + dynamic_loss_scale" for said, name in ways.items()}
    figures = {"bytes moved": "bytes", "peak memory": "peak_bytes"}
    wanted = {
        f"{figure}, by {said}": (row, key, BY_HAND)
        for figure, key in figures.items()
        for said, row in ways.items()
    }
    row = "temporaries of autocast, against float32"
    wanted[row] = ways["autocast"], "temporary_bytes", "float32"

    def compared(part):
        rows = rows_of(documents, part)
        return lambda cell: f"{rows[cell[0]][cell[1]] / rows[cell[2]][cell[1]]:.3f}"

    columns = {said: compared(part) for said, part in parts.items()}
    made = grid("compiled for an H100, against float16 by hand", wanted, columns)
    return f"{made}\n\n{about(*(documents[part] for part in parts.values()))}"


def scaled(documents):
    """What scaled float16 costs beside plain float16."""
    if "full-h100-mlp-1024" not in documents:
        return ""
    own = ("scaled float16",)
    wanted = {
        "mlp-1024": ("MLP, 1024 wide", own),
        "mlp-4096": ("MLP, 4096 wide", own),
        "resnet50": (MODELS["resnet50"], own),
        "gpt2": (MODELS["gpt2"], ("float16 with XLA's attention", *own)),
    }
    lines = []
    for part, (said, rows) in wanted.items():
        found = rows_of(documents, f"full-h100-{part}")
        base = found["float16"]
        for row in ("float16", *rows):
            cells = [f"{said}, {row}", str(found[row]["ops"])]
            for key in ("bytes", "temporary_bytes"):
                ratio = found[row][key] / base[key]
                cells.append(f"{found[row][key] / 1e9:.2f}")
                cells.append("" if row == "float16" else f"{ratio:.2f}")
            lines.append(cells)
    sizes = ("GB moved", "ratio", "temporaries, GB", "ratio")
    made = markdown(["compiled for an H100", "StableHLO ops", *sizes], lines)
    return f"{made}\n\n{about(*(documents[f'full-h100-{n}'] for n in wanted))}"


# --- smaller ones, for all targets


def load(start="targets-", documents=None):
    """The runs, the figures of each "target model", and those of each "N x target"."""
    if documents is None:
        files = sorted(RESULTS.glob(f"{start}*.json"))
        documents = {path.stem: json.loads(path.read_text()) for path in files}
    runs, models, meshes = [], {}, {}
    for name, document in documents.items():
        if name.startswith(start):
            runs.append(document["run"])
            for title, found in document["results"].items():
                (meshes if " x " in title else models)[title] = found
    return runs, models, meshes


def name_of(target):
    return NAMES.get(target, target.upper())


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


def moved(figures):
    return f"{figures['bytes'] / 1e9:.2f}"


def by_target(models, model, value, among):
    """The table of a figure of a model: a row for each target, a column for each row
    of `benchmarks.targets`."""
    there = [target for target in targets_with(models, model) if target in among]
    if not there:
        return ""
    rows = {name_of(target): models[f"{target} {model}"]["rows"] for target in there}
    first = models[f"{there[0]} {model}"]
    columns = {c: lambda row, c=c: cell(row[c], value) for c in first["rows"]}
    return f"`{first['size']}`\n\n" + grid(SMALLER[model], rows, columns)


def reads(models):
    """Bytes that loss scaling adds, in reads of the gradients: targets x models."""
    columns = {
        said: lambda target, model=model: added(models.get(f"{target} {model}"))
        for model, said in SMALLER.items()
        if targets_with(models, model)
    }
    rows = {
        name_of(target): target
        for target in TARGETS
        if any(f"{target} {model}" in models for model in SMALLER)
    }
    return grid("reads", rows, columns)


def added(found):
    rows = found["rows"] if found else {}
    scaled, plain = (rows.get(row, {}) for row in (SCALED, "float16"))
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


def newest(documents):
    """What a newer JAX makes of some of the models."""
    (first, *_), models, _ = load(documents=documents)
    runs, newer, meshes = load("newest-", documents)
    if not newer:
        return ""
    old, new = (f"JAX {run['jax']}" for run in (first, runs[0]))
    pairs = {
        (title, row): (models[title]["rows"][row], figures)
        for title, found in newer.items()
        for row, figures in found["rows"].items()
    }
    changed = [(key, pair) for key, pair in pairs.items() if differs(*pair)]
    alike = {}  # the precisions that move from the same to the same
    for (title, row), pair in changed:
        target, model = title.split()
        cells = tuple(cell(figures, moved) for figures in pair)
        names = name_of(target), SMALLER[model]
        alike.setdefault((names, cells), []).append(row)
    rows = [[*names, ", ".join(of), *cells] for (names, cells), of in alike.items()]
    parts = [
        f"### On {new}",
        f"With Flax {runs[0]['flax']} and optax {runs[0]['optax']}, of "
        f"{len(pairs)} rows, {len(changed)} move other bytes, by more than 1 %, or "
        "have other products:",
        markdown(["GB", "model", "precision", old, new], rows, text=3),
        meshes_tables(meshes),
    ]
    return "\n\n".join(filter(None, parts))


def small_gpt2(documents):
    """The example in the text of the page on targets."""
    _, models, _ = load(documents=documents)
    if not models:
        return ""
    rows = {}
    for target in ("t4", "a100"):
        for title, key in (("memory at its peak", "peak_bytes"), ("moved", "bytes")):
            found = models[f"{target} gpt2"]["rows"]
            rows[f"{name_of(target)}, {title}"] = (found, key)
    columns = {
        name: lambda row, name=name: f"{row[0][name][row[1]] / 1e9:.1f} GB"
        for name in DRAWN[:3]
    }
    return grid("a training step of a small GPT-2", rows, columns)


def targets(documents):
    """All tables of the page on targets."""
    runs, models, meshes = load(documents=documents)
    if not models:
        return ""
    cycles = lambda figures: f"{figures['cycles'] / 1e6:.3f}"
    tpus = set(TARGETS) - set(GPUS)
    first = runs[0]
    dates = sorted({run["date"] for run in runs})
    parts = [
        f"Compiled {' and '.join(dates)} with JAX {first['jax']}, Flax {first['flax']} "
        f"and optax {first['optax']}. Each file of `benchmarks/results` has its "
        "command.",
        "### GB moved on GPUs",
        *(by_target(models, model, moved, GPUS) for model in SMALLER),
        "### Millions of estimated cycles on TPUs",
        *(by_target(models, model, cycles, tpus) for model in SMALLER),
        "### What loss scaling adds",
        reads(models),
        "### Many chips",
        meshes_tables(meshes),
        newest(documents),
    ]
    return "\n\n".join(part for part in parts if part)


def draw(models):
    """The MLP's bytes by target and precision."""
    from matplotlib.figure import Figure

    there = [t for t in targets_with(models, "mlp") if t in GPUS]
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    colors = ("#b0bec5", "#5c6bc0", "#e65100", "#2e7d32")
    for index, (row, color) in enumerate(zip(DRAWN, colors, strict=True)):
        heights = [models[f"{t} mlp"]["rows"][row]["bytes"] / 1e9 for t in there]
        places = [place + 0.2 * (index - 1.5) for place in range(len(there))]
        axes.bar(places, heights, 0.18, label=row, color=color)
    axes.set_xticks(range(len(there)), map(name_of, there))
    axes.set_ylabel("GB moved by a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw(load()[1])
