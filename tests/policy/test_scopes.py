"""`jamp.nnx.named_scopes`: NNX modules write their paths into the name stack."""

import copy
import functools
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from jamp import debug

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.inner(x)

    def inner(self, x):
        return self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def made():
    return nnx.split(nnx.jit(Net)())


def net():
    """A new model, which one program has initialized for all tests."""
    return nnx.merge(*made(), copy=True)


X = np.ones((2, 8), np.float32)


def paths_of(function, *args):
    """The paths of the products, which `explain` writes with stars for numbers."""
    rows = debug.explain(function, jnp.bfloat16)(*args).rows
    return {row.path for row in rows if row.op == "dot_general"}


PATHS = {"blocks/*/up", "blocks/*/down", "head"}


def test_modules_have_the_paths_of_their_attributes():
    model = jamp.nnx.named_scopes(net())
    # As an argument, parameters would name ops too.
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    run = lambda *leaves: nnx.merge(graph, jax.tree.unflatten(tree, leaves))(X)
    assert paths_of(run, *leaves) == PATHS
    names = str(jax.make_jaxpr(model)(X).pretty_print(name_stack=True))
    assert "blocks/0/up" in names and "blocks/1/down" in names
    assert "blocks/0/blocks" not in names


def test_the_head_stays_in_bfloat16():
    model = jamp.nnx.named_scopes(net())

    def run(module):
        with jamp.autocast(jnp.float16, rules={"^head$": jnp.bfloat16}):
            return module(X)

    assert jax.eval_shape(lambda: run(model)).dtype == jnp.bfloat16
    part = lambda model: run(lambda x: (model(x), model.blocks[0](x))[1])
    assert jax.eval_shape(lambda: part(model)).dtype == jnp.float16
    with pytest.raises(ValueError, match="no op matched 'head'"):
        with jamp.autocast(jnp.float16, rules={"head": jnp.bfloat16}):
            net()(X)


def test_numbers_and_state_are_those_of_the_model():
    plain = net()
    model = jamp.nnx.named_scopes(plain)
    np.testing.assert_array_equal(model(X), plain(X))
    paths = lambda m: jax.tree_util.tree_structure(nnx.to_pure_dict(nnx.state(m)))
    assert paths(model) == paths(plain)
    assert isinstance(model.head, nnx.Linear) and type(model.head) is not nnx.Linear
    assert type(plain.head) is nnx.Linear
    assert type(model.head).__name__ == "Linear"
    again = jamp.nnx.named_scopes(plain)  # jit compiles once for both
    assert nnx.graphdef(again) == nnx.graphdef(model)


def test_it_trains_under_jit():
    model = jamp.nnx.named_scopes(net())
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            with jamp.autocast(jnp.bfloat16, rules={"blocks/1/down": jnp.float32}):
                return jnp.mean(model(x) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    assert step(model, optimizer, X) > step(model, optimizer, X)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_keep_their_scopes(again):
    model = again(jamp.nnx.named_scopes(net()))
    with jamp.autocast(jnp.float16, rules={"^head$": jnp.float32}):
        assert model(X).dtype == jnp.float32


def test_scopes_and_policies_go_together():
    part = jamp.nnx.named_scopes(net()).head  # its class is a subclass already
    assert jamp.nnx.with_policy(part, "c=float16")(X).dtype == jnp.float16
    for model in (
        jamp.nnx.with_policy(jamp.nnx.named_scopes(net()), "c=float16"),
        jamp.nnx.named_scopes(jamp.nnx.with_policy(net(), "c=float16")),
    ):
        assert model(X).dtype == jnp.float16
        text = jax.make_jaxpr(model)(X).pretty_print(name_stack=True)
        assert "blocks/1/up" in text


def test_scopes_that_are_named_again_keep_a_policy():
    scoped = jamp.nnx.named_scopes(net())
    policied = jamp.nnx.with_policy(scoped, "c=float16", {"head": "c=float32"})

    class Outer(nnx.Module):
        def __init__(self):
            self.net = policied

        def __call__(self, x):
            return self.net(x)

    for model, path in ((policied, "head"), (Outer(), "net/head")):
        again = jamp.nnx.named_scopes(model)
        jaxprs = [jax.make_jaxpr(m)(X) for m in (model, again)]
        dtypes = [[v.aval.dtype for e in j.eqns for v in e.outvars] for j in jaxprs]
        assert dtypes[0] == dtypes[1] and jnp.float16 in dtypes[0]
        text = jaxprs[1].pretty_print(name_stack=True)
        text = re.sub(r"jamp\.autocast[^/\]]*/", "", text)  # the policy's region
        assert f"[{path}" in text and "head/head" not in text


def test_a_part_gets_the_paths_of_the_whole():
    class Outer(nnx.Module):
        def __init__(self):
            self.net = jamp.nnx.named_scopes(net())

        def __call__(self, x):
            return self.net(x)

    model = jamp.nnx.named_scopes(Outer())
    text = jax.make_jaxpr(model)(X).pretty_print(name_stack=True)
    assert "net/head" in text and "net/head/head" not in text


def traced(function, *args):
    return jax.make_jaxpr(function)(*args).pretty_print(name_stack=True)


def test_a_call_that_fails_leaves_no_path_behind():
    model = jamp.nnx.named_scopes(net())
    with pytest.raises(TypeError):
        model.head(jnp.ones((2, 3)))
    assert "[head]" in traced(model.head, X)


def test_another_thread_is_in_no_module():
    class Calls(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, function):
            return function()

    class Outer(nnx.Module):
        def __init__(self):
            self.part = Calls()

    part = jamp.nnx.named_scopes(Outer()).part
    assert "[part/inner]" in traced(lambda: part(lambda: part.inner(X)))
    with ThreadPoolExecutor() as pool:
        in_thread = lambda: pool.submit(traced, part.inner, X).result()
        assert "[part/inner]" in part(in_thread)
