"""Twelve planted faults: the right report names the right path or line.

Each case runs with its fault and without. A comment marks the faulty line, and the test
reads the expected line number from this file.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jamp
from jamp import debug
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")


def line(marker: str) -> str:
    """ "test_faults.py:17" for the line that ends in this comment."""
    file = pathlib.Path(__file__)
    for number, text in enumerate(file.read_text().splitlines(), 1):
        if text.endswith(f"# fault: {marker}"):
            return f"{file.name}:{number} "
    raise AssertionError(marker)


def half(fn: Callable) -> Callable:
    return jamp.autocast(dtype=jnp.float16)(fn)


def inf_in_one_leaf(fault):
    params = {"embed": jnp.ones((3, 4)), "head": {"w": jnp.ones((4, 2))}}
    x = jnp.ones((5, 3)).at[2, 1].set(1e38 if fault else 1.0)
    loss = lambda params: jnp.sum(x @ params["embed"] @ params["head"]["w"])
    return debug.overflow_report(jax.grad(lambda p: 10.0 * loss(p))(params))


def overflow_in_attention_logits(fault):
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            q, k = nn.Dense(64, name="query")(x), nn.Dense(64, name="key")(x)
            logits = q @ k.swapaxes(-1, -2)  # fault: attention
            return jax.nn.softmax(logits / 8.0) @ x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Attention(name="attention_3")(x)

    x = jax.random.normal(jax.random.key(0), (2, 16, 64)) * (100.0 if fault else 1.0)
    params = jax.jit(Model().init)(jax.random.key(1), x)
    loss = half(lambda params: jnp.mean(Model().apply(params, x) ** 2))
    return debug.find_nonfinite(jax.grad(loss))(params)


def log_of_zero(fault):
    def loss(params, labels):
        p = jax.nn.softmax(params["logits"])
        return -jnp.sum(labels * jnp.log(p))  # fault: log

    logits = jnp.array([0.0, 0.0, -1000.0 if fault else -10.0])
    return debug.find_nonfinite(loss)({"logits": logits}, jnp.array([0.0, 0.5, 0.5]))


def ones(fault):
    return jnp.ones(70_000 if fault else 1_000, jnp.float16)


def total(x):
    return jnp.sum(x)  # fault: sum


def float16_sum_of_many_ones(fault):
    return debug.find_nonfinite(total)(ones(fault))


def float16_sum_explained(fault):
    return debug.explain(total)(ones(fault))


def promoting_constant(fault):
    mask = jnp.linspace(0.5, 1.5, 8)

    def model(params, x):
        h = x @ params["w"]
        h = h * (mask if fault else mask.astype(h.dtype))  # fault: promotion
        return h @ params["v"]

    params = {"w": jnp.ones((4, 8)), "v": jnp.ones((8, 2))}
    return debug.explain(model, dtype=jnp.float16)(params, jnp.ones((16, 4)))


def layer_forced_to_float32(fault):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="body")(x)
            with jamp.autocast(dtype=jnp.float16, enabled=not fault):
                return nn.Dense(2, name="head")(x.astype(jnp.float32))  # fault: layer

    x = jnp.ones((4, 8))
    params = jax.jit(Model().init)(jax.random.key(0), x)
    return debug.explain(Model().apply, dtype=jnp.float16)(params, x)


def vanishing_gradient(fault):
    params = {"a": jnp.ones((8, 8)), "b": {"w": jnp.ones(8)}}
    small = 2.0**-26 if fault else 2.0**-10
    loss = lambda p: jnp.sum(p["a"]) + small * jnp.sum(p["b"]["w"])
    return debug.underflow_report(jax.grad(loss)(params), scale=1.0)


def backward_division_by_zero(fault):
    def loss(params, x):
        distance = jnp.sum((params["center"] - x) ** 2)
        return jnp.sqrt(distance)  # fault: sqrt

    params = {"center": jnp.ones(3)}
    x = jnp.ones(3) if fault else jnp.zeros(3)
    assert jnp.isfinite(loss(params, x))
    return debug.find_nonfinite(jax.grad(loss))(params, x)


def inside_scan(fault):
    def loss(params, xs):
        def body(carry, x):
            carry = carry * params["decay"]
            return carry, jnp.log(x + 0 * carry)  # fault: scan

        _, ys = jax.lax.scan(body, 1.0, xs)
        return jnp.sum(ys)

    xs = jnp.ones(20).at[17].set(0.0 if fault else 1.0)
    return debug.find_nonfinite(loss)({"decay": jnp.float32(0.5)}, xs)


def inside_custom_vjp(fault):
    @jax.custom_vjp
    def normalize(x):
        return x / jnp.sqrt(jnp.sum(x**2) + 1e-6)

    def fwd(x):
        return normalize(x), x

    def bwd(x, g):
        return (g / jnp.sum(x**2),)

    normalize.defvjp(fwd, bwd)

    def loss(params):
        return jnp.sum(normalize(params["x"]))  # fault: custom_vjp

    x = jnp.zeros(4) if fault else jnp.ones(4)
    return debug.find_nonfinite(jax.jit(jax.grad(loss)))({"x": x})


def inside_remat(fault):
    @jax.checkpoint
    def block(w, x):
        h = x @ w
        return jnp.exp(h)  # fault: remat

    loss = lambda params, x: jnp.sum(block(params["block"]["w"], x))
    x = jnp.ones((2, 4)) * (100.0 if fault else 1.0)
    params = {"block": {"w": jnp.ones((4, 4))}}
    return debug.find_nonfinite(jax.value_and_grad(loss))(params, x)


def inside_linen(fault):
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x / jnp.std(x)  # fault: linen

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sum(Norm(name="norm_2")(nn.Dense(3, name="dense")(x)))

    x = jnp.ones((1, 4))
    params = jax.jit(Model().init)(jax.random.key(0), x)
    if fault:
        params = jax.tree.map(jnp.zeros_like, params)
    return debug.find_nonfinite(Model().apply)(params, x)


def inside_nnx(fault):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.full(4, 1e5 if fault else 1.0))

        def __call__(self, x):
            return x.astype(jnp.float16) * self.scale.astype(jnp.float16)  # fault: nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 4, rngs=rngs)
            self.block = Block(rngs)

        def __call__(self, x):
            return jnp.sum(self.block(self.dense(x)).astype(jnp.float32))

    model = Model(nnx.Rngs(0))
    grad = nnx.grad(lambda model, x: model(x))
    return debug.find_nonfinite(grad)(model, jnp.ones((2, 4)))


class Case(NamedTuple):
    plant: Callable[[bool], Any]
    expected: list[str]  # all are in the printed report and in its `found`
    marker: str = ""  # of another line that the report names


CASES = [
    Case(inf_in_one_leaf, ["embed"]),
    Case(overflow_in_attention_logits, ["attention_3", "dot_general"], "attention"),
    Case(log_of_zero, ["log"], "log"),
    Case(float16_sum_of_many_ones, ["float32 -> float16"], "sum"),
    Case(float16_sum_explained, ["reduce_sum", "70000"], "sum"),
    Case(promoting_constant, ["mul"], "promotion"),
    Case(layer_forced_to_float32, ["head", "dot_general"], "layer"),
    Case(vanishing_gradient, ["b/w"]),
    Case(backward_division_by_zero, ["div"], "sqrt"),
    Case(inside_scan, ["log"], "scan"),
    Case(inside_custom_vjp, ["div", "its custom_vjp"], "custom_vjp"),
    Case(inside_remat, ["exp"], "remat"),
    Case(inside_linen, ["norm_2", "div"], "linen"),
    Case(inside_nnx, ["convert_element_type"], "nnx"),
]


COSTLY = [vanishing_gradient, inside_linen, inside_nnx, inf_in_one_leaf, log_of_zero]
COSTLY += [layer_forced_to_float32, overflow_in_attention_logits]
CASES.sort(key=lambda case: case.plant in COSTLY)


@cover(quick=len(CASES) - len(COSTLY))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.plant.__name__)
def test_the_fault_is_named(case):
    report = case.plant(True)
    first, text = report.found[0], str(report)
    for word in case.expected:
        assert word in first and word in text
    if case.marker:
        assert line(case.marker) in first and line(case.marker) in text
    assert report.to_markdown()


@cover(quick=len(CASES) - len(COSTLY))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.plant.__name__)
def test_a_clean_control_reports_nothing(case):
    report = case.plant(False)
    assert report.found == []
    if not isinstance(report, debug.Explanation | debug.UnderflowReport):
        assert report.to_dict() == {}


def test_the_iteration_of_the_scan_is_named():
    assert "in iteration 17 of a scan" in str(inside_scan(True))


def test_the_parameters_that_feed_the_fault_are_named():
    assert "block/scale" in str(inside_nnx(True))
    assert "params/block/w" in str(inside_remat(True))


def test_only_the_rule_of_a_custom_vjp_is_called_one():
    assert "custom_vjp" not in str(inside_remat(True))
    assert "custom_vjp" not in str(log_of_zero(True))
