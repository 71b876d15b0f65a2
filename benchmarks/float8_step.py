"""A training step in float8 beside bfloat16, by width: when does float8 pay?

    python -m benchmarks.float8_step --device gpu
    python -m benchmarks.float8_step                  # on the CPU, to try the code

A block of Llama and an MLP with four layers train with AdamW and donated state. Rows
take turns, one step each. "ratio" is a row's time over bfloat16's in the same round, as
the median over rounds. A CPU has no float8 products, so its times say nothing about a
GPU. The losses of the first steps must be finite and near bfloat16's.
"""

import gc
import os
import statistics

from benchmarks import _harness
from benchmarks.model_sizes import MLP, Llama
from benchmarks.train_step import check_losses, first_losses

WIDTHS = {"gpu": (1024, 2048, 4096, 8192), "cpu": (128, 256), "small": (32,)}
SHAPES = {"gpu": (4, 2048), "cpu": (2, 64), "small": (1, 16)}  # batch, sequence
TOLERANCE = 0.05  # relative to the loss


ROWS = ("bfloat16", "float8", "rowwise", "rowwise_with_gw_hp")


def sizes(width, shape):
    """Name -> the model's size."""
    batch, sequence = shape
    return {
        "llama": Llama(batch, 1, width, sequence),
        "mlp": MLP(batch * sequence, 4, width),
    }


def measure(size, flash, rounds):
    """Row -> its figures."""
    from benchmarks import models
    from benchmarks.train_rows import OTHERS, PRECISIONS
    from benchmarks.train_step import Row

    batch, builds = models.make_batch(size), PRECISIONS | OTHERS
    rows = {name: Row(builds[name], size, flash, batch) for name in ROWS}
    seconds = _harness.take_turns(rows, rounds)
    check_losses("float8", rows, ROWS[0], TOLERANCE)
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(seconds[name]),
            "ratio": _harness.ratio(seconds[name], seconds[ROWS[0]]),
            "temporary_megabytes": row.program.temporary_bytes / 1e6,
            "kernels": row.program.kernels,
            "losses": first_losses(row),
        }
        for name, row in rows.items()
    }


def show(title, table):
    _harness.print_table(
        (title, "time", "ratio", "temporaries", "kernels", "losses"),
        (
            (
                name,
                f"{row['milliseconds']:.2f} ms",
                f"{row['ratio']:.3f}",
                f"{row['temporary_megabytes']:,.0f} MB",
                str(row["kernels"]),
                " ".join(f"{loss:.4f}" for loss in row["losses"]),
            )
            for name, row in table.items()
        ),
    )


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, help="20, with --small 4")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _harness.prepare(args, "benchmarks.float8_step")
    import jax

    _harness.print_heading()
    kind, flash = "small" if args.small else args.device, args.device == "gpu"
    rounds, results = args.rounds or (4 if args.small else 20), {}
    for width in WIDTHS[kind]:
        for name, size in sizes(width, SHAPES[kind]).items():
            title = f"{name} {width}"
            results[title] = measure(size, flash, rounds)
            show(title, results[title])
            gc.collect()
            jax.clear_caches()
            _harness.save(args.json, results)  # after each model, in case time runs out


if __name__ == "__main__":
    main()
