"""On a CPU: a conditional for donated buffers, a selection for others."""

import functools
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
from jamp._scaling.apart import Apart
from jamp._scaling.donated import overwrites
from shared import hlo
from tests.marks import mostly_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")
WIDTH, LAYERS = 256, 3
GRADIENT = 4 * WIDTH**2  # bytes
TX = jamp.dynamic_loss_scale(optax.adamw(1e-3))
X = jnp.ones((8, WIDTH))


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


@pytest.mark.parametrize("fn", [step, update])
def test_without_donation_nothing_is_copied_into_a_conditional(fn, monkeypatch):
    _, _, plain = figures(plain_step, donate=False)
    conditionals, copies, reads = figures(fn, donate=False)
    assert (conditionals, copies) == (0, 0)
    assert reads < plain + 2.6  # jmp adds 2.5
    monkeypatch.setattr(skip, "overwrites", lambda: np.True_)  # the control
    conditionals, copies, reads = figures(fn, donate=False)
    assert conditionals == 1
    assert copies >= 2 * LAYERS
    assert reads > plain + 5


@pytest.mark.parametrize("fn", [step, update])
def test_with_donation_a_conditional_works_in_place(fn, monkeypatch):
    _, copies, plain = figures(plain_step, donate=True)
    conditionals, ours, reads = figures(fn, donate=True)
    assert conditionals == 1
    assert ours <= copies
    assert reads < plain + 0.25
    monkeypatch.setattr(skip, "by_branch", lambda: False)  # the control
    conditionals, ours, reads = figures(fn, donate=True)
    assert conditionals == 0
    assert reads > plain + 2


@pytest.mark.parametrize("fn", [scan, nested])
@pytest.mark.parametrize("donate", [True, False])
def test_in_a_loop_or_another_jit_it_branches(fn, donate):
    assert " conditional(" in compiled(fn, *start(), donate=donate).as_text()


def test_a_gpu_asks_for_nothing(monkeypatch):
    text = lambda: str(jax.make_jaxpr(lambda *args: step(*args))(*start()))
    assert "jamp_overwrites" in text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "jamp_overwrites" not in text()


def overwriting(x):
    return jnp.where(overwrites(), x + 1, x)


def test_what_a_program_may_overwrite():
    def seen(fn, **jit):
        return bool(jax.jit(fn, **jit)(jnp.zeros(2))[0])

    fns = {
        "jit": lambda x: overwriting(x),
        "vmap": jax.vmap(overwriting),
        "jvp": lambda x: jax.jvp(overwriting, (x,), (x,))[0],
        "grad": lambda x: jax.linearize(overwriting, x)[0],
    }
    for name, fn in fns.items():
        assert not seen(fn), name
        assert seen(fn, donate_argnums=0), name
    assert seen(lambda x: jax.lax.fori_loop(0, 1, lambda _, x: overwriting(x), x))
    assert seen(lambda x: jax.jit(overwriting)(x))
    assert overwriting(jnp.zeros(2))[0] == 1  # outside a trace
    # One jitted function, donated or not, from one trace.
    one = jax.jit(overwriting)
    exported = jax.export.export(one)(jnp.zeros(2))
    assert exported.call(jnp.zeros(2))[0] == 0


def test_grad_scaler_follows_donation():
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

    assert (conditionals(False), conditionals(True)) == (0, 1)


OPTIMIZERS = {
    # Updates come from the new state alone, or from gradients without any state.
    "sgd": (optax.sgd(0.1), True),
    "momentum": (optax.sgd(0.1, momentum=0.9), True),
    "clipped adamw": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        True,
    ),
    "injected": (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), True),
    "lamb": (optax.lamb(0.1), True),
    # These read the old moments, or what the new ones are made from.
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), False),
    "lion": (optax.lion(0.1), False),
    "rounded moments": (optax.adam(0.1, mu_dtype=jnp.bfloat16), False),
    "MultiSteps": (optax.MultiSteps(optax.adam(0.1), 2), False),
}


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, *[*OPTIMIZERS][::3]))
def test_an_update_apart_is_the_update(name, monkeypatch):
    inner, free = OPTIMIZERS[name]
    inner = jamp._scaling.transformation.as_transformation(inner)
    traced, asked = [], []

    def counted(updates, state, params=None, **extra):
        traced.append(1)
        return inner.update(updates, state, params, **extra)

    tx = jamp.dynamic_loss_scale(
        optax.GradientTransformationExtraArgs(inner.init, counted)
    )
    is_free = Apart.is_free

    def train():
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params, state, scale):
            grads = jax.tree.map(lambda p: (p - 0.3) * scale, params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, updates

        params = {"w": jnp.arange(6.0).reshape(2, 3) / 8, "b": jnp.ones(3)}
        state, seen = tx.init(params), []
        for scale in (2.0**16, jnp.inf, 2.0**15, 2.0**15):
            params, state, updates = train_step(params, state, scale)
            seen += map(np.array, jax.tree.leaves((params, state, updates)))
        return seen

    def asking(self):
        asked.append(is_free(self))
        return asked[-1]

    monkeypatch.setattr(Apart, "is_free", asking)
    apart = train()
    assert (asked, len(traced)) == ([free], 1)
    monkeypatch.setattr(Apart, "is_free", lambda self: False)
    for one, other in zip(apart, train(), strict=True):
        # XLA may round a product before a sum in one program, and not in the other.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    updates = apart[len(apart) // 4 : len(apart) // 2][-2:]
    assert all(np.all(u == 0) and np.all(np.signbit(u)) for u in updates)
