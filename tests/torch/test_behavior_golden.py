"""jamp against torch's runs and answers in the golden file; torch is not needed."""

import pytest

from parity import behaviors, golden
from tests.marks import mostly_nightly


@pytest.fixture(scope="module")
def recorded():
    return golden.load()


QUICK = (
    "plain, SGD: GradScaler in nnx.jit",
    "autocast, AdamW: dynamic_loss_scale",
    "clipping after unscale_: dynamic_loss_scale",
    "two models, two optimizers, one poisoned: GradScaler in nnx.jit",
    "saved and resumed: torch to jamp",
    "update(new_scale), a float: GradScaler",
    "error messages: GradScaler",
    "what is refused: GradScaler",
    "states: GradScaler",
)
NAMES = [
    name for name, case in behaviors.CASES.items() if case.side not in behaviors.LIVE
]


@pytest.mark.parametrize("name", mostly_nightly(NAMES, *QUICK))
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
