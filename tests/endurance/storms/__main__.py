"""`python -m tests.endurance.storms`: runs and counts storms."""

import argparse
import math
import time
import traceback
import warnings

import jax

from . import STORMS, rage

CASES = {
    "trees": 400,
    "calls": 25,
    "garbage": 100,
    "programs": 50,
}  # in one storm
SHARES = {"trees": 0.72, "calls": 0.06, "garbage": 0.14, "programs": 0.08}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=STORMS)
    parser.add_argument("--number", type=int)
    parser.add_argument("--batch", type=int, help="cases in one storm")
    args = parser.parse_args()
    warnings.simplefilter("error")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    failures = 0
    for kind in [args.kind] if args.kind else STORMS:
        begin, done = time.perf_counter(), 0
        batch = args.batch or CASES[kind]
        count = math.ceil(args.cases * SHARES[kind] / batch)
        for number in range(count) if args.number is None else [args.number]:
            try:
                done += rage(kind, args.seed, range(number, number + 1), batch)
            except Exception:
                failures += 1
                traceback.print_exc()
            if number % 50 == 49:
                jax.clear_caches()
        took = time.perf_counter() - begin
        print(f"{kind}: {done} cases passed in {took:.0f} s", flush=True)
    print(f"{failures} storms failed")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
