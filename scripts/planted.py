"""Would the tests notice an error? Plants some forty in copies of jamp, one by one.

Each is a slip that somebody could make: a condition that is turned round, a term or a
row that is missing, another constant. The quick tests of a row's files run first, then
the other quick tests of its wing and those that lie above the wings. The table at the
end says which test fails first. A row whose place in the code has changed is an error.

Usage: python scripts/planted.py [--ci] [--jobs N] [--at-least N] [NAME ...]

  NAME: a row; without one, all run.
  --ci: run what the quick tests miss with the other tests of CI, of the row's files.
  --jobs: rows that run side by side, by default as many as there are cores.
  --at-least: the status is 1 if the quick tests catch fewer than this, or than all of
    the rows that run.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

# A row is its name, the file in jamp/, test files, and the change. The row without a
# change is a control: its tests pass.
ROWS = """
control - scaling/test_optax.py autocast/test_sums.py policy/test_policy.py

inverse-shift _scaling/arithmetic.py scaling/test_loss_scale.py
- return _times(_times(wide, inverse.inverse), inverse.shift)
+ return _times(wide, inverse.inverse)

scalar-loss _scaling/arithmetic.py scaling/test_loss_scale.py
- return product if jnp.ndim(x) == 0 else lax.convert_element_type(product, dtype)
+ return lax.convert_element_type(product, dtype)

adopted-ceiling _scaling/rule.py scaling/test_adopted.py
- kept = jnp.clip(old, floor(config), highest)
+ kept = jnp.maximum(old, floor(config))

hysteresis-growth _scaling/rule.py scaling/test_loss_scale.py
- found_inf, after_overflow, jnp.where(grow, 0, tracker)
+ found_inf, after_overflow, tracker

floor-backoff _scaling/rule.py scaling/test_health.py
- shrunk = jnp.maximum(shrunk, floor(config))
+ shrunk = jnp.maximum(shrunk, np.float32(SMALLEST_SCALE))

floor-steps _scaling/rule.py scaling/test_health.py
- stuck = at_floor & (skipped | (state.floor_steps > 0))
+ stuck = at_floor & skipped

unscaled-check _scaling/grad_scaler.py scaling/test_grad_scaler.py
- selected, lambda _: found)
+ selected, lambda new: arithmetic.all_finite(new, self._axis_name))

loaded-bounds _scaling/grad_scaler.py scaling/test_grad_scaler.py
- self._set_scalars(rule.adopted(scalars_of(self), self._config))
+ self._set_scalars(scalars_of(self))

saved-hysteresis _scaling/grad_scaler.py scaling/test_grad_scaler.py
- self._config.hysteresis - tracker.item()
+ tracker.item()

disabled-skips _scaling/wrapper.py scaling/test_optax.py scaling/test_adopted.py
- return np.True_
+ return arithmetic.all_finite(grads, self.by.axis_name)

half-parameters _scaling/wrapper.py scaling/test_adopted.py
- params if as_they_are else widen(params),
+ params,

held-growth _scaling/wrapper.py scaling/test_growing_states.py
- self.held = grown(self.old, shapes and shapes[1])
+ self.held = self.old

held-parameters _scaling/step.py scaling/test_checked_is_used.py
- return held(finite, (new_params, new_state), (params, opt_state))
+ return new_params, held(finite, new_state, opt_state)

master-ties _scaling/master_form.py scaling/test_remainder.py
- nearest = (pattern + np.int32(0x8000)) >> np.int32(16)
+ nearest = (pattern + np.int32(0x7FFF)) >> np.int32(16)

master-near-zero _scaling/master_weights.py scaling/test_master_weights.py
- target = jnp.where(target == 0, moved, target)
+ target = jnp.where(moved == 0, moved, target)

master-form _scaling/state_types.py scaling/test_remainder.py
- return kept if same else keep(master_of(kept, param), like.dtype)
+ return kept

retry-at-floor _scaling/retry.py scaling/test_retry.py
- flags.append(new.found_inf & moved)
+ flags.append(new.found_inf)

retry-attempts _scaling/retry.py scaling/test_retry.py
- again = is_worth_another(held, new) & (count + 1 < at_most)
+ again = is_worth_another(held, new) & (count < at_most)

trial-of-steps _scaling/trials.py scaling/test_proof.py
- new.found_inf | (skipped > 0) | (new.loss_scale < tried.loss_scale),
+ new.found_inf | (new.loss_scale < tried.loss_scale),

retry-counts-all _scaling/retry.py scaling/test_retry.py
- found_inf = new.found_inf
+ found_inf = jnp.bool_(True)

narrowed-state _scaling/state_types.py scaling/test_checkpoints.py
- is_wider = given != dtype and np.can_cast(given, dtype)
+ is_wider = given != dtype

