"""Calls and programs of other libraries in regions, where those are installed.

`make foreign` runs them all, each night. `docs/libraries.md` says what to write where a
call differs.
"""

import warnings
from importlib.util import find_spec

import pytest

from .compare import DTYPES, calls, compare
from .parts import names
from .programs import PROGRAMS, measure

pytestmark = pytest.mark.nightly
CALLS = [*calls()]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.cell)
def test_a_call_is_as_in_float32_except_for_its_faults(call):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = names(call.section)
    except ImportError as error:
        pytest.skip(str(error))
    found = compare(call, known)
    assert found.keys() == call.faults, found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_in_float32(name):
    """Its mean is at most three standard errors away, of float32's own seeds."""
    library = name.partition(" ")[0]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not measure(PROGRAMS[name], DTYPES)
