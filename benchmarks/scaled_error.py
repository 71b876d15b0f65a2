"""How wrong the gradients of twelve layers are in float16, bfloat16 and scaled float16.

    python -m benchmarks.scaled_error
    python -m benchmarks.scaled_error --picture docs/images/layers_apart.png

The layers are those of `shared/layers_apart.py`, and errors are measured against
float64. In plain float16 the loss is multiplied by the power of two that leaves the
fewest layers wrong.
"""

import os
from pathlib import Path

import numpy as np

from benchmarks import _harness

LOOKS = {
    "scaled float16": {"color": "#1761b0", "marker": "o"},
    "bfloat16": {"color": "#f5b971", "marker": "s"},
    "float16, best loss scale": {"color": "#c8102e", "marker": "X"},
}


def measure():
    """log2 of each layer's largest gradient, and the errors by row."""
    import jamp
    from shared import layers_apart as layers

    truth = layers.exact()
    scale, plain = layers.best_scale(truth)
    found = {
        name: layers.errors(layers.gradients(jamp.autocast(**how))(), truth)
        for name, how in layers.REGIONS.items()
        if name != "float16"
    }
    found["float16, best loss scale"] = plain
    sizes = [np.log2(np.abs(gradient).max()) for gradient in truth]
    return np.array(sizes), found, scale


def draw(path, sizes, found):
    from matplotlib.figure import Figure

    from shared.layers_apart import WRONG

    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    for name, errors in found.items():
        axis.plot(sizes, 100 * errors, lw=1.2, markersize=6, label=name, **LOOKS[name])
    axis.axhline(100 * WRONG, color="#888888", lw=0.8, ls="--")
    axis.set_yscale("log")
    axis.set_yticks(
        [0.01, 0.1, 1, 10, 100], ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"]
    )
    axis.set(xlabel="log2 of the layer's largest gradient", ylabel="error to float64")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument("--picture", type=Path, help="the PNG file to write")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", args.device.replace("gpu", "cuda"))
    sizes, found, scale = measure()
    _harness.print_heading(f"best loss scale of float16: 2**{np.log2(scale):.0f}")
    _harness.print_table(
        ("layer's largest gradient", *found),
        (
            (f"2**{size:.0f}", *(f"{errors[i]:.3%}" for errors in found.values()))
            for i, size in enumerate(sizes)
        ),
    )
    errors = {name: row.tolist() for name, row in found.items()}
    _harness.save(args.json, {"log2 of gradients": sizes.tolist(), **errors})
    if args.picture:
        draw(args.picture, sizes, found)


if __name__ == "__main__":
    main()
