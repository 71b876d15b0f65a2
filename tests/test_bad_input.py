"""Wrong calls of every public function are refused, with a message that helps."""

import inspect
import operator
import re
from pathlib import Path

import pytest

import jamp

from .bad_input import (
    CASES,
    PAGE,
    RECORD,
    WRITES_THE_PAGES,
    after_setup,
    copies,
    first_message,
    message_of,
    names_argument,
    page,
    record,
    run,
)
from .first_errors import FIRST
from .marks import cover

REFERENCE = Path(__file__).parent.parent / "docs" / "api.md"
TAKES_ANYTHING = {
    f"jamp.Policy.cast_to_{kind}" for kind in ("param", "compute", "output")
}
TAKES_NOTHING = {"jamp.ScaledFloat16"}
OUT_OF_DATE = "A page is out of date: run `python -m tests.bad_input --write`."

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


@pytest.fixture(scope="module")
def prepared():
    """The set-up, which is run once."""
    return after_setup()


@pytest.fixture
def names(prepared, standard_promotion):
    """What the calls of one test may use and change."""
    return copies(prepared)


def values(names):
    scaler, optimizer, model = (names[n] for n in ("scaler", "optimizer", "model"))
    steps = [optimizer.step[...].item(), len(names["history"])]
    return [scaler.state_dict(), *steps, model.kernel[...].tolist()]


@pytest.mark.slow
def test_good_calls_after_the_same_setup(prepared, names):
    before = values(prepared)
    run(GOOD_CALLS, names)
    assert all(map(operator.ne, values(names), before))
    assert values(prepared) == before  # what a test changes is its own


@pytest.mark.parametrize("first", FIRST, ids=lambda first: first.title)
def test_a_first_error_is_met_and_its_cure_runs(first, prepared, names):
    first_message(first, names)
    assert bool(first.error) != bool(first.symptom)
    assert 2 <= first.right.count("\n") <= 4
    run(first.right, copies(prepared))


def test_the_jitted_cure_runs_when_it_is_called(names):
    (first,) = [first for first in FIRST if "def update" in first.right]
    run(first.right + "update(model, optimizer, scaler, nnx_grads)", names)
    assert names["optimizer"].step[...] == 1


def owner(case):
    """The public function or class that a wrong call belongs to."""
    name = case.name.removeprefix("jamp.").split(".")
    return ".".join(name[: 1 + (name[0] in ("debug", "linen", "nnx", "sharding"))])


COSTLY = """
debug.GradHistogram linen.dot_product_attention find_loss_scale debug.Calibration
debug.StepReport GradScaler retry linen.with_policy autocast calibrate
""".split()
OWNERS = sorted(
    {owner(case) for case in CASES}, key=lambda name: (name in COSTLY, name)
)


@cover(quick=len(OWNERS) - len(COSTLY))
@pytest.mark.parametrize("name", OWNERS)
def test_wrong_calls_are_refused(name, prepared, standard_promotion):
    failed = {}
    for case in (case for case in CASES if owner(case) == name):
        message = message_of(case, copies(prepared))
        if not names_argument(message, case.argument):
            failed[case.call] = message
    assert not failed


@pytest.mark.slow
@pytest.mark.skipif(not WRITES_THE_PAGES, reason="other messages than JAX 0.10's")
@pytest.mark.usefixtures("standard_promotion")
def test_the_pages_have_the_messages_of_this_version(prepared):
    first = [first_message(first, copies(prepared)) for first in FIRST]
    messages = [message_of(case, copies(prepared)) for case in CASES]
    assert PAGE.read_text() == page(first, messages), OUT_OF_DATE
    assert RECORD.read_text() == record(messages), OUT_OF_DATE


