"""The table of other libraries: jamp's row is clean, theirs show the known defects."""

import functools
import importlib.util
from collections.abc import Mapping

import pytest

from .cases import CASES, Case

pytest.importorskip("torch")
peers = pytest.importorskip("parity.peers")
pytestmark = pytest.mark.suite  # they run the libraries again

KINDS = {case.kind for case in CASES}


@functools.cache
def run(name: str):
    return peers.run(name, "cpu")


def found(name: str):
    if importlib.util.find_spec(peers.MODULES[name]) is None:
        pytest.skip(f"{name} is not installed")
    return run(name).data


def test_jamp_has_no_mismatch_in_any_case():
    result = run("jamp")
    assert result.as_expected and not result.mismatches
    scaling = result.data.scaling
    assert scaling.cases == len(peers.SCALER_CASES) and not scaling.cannot
    assert scaling.mismatches.keys() == {*peers.FIELDS, "far"}
    assert not any(scaling.mismatches.values()) and not scaling.where


def test_each_kind_of_case_is_there():
    assert {case.kind for case in peers.SCALER_CASES} == KINDS


@pytest.mark.parametrize("name", peers.PEERS)
def test_cases_are_run_or_left_out_for_a_reason(name):
    scaling = found(name).scaling
    left_out = sum(scaling.cannot.values())
    assert scaling.cases + left_out == len(peers.SCALER_CASES)
    assert scaling.cases and all(scaling.cannot)


@pytest.mark.parametrize(
    ("name", "differing", "first"),
    [
        # It grows one step late.
        ("flax DynamicScale", "scale", "step 2000: scale 65536, torch 131072"),
        # `min_loss_scale` is 1 again after `lax.scan`.
        ("jmp", "scale", "scale 1, torch 0.5"),
        # Gradients are halved where the scale grows, from the first step on.
        ("mpx", "far", "step 2: parameters"),
        # The scale reaches inf, and all steps are skipped.
        ("Keras LossScaleOptimizer", "skipped", "parameters"),
        ("optax apply_if_finite", "skipped", "overflow in the product"),
    ],
)
def test_what_the_streams_show(name, differing, first):
    scaling = found(name).scaling
    assert scaling.mismatches[differing] and first in scaling.where


def mismatches(name: str, case: Case) -> Mapping[str, int]:
    torch = peers.reference(case, "cpu")
    run = peers.run_library(name, case, torch)
    return peers.compare(case, torch, run, case.steps).mismatches


@pytest.mark.parametrize("name", ["jmp", "Keras LossScaleOptimizer"])
def test_the_usual_case_agrees(name):
    # Control: the counts do not come from the way that a library is called.
    found(name)
    (case,) = (case for case in peers.SCALER_CASES if case.kind == "default")
    assert not any(mismatches(name, case).values())


def test_apply_if_finite_agrees_where_it_sees_the_same_overflows():
    name = "optax apply_if_finite"
    for case in peers.SCALER_CASES:
        if case.enabled and case.kind != "overflow in the product":
            assert not any(mismatches(name, case).values()), case.name


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("flax DynamicScale", [("4", "3"), ("4+0j", "4+8j")]),
        ("jmp", [("1", "4"), ("TypeError", "1024"), ("0", "1")]),
        ("mpx", [("1.5", "3"), ("inf", "3")]),
        ("Keras LossScaleOptimizer", [("inf", "127")]),
        ("optax apply_if_finite", [("8", "0")]),
        ("grampax", [("TypeError", "8"), ("NotImplementedError", "4")]),
    ],
)
def test_defects(name, seen):
    assert [(there, jamp) for _, there, jamp in found(name).defects] == seen


def test_every_library_has_a_defect_or_needs_none():
    assert peers.DEFECTS.keys() == peers.CASES.keys() - {"jamp", "plain JAX"}


def test_casting():
    jamp, plain = found("jamp").casting, found("plain JAX").casting
    for kind in ("lower precision", "float32"):
        agree, of = jamp[kind]
        assert agree == of > plain[kind][0]
    # `x.at[i].set(y)` and products of two matrices, where jamp differs on purpose.
    agree, of = jamp["promote"]
    assert of - 5 <= agree < of


@pytest.mark.parametrize("name", ["jmp", "mpx"])
def test_casting_inputs_alone_leaves_nothing_in_float32(name):
    agree, of = found(name).casting["float32"]
    assert agree == 0 and of > 100


def test_grampax_casts_back():
    assert found("grampax").casting == found("plain JAX").casting


def test_a_library_that_is_missing_is_a_row(monkeypatch):
    for name in ("jmp", "grampax"):
        monkeypatch.setitem(peers.MODULES, name, "a_module_that_nobody_has")
    results = [peers.run(name, "cpu") for name in ("jmp", "grampax")]
    assert all(r.as_expected and not r.compared for r in results)
    rows = [row for row in peers.section(results).splitlines() if "installed" in row]
    # jmp in both tables, grampax in that of casts.
    assert [row.split(" | ")[0] for row in rows] == ["| jmp", "| jmp", "| grampax"]
    heads = [row for row in peers.section(results).splitlines() if "| all |" in row]
    assert heads[0].count("|") == rows[-1].count("|")


def test_a_difference_of_jamp_is_not_as_expected(monkeypatch):
    right = peers.run_library

    def wrong(name, case, torch):
        fields = right(name, case, torch)
        return fields | {"skipped": ~fields["skipped"]}

    monkeypatch.setattr(peers, "SCALER_CASES", peers.SCALER_CASES[-1:])
    monkeypatch.setattr(peers, "run_library", wrong)
    result = peers.run("jamp", "cpu")
    assert result.mismatches == {"skipped": 2000} and not result.as_expected
    assert "skips true, torch false" in result.where


def test_the_section_is_the_same_each_time():
    results = [run("jamp"), peers.run("jamp", "cpu")]
    assert peers.section(results[:1]) == peers.section(results[1:])
