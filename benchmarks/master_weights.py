"""Training with master weights beside float32 and naive float16.

    python -m benchmarks.master_weights

The problem is the one in shared/master_weights.py: a wide net on 256 points, for 100
steps on the whole set. float16 means float16 parameters and a float16 forward and
backward pass. Without a loss scale, the plain optax optimizer also works in float16.
Under `jamp.dynamic_loss_scale` it works in float32, and its updates are rounded to
float16. Nothing is timed.
"""

import numpy as np

from benchmarks import _harness
from shared.master_weights import STEPS, TRAINED, curves, worst_difference


def summarize(losses):
    reference = losses["float32"]
    return {
        kind: {
            "first": float(curve[0]),
            "last": float(curve[-1]),
            "worst difference": float(worst_difference(curve, reference)),
        }
        for kind, curve in losses.items()
    }


def print_table(name, table):
    print(f"\n{name}")
    rows = []
    for kind, row in table.items():
        worst = row["worst difference"]
        far = f"{100 * worst:.2f} %" if np.isfinite(worst) else "not finite"
        rows.append((kind, f"{row['first']:.4f}", f"{row['last']:.4f}", far))
    columns = ("parameters", "first loss", f"after {STEPS} steps", "worst difference")
    _harness.print_table(columns, rows)


def main():
    args = _harness.parser(__doc__).parse_args()
    _harness.prepare(args, "benchmarks.master_weights")
    _harness.print_heading()
    optimizers = list(TRAINED.items())[: 1 if args.small else None]
    results = {name: summarize(curves(inner)) for name, inner in optimizers}
    for name, table in results.items():
        print_table(name, table)
    _harness.save(args.json, results)


if __name__ == "__main__":
    main()
