"""Training with master weights beside float32 and naive float16.

    python -m benchmarks.master_weights

The problem is the one in shared/master_weights.py: a wide net on 256 points, for 100
steps on the whole set. float16 means float16 parameters and a float16 forward and
backward pass. Without a loss scale, the plain optax optimizer also works in float16.
Under `jamp.dynamic_loss_scale` it works in float32, and its updates are rounded to
float16. Nothing is timed.

    python -m benchmarks.master_weights --steps 10000

trains a small net in bfloat16 for so many steps, with full masters and with remainders:
loss scale, skipped steps and a checkpoint in the middle included. It counts the numbers
that differ between the two, and shows how much of the masters' path the parameters lose
without them.
"""

import numpy as np

from benchmarks import _harness
from shared.master_weights import (
    FORMS,
    STEPS,
    TRAINED,
    Forms,
    both_forms,
    curves,
    worst_difference,
)


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


def compare_forms(args):
    results = {}
    for name, inner in list(FORMS.items())[: 1 if args.small else None]:
        for seed in range(1 if args.small else args.seeds):
            found = both_forms(inner, args.steps, seed)
            results[f"{name}, seed {seed}"] = found._asdict()
            _harness.save(args.json, results)
    columns = ("", "numbers", "differ", "skipped steps", "ties", "lost without masters")
    rows = [
        (name, *(f"{row[k]:,}" for k in Forms._fields[:-1]), f"{row['lost']:.3f}")
        for name, row in results.items()
    ]
    _harness.print_table(columns, rows)


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument("--steps", type=int, help="of both forms in bfloat16 instead")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    _harness.prepare(args, "benchmarks.master_weights")
    _harness.print_heading()
    if args.steps:
        compare_forms(args)
        return
    optimizers = list(TRAINED.items())[: 1 if args.small else None]
    results = {name: summarize(curves(inner)) for name, inner in optimizers}
    for name, table in results.items():
        print_table(name, table)
    _harness.save(args.json, results)


if __name__ == "__main__":
    main()