asked-before _scaling/trials.py scaling/test_retry.py
- recent_skips=typed_as(fresh, scale.recent_skips),
+ recent_skips=typed_as(scale.recent_skips | fresh, scale.recent_skips),

mean-divides-last _scaling/mean.py scaling/test_eight_bits.py
- summed = lax.psum(leaf / lax.axis_size(axes), axes)
+ summed = lax.psum(leaf, axes) / lax.axis_size(axes)

eight-bit-feedback _scaling/eight_bits.py scaling/test_eight_bits.py
- means = [mean + lost for mean, lost in zip(means, carried, strict=True)]
+ means = [mean for mean, _ in zip(means, carried, strict=True)]

segment-sum _autocast/ops.py autocast/test_sums.py
- jax.ops.segment_prod jax.ops.segment_sum jax.scipy.linalg.expm
+ jax.ops.segment_prod jax.scipy.linalg.expm

mean-row _autocast/ops.py autocast/test_sums.py
- "jax.numpy.mean": Row(STATISTIC),
+ "jax.numpy.mean": Row(KEEP),

huge-bias _autocast/bias.py autocast/test_autocast.py
- if number is not None and not fits(number, dtype):
+ if number is not None and number != number:

written-mask _autocast/bias.py autocast/test_masks.py
- is_mask = (bias <= np.float32(-largest)) & lax.is_finite(bias)
+ is_mask = (bias < np.float32(-1e8)) & lax.is_finite(bias)

norm-in-a-branch _autocast/nested.py autocast/test_batch_statistics.py
- trace.notes[value] = Note(result=all(note.result for note in notes))
+ trace.notes[value] = Note(result=any(note.result for note in notes))

kept-context _autocast/retracing.py autocast/test_tracing.py
- key = fixed, avals, _compat.tracing_context()
+ key = fixed, avals

rewriting-key _autocast/rewriting.py autocast/test_around.py
- key = (*given, outs, op.within, baked, trace.settings, place)
+ key = (*given, outs, op.within, baked, place)

scaled-copy-key _autocast/derivatives.py autocast/test_float8.py
- key = "scaled", dtype, axes
+ key = "scaled", dtype

scale-of-an-entry _autocast/scaled_float16.py autocast/test_experts.py
- axes = tuple(range(n, cotangent.ndim)) if n else None
+ axes = None

ended-region _autocast/name_stack.py autocast/test_called_later.py
- at > self.depth or (ended and at == self.depth and d != dtype)
+ at > self.depth or (ended and at > self.depth and d != dtype)

path-prefix _autocast/name_stack.py autocast/test_autocast.py
- return "/".join([self.prefix, *names] if self.prefix else names)
+ return "/".join(names)

first-of-rules _autocast/rules.py autocast/test_keys.py autocast/test_autocast.py
- for index, (_, test, decision) in enumerate(self.settings.rules):
+ for index, (_, test, decision) in reversed([*enumerate(self.settings.rules)]):

attention-bias _autocast/primitives.py autocast/test_own_attention.py
- op, params = op._replace(args=[*cast, *op.args[3:]]), op.params
+ op, params = op._replace(args=[trace.cast(x, dtype) for x in op.args]), op.params

library-losses _autocast/libraries.py autocast/test_library_products.py
- numpyro.distributions optax.losses
+ numpyro.distributions

carried-dtype _policy/module_call.py policy/test_with_policy.py
- like = lambda x, y: cast_floating(x, jnp.result_type(y))
+ like = lambda x, y: x

override-inside _policy/overrides.py policy/test_with_policy.py
- return bool(found(path)) and (path == "" or not found(around))
+ return bool(found(path))

stored-dtype _policy/overrides.py policy/test_linen.py
- starts = (path[:depth] for depth in range(len(path), -1, -1))
+ starts = (path[:depth] for depth in range(len(path) + 1))

flushed-tie _debug/grad_numbers.py debug/test_grad_reports.py
- return many((bits > 0) & (bits <= bits_of(limit)))
+ return many((bits > 0) & (bits < bits_of(limit)))

follows-from-an-inf _debug/nonfinite.py debug/test_nonfinite.py
- if any(not o.from_inf for o in ops):  # the others follow from these
+ if all(not o.from_inf for o in ops):

moved-overflow _debug/swallowed.py debug/test_swallowed.py
- (pairs if isinstance(kept, Loop) else inside.outputs)[:n_carry]
+ inside.outputs[:n_carry]

