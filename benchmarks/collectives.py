"""What jamp adds to the collectives of a sharded step: counts and bytes in the HLO.

    python -m benchmarks.collectives                  # 8 fake CPU devices
    python -m benchmarks.collectives --devices 512 --layers 1 --width 512 --rows 512

A float16 MLP with `--layers` residual blocks (two kernels and two biases each) and Adam
is compiled for a mesh in each layout, once plain and once with `dynamic_loss_scale` and
`jamp.step`. The counts are from one device's compiled program, and bytes are those of a
collective's result. Nothing runs, so the counts do not depend on the machine. They do
depend on the backend, since XLA joins collectives differently on each:
`benchmarks.targets --chips` compiles for GPUs and TPUs.
"""

import jax

from benchmarks import _harness, tables
from shared.collectives import ROWS, measure

FULL = {"devices": 8, "layers": 12, "width": 256, "rows": 64}
SIZES = {
    "cpu": FULL,
    "gpu": FULL,  # as many as available
    "small": {"devices": 4, "layers": 1, "width": 16, "rows": 8},
}


def main():
    parser = _harness.parser(__doc__)
    args = _harness.parse_sizes(parser, SIZES)
    _harness.prepare(args, "benchmarks.collectives")
    jax.config.update("jax_num_cpu_devices", args.devices)
    sizes = {"layers": args.layers, "width": args.width, "rows": args.rows}
    wanted = ROWS[::8] if args.small else ROWS
    rows = [measure(*row, **sizes) for row in wanted]
    _harness.print_heading(f"{jax.device_count()} devices")
    tables.show("collectives", rows)
    _harness.save(args.json, rows)


if __name__ == "__main__":
    main()
