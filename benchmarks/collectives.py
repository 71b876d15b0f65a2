"""What jamp adds to the collectives of a sharded step: counts and bytes in the HLO.

    python -m benchmarks.collectives                  # 8 fake CPU devices
    python -m benchmarks.collectives --devices 512 --layers 1 --width 512 --rows 512
    python -m benchmarks.collectives --for-h100       # as benchmarks.gpu_programs

A float16 MLP with `--layers` residual blocks (two kernels and two biases each) and Adam
is compiled for a mesh in each layout, once plain and once with `dynamic_loss_scale` and
`jamp.step`. The counts are from one device's compiled program, and bytes are those of a
collective's result. Nothing runs, so the counts do not depend on the machine. They do
depend on the backend, since XLA joins collectives differently on each.
"""

import jax

from benchmarks import _harness, gpu_programs
from shared.collectives import ROWS, measure

FULL = {"devices": 8, "layers": 12, "width": 256, "rows": 64}
SIZES = {
    "cpu": FULL,
    "gpu": FULL,  # as many as available
    "small": {"devices": 4, "layers": 1, "width": 16, "rows": 8},
}


def print_table(rows):
    columns = ("layout", "mode", "collectives", "MB: float16", "float32")
    table = []
    for row in rows:
        count, _, by_dtype = row["plain"].values()
        megabytes = (f"{by_dtype.get(d, 0) / 1e6:.3f}" for d in ("f16", "f32"))
        extra = f"+{row['extra_count']}", f"+{row['extra_bytes']}"
        table.append((row["layout"], row["mode"], str(count), *megabytes, *extra))
    _harness.print_table((*columns, "extra", "bytes"), table)


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument("--for-h100", action="store_true", help="compile for H100s")
    args = _harness.parse_sizes(parser, SIZES)
    _harness.prepare(args, "benchmarks.collectives")
    jax.config.update("jax_num_cpu_devices", args.devices)
    sizes = {"layers": args.layers, "width": args.width, "rows": args.rows}
    wanted = ROWS[::8] if args.small else ROWS
    if args.for_h100:
        sizes["devices"] = gpu_programs.h100s(jax.device_count())
        with gpu_programs.as_on_a_gpu():
            rows = [measure(*row, **sizes) for row in wanted]
    else:
        rows = [measure(*row, **sizes) for row in wanted]
    facts = ["compiled for H100s"] if args.for_h100 else []
    _harness.print_heading(f"{jax.device_count()} devices", *facts)
    print_table(rows)
    _harness.save(args.json, rows)


if __name__ == "__main__":
    main()