widened-and-cast-back _debug/explain.py debug/test_explain.py
- and not casts_after(user, op.used_by)  # a region casts it back
+ and True
"""
QUICK, CI = "not slow", "not nightly"
LIMIT = 3600  # seconds for the tests of a row
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py::.*?)(?: - .*)?$", re.MULTILINE)


class Row(NamedTuple):
    """An error, or the control: then `old` and `new` are empty."""

    name: str
    file: str  # in jamp/
    tests: tuple[str, ...]  # files, of which one is likely to fail
    old: str
    new: str

    @property
    def wing(self) -> str:
        return f"tests/{self.file.split('/')[0].removeprefix('_')}"


class Broken(Exception):
    """A row proves nothing: it cannot be planted, or the tests did not run."""


def rows() -> list[Row]:
    found = []
    for block in ROWS.strip().split("\n\n"):
        head, *change = block.splitlines()
        name, file, *tests = head.split()
        old, new = (
            "\n".join(line[2:] for line in change if line[0] == sign) for sign in "-+"
        )
        found.append(Row(name, file, tuple(f"tests/{t}" for t in tests), old, new))
    return found


def copy_tree(folder: Path) -> None:
    """Copies what git tracks, as it is now."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def plant(row: Row, folder: Path) -> None:
    path = folder / "jamp" / row.file
    source = path.read_text(encoding="utf-8")
    if (count := source.count(row.old)) != 1:
        raise Broken(
            f"the place is gone: jamp/{row.file} has {row.old!r} {count} times, not "
            "once. Plant the error where the code is now."
        )
    path.write_text(source.replace(row.old, row.new), encoding="utf-8")


def first_failure(folder: Path, marks: str, *selection: str) -> str:
    """The first test that fails, or "" if none does.

    Raises:
      Broken: pytest says something else than that tests passed or that one failed.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marks, *selection]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "500"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        raise Broken(f"the tests do not end in {LIMIT} seconds") from None
    if done.returncode == 0:
        return ""
    failed = FAILED.search(done.stdout)  # not of a file that cannot be imported
    if done.returncode != 1 or failed is None:
        last = "\n".join(f"{done.stdout}{done.stderr}".splitlines()[-30:])
        raise Broken(f"pytest ended with {done.returncode}:\n{last}")
    return failed[1]


def run(row: Row, folder: Path, in_ci: bool) -> tuple[str, bool]:
    """What caught the error, and whether the row is as it should be."""
    try:
        if not row.old:
            failed = first_failure(folder, QUICK, *row.tests)
            return failed or "green", not failed
        plant(row, folder)
        if failed := first_failure(folder, QUICK, *row.tests):
            return failed, True
        above = sorted(path.name for path in (folder / "tests").glob("test_*.py"))
        others = row.wing, *(f"tests/{name}" for name in above)
        left_out = (f"--ignore={path}" for path in row.tests)
        if failed := first_failure(folder, QUICK, *others, *left_out):
            return failed, True
        if in_ci and (failed := first_failure(folder, CI, *row.tests)):
            return f"missed, but in CI by {failed}", False
        return "missed", False
    except Broken as error:
        return f"ERROR: {error}", False
    finally:
        if row.old:
            shutil.copy2(ROOT / "jamp" / row.file, folder / "jamp" / row.file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*")
    parser.add_argument("--ci", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--at-least", type=int, default=34)
    args = parser.parse_args()
    known = {row.name: row for row in rows()}
    if unknown := {*args.name} - known.keys():
        parser.error(f"there is no row {', '.join(sorted(unknown))}; see ROWS")
    chosen = [known[name] for name in dict.fromkeys(args.name or known)]

    trees: SimpleQueue[Path] = SimpleQueue()  # one for each job

    def run_one(row: Row) -> tuple[str, bool]:
        start, tree = time.monotonic(), trees.get()
        result = run(row, tree, args.ci)
        trees.put(tree)
        print(f"{row.name}: {result[0]} ({time.monotonic() - start:.0f} s)", flush=True)
        return result

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        for job in range(args.jobs):
            copy_tree(tree := Path(name) / str(job))
            trees.put(tree)
        results = [*zip(chosen, pool.map(run_one, chosen), strict=True)]
    errors = [(row, ok) for row, (_, ok) in results if row.old]
    caught = sum(ok for _, ok in errors)
    print("\n| error | in | caught by |\n| --- | --- | --- |")
    for row, (by, _) in results:
        print(f"| {row.name} | {row.file} | {by.partition(chr(10))[0]} |")
    print(f"\n{caught} of {len(errors)} caught by the quick tests")
    is_broken = any(by.startswith("ERROR") for _, (by, _) in results)
    is_red = any(not ok for row, (_, ok) in results if not row.old)
    enough = caught >= min(args.at_least, len(errors))
    return int(is_broken or is_red or not enough)


if __name__ == "__main__":
    sys.exit(main())
