"""jamp against torch's runs and answers in the golden file; torch is not needed."""

import pytest

from parity import behaviors, golden
from tests.marks import cover


@pytest.fixture(scope="module")
def recorded():
    return golden.load()


KINDS = [  # one of each
    "clipping after unscale_: dynamic_loss_scale",
    "saved and resumed: torch to jamp",
    "what is refused: GradScaler",
    "states: GradScaler",
    "error messages: GradScaler",
    "plain, SGD: GradScaler in nnx.jit",
]
NAMES = [
    name for name, case in behaviors.CASES.items() if case.side not in behaviors.LIVE
]


@pytest.mark.every_release
@cover(quick=len(KINDS) - 1, ci=len(KINDS))
@pytest.mark.parametrize("name", dict.fromkeys(KINDS + NAMES))
@pytest.mark.usefixtures("standard_promotion")
def test_behavior_equals_torch(name: str, recorded):
    result = behaviors.compare_with(behaviors.CASES[name], recorded)
    assert not result.differs, result.where


def test_every_behavior_is_in_the_file(recorded):
    # Cases that end in torch have other sides, which are compared above.
    alone = {case.behavior.name for case in behaviors.CASES.values()} - {
        case.behavior.name
        for case in behaviors.CASES.values()
        if case.side not in behaviors.LIVE
    }
    assert not alone
    assert {case.behavior.name for case in behaviors.CASES.values()} == {
        name.split("/")[1] for name in recorded if name.startswith("behavior/")
    }