# Code in messages: the wrong call, what its message says, and a program with that.
ADVICE = {
    "jamp.step(clip_tx": (
        "jamp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), "
        "optimizer))",
        """
optimizer = optax.sgd(1.0)
tx = jamp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer))
loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, 100 * x)
new, _ = jamp.step(tx, grads, tx.init(params), params)
moved = optax.tree.norm(jax.tree.map(jnp.subtract, new, params))
assert abs(moved - 1) < 1e-3
""",
    ),
    "jamp.step(sam_tx": (
        "opaque_mode=False",
        """
sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=False)
tx = jamp.dynamic_loss_scale(sam)
new, opt_state = params, tx.init(params)
for _ in range(2):
    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(new, x)
    new, opt_state = jamp.step(tx, grads, opt_state, new)
assert jnp.all(new["w"] != params["w"])
""",
    ),
    "jamp.value_and_grad(loss_fn, optax.MultiSteps(tx": (
        "jamp.dynamic_loss_scale(optax.MultiSteps(optimizer, every_k_schedule=k))",
        """
optimizer, k = optax.sgd(0.1), 1
tx = jamp.dynamic_loss_scale(optax.MultiSteps(optimizer, every_k_schedule=k))
loss, grads = jamp.value_and_grad(loss_fn, tx.init(params))(params, x)
new, _ = jamp.step(tx, grads, tx.init(params), params)
assert jnp.all(new["w"] != params["w"])
""",
    ),
    "jamp.find_loss_scale(plain_step": (
        "jamp.value_and_grad(loss_fn, opt_state)",
        """
loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
state = jamp.find_loss_scale(retry_step, (params, opt_state), x)
assert jamp.loss_scale(state) > 1
""",
    ),
    "jamp.step(part_tx": (
        "optax.set_to_zero()",
        """
parts = {"a": optax.sgd(0.1), "b": optax.set_to_zero()}
inner = optax.multi_transform(parts, {"w": "a", "b": "b"})
tx = jamp.dynamic_loss_scale(inner)
loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
new, _ = jamp.step(tx, grads, tx.init(params), params)
assert jnp.all(new["w"] != params["w"]) and jnp.all(new["b"] == params["b"])
""",
    ),
    "scaler.update()": (
        "scaler.step(optimizer, model, grads)",
        """
grads, before = nnx_grads, model.kernel[...]
assert not scaler.step(optimizer, model, grads)
scaler.update()
assert jnp.all(model.kernel[...] != before)
""",
    ),
    "jamp.retry(donating": (
        "jax.jit(jamp.retry(step), donate_argnums=0)",
        """
step = retry_step
retried = jax.jit(jamp.retry(step), donate_argnums=0)
(new, _), _ = retried(copied((params, opt_state)), x)
assert jnp.all(new["w"] != params["w"])
""",
    ),
    "jamp.retry(nnx_donating": (
        "nnx.jit(jamp.retry(step), donate_argnums=(0, 1, 2))",
        """
step, before = scaled_step, model.kernel[...]
model, optimizer, scaler = copied((model, optimizer, scaler))
retried = nnx.jit(jamp.retry(step), donate_argnums=(0, 1, 2))
assert not retried(model, optimizer, scaler, x)
assert jnp.all(model.kernel[...] != before)
""",
    ),
    "jamp.value_and_grad(loss_fn, some_steps(tx": (
        "optax.conditionally_mask",
        """
for tx in (
    jamp.dynamic_loss_scale(some_steps(optax.sgd(0.1))),
    optax.conditionally_mask(jamp.dynamic_loss_scale(optax.sgd(0.1)), lambda n: n > 0),
):
    new, opt_state = params, tx.init(params)
    for _ in range(2):
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(new, x)
        new, opt_state = jamp.step(tx, grads, opt_state, new)
    assert jnp.all(new["w"] != params["w"])
""",
    ),
}


@cover(quick=5)
@pytest.mark.parametrize("start", ADVICE)
def test_code_in_a_message_runs(start, names, prepared):
    case = next(case for case in CASES if case.call.startswith(start))
    code, program = ADVICE[start]
    assert code in message_of(case, names)
    assert code in program
    run(program, copies(prepared))


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
    assert public - TAKES_ANYTHING - TAKES_NOTHING <= known
    assert all(callable(named(case.name)) for case in CASES)


def test_the_table_is_long_and_each_row_is_new():
    calls = [case.call for case in CASES]
    assert len(calls) == len(set(calls)) >= 250
    assert all(case.error and case.argument for case in CASES)


def test_an_argument_is_named_as_a_word_of_the_first_sentence():
    assert names_argument("f(scale=...) must be 1. Call g.", "scale")
    assert not names_argument("f(loss_scale=...) must be 1. Call g.", "scale")
    assert not names_argument("f must be 1. Set the scale.", "scale")
    assert names_argument("the gradient at ['w'] is complex.", "gradient at ['w']")
