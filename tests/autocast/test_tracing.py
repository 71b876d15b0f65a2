"""What autocast does to trace faster changes nothing in the program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import jamp
from jamp import _compat
from jamp._autocast import retracing
from jamp._autocast.rules import Decider
from jamp._autocast.trace import AutocastTrace

pytestmark = pytest.mark.usefixtures("standard_promotion")


def three_layers(w, b, x):
    with jamp.autocast(dtype=jnp.float16):
        for _ in range(3):
            x = jnp.tanh(x @ w + b[None])
        return jnp.sum(x)


TRANSFORMS = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "in a scope": lambda f: jax.named_scope("outer")(jax.grad(f)),
    "jacfwd": jax.jacfwd,
    "mapped": lambda f: jax.grad(
        lambda w, b, x: jax.vmap(f, (None, None, 0))(w, b, x[None])[0]
    ),
    "per example": lambda f: jax.vmap(jax.grad(f), (None, None, 0)),
    "linearize": lambda f: (
        lambda w, *rest: jax.linearize(lambda w: f(w, *rest), w)[1](w)
    ),
}


@pytest.mark.parametrize("jits", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_that_are_kept_leave_no_trace(name, jits, monkeypatch):
    """The program is as if each op were derived anew."""
    transform, used = TRANSFORMS[name], []
    args = jnp.eye(4), jnp.zeros(4), jnp.ones((2, 4))
    if name == "per example":
        args = *args[:2], args[2][None]

    def run(*arguments, original=retracing.run):
        used.append(arguments[-1] is not None)
        return original(*arguments)

    monkeypatch.setattr(retracing, "run", run)
    if jits:  # as where JAX's inside is another one
        monkeypatch.setattr(_compat, "CAN_LINEARIZE", False)
    kept = jax.jit(transform(three_layers)).trace(*args).jaxpr
    assert any(used)
    monkeypatch.setattr(retracing, "kept_for", lambda trace: None)
    used.clear()
    plain = jax.jit(transform(lambda *args: three_layers(*args))).trace(*args).jaxpr
    assert not any(used)
    assert equations(kept) == equations(plain)


def test_what_is_kept_is_of_its_context():
    """Here the second of two equal ops has a note for the compiler."""

    def loss(x):
        x = jnp.tanh(x @ x)
        with set_xla_metadata(part="head"):
            x = jnp.tanh(x @ x)
        return jnp.tanh(x @ x).sum()

    def noted():
        region = jamp.autocast(jnp.float16)(lambda x: loss(x))
        return jax.jit(jax.grad(region)).lower(jnp.eye(4)).as_text().count("head")

    with retracing.without_caches():
        expected = noted()
    assert noted() == expected > 0


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
    monkeypatch.setattr(_compat, "Linearized", None)
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
