"""`find_loss_scale` and `check_step` prove a step: wrong ones are named, right ones pass."""

import itertools
import re

import pytest

import jamp

from ..marks import mostly_nightly
from .wrong_steps import RIGHT, STYLES, WAYS, WRONG, call

CASES = list(itertools.product(STYLES, WAYS))
QUICK = [("pair", "jit"), ("TrainState", "pmap"), ("NNX", "scan")]
pytestmark = [
    pytest.mark.devices(4),
    pytest.mark.usefixtures("standard_promotion"),
]


def some(table):
    """Each step in each style and way, of which CI runs one."""
    rows = [(name, *case) for name in table for case in CASES]
    quick = [(name, *QUICK[i % 3]) for i, name in enumerate(table)]
    return mostly_nightly(rows, *quick)


@pytest.mark.parametrize("name, style, way", some(WRONG))
def test_a_wrong_step_is_named(name, style, way):
    if (made := call(style, WRONG[name], way)) is None:
        pytest.skip("no such step")
    with pytest.raises(ValueError) as error:
        jamp.find_loss_scale(*made)
    assert re.search(WRONG[name].message, str(error.value), re.DOTALL)


@pytest.mark.parametrize("name, style, way", some(RIGHT))
def test_a_right_step_passes(name, style, way):
    if (made := call(style, RIGHT[name], way)) is None:
        pytest.skip("no such step")
    jamp.find_loss_scale(*made)
