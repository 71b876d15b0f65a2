"""What runs with CUDA alone, in a rehearsal: torch on the CPU answers as CUDA does."""

from typing import Any

import jax
import pytest

from . import behaviors, behaviors_jamp, devices, ops, runner, scale
from .behaviors_table import HANDOVER, JAMP_TO_TORCH

pytest.importorskip("torch")

from . import behaviors_torch

BFLOAT16 = [c for c in behaviors.CASES.values() if getattr(c[0], "bfloat16", False)]
SCALE = [c for c in behaviors.CASES.values() if c[0].name == "what scale() returns"]
REHEARSAL = devices.REHEARSAL


@pytest.mark.parametrize("case", BFLOAT16, ids=lambda case: case.name)
def test_that_torch_refuses_bfloat16_is_expected_on_cuda(case, monkeypatch):
    result = behaviors.run(case, REHEARSAL)
    assert result.as_expected
    assert result.figures["parameters"] == "torch on CUDA refuses"
    monkeypatch.setattr(behaviors_torch, "reference", lambda *_: None)
    assert not behaviors.run(case, REHEARSAL).as_expected


@pytest.mark.parametrize("case", SCALE, ids=lambda case: case.name)
def test_an_array_in_half_precision_is_scaled_as_on_a_cpu(case, monkeypatch):
    on_cpu, on_cuda = (
        case.behavior.ask(behaviors_torch.DRIVERS[name])
        for name in (devices.CPU, REHEARSAL)
    )
    apart = {question for question in on_cpu if on_cpu[question] != on_cuda[question]}
    assert apart and all(map(case.behavior.as_on_cpu, apart))
    result = behaviors.run(case, REHEARSAL)
    assert result.as_expected and result.compared > len(on_cpu)
    # If CUDA answered as a CPU does, the page would be wrong, and it is seen.
    drivers = behaviors_torch.DRIVERS | {REHEARSAL: behaviors_torch.Driver}
    monkeypatch.setattr(behaviors_torch, "DRIVERS", drivers)
    assert behaviors.run(case, REHEARSAL).mismatches == {"answers": len(apart)}


def test_each_part_of_a_run_has_one_matmul_precision(monkeypatch):
    seen, run = [], behaviors_jamp.Run.run
    config: Any = jax.config

    def record(self, start=0, *rest):
        seen.append((start, config.jax_default_matmul_precision))
        return run(self, start, *rest)

    monkeypatch.setattr(behaviors_jamp.Run, "run", record)
    case = next(c for c in behaviors.CASES.values() if c.side == JAMP_TO_TORCH)
    assert isinstance(case.behavior, behaviors.Behavior)
    with jax.default_matmul_precision("tensorfloat32"):
        assert behaviors.run(case, REHEARSAL).as_expected
        behaviors.run_jamp(case.behavior, behaviors.JAMP_TO_JAMP, None)
    assert seen == [(0, "float32"), (0, "float32"), (HANDOVER, "float32")]


def test_the_long_run_is_shorter_and_not_kept():
    run = scale.run(scale.CASES[scale.LONG], REHEARSAL)
    assert run.as_expected and run.compared == 200_000
    first = next(name for name in scale.CASES if name != scale.LONG)
    results = [run, scale.run(scale.CASES[first], REHEARSAL)]
    assert "long_run" not in scale.golden(results)


# Many cases in one program.


def test_ops_of_one_dtype_share_programs_on_a_gpu():
    for names in (list(ops.CASES), list(ops.CASES)[:5]):
        assert runner.groups(ops, names, devices.CPU) == [[name] for name in names]
        shared = runner.groups(ops, names, devices.CUDA)
        assert sorted(name for group in shared for name in group) == sorted(names)
        for group in shared:
            assert len(group) <= runner.TOGETHER
            assert len({ops.CASES[name].half for name in group}) == 1
    assert all(len(g) == 1 for g in runner.groups(scale, list(scale.CASES), "cuda"))


NAMES = [c.name for c in ops.CASES.values() if c.op.base in ("mm", "exp", "add")]
HALF = [name for name in NAMES if name.endswith(" float16")]


def test_a_shared_program_finds_what_programs_of_their_own_find():
    together = runner.run_cases(ops.__name__, HALF, REHEARSAL)
    alone = [runner.run_cases(ops.__name__, [name], REHEARSAL)[0] for name in HALF]
    for (found, _), (expected, _) in zip(together, alone, strict=True):
        assert found[:5] == expected[:5]
        assert found.figures == expected.figures
        assert not found.differs and found.compared > 0


def test_one_case_that_raises_does_not_hide_the_others(monkeypatch, capfd):
    case = ops.CASES[HALF[0]]

    def jax_raises(*_):
        raise ValueError("no such op on a GPU")

    broken = case.op._replace(jax=jax_raises)
    monkeypatch.setitem(ops.OPS, case.title, broken)
    found = {r.case: r for r, _ in runner.run_cases(ops.__name__, HALF, REHEARSAL)}
    assert list(found) == HALF
    assert found.pop(HALF[0]).where.endswith("raised ValueError: no such op on a GPU")
    assert all(result.as_expected for result in found.values())
    assert "no such op on a GPU" in capfd.readouterr().err
