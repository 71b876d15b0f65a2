"""Five faults of other people's programs, each named by the first `find_nonfinite`."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jamp
from jamp import debug

pytestmark = pytest.mark.usefixtures("standard_promotion")
LINES = Path(__file__).read_text().splitlines()
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
TX = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=8.0)


def line(fault):
    """Where a fault is planted, as reports write it."""
    (number,) = [n for n, text in enumerate(LINES, 1) if text.endswith(f"# {fault}")]
    return f"test_planted.py:{number}"


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.Dense(8, name=name)(x) for name in "qkv")
        weights = jax.nn.softmax(q @ k.T)  # attention logits
        return weights @ v


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        mean = jnp.mean(x * x, -1, keepdims=True)  # swallowed variance
        return x * jax.lax.rsqrt(mean + 1e-6) * scale.astype(x.dtype)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(Norm(name="norm")(nn.Dense(8, use_bias=False)(x)))


class Embedding(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        h = nnx.relu(self.dense(x))
        return h / (jnp.max(h, -1, keepdims=True) + 1e-8)  # tiny epsilon


def ratio_loss(params, x, old):
    with jamp.autocast(dtype=jnp.float16):
        new = jax.nn.log_softmax(x @ params["w"])
        ratio = jnp.exp(new - old)  # exp in a loss
        return jnp.mean(jnp.minimum(ratio, 1.2) * ratio)


def regression(params, x):
    with jamp.autocast(dtype=jnp.float16):
        h = jnp.tanh(x @ params["w"])  # unnormalised input
        return jnp.mean((h - 1) ** 2)


def loss_of(model):
    def loss_fn(params, x):
        with jamp.autocast(dtype=jnp.float16):
            return jnp.mean((model.apply(params, x) - 1) ** 2)

    return loss_fn


def step_of(loss_fn):
    @jax.jit
    def step(params, opt_state, *batch):
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, *batch)
        params, opt_state = jamp.step(TX, grads, opt_state, params)
        return params, opt_state, loss

    return step


def first_op(step, params, *batch):
    find = jax.jit(debug.find_nonfinite(step))
    report = find(params, jax.jit(TX.init)(params), *batch)
    return report.to_dict()["ops"][0], str(report)


@pytest.mark.slow
def test_attention_logits():
    init = lambda x: jax.tree.map(
        lambda leaf: leaf * 300, Attention().init(jax.random.key(0), x)
    )
    params = jax.jit(init)(X)
    op, _ = first_op(step_of(loss_of(Attention())), params, X)
    assert (op["primitive"], op["path"]) == ("dot_general", "Attention")
    assert op["line"].startswith(line("attention logits"))


@pytest.mark.slow
def test_a_swallowed_variance_under_pmap():
    model = Normed()

    @functools.partial(jax.pmap, axis_name="batch")
    def step(params, opt_state, x):
        loss, grads = jamp.value_and_grad(loss_of(model), opt_state)(params, x)
        grads = jax.lax.pmean(grads, "batch")
        params, opt_state = jamp.step(TX, grads, opt_state, params)
        return params, opt_state, loss

    params = model.init(jax.random.key(0), X)
    stack = lambda tree: jax.tree.map(lambda a: jnp.stack([a] * 2), tree)
    state = stack(params), stack(TX.init(params))
    report = debug.find_nonfinite(step)(*state, stack(1000 * X))
    assert not jamp.metrics(step(*state, stack(1000 * X))[1])["found_inf"].any()
    (op,) = report.to_dict()["swallowed"]
    assert (op["primitive"], op["path"]) == ("mul", "Normed/norm")
    assert op["line"].startswith(line("swallowed variance")) and "rsqrt" in str(report)
    assert report.to_dict()["ops"] == []
    (square,) = debug.explain(loss_of(model))(params, X).squares
    assert square.line.startswith(line("swallowed variance"))  # before it overflows


@pytest.mark.slow
def test_a_tiny_epsilon():
    def loss_fn(model, x):
        with jamp.autocast(dtype=jnp.float16):
            return jnp.mean(model(x))

    model = nnx.jit(Embedding)()
    report = debug.find_nonfinite(nnx.value_and_grad(loss_fn))(model, 0 * X)
    op = report.to_dict()["ops"][0]
    assert op["primitive"] == "div" and op["line"].startswith(line("tiny epsilon"))


@pytest.mark.slow
def test_exp_in_a_loss():
    params = {"w": np.eye(8, dtype=np.float32)}
    op, _ = first_op(step_of(ratio_loss), params, X, np.full((4, 8), np.float32(-100)))
    assert op["primitive"] == "exp" and op["line"].startswith(line("exp in a loss"))


def test_an_unnormalised_input():
    op, text = first_op(
        step_of(regression), {"w": np.eye(8, dtype=np.float32)}, X * np.float32(1e6)
    )
    assert op["primitive"] == "convert_element_type" and "from batch[0]" in text
    assert op["line"].startswith(line("unnormalised input"))
