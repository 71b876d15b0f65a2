"""GradScaler step by step: the behaviors that torch's own tests cover.

A case pairs a behavior with the part of jamp that shows it: a training run from
`behaviors_table`, or a probe from `behaviors_api`. torch is imported only where it
runs, so jamp can be compared with the golden file on a machine without torch.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    WIDTH,
    Behavior,
    Record,
    Reference,
    Saved,
)
from .result import Result, grouped, table
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


class Shown(NamedTuple):
    """What the section and the golden file need from a case."""

    arrays: dict[str, np.ndarray]  # torch's, for the golden file
    skipped: int = 0  # steps of an optimizer
    equal: float = 1.0  # share of the parameters that are equal bit for bit
    refused: bool = False  # whether torch cannot run the case on the device


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
    return Result(case.name, 1, mismatches, where, data=Shown({}, refused=True))


def compare(case: Case, torch: Reference, found: Record) -> Result:
    behavior = case.behavior
    assert isinstance(behavior, Behavior)
    differ, where = differences(behavior, torch, found)
    shown = Shown(
        pack(behavior, torch),
        int(torch.record.skipped.sum()),
        share_equal(torch, found),
    )
    return Result(
        case.name,
        sum(wrong.size for wrong in differ.values()),
        {name: int(wrong.sum()) for name, wrong in differ.items()},
        where,
        data=shown,
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
        data=Shown({f"{PREFIX}{case.behavior.name}/answers": lines}),
    )


def differences(
    behavior: Behavior, torch: Reference, found: Record
) -> tuple[dict[str, np.ndarray], str]:
    """Which values of two runs differ, by field, and the first difference in words."""
    rows, expected, found = torch.beside(found)
    of_loss = max(behavior.tolerance, TOLERANCE) * np.abs(expected.loss)
    limits = np.zeros_like(expected.params)
    for part, _ in LEAVES.values():
        largest = np.abs(expected.params[..., part]).max(-1, keepdims=True)
        finite = np.where(np.isfinite(largest), largest, 0)
        limits[..., part] = behavior.tolerance * finite
    differ = {
        "scale": _apart(expected.scale, found.scale),
        "tracker": expected.tracker != found.tracker,
        "skipped": expected.skipped != found.skipped,
        "loss": _apart(expected.loss, found.loss, of_loss),
        "params": _apart(expected.params, found.params, limits),
    }
    firsts = [
        (steps[np.argwhere(wrong)[0][0]], name)
        for name, wrong in differ.items()
        for steps in [rows if name == "params" else range(STEPS - len(wrong), STEPS)]
        if wrong.any()
    ]
    where = "step {}: {} differs".format(*min(firsts)) if firsts else ""
    return differ, where


def _apart(expected: np.ndarray, found: np.ndarray, limit: Any = 0.0) -> np.ndarray:
    """Where the bits of float32 values differ and, if finite, by more than a limit."""
    with np.errstate(invalid="ignore"):  # inf - inf
        close = np.abs(expected - found) <= limit
    close &= np.isfinite(expected) & np.isfinite(found)
    return (bits(expected) != bits(found)) & ~close


def share_equal(torch: Reference, found: Record) -> float:
    """The share of the parameters that are equal bit for bit."""
    _, expected, found = torch.beside(found)
    return float(np.mean(bits(expected.params) == bits(found.params)))


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
        arrays |= result.data.arrays
    return arrays


def stale(
    committed: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]
) -> list[str]:
    """Behaviors for which live torch gives other arrays than a golden file.

    Losses and parameters need only agree as closely as jamp's must, since their last
    bits depend on the processor.
    """
    found = []
    for behavior in (*BEHAVIORS, *PROBES):
        names = [n for n in made if n.startswith(f"{PREFIX}{behavior.name}/")]
        if not names:
            continue
        if not committed.keys() >= set(names):
            found.append(behavior.name)
        elif isinstance(behavior, Probe):
            if any(committed[n].tolist() != made[n].tolist() for n in names):
                found.append(behavior.name)
        else:
            old, new = unpack(behavior, committed), unpack(behavior, made).record
            params = np.zeros((STEPS, *new.params.shape[1:]), np.float32)
            params[list(GOLDEN_ROWS)] = new.params
            _, where = differences(behavior, old, new._replace(params=params))
            found += [f"{behavior.name}, {where}"] if where else []
    return found


_TEXT = """{runs} training runs of {steps} steps went through torch and jamp with \
the same weights, batches and settings. The model has two {width} x {width} layers and \
the loss is the mean squared error. At recorded steps an inf or nan enters the input, \
the loss or a scaled gradient. After every step the bits of the scale, the growth \
tracker, the skipped flags, the loss and every parameter were compared. Parameters \
must be equal bit for bit where the arithmetic is exact. Elsewhere they must agree \
within 1e-6 of the largest parameter of their leaf, or under autocast within 2^-10, \
one unit in the last place of float16. The last column says how many are equal bit for \
bit. Losses must agree to 1e-6, or under autocast to 2^-10. The rows after the runs \
are questions about the interface, with the number of answers compared.

