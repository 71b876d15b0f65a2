"""Would the suite notice a fault? Plants faults in a copy of jamp, and runs it there.

Each fault is one change to jamp's source. The suite then runs on the copy, in a
separate process, as `python -m parity --only PART --case CASE`. A fault counts as
caught if a case differs from torch. A copy that does not even run would prove nothing.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from .result import Result

TITLE = "Planted faults"
ROOT = pathlib.Path(__file__).parent.parent
_VERDICT = re.compile(r"^(\d+) cases, (\d+) not as expected$", re.MULTILINE)


class Fault(NamedTuple):
    """A change to jamp's source, and the part of the suite that must notice it.

    Attributes:
      name: what the change breaks.
      file: the file in `jamp/`.
      before: the text to replace, which occurs once.
      after: the text to put in its place.
      part: the part of the suite to run.
      case: runs the cases of that part whose names contain this.
    """

    name: str
    file: str
    before: str
    after: str
    part: str
    case: str

    def explains(self, first: str) -> bool:
        """Whether the first case that differs does so because of this fault."""
        return bool(first) and "raised" not in first


_RULE = "_scaling/rule.py"
_FLOAT8 = "_autocast/low_precision.py"
_FLOAT8_GRADIENTS = "_autocast/float8.py"
FAULTS = (
    Fault(
        "the scale grows one step late",
        _RULE,
        "successes == _int32",
        "state.growth_tracker == _int32",
        "scale",
        "interval: growth_interval=3, seed=11",
    ),
    Fault(
        "gradients are unscaled in float16",
        "_scaling/arithmetic.py",
        "return _times(_times(wide, inverse.inverse), inverse.shift)",
        "half = jnp.asarray(wide, jnp.float16)\n"
        "        half = _times(_times(half, inverse.inverse), inverse.shift)\n"
        "        return jnp.asarray(half, wide.dtype)",
        "scale",
        "interval: growth_interval=2, seed=11",
    ),
    Fault(
        "infs are looked for after the product with the inverse scale",
        "_scaling/grad_scaler.py",
        "selected,\n                    self._all_finite,",
        "selected, lambda scaled: self._all_finite("
        "arithmetic.unscale_as_before(scaled, inverse)),",
        "scale",
        "overflow in the product: init_scale=7.88860905e-31, growth_interval=100, "
        "seed=86",
    ),
    Fault(
        "the scale's product is formed in float32",
        _RULE,
        "factor = factor if is_traced(factor) else np.float64(factor)",
        "return x * jnp.asarray(factor, jnp.float32)",
        "scale",
        "growth_factor=1.1, backoff_factor=0.7, growth_interval=3",
    ),
    Fault(
        "a key of the state dict has another name",
        "_scaling/grad_scaler.py",
        '"_growth_tracker": state',
        '"growth_tracker": state',
        "behaviors",
        "save",
    ),
    Fault(
        "softmax is in the list of float16",
        "_autocast/ops.py",
        '"jax.nn.softmax": Row(FLOAT32, "softmax")',
        '"jax.nn.softmax": Row(LOWER, "softmax")',
        "ops",
        "softmax.int: jax.nn.softmax, float16",
    ),
    Fault(
        "a tracker that is past the interval grows the scale",
        _RULE,
        "successes == _int32",
        "successes >= _int32",
        "scale",
        "interval changed: growth_interval=3, seed=61",
    ),
    Fault(
        "the scale grows to infinity",
        _RULE,
        "grow & jnp.isfinite(grown)",
        "grow",
        "scale",
        "long run",
    ),
    Fault(
        "only the last optimizer's overflow counts",
        "_scaling/grad_scaler.py",
        "functools.reduce(jnp.logical_and, flags)",
        "flags[-1]",
        "scale",
        "n_optimizers=2, growth_interval=3, growth_factor=2, seed=70",
    ),
    Fault(
        "an overflow leaves the growth tracker alone",
        _RULE,
        "jnp.where(found_inf | grow, 0, successes)",
        "jnp.where(grow, 0, successes)",
        "scale",
        "interval: growth_interval=10, seed=11",
    ),
    Fault(
        "a skipped step takes the momentum away",
        "_scaling/wrapper.py",
        "lambda _: (params, scaled.held)",
        "lambda _: (params, jax.tree.map(jnp.zeros_like, scaled.held))",
        "scale",
        "interval: growth_interval=2, seed=10",
    ),
    Fault(
        "the gradient of a bias is not rounded to float16",
        "_autocast/bias.py",
        "return rounded(bias, dtype)",
        "return bias",
        "ops",
        "linear: flax(nn.Dense",
    ),
    Fault(
        "a scale of float8 uses half of the format's range",
        _FLOAT8,
        "EXPONENTS = {E4M3: 8,",
        "EXPONENTS = {E4M3: 7,",
        "float8",
        "cast: float32 to E4M3, whole array",
    ),
    Fault(
        "the largest number of float8 counts as out of range",
        _FLOAT8,
        "ABOVE_1_75 = 0x1FFFFF",
        "ABOVE_1_75 = 0x200000",
        "float8",
        "cast: bfloat16 to E5M2, rows",
    ),
    Fault(
        "gradients are cast to E4M3 where it should be E5M2",
        _FLOAT8_GRADIENTS,
        "dtype = E4M3 if self.is_rowwise else E5M2",
        "dtype = E4M3",
        "float8",
        "product: tensorwise, whole numbers",
    ),
    Fault(
        "a product's gradients have one scale for an array, not for rows",
        _FLOAT8_GRADIENTS,
        'return dims.free if self.recipe == "rowwise" else dims.of_an_entry',
        "return dims.of_an_entry",
        "float8",
        "product: rowwise, outliers, 96x192x128, seed 4",
    ),
)
CASES = {fault.name: fault for fault in FAULTS}


def plant(fault: Fault, folder: pathlib.Path) -> None:
    """Copies jamp, the suite and what it shares, and plants the fault in the copy.

    Raises:
      ValueError: the text to replace does not occur exactly once.
    """
    for name in ("jamp", "parity", "shared"):
        shutil.copytree(ROOT / name, folder / name)
    path = folder / "jamp" / fault.file
    source = path.read_text(encoding="utf-8")
    if source.count(fault.before) != 1:
        raise ValueError(f"{fault.file} does not have {fault.before!r} once.")
    path.write_text(source.replace(fault.before, fault.after), encoding="utf-8")


def suite(folder: pathlib.Path, part: str, case: str) -> tuple[int, str]:
    """Runs a part of the suite on the copy of jamp in a folder.

    Returns:
      How many of the cases are not as expected, and the first that is not.

    Raises:
      RuntimeError: there were no cases, or the copy did not run to the end.
    """
    command = [sys.executable, "-m", "parity", "--processes", "1"]
    command += ["--only", part, "--case", case]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    verdict = _VERDICT.search(done.stdout)
    if verdict is None or verdict[1] == "0":
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    wrong = [line for line in done.stdout.splitlines() if line.startswith("differs: ")]
    return int(verdict[2]), wrong[0].removeprefix("differs: ") if wrong else ""


def run(fault: Fault, device: str) -> Result:
    """Plants a fault and counts a mismatch if no case differs because of it."""
    with tempfile.TemporaryDirectory() as folder:
        plant(fault, pathlib.Path(folder))
        _, first = suite(pathlib.Path(folder), fault.part, fault.case)
    caught = fault.explains(first)
    where = "" if caught else f"{fault.name}: not noticed, but {first or 'nothing'}"
    figures = {
        "in": f"jamp/{fault.file}",
        "caught": "yes" if caught else "no",
        "the first case that differs": first,
    }
    missed = {"unnoticed": int(not caught)}
    return Result(fault.name, 1, missed, where, data=first, figures=figures)
