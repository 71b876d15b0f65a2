"""The ten errors that people meet first: wrong code, why, and right code.

`bad_input.py` writes them into docs/errors.md, with the messages of the run, and
`test_bad_input.py` runs both codes after the set-up of all wrong calls.
"""

from typing import NamedTuple


class First(NamedTuple):
    """An error that people meet first."""

    title: str
    wrong: str
    error: str  # the type of what `wrong` raises, or "": it asserts the symptom
    why: str
    right: str
    symptom: str = ""  # if nothing is raised


FIRST = [
    First(
        "A device argument for autocast",
        """\
with jamp.autocast("cuda", dtype=jnp.float16):
    loss = loss_fn(params, x)
""",
        "TypeError",
        "torch keeps one setting per device. JAX runs an op where its arrays are, so "
        "a region has only a dtype.",
        """\
with jamp.autocast(dtype=jnp.float16):
    loss = loss_fn(params, x)
""",
    ),
    First(
        "`jax.value_and_grad`, or Equinox's or Flax's, with a wrapped optimizer",
        """\
loss, grads = jax.value_and_grad(loss_fn)(params, x)
new, _ = jamp.step(tx, grads, opt_state, params)
assert 0 < jnp.max(jnp.abs(new["w"] - params["w"])) < 1e-4
""",
        "",
        "`jamp.step` and `tx.update` divide the gradients by the scale, so the loss "
        "must be multiplied by it first. `jamp.value_and_grad` does that. `jax.grad`, "
        "`eqx.filter_value_and_grad`, `nnx.value_and_grad` and Linen's "
        "`nn.value_and_grad` do not: with these, let the loss function return "
        "`jamp.scale_loss(loss, opt_state)`. To test a step, give it to "
        "[`jamp.find_loss_scale`](recipes.md#where-to-start), which raises an error "
        "for this mistake.",
        """\
loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
params, opt_state = jamp.step(tx, grads, opt_state, params)
""",
        "No error, and `jamp.metrics` shows nothing unusual. With SGD the parameters "
        "hardly move. With Adam the loss falls, but gradients underflow as they do "
        "without a scale.",
    ),
    First(
        "The wrapper is not around the whole optimizer",
        """\
scaled = jamp.dynamic_loss_scale(optax.sgd(0.1))
tx = optax.chain(optax.clip_by_global_norm(1.0), scaled)
opt_state = tx.init(params)
loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
params, opt_state = jamp.step(tx, grads, opt_state, params)
""",
        "ValueError",
        "Clipping sees gradients that are still multiplied by the scale, and clips "
        "all of them. Only transformations inside the wrapper see unscaled gradients. "
        "`tx.update` alone cannot tell: there, the parameters hardly move.",
        """\
inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
tx = jamp.dynamic_loss_scale(inner)
opt_state = tx.init(params)
""",
    ),
    First(
        "A mask around the wrapper",
        """\
tx = optax.masked(jamp.dynamic_loss_scale(optax.sgd(0.1)), {"w": True, "b": False})
opt_state = tx.init(params)
loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
params, opt_state = jamp.step(tx, grads, opt_state, params)
""",
        "ValueError",
        "`optax.masked` does not change the gradients that it leaves out, so they "
        "would be added to the parameters, and with the scale. Put masks inside.",
        """\
frozen = optax.masked(optax.set_to_zero(), {"w": False, "b": True})
tx = jamp.dynamic_loss_scale(optax.chain(optax.sgd(0.1), frozen))
opt_state = tx.init(params)
""",
    ),
    First(
        "A state that was captured outside of the step",
        """\
grad_fn = jamp.value_and_grad(loss_fn, opt_state)
loss, grads = grad_fn(params, x * jnp.inf)
params, opt_state = jamp.step(tx, grads, opt_state, params)
loss, grads = grad_fn(params, x)
expected = jax.grad(loss_fn)(params, x)
assert jnp.allclose(jamp.unscale(grads, opt_state)["w"], 2 * expected["w"])
""",
        "",
        "`jamp.value_and_grad` reads the scale from the state that it gets. Call it in "
        "the step, with the current state.",
        """\
for x in batches():
    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
    params, opt_state = jamp.step(tx, grads, opt_state, params)
""",
        "No error. When the scale moves, all gradients are off by the same factor.",
    ),
    First(
        "The carry of a `scan` changes its dtype",
        """\
w = jnp.ones((2, 2))
with jamp.autocast(dtype=jnp.float16):
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x @ w, length=3)
""",
        "TypeError",
        "The product before the loop is float16. JAX traces the body before autocast "
        "sees it, and there float16 times float32 is float32.",
        """\
w = jnp.ones((2, 2))
with jamp.autocast(dtype=jnp.float16):
    h = (x @ w).astype(jnp.float32)
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, length=3)
""",
    ),
    First(
        "float16 parameters",
        """\
model = nnx.Linear(2, 3, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
grads = nnx.grad(lambda model: scaler.scale(jnp.mean(model(x))))(model)
scaler.step(optimizer, model, grads)
""",
        "ValueError",
        "As in torch, gradients of float16 parameters would lose in float16 what the "
        "scale saved. Keep the parameters in float32, and let autocast cast them.",
        """\
loss = jamp.autocast(dtype=jnp.float16)(lambda model: jnp.mean(model(x)))
grads = nnx.grad(lambda model: scaler.scale(loss(model)))(model)
scaler.step(optimizer, model, grads)
scaler.update()
""",
    ),
    First(
        "`unscale_` twice",
        """\
grads = scaler.unscale_(optimizer, nnx_grads)
grads = scaler.unscale_(optimizer, grads)
""",
        "RuntimeError",
        "A second division would make the gradients too small. Each optimizer gets "
        "one `unscale_` per iteration, and `update` ends the iteration.",
        """\
grads = scaler.unscale_(optimizer, nnx_grads)
scaler.step(optimizer, model, grads)
scaler.update()
""",
    ),
    First(
        "`step` outside of the jitted function that unscaled",
        """\
@nnx.jit
def backward(model, optimizer, scaler, x):
    grads = nnx.grad(lambda model: scaler.scale(jnp.mean(model(x))))(model)
    return scaler.unscale_(optimizer, grads)

grads = backward(model, optimizer, scaler, x)
scaler.step(optimizer, model, grads)
""",
        "RuntimeError",
        "A scaler notes in Python what has happened since the last `update`, and these "
        "notes cannot leave a trace. Put the whole iteration into one function.",
        """\
@nnx.jit
def update(model, optimizer, scaler, grads):
    scaler.step(optimizer, model, scaler.unscale_(optimizer, grads))
    scaler.update()
""",
    ),
    First(
        "A generator that holds a region open",
        """\
@jamp.autocast(dtype=jnp.float16)
def losses():
    for x in batches():
        yield loss_fn(params, x)
""",
        "TypeError",
        "The body of a generator runs after the call, piece by piece, and code between "
        "the pieces would run in the region. Decorate the function that computes.",
        """\
half_loss = jamp.autocast(dtype=jnp.float16)(loss_fn)
losses = (half_loss(params, x) for x in batches())
""",
    ),
]
