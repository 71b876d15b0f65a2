"""Training with master weights beside float32 and naive float16.

    python -m benchmarks.master_weights

The problem is that of tests/test_master_weights.py: a wide net on 256 points, 100 steps
of the whole set. float16 means float16 parameters and a float16 forward and backward
pass. Without a loss scale the optimizer, optax's own, works in float16 as well; under
`jamp.dynamic_loss_scale` it works in float32 and its updates are rounded to float16.
"""

import sys

import jax
import numpy as np

from tests.test_master_weights import STEPS, TRAINED, curves, worst_difference


def print_table(name, losses):
    reference = losses["float32"]
    print(f"\n{name}\n")
    print(f"| parameters | first loss | after {STEPS} steps | worst difference |")
    print("|---|---:|---:|---:|")
    for kind, curve in losses.items():
        worst = worst_difference(curve, reference)
        far = f"{100 * worst:.2f} %" if np.isfinite(worst) else "not finite"
        print(f"| {kind} | {curve[0]:.4f} | {curve[-1]:.4f} | {far} |")


def main():
    print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}")
    for name, inner in TRAINED.items():
        print_table(name, curves(inner))


if __name__ == "__main__":
    main()
