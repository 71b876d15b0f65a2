"""A training step in float8 beside bfloat16, by width: when does float8 pay?

    python -m benchmarks.float8_step --device gpu
    python -m benchmarks.float8_step                  # on the CPU, to try the code

A block of Llama and an MLP with four layers train with AdamW and donated state. Rows
take turns, one step each. "ratio" is a row's time over bfloat16's in the same round, as
the median over rounds with its standard error. A CPU has no float8 products, so its
times say nothing about a GPU. The losses of the first steps must be finite and near
bfloat16's. `benchmarks.float8_compile` finds out how long each row compiles.
"""

import functools
import gc
import os

from benchmarks import _harness
from benchmarks.model_sizes import MLP, Llama
from benchmarks.train_step import check_losses, first_losses

WIDTHS = {"gpu": (1024, 2048, 4096, 8192), "cpu": (128, 256), "small": (32,)}
SHAPES = {"gpu": (4, 2048), "cpu": (2, 64), "small": (1, 16)}  # batch, sequence
TOLERANCE = 0.05  # relative to the loss
ROWS = ("bfloat16", "float8", "rowwise", "rowwise_with_gw_hp")
AGAIN = "bfloat16, again"


def sizes(width, shape):
    """Name -> the model's size."""
    batch, sequence = shape
    return {
        "llama": Llama(batch, 1, width, sequence),
        "mlp": MLP(batch * sequence, 4, width),
    }


def builds():
    """Row -> the function that makes it, of those of `train_rows`."""
    from benchmarks.train_rows import OTHERS, PRECISIONS

    found = {name: (PRECISIONS | OTHERS)[name] for name in ROWS}
    return found | {AGAIN: found[ROWS[0]]}


def measure(size, flash, rounds):
    """Row -> its figures."""
    from benchmarks import models
    from benchmarks.train_step import Row

    batch = models.make_batch(size)
    rows = _harness.together(
        {
            name: functools.partial(Row, build, size, flash, batch)
            for name, build in builds().items()
        }
    )
    seconds = _harness.take_turns(rows, rounds)
    check_losses("float8", rows, ROWS[0], TOLERANCE)
    return {
        name: {
            **_harness.figures(seconds[name], seconds[ROWS[0]]),
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
                _harness.ratio_cell(row, table[AGAIN]),
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
    parser.add_argument("--widths", help="by commas; 1024,2048,4096,8192 on a GPU")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _harness.prepare(args, "benchmarks.float8_step")
    import jax

    _harness.print_heading()
    kind, flash = "small" if args.small else args.device, args.device == "gpu"
    rounds, results = args.rounds or (4 if args.small else 20), {}
    widths = map(int, args.widths.split(",")) if args.widths else WIDTHS[kind]
    for width in widths:
        for name, size in sizes(width, SHAPES[kind]).items():
            title = f"{name} {width}"
            results[title] = measure(size, flash, rounds)
            show(title, results[title])
            gc.collect()
            jax.clear_caches()
            _harness.save(args.json, results)  # after each model, in case time runs out


if __name__ == "__main__":
    main()
