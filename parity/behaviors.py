"""GradScaler step by step: the behaviors that torch's own tests cover.

A case pairs a behavior with the part of jamp that shows it: a training run of 64 steps
from `behaviors_table`, or a probe from `behaviors_api`, with the number of its answers.
torch is imported only where it runs, so jamp can be compared with the golden file on a
machine without torch.

After every step the bits of the scale, the growth tracker, the skipped flags, the loss
and every parameter are compared. Parameters must be equal bit for bit where the
arithmetic is exact, elsewhere within 1e-6 of the largest of their leaf, and under
autocast within 2^-10, one unit in the last place of float16. Losses must agree to 1e-6,
under autocast to 2^-10. The names of torch's tests are without the prefix `test_`.

- `dynamic_loss_scale` wraps one optimizer and has no state to set, so two optimizers,
  `update(new_scale)` and anything after `unscale_` are compared with `GradScaler`
  alone. Where `GradScaler` has a setter, a new wrapper takes over the old state.
- In bfloat16 `dynamic_loss_scale` keeps unscaled gradients in float32, where torch
  rounds them to bfloat16. If the scale is a power of two, both give the same.
- On CUDA torch multiplies an array in half precision by the scale rounded to the
  array's dtype, in which 65536 is inf for float16. jamp does as torch does on a CPU,
  where the product alone is rounded. On CUDA torch does not unscale bfloat16 gradients.
- These have no counterpart: sparse gradients (JAX's are dense), parameters whose `grad`
  is `None` (JAX gives zeros, and `wrt` leaves parameters out), optimizers that unscale
  gradients themselves (`grad_scaler_pass_itself`), several devices in one process, and
  `step` before the first `scale`, since jamp's scale exists from the start.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from . import behaviors_jamp, devices
from .behaviors_api import DRIVERS, PROBES, Answers, Probe
from .behaviors_table import (
    BEHAVIORS,
    HANDOVER,
    JAMP_TO_JAMP,
    JAMP_TO_TORCH,
    JIT,
    LEAVES,
    LIVE,
    OPTAX,
    STEPS,
    TOLERANCE,
    TORCH_TO_JAMP,
    TORCH_TO_TORCH,
    Behavior,
    Record,
    Reference,
    Saved,
)
from .result import Result
from .trajectory import bits

TITLE = "GradScaler, behavior by behavior"
PREFIX = "behavior/"
GOLDEN_ROWS = range(15, STEPS, 16)  # steps after which the file has the parameters


class Case(NamedTuple):
    """A behavior and the part of jamp that shows it."""

    behavior: Behavior | Probe
    side: str

    @property
    def name(self) -> str:
        return f"{self.behavior.name}: {self.side}"


RUNS = {behavior.name: behavior for behavior in BEHAVIORS}
CASES = {
    case.name: case
    for behavior in (*BEHAVIORS, *PROBES)
    for case in (Case(behavior, side) for side in behavior.sides)
}


def run(case: Case, device: str) -> Result:
    behavior, side = case
    from . import behaviors_torch

    if isinstance(behavior, Probe):
        answers, found = behaviors_torch.answers(behavior, device)
        return compare_answers(case, answers, found | behavior.ask(DRIVERS[side]))
    if behavior.bfloat16 and device != devices.CPU:
        return _refused(case, lambda: behaviors_torch.reference(behavior, device))
    place = devices.of_torch(device)
    torch = behaviors_torch.reference(behavior, place)
    resume = lambda saved: behaviors_torch.Run(behavior, saved, place).run(HANDOVER)
    if side == TORCH_TO_TORCH:
        found = resume(torch.saved)
    elif side == JAMP_TO_TORCH:
        first, saved = _first_part(behavior)
        found = first.then(resume(saved))
    else:
        found = run_jamp(behavior, side, torch.saved)
    return compare(case, torch, found)


def compare_with(case: Case, golden: Mapping[str, np.ndarray]) -> Result:
    """Runs jamp's side of a case and compares it with a golden file.

    Raises:
      KeyError: the file lacks the case.
      ValueError: the case ends in torch and so needs it.
    """
    behavior, side = case
    if side in LIVE:
        raise ValueError(f"{case.name} needs torch")
    if isinstance(behavior, Probe):
        recorded = golden[f"{PREFIX}{behavior.name}/answers"].tolist()
        answers = dict(line.split("\t") for line in recorded)
        return compare_answers(case, answers, behavior.ask(DRIVERS[side]))
    torch = unpack(behavior, golden)
    return compare(case, torch, run_jamp(behavior, side, torch.saved))


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    with (
        jax.default_matmul_precision("float32"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@_settings()
def run_jamp(behavior: Behavior, side: str, saved: Saved | None) -> Record:
    """jamp's part of a run: all steps, or those that follow a saved state."""
    if side == OPTAX:
        return behaviors_jamp.run_optax(behavior)
    if side == TORCH_TO_JAMP:
        return behaviors_jamp.Run(behavior, JIT, saved).run(HANDOVER)
    if side == JAMP_TO_JAMP:
        first, saved = _first_part(behavior)
        return first.then(behaviors_jamp.Run(behavior, JIT, saved).run(HANDOVER))
    return behaviors_jamp.Run(behavior, side).run()


@_settings()
def _first_part(behavior: Behavior) -> tuple[Record, Saved]:
    first = behaviors_jamp.Run(behavior, JIT)
    return first.run(0, HANDOVER), first.save()


def _refused(case: Case, run: Callable[[], Reference]) -> Result:
    """The result of a case that torch on CUDA must refuse."""
    try:
        run()
        where = f"{case.name}: torch runs it on CUDA"
    except NotImplementedError:
        where = ""
    mismatches = dict.fromkeys(Record._fields, 0) | {"refused": int(bool(where))}
    figures = _figures(case) | {"parameters": "torch on CUDA refuses"}
    return Result(case.name, 1, mismatches, where, "", {}, case.behavior.name, figures)


