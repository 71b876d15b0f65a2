"""A conditional on a CPU, a selection elsewhere."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from jamp._scaling import skip
from jamp._scaling.skip import branches
from shared import hlo

from ..marks import cover

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("standard_promotion")]
WIDTH, LAYERS = 256, 3
GRADIENT = 4 * WIDTH**2  # bytes
TX = jamp.dynamic_loss_scale(optax.adamw(1e-3))
X = np.ones((8, WIDTH), np.float32)


def make_params():
    return [jnp.eye(WIDTH) for _ in range(LAYERS)]


def start():
    params = make_params()
    return params, TX.init(params)


def loss_fn(params):
    h = X
    for kernel in params:
        h = jnp.tanh(h @ kernel)
    return jnp.mean(h**2)


def step(params, state):
    _, grads = jamp.value_and_grad(loss_fn, state)(params)
    return jamp.step(TX, grads, state, params)


def update(params, state):
    _, grads = jamp.value_and_grad(loss_fn, state)(params)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def plain_step(params, state):
    updates, inner = optax.adamw(1e-3).update(
        jax.grad(loss_fn)(params), state.inner_state, params
    )
    return optax.apply_updates(params, updates), state._replace(inner_state=inner)


def scan(params, state):
    carry, _ = jax.lax.scan(lambda carry, _: (step(*carry), None), (params, state), X)
    return carry


def nested(params, state):
    return jax.jit(step)(params, state)


def compiled(fn, *args, donate=True):
    """The figures of a function, compiled with empty caches."""
    fresh = lambda *args: fn(*args)
    jitted = jax.jit(fresh, donate_argnums=range(len(args)) if donate else ())
    return jitted.lower(*args).compile()


def figures(fn, donate):
    """Conditionals, copies of whole arrays, and gradients' worth of bytes."""
    program = compiled(fn, *start(), donate=donate)
    copies = re.findall(rf" f32\[{WIDTH},{WIDTH}\]\S* copy\(", program.as_text())
    summary = hlo.summarize(program)
    return summary.conditionals, len(copies), summary.bytes / (LAYERS * GRADIENT)


@cover()
@pytest.mark.parametrize("fn", [update, step])
def test_without_donation_each_array_is_copied_into_the_conditional_once(fn):
    _, _, plain = figures(plain_step, donate=False)
    conditionals, copies, reads = figures(fn, donate=False)
    assert conditionals == 1
    assert copies <= 3 * LAYERS  # parameters, and both moments
    assert reads < plain + (8 if fn is step else 9)  # `update` stores the updates


def test_with_donation_a_conditional_works_in_place(monkeypatch):
    _, copies, plain = figures(plain_step, donate=True)
    conditionals, ours, reads = figures(step, donate=True)
    assert conditionals == 1
    assert ours <= copies
    assert reads < plain + 0.25
    monkeypatch.setattr(skip, "branches", lambda: np.False_)  # the control
    conditionals, ours, reads = figures(step, donate=True)
    assert conditionals == 0
    assert reads > plain + 2


@cover(ci=4)
@pytest.mark.parametrize("fn", [nested, scan])
@pytest.mark.parametrize("donate", [True, False])
def test_in_a_loop_or_another_jit_it_branches(fn, donate):
    assert " conditional(" in compiled(fn, *start(), donate=donate).as_text()


@cover(quick=4, ci=12)
@pytest.mark.parametrize("fn", [step, update, scan])
@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu", "cpu"])
def test_only_a_cpu_branches_wherever_a_step_is_traced(fn, platform):
    jitted = jax.jit(lambda *args: fn(*args), donate_argnums=(0, 1))
    lowered = jitted.trace(*start()).lower(lowering_platforms=(platform,))
    # XLA, here that for CPUs, drops a conditional whose flag is a constant.
    text = lowered.compile().as_text()
    assert text.count(" conditional(") == (1 if platform == "cpu" else 0)


def branching(x):
    return jnp.where(branches(), x + 1, x)


def test_the_platform_decides_under_each_transformation():
    fns = {
        "jit": jax.jit(lambda x: branching(x)),
        "donated": jax.jit(lambda x: branching(x), donate_argnums=0),
        "vmap": jax.jit(jax.vmap(branching)),
        "jvp": jax.jit(lambda x: jax.jvp(branching, (x,), (x,))[0]),
        "grad": jax.jit(lambda x: jax.linearize(branching, x)[0]),
        "loop": lambda x: jax.lax.fori_loop(0, 1, lambda _, x: branching(x), x),
        "outside a trace": branching,
    }
    for name, fn in fns.items():
        assert fn(jnp.zeros(2))[0] == 1, name
    jitted = jax.jit(branching)
    exported = jax.export.export(jitted, platforms=("tpu", "cpu"))(jnp.zeros(2))
    assert exported.call(jnp.zeros(2))[0] == 1


def test_grad_scaler_branches():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer, jamp.GradScaler()))

    def train_step(state):
        model, optimizer, scaler = nnx.merge(graph, state)
        grads = nnx.grad(lambda model: scaler.scale(jnp.mean(model(X) ** 2)))(model)
        scaler.step(optimizer, model, grads)
        scaler.update()
        return nnx.state((model, optimizer, scaler))

    def conditionals(donate):
        return hlo.summarize(compiled(train_step, state, donate=donate)).conditionals

    assert (conditionals(False), conditionals(True)) == (1, 1)