{table}

{notes}"""

_NOTES = (
    "torch's tests are in `test_torch.py`, `test_cuda.py` and their siblings; the "
    "table drops the prefix `test_`. Those that train take four steps, beside an "
    "unscaled run.",
    "Exact runs round the parameters to multiples of 1/16 in the forward pass (with a "
    "gradient of 1) and use binary fractions throughout, so that no sum is rounded.",
    "In exact runs the growth factor is a power of 2 and the backoff factor matches "
    "it. In most others they are 1.1 and 0.7. The growth interval is 1 to 5.",
    "Under autocast the scale, the tracker and the skipped flags must still be equal. "
    "A gradient may be off by one unit in the last place of float16, at worst in the "
    "same direction at every step. Over a run a parameter moves about as far as the "
    "largest one is from zero, so the limit is 2^-10 of the largest.",
    "`torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm, which "
    "`optax.clip_by_global_norm` does not; here both sides use torch's formula. In "
    "optax, unscaled gradients are clipped inside the wrapper.",
    "AdamW has beta2 = 0.96875 and a weight decay of 2^-7. With torch's defaults optax "
    "and torch differ by more than 1e-6 even without a scaler: optax corrects the bias "
    "in float32, and torch rounds 1 - rate x decay before it multiplies.",
    "`dynamic_loss_scale` wraps one optimizer and has no state to set, so two "
    "optimizers, `update(new_scale)` and anything after `unscale_` are compared with "
    "`GradScaler` alone. Where `GradScaler` has a setter, a new wrapper takes over the "
    "old state. Gradients are summed by hand, because with `optax.MultiSteps` around "
    "or inside the wrapper overflows are checked for at other steps.",
    "In bfloat16 `dynamic_loss_scale` keeps unscaled gradients in float32, where torch "
    "rounds them to bfloat16. If the scale is a power of two, both give the same. "
    "It takes float16 gradients, which torch and `GradScaler` refuse.",
    "On CUDA torch multiplies an array in half precision by the scale rounded to the "
    "array's dtype, in which 65536 is inf for float16. jamp does as torch does on a "
    "CPU, where the product alone is rounded; on CUDA jamp's answers for such arrays "
    "are compared with the CPU's, and CUDA's with that product. On CUDA torch does not "
    "unscale bfloat16 gradients.",
    "torch checks its arguments with assertions. jamp raises `RuntimeError` with the "
    "same text for misuse, sometimes followed by advice, and `ValueError` with its own "
    "text for bad numbers. jamp's constructors refuse more: intervals below 1 and "
    "factors that are not finite.",
    "These have no counterpart: sparse gradients (JAX's are dense), parameters whose "
    "`grad` is `None` (JAX gives zeros; `wrt` leaves parameters out), optimizers that "
    "unscale gradients themselves (`grad_scaler_pass_itself`), several devices in one "
    "process, and `step` before the first `scale`, since jamp's scale exists from the "
    "start.",
)


def section(results: Sequence[Result]) -> str:
    """A table with a row for each behavior, and notes on it."""
    groups = grouped(results, lambda r: CASES[r.case].behavior.name).values()
    head = ["behavior", "torch's tests", "in jamp", "skipped:"]
    head += ["values compared:", "mismatches:", "parameters"]
    runs = sum(isinstance(CASES[r.case].behavior, Behavior) for r in results)
    failures = [f"- {r.case}: {r.where}." for r in results if r.where]
    return _TEXT.format(
        runs=runs,
        steps=STEPS,
        width=WIDTH,
        table=table(head, map(_row, groups)),
        notes="\n".join([*failures, *(f"- {note}" for note in _NOTES)]),
    )


def _row(results: Sequence[Result]) -> list[Any]:
    behavior = CASES[results[0].case].behavior
    is_run = isinstance(behavior, Behavior)
    equal = min(r.data.equal for r in results)
    return [
        behavior.name,
        ", ".join(f"`{test}`" for test in behavior.tests) or "-",
        ", ".join(CASES[r.case].side for r in results),
        f"{results[0].data.skipped}" if is_run else "-",
        sum(r.compared for r in results),
        sum(sum(r.mismatches.values()) for r in results),
        _parameters(behavior, equal, results) if is_run else "-",
    ]


def _parameters(behavior: Behavior, equal: float, results: Sequence[Result]) -> str:
    if any(r.data.refused for r in results):
        return "torch on CUDA refuses"
    if any(r.mismatches["params"] for r in results):
        return "differ"
    if equal == 1:
        return "equal"
    limit = "2^-10" if behavior.autocast else "1e-6"
    return f"within {limit}, {round(10 * equal) * 10}% equal"
