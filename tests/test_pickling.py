"""A region is copied and pickled as its constructor arguments."""

import copy
import pickle
import pickletools
import re
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import jamp

from .jaxprs import products

pytestmark = [pytest.mark.usefixtures("standard_promotion")]


@pytest.fixture
def x():
    return jnp.ones((4, 4))


COPIES = pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda region: pickle.loads(pickle.dumps(region))],
    ids=["copy", "deepcopy", "pickle"],
)


def head(x):
    with jax.named_scope("head"):
        return jnp.exp(x @ x)


class Model:
    def __init__(self, region):
        self.region = region

    def __call__(self, x):
        with self.region:
            return head(x)


@COPIES
def test_a_copy_has_the_arguments(copied, x):
    rules = {"head": jnp.float32, lax.exp_p: None, nn.Dense: None, head: jnp.bfloat16}
    for region in (
        jamp.autocast(dtype=jnp.bfloat16),
        jamp.autocast(dtype=jnp.float16, rules=rules),
        jamp.autocast(enabled=False),
        jamp.autocast(dtype=jnp.float16, cast_inputs=jnp.float32),
        jamp.autocast(jamp.Float8("rowwise"), rules={"head": jamp.ScaledFloat16()}),
        jamp.autocast(jamp.ScaledFloat16(), rules={"head": "float8"}),
    ):
        new = copied(region)
        assert new.settings == region.settings
        assert (new.enabled, new.cast_inputs) == (region.enabled, region.cast_inputs)
    for rules, runs_in in (({"head": jnp.float32}, "float32"), (None, "float16")):
        model = copied(Model(jamp.autocast(dtype=jnp.float16, rules=rules)))
        assert products(model, x) == [{runs_in}]
    (kept,) = copied(
        jamp.autocast(dtype=jnp.float16, rules={lax.exp_p: None})
    ).settings.rules
    assert kept.test is lax.exp_p


@COPIES
def test_what_was_entered_stays_where_it_is(copied, x):
    region = jamp.autocast(dtype=jnp.float16)
    with region:
        new = copied(region)
    assert not jamp.is_autocast_enabled()
    with new:
        assert (x @ x).dtype == jnp.float16
    assert not jamp.is_autocast_enabled()


@COPIES
def test_a_copy_is_used_by_another_thread(copied, x):
    found = []
    with jamp.autocast(dtype=jnp.float16) as region:
        thread = threading.Thread(target=lambda: found.append(Model(copied(region))(x)))
        thread.start()
        thread.join()
    assert found[0].dtype == jnp.float32  # exp


SOURCE = """
import jax.numpy as jnp
import jamp

class Net:
    @jamp.autocast(dtype=jnp.float16)
    def __call__(self, x):
        return x @ x

@jamp.autocast(dtype=jnp.float16)
def product(x):
    return x @ x
"""


def test_a_class_of_a_notebook_with_a_decorated_method(x):
    cloudpickle = pytest.importorskip("cloudpickle")
    notebook = {"__name__": "__main__"}
    exec(SOURCE, notebook)
    made = cloudpickle.dumps((notebook["Net"](), notebook["product"]))
    net, product = pickle.loads(made)
    assert net(x).dtype == product(x).dtype == jnp.float16


def test_the_closure_of_a_decorated_function_is_pickled(x):
    # What cloudpickle saves of a function that cannot be imported from a module.
    decorated = jamp.autocast(dtype=jnp.float16)(lambda x: x @ x)
    cells = [cell.cell_contents for cell in decorated.__closure__]
    (region,) = (c for c in cells if isinstance(c, jamp.autocast))
    with pickle.loads(pickle.dumps(region)):
        assert (x @ x).dtype == jnp.float16


def made():
    """One of each kind that a user may save, except their own functions and classes."""
    params = {"w": jnp.ones(3), "h": jnp.ones(2, jnp.float16)}
    loss_fn = lambda params: jnp.sum(params["w"] ** 2) / jnp.sum(params["h"])
    history = jamp.debug.History()
    history.append({"loss": jnp.float32(1)})
    history.fetch()
    tx = jamp.dynamic_loss_scale(jamp.master_weights(optax.adam(1e-3)))
    scaler = jamp.GradScaler()
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    grads = jax.grad(lambda params: jnp.inf * loss_fn(params))
    return {
        "state": tx.init(params),
        "static state": jamp.static_loss_scale(optax.sgd(0.1), 8.0).init(params),
        "scaler": scaler,
        "split scaler": nnx.split(scaler),
        "policy": jamp.get_policy("mixed_float16"),
        "region": jamp.autocast(jnp.float16, rules={"head": jnp.float32}),
        "nnx model": jamp.nnx.with_policy(linear, "mixed_float16"),
        "linen model": jamp.linen.with_policy(nn.LayerNorm(), "mixed_float16"),
        "function": jamp.value_and_grad,
        "history": history,
        "explanation": jamp.debug.explain(jamp.autocast(jnp.float16)(loss_fn))(params),
        "non-finite": jamp.debug.find_nonfinite(grads)(params),
        "overflow": jamp.debug.overflow_report(params),
        "underflow": jamp.debug.underflow_report(params, 8.0),
        "histogram": jamp.debug.grad_histogram(params, 8.0),
    }


def modules_in(pickled):
    """The modules of jamp that it names."""
    strings = (argument for _, argument, _ in pickletools.genops(pickled))
    return {str(text) for text in strings if re.fullmatch(r"jamp(\.\w+)*", str(text))}


@pytest.mark.slow
@pytest.mark.every_release
def test_pickles_name_nothing_that_moves():
    stays = {"jamp", "jamp.debug", "jamp.linen", "jamp.nnx", "jamp._stable"}
    for kind, value in made().items():
        pickled = pickle.dumps(value)
        assert set() < modules_in(pickled) <= stays, kind
        assert type(pickle.loads(pickled)) is type(value), kind
