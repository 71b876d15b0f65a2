"""Wrong calls of every public function are refused, with a message that helps."""

import inspect
import operator
import re
from pathlib import Path

import pytest

import jamp

from .bad_input import CASES, PAGE, SETUP, matches, page

REFERENCE = Path(__file__).parent.parent / "docs" / "api.md"
TAKES_ANYTHING = {
    f"jamp.Policy.cast_to_{kind}" for kind in ("param", "compute", "output")
}
SETUP_CODE = compile(SETUP, "setup", "exec")

GOOD_CALLS = """
loss, wrapped_grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
jamp.step(tx, wrapped_grads, opt_state, params)
adam_tx.update(grads, adam_tx.init(params), params)
off_tx.update(grads, off_tx.init(params), params)
master_tx.update(grads, master_tx.init(half), half)
state.apply_gradients(grads=grads)
net.init(jax.random.key(0), x)
assert not scaler.step(optimizer, model, nnx_grads)
scaler.update()
history.append(jamp.metrics(opt_state))
jamp.debug.check(history)
"""

# What these refuse must leave the scaler as it was.
SETTERS = ("scaler.load_state_dict(", "scaler.set_", "scaler.update(")


@pytest.fixture
def names(standard_promotion):
    """What the calls may use."""
    namespace = {"__name__": "setup"}
    exec(SETUP_CODE, namespace)
    return namespace


def run(call, names):
    exec(compile(call, "call", "exec"), names)


def test_good_calls_after_the_same_setup(names):
    run(GOOD_CALLS, names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.call)
def test_a_wrong_call_is_refused(case, names):
    with pytest.raises(Exception) as caught:
        run(case.call, names)
    assert type(caught.value).__name__ == case.error
    text = str(caught.value).partition("\n-----")[0]  # JAX adds a note on tracebacks
    assert matches(case.message, text), text


@pytest.mark.parametrize(
    "call", [case.call for case in CASES if case.call.startswith(SETTERS)]
)
def test_a_refused_scaler_is_as_it_was(call, names):
    before = names["scaler"].state_dict()
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        run(call, names)
    assert names["scaler"].state_dict() == before


def named(name):
    return operator.attrgetter(name.removeprefix("jamp."))(jamp)


def methods_with_arguments(name):
    """The methods of a public class, written in jamp, that take something."""
    value = named(name)
    if not inspect.isclass(value):
        return
    for method, function in inspect.getmembers(value, inspect.isroutine):
        own = getattr(function, "__module__", None) or ""
        if method.startswith("_") or not own.startswith("jamp"):
            continue
        parameters = set(inspect.signature(function).parameters) - {"self"}
        if parameters:
            yield f"{name}.{method}"


def test_every_public_name_is_in_the_table():
    public = set(re.findall(r"^::: (jamp\S+)$", REFERENCE.read_text(), re.MULTILINE))
    public |= {method for name in public for method in methods_with_arguments(name)}
    known = {case.name for case in CASES}
    known |= {name.rpartition(".")[0] for name in known}
    assert public - TAKES_ANYTHING <= known
    assert all(callable(named(case.name)) for case in CASES)


def test_the_table_is_long_and_each_row_is_new():
    calls = [case.call for case in CASES]
    assert len(calls) == len(set(calls)) >= 250
    assert len({(case.name, case.message) for case in CASES}) >= 200


def test_the_page_is_up_to_date():
    """Else: `python -m tests.bad_input --write`."""
    assert PAGE.read_text() == page()


def test_messages_are_compared_as_a_whole():
    assert matches("a must be 1; got 2.", "a must be 1; got 2.")
    assert not matches("a must be 1; got 2.", "a must be 1; got 22.")
    assert not matches("a must be 1", "a must be 1; got 2.")
    assert matches("a ... b ... c", "a 1\n b 2 c")
    assert not matches("a ... b ... c", "a 1 2 c")
    assert not matches("a ... c", "b a c")
    assert matches("got f(rules=...)", "got f(rules=...)")
