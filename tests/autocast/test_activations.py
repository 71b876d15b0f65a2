"""Activations of which the backward pass keeps the input alone."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jamp
from jamp._autocast import nested, primitives
from jamp._autocast.retracing import without_caches
from tests.bits import check_near, check_same_bits, nudged
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
x = RNG.normal(size=(16, 32)).astype(np.float32)
up, gate = 0.3 * RNG.normal(size=(2, 32, 64)).astype(np.float32)
down = 0.1 * RNG.normal(size=(64, 8)).astype(np.float32)
ROW = np.linspace(0.5, 1.5, 16 * 64, dtype=np.float16).reshape(16, 64)
exact = functools.partial(jax.nn.gelu, approximate=False)
SAVED = {
    "gelu": jax.nn.gelu,
    "exact gelu": exact,
    "mish": jax.nn.mish,
    "Linen's gelu": nn.gelu,
    "NNX's gelu": nnx.gelu,
    "jitted": jax.jit(jax.nn.gelu),
    "of a mapped row": jax.vmap(jax.nn.gelu),
    "twice": lambda h: jax.nn.gelu(jax.nn.gelu(h)),
    "of float32": lambda h: jax.nn.gelu(h.astype(jnp.float32)),
}
LAYERS = {
    "alone": lambda act: lambda up, gate: jnp.sum((act(jnp.matmul(x, up)) @ down) ** 2),
    "gated": lambda act: (
        lambda up, gate: jnp.sum((act(jnp.matmul(x, gate)) * jnp.matmul(x, up)) @ down)
    ),
    "gated by it": lambda act: (
        lambda up, gate: jnp.sum((jnp.matmul(x, up) * act(jnp.matmul(x, gate))) @ down)
    ),
    "gated by NumPy's": lambda act: (
        lambda up, gate: jnp.sum((act(jnp.matmul(x, up)) * ROW) @ down * gate[0, 0])
    ),
    "of one value": lambda act: (
        lambda up, gate: jnp.sum((act(jnp.matmul(x, up)) * jnp.matmul(x, up)) @ down)
    ),
    "two": lambda act: (
        lambda up, gate: jnp.sum(
            (act(jnp.matmul(x, up)) * act(jnp.matmul(x, gate))) @ down
        )
    ),
    "scaled by a number": lambda act: (
        lambda up, gate: jnp.sum((act(jnp.matmul(x, up)) * 0.5) @ down)
    ),
    "scaled by a row": lambda act: (
        lambda up, gate: jnp.sum((act(jnp.matmul(x, up)) * gate[0]) @ down)
    ),
}


@pytest.fixture
def as_jax_keeps(monkeypatch):
    """Runs a call as if no activation were saved once."""

    def run(call, *args):
        with monkeypatch.context() as patch, without_caches():
            for module in (nested, primitives):
                patch.setattr(module, "SAVED_ONCE", frozenset())
            return call(*args)

    return run


CALLS = {
    "value": lambda loss: loss,
    "grad": lambda loss: jax.grad(loss, (0, 1)),
    "jvp": lambda loss: lambda *args: jax.jvp(loss, args, args),
}
DTYPES = ["float16", "bfloat16", "float8"]
RUNS = [(call, dtype) for dtype in DTYPES for call in CALLS]
RUNS.remove(("jvp", "float8"))  # which has no forward mode


@cover(quick=3, ci=72)
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_the_numbers_are_the_same(as_jax_keeps, name, layer, run):
    call, dtype = run
    function = CALLS[call](jamp.autocast(dtype)(LAYERS[layer](SAVED[name])))
    arrays = jnp.asarray(up), jnp.asarray(gate)
    check_same_bits(function(*arrays), as_jax_keeps(function, *arrays))


def second(loss):
    grad = jax.grad(loss, (0, 1))
    squares = lambda *args: sum(jnp.sum(jnp.float32(g) ** 2) for g in grad(*args))
    return jax.grad(squares, (0, 1))


@cover(quick=4, ci=30)
@pytest.mark.parametrize(
    "derivative", [functools.partial(jax.grad, argnums=(0, 1)), second]
)
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_numbers_of_one_program(as_jax_keeps, name, layer, derivative):
    """In the second derivative, cotangents are added in another order."""
    loss = jamp.autocast("float16")(LAYERS[layer](SAVED[name]))
    call = jax.jit(derivative(loss))
    several = [(up, gate), *nudged((up, gate), jnp.float16)]
    plain, *near = as_jax_keeps(lambda: [call(*args) for args in several])
    check_near(call(up, gate), plain, near)


def kept(function, *args):
    """The shapes of what is kept for the backward pass, without the arguments."""
    leaves = jax.tree.leaves(
        jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    )
    return sorted(leaf.shape for leaf in leaves)


@pytest.mark.parametrize("name", SAVED)
def test_the_input_alone_is_kept(as_jax_keeps, name):
    """Here each release says whether its formulas are those that are known."""
    act = jamp.autocast("float16")(SAVED[name])
    h = jnp.ones((16, 64), jnp.float16)
    times = 2 if name == "twice" else 1
    assert kept(act, h) == [h.shape] * times
    assert len(as_jax_keeps(kept, act, h)) > times


@pytest.mark.parametrize("name", ["gelu", "exact gelu", "mish"])
def test_a_gate_and_the_input_are_kept(as_jax_keeps, name):
    gated = jamp.autocast("float16")(lambda h, g: g * SAVED[name](h))
    h = jnp.ones((16, 64), jnp.float16)
    assert kept(gated, h, h) == [h.shape] * 2
    assert len(as_jax_keeps(kept, gated, h, h)) > 2


OTHERS = ["celu", "elu", "log_sigmoid", "selu", "silu", "softplus", "squareplus"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_are_kept_as_jax_does(as_jax_keeps, name):
    act = jamp.autocast("float16")(getattr(jax.nn, name))
    h = jnp.ones((16, 64), jnp.float16)
    assert kept(act, h) == as_jax_keeps(kept, act, h)


def test_a_gpu_computes_it_anew_and_others_as_they_like():
    loss = jax.jit(jax.grad(jamp.autocast("float16")(LAYERS["alone"](jax.nn.gelu))))
    for platform, expected in {"cuda": 1, "rocm": 1, "tpu": 0, "cpu": 0}.items():
        text = loss.trace(up, gate).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == expected, platform


@pytest.mark.parametrize(
    "dtype", ["float8", jamp.Float8("rowwise"), jamp.ScaledFloat16()]
)
def test_beside_a_recipe_it_is_kept_as_jax_does(as_jax_keeps, dtype):
    act = jamp.autocast(dtype)(jax.nn.gelu)
    h = jnp.ones((16, 64))
    assert kept(act, h) == as_jax_keeps(kept, act, h)


def test_a_rule_of_the_users_decides_about_it():
    act = jamp.autocast("float16", rules={jax.nn.gelu: jnp.float32})(jax.nn.gelu)
    assert act(jnp.ones((16, 64), jnp.float16)).dtype == jnp.float32


def test_a_loop_keeps_the_input_alone():
    def loss(up):
        def layer(h, _):
            return jax.nn.gelu(h @ up) @ up.T, None

        return jnp.sum(jax.lax.scan(layer, x, None, 3)[0])

    with_region = jamp.autocast("float16")(loss)
    of_layers = [shape for shape in kept(with_region, up) if shape == (3, 16, 64)]
    assert len(of_layers) < len([s for s in kept(loss, up) if s == (3, 16, 64)])
