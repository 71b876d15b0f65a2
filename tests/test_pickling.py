"""A region is copied and pickled as the arguments that it was made with."""

import copy
import pickle
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp

from .jaxprs import products

pytestmark = [pytest.mark.usefixtures("standard_promotion")]

x = jnp.ones((4, 4), jnp.float32)
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
def test_a_copy_has_the_arguments(copied):
    rules = {"head": jnp.float32, lax.exp_p: None, nn.Dense: None, head: jnp.bfloat16}
    for region in (
        jamp.autocast(dtype=jnp.bfloat16),
        jamp.autocast(dtype=jnp.float16, rules=rules),
        jamp.autocast(enabled=False),
        jamp.autocast(dtype=jnp.float16, cast_inputs=jnp.float32),
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
def test_what_was_entered_stays_where_it_is(copied):
    region = jamp.autocast(dtype=jnp.float16)
    with region:
        new = copied(region)
    assert not jamp.is_autocast_enabled()
    with new:
        assert (x @ x).dtype == jnp.float16
    assert not jamp.is_autocast_enabled()


@COPIES
def test_a_copy_is_used_by_another_thread(copied):
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


def test_a_class_of_a_notebook_with_a_decorated_method():
    cloudpickle = pytest.importorskip("cloudpickle")
    notebook = {"__name__": "__main__"}
    exec(SOURCE, notebook)
    made = cloudpickle.dumps((notebook["Net"](), notebook["product"]))
    net, product = pickle.loads(made)
    assert net(x).dtype == product(x).dtype == jnp.float16


def test_the_closure_of_a_decorated_function_is_pickled():
    # What cloudpickle takes of a function that has no module to be imported from.
    decorated = jamp.autocast(dtype=jnp.float16)(lambda x: x @ x)
    cells = [cell.cell_contents for cell in decorated.__closure__]
    (region,) = (c for c in cells if isinstance(c, jamp.autocast))
    with pickle.loads(pickle.dumps(region)):
        assert (x @ x).dtype == jnp.float16
