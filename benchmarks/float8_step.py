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
from benchmarks.train_step import check_losses, first_losses

WIDTHS = {"gpu": (1024, 2048, 4096, 8192), "cpu": (128, 256), "small": (32,)}
SHAPES = {"gpu": (4, 2048), "cpu": (2, 64), "small": (1, 16)}  # batch, sequence
TOLERANCE = 0.05  # relative to the loss


def models(width, shape, flash):
    """Name -> a model and the shape of its batch."""
    from benchmarks import float8_models as f8

    tokens = shape[0] * shape[1]
    return {
        "llama": (f8.Llama(width, flash=flash), (*shape, width)),
        "mlp": (f8.MLP(width), (tokens, width)),
    }


def measure(model, shape, rounds):
    """Row -> its figures."""
    from benchmarks import float8_models as f8
    from benchmarks.train_step import Row

    batch, rows = f8.make_batch(*shape), {}
    for name, region in f8.REGIONS.items():
        build = lambda *_, region=region: f8.training(model, region, shape)
        rows[name] = Row(build, None, None, batch)
    seconds = _harness.take_turns(rows, rounds)
    check_losses("float8", rows, f8.BFLOAT16, TOLERANCE)
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(seconds[name]),
            "ratio": _harness.ratio(seconds[name], seconds[f8.BFLOAT16]),
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
    size, flash = "small" if args.small else args.device, args.device == "gpu"
    rounds, results = args.rounds or (4 if args.small else 20), {}
    for width in WIDTHS[size]:
        for name, (model, shape) in models(width, SHAPES[size], flash).items():
            title = f"{name} {width}"
            results[title] = measure(model, shape, rounds)
            show(title, results[title])
            gc.collect()
            jax.clear_caches()
            _harness.save(args.json, results)  # after each model, in case time runs out


if __name__ == "__main__":
    main()
