"""Whether `behaviors` would see a difference: controls for its comparison and data.

The cases themselves run in `python -m parity`.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jamp._scaling import arithmetic, rule

from . import behaviors, behaviors_api, golden
from .behaviors import CASES, RUNS, Case, compare
from .behaviors_table import (
    FLOAT16_TOLERANCE,
    HANDOVER,
    JIT,
    OPTAX,
    STEPS,
    Record,
    Reference,
)

pytest.importorskip("torch")

from . import behaviors_torch

PLAIN = CASES[f"plain, SGD: {OPTAX}"]


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {name: behaviors_torch.reference(b, "cpu") for name, b in RUNS.items()}


def changed(record: Record, field: str, index: Any, change: Any) -> Record:
    array = getattr(record, field).copy()
    array[index] = change(array[index])
    return record._replace(**{field: array})


CHANGES = {
    "scale": ((20,), lambda x: np.nextafter(x, np.float32(np.inf))),
    "tracker": ((20,), lambda x: x + 1),
    "skipped": ((20, 0), np.logical_not),
    "loss": ((20,), lambda x: x * np.float32(1 + 2e-6)),
    "params": ((20, 0, 70), lambda x: np.nextafter(x, np.float32(np.inf))),
}


@pytest.mark.parametrize("field", Record._fields)
def test_one_wrong_value_is_counted_and_named(field, references):
    torch = references[PLAIN.behavior.name]
    index, change = CHANGES[field]
    result = compare(PLAIN, torch, changed(torch.record, field, index, change))
    assert result.mismatches == dict.fromkeys(Record._fields, 0) | {field: 1}
    assert result.where == f"step 20: {field} differs"
    assert result.compared == STEPS * (4 + 144)


@pytest.mark.parametrize(
    "name, tolerance",
    [("plain, AdamW", 1e-6), ("autocast, AdamW", FLOAT16_TOLERANCE)],
)
def test_the_tolerance_is_of_the_largest_of_the_leaf(name, tolerance, references):
    case, torch = CASES[f"{name}: {OPTAX}"], references[name]
    largest = np.abs(torch.record.params[5, 0, 64:72]).max()
    for share, mismatches in ((0.9, 0), (1.1, 1), (np.inf, 1), (np.nan, 1)):
        move = lambda x, by=share * tolerance * largest: x + by
        moved = changed(torch.record, "params", (5, 0, 66), move)
        assert compare(case, torch, moved).mismatches["params"] == mismatches


def test_a_run_that_is_taken_up_is_compared_with_the_end(references):
    case = CASES["saved and resumed: torch to jamp"]
    torch = references[case.behavior.name]
    part = Record(*(array[HANDOVER:] for array in torch.record))
    assert not compare(case, torch, part).differs
    early = Record(*(array[HANDOVER - 1 : -1] for array in torch.record))
    assert compare(case, torch, early).differs


def late(state, found_inf, config):
    """Grows a step late, as flax's DynamicScale does."""
    later = dataclasses.replace(config, growth_interval=config.growth_interval + 1)
    return update(state, found_inf, later)


def float32(x, factor):
    return x * np.float32(factor)


update = rule.update
FAULTS = {
    "grows a step late": (rule, "update", late, "plain, SGD"),
    "float32 product": (
        rule,
        "_float64_product",
        float32,
        "clipping of scaled gradients",
    ),
    "nothing is checked": (
        arithmetic,
        "all_finite",
        lambda *_, **__: np.True_,
        "plain, SGD",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("side", [JIT, OPTAX])
def test_a_fault_in_jamp_is_seen(fault, side, references, monkeypatch, request):
    module, name, wrong, behavior = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    jax.clear_caches()  # drop programs compiled without the fault, and then with it
    request.addfinalizer(jax.clear_caches)
    case, torch = CASES[f"{behavior}: {side}"], references[behavior]
    found = behaviors.run_jamp(RUNS[behavior], side, None)
    assert compare(case, torch, found).differs


def test_a_wrong_answer_is_seen():
    probe = behaviors_api.PROBES[0]
    case = Case(probe, behaviors_api.SCALER)
    answers = probe.ask(behaviors_api.Driver)
    wrong = answers | {"step twice, text": "step() again."}
    assert not behaviors.compare_answers(case, answers, answers).differs
    assert behaviors.compare_answers(case, answers, wrong).mismatches == {"answers": 1}
    assert behaviors.compare_answers(case, answers, {}).differs


def test_a_stale_golden_file_is_seen(references):
    result = compare(PLAIN, references["plain, SGD"], references["plain, SGD"].record)
    made = behaviors.golden([result])
    assert golden.differences(made, made) == []
    assert golden.differences({}, made) == sorted(made)
    for name in made:
        old = made | {name: made[name].copy()}
        old[name].flat[0] += 64 if name.endswith("loss") else 1  # bits
        assert golden.differences(old, made) == [name]


def test_the_runs_show_what_they_are_for(references):
    for name, torch in references.items():
        record, behavior = torch.record, RUNS[name]
        scales = record.scale
        assert np.isfinite(scales).all() and (scales >= 2.0**-126).all()
        if not behavior.enabled or behavior.overwrite:
            assert not record.skipped.any()
            assert not np.isfinite(record.params[-1]).all()
            continue
        assert record.skipped.any(0).all(), name  # each optimizer
        assert not record.skipped.all(1).all(), name
        assert (np.diff(scales) > 0).any() and (np.diff(scales) < 0).any(), name
        assert np.isfinite(record.params).all(), name
        assert not np.array_equal(record.params[0], record.params[-1])
    most = references["growth that must not overflow"].record.scale.max()
    assert most * np.float64(16) > np.finfo(np.float32).max
