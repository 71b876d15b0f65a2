"""What autocast does to trace faster changes nothing in the program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp._autocast import retracing
from jamp._autocast.rules import Decider
from jamp._autocast.trace import AutocastTrace

pytestmark = pytest.mark.usefixtures("standard_promotion")


def three_layers(w, b, x):
    with jamp.autocast(dtype=jnp.float16):
        for _ in range(3):
            x = jnp.tanh(x @ w + b[None])
        return jnp.sum(x)


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, jax.jacfwd])
def test_ops_jitted_for_their_derivatives_leave_no_trace(transform, monkeypatch):
    """What recurs under a derivative is jitted; the program is as if it were not."""
    args = jnp.eye(4), jnp.zeros(4), jnp.ones((2, 4))
    used = []

    def jitted(function, params, original=retracing.jitted):
        used.append(function)
        return original(function, params)

    monkeypatch.setattr(retracing, "jitted", jitted)
    kept = jax.jit(transform(three_layers)).trace(*args).jaxpr
    assert used
    monkeypatch.setattr(retracing, "seen_on", lambda trace: None)
    used.clear()
    plain = jax.jit(transform(lambda *args: three_layers(*args))).trace(*args).jaxpr
    assert not used
    assert equations(kept) == equations(plain)


def equations(jaxpr):
    """In no order: JAX adds up cotangents a little later.

    And it names the derivative of a checkpoint after one transformation or two.
    """
    stack = lambda e: "" if e.primitive.name == "remat2" else e.source_info.name_stack
    return sorted(
        f"{e.primitive} {stack(e)} {[v.aval for v in e.outvars]}" for e in jaxpr.eqns
    )


def test_ops_are_not_jitted_where_they_are_not_differentiated(monkeypatch):
    """Nor in an eager derivative, where each would be compiled anew."""
    args = jnp.eye(4), jnp.zeros(4), jnp.ones((2, 4))
    monkeypatch.setattr(retracing, "jitted", None)
    jax.jit(three_layers).trace(*args)
    jax.grad(three_layers)(*args)


def test_each_op_of_a_derivative_is_decided_on_once(monkeypatch):
    counts = {"apply": 0, "__call__": 0}
    for cls, name in ((AutocastTrace, "apply"), (Decider, "__call__")):
        method = getattr(cls, name)

        def counted(self, *args, name=name, method=method, **kwargs):
            counts[name] += 1
            return method(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, counted)
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    with jamp.autocast(jnp.float16):  # functions of jnp are jitted, and asked about too
        y, pull_back = jax.vjp(lambda w: lax.tanh(lax.dot(x, w)), w)
        pull_back(y)
    assert 0 < counts["__call__"] <= counts["apply"]