def _figures(case: Case) -> dict[str, str]:
    return {"torch's tests": ", ".join(case.behavior.tests), "in jamp": case.side}


def compare(case: Case, torch: Reference, found: Record) -> Result:
    behavior = case.behavior
    assert isinstance(behavior, Behavior)
    differ, where = differences(behavior, torch, found)
    _, expected, other = torch.beside(found)
    equal = np.array_equal(bits(expected.params), bits(other.params))
    limit = "2^-10" if behavior.autocast else "1e-6"
    figures: dict[str, Any] = _figures(case) | {
        "skipped": int(torch.record.skipped.sum()),
        "parameters": "equal" if equal else f"within {limit}",
    }
    if differ["params"].any():
        figures["parameters"] = "differ"
    return Result(
        case.name,
        sum(wrong.size for wrong in differ.values()),
        {name: int(wrong.sum()) for name, wrong in differ.items()},
        where,
        "",
        pack(behavior, torch),
        behavior.name,
        figures,
    )


def compare_answers(case: Case, torch: Answers, found: Answers) -> Result:
    wrong = [
        name
        for name in dict.fromkeys((*torch, *found))
        if torch.get(name) != found.get(name)
    ]
    where = ""
    if wrong:
        name = wrong[0]
        where = f"{name}: {found.get(name)}; torch: {torch.get(name)}"
    lines = np.array([f"{name}\t{answer}" for name, answer in torch.items()])
    return Result(
        case.name,
        len(torch),
        {"answers": len(wrong)},
        where,
        "",
        {f"{PREFIX}{case.behavior.name}/answers": lines},
        case.behavior.name,
        _figures(case),
    )


def differences(
    behavior: Behavior, torch: Reference, found: Record
) -> tuple[dict[str, np.ndarray], str]:
    """Which values of two runs differ, by field, and the first difference in words."""
    rows, expected, found = torch.beside(found)
    differ = {
        name: apart(behavior, name, getattr(expected, name), getattr(found, name))
        for name in ("scale", "tracker", "skipped", "loss", "params")
    }
    firsts = [
        (steps[np.argwhere(wrong)[0][0]], name)
        for name, wrong in differ.items()
        for steps in [rows if name == "params" else range(STEPS - len(wrong), STEPS)]
        if wrong.any()
    ]
    where = "step {}: {} differs".format(*min(firsts)) if firsts else ""
    return differ, where


def apart(
    behavior: Behavior, field: str, expected: np.ndarray, found: np.ndarray
) -> np.ndarray:
    """Where bits differ, and losses and parameters by more than their limit."""
    if field in ("tracker", "skipped"):
        return expected != found
    limit: Any = 0.0
    if field == "loss":
        limit = max(behavior.tolerance, TOLERANCE) * np.abs(expected)
    if field == "params":
        limit = np.zeros_like(expected)
        for part, _ in LEAVES.values():
            largest = np.abs(expected[..., part]).max(-1, keepdims=True)
            finite = np.where(np.isfinite(largest), largest, 0)
            limit[..., part] = behavior.tolerance * finite
    with np.errstate(invalid="ignore"):  # inf - inf
        close = np.abs(expected - found) <= limit
    close &= np.isfinite(expected) & np.isfinite(found)
    return (bits(expected) != bits(found)) & ~close


def pack(behavior: Behavior, torch: Reference) -> dict[str, np.ndarray]:
    """torch's run as arrays of the golden file."""
    record, saved = torch.record, torch.saved
    arrays = record._asdict() | {
        "scale": bits(record.scale),
        "tracker": record.tracker.astype(np.uint16),
        "loss": bits(record.loss),
        "params": bits(record.params[[torch.rows.index(row) for row in GOLDEN_ROWS]]),
    }
    if saved is not None:
        arrays |= {f"saved_{k}": np.array(v) for k, v in saved._asdict().items()}
    return {f"{PREFIX}{behavior.name}/{name}": a for name, a in arrays.items()}


def unpack(behavior: Behavior, golden: Mapping[str, np.ndarray]) -> Reference:
    """torch's run from a golden file.

    Raises:
      KeyError: the file lacks it.
    """
    start = f"{PREFIX}{behavior.name}/"
    arrays = {name: golden[f"{start}{name}"] for name in Record._fields}
    for name in ("scale", "loss", "params"):
        arrays[name] = arrays[name].view(np.float32)
    record = Record(**arrays)._replace(tracker=arrays["tracker"].astype(np.int32))
    saved = None
    if behavior.resumed:
        scaler, *arrays = (golden[f"{start}saved_{name}"] for name in Saved._fields)
        saved = Saved(str(scaler), *arrays)
    return Reference(record, GOLDEN_ROWS, saved)


def golden(results: Iterable[Result]) -> dict[str, np.ndarray]:
    arrays = {}
    for result in results:
        arrays |= result.data
    return arrays


def agree(name: str, committed: np.ndarray, made: np.ndarray) -> bool:
    """Whether two arrays of torch's are the same, as far as the processor allows.

    Losses and parameters need only agree as closely as jamp's must.
    """
    _, title, field = name.split("/")
    if committed.dtype != made.dtype or committed.shape != made.shape:
        return field == "answers" and committed.tolist() == made.tolist()
    if field in ("saved_params", "saved_momentum"):
        return True  # a resumed run starts from them, and has them to compare
    if field not in ("loss", "params"):
        return np.array_equal(committed, made)
    sides = (x.view(np.float32) for x in (committed, made))
    return not apart(RUNS[title], field, *sides).any()
