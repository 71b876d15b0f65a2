"""Errors of JAX and other libraries in a region get a note, and its cure works."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.scipy.optimize
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint

import jamp
from tests.marks import cover

pytestmark = [pytest.mark.usefixtures("standard_promotion")]

half = functools.partial(jamp.autocast, dtype=jnp.float16)
x, w = np.full((4, 4), 0.1, np.float32), np.full((4, 4), 0.2, np.float32)
times = np.float32([0, 1])
cg = jax.scipy.sparse.linalg.cg
gmres = jax.scipy.sparse.linalg.gmres


def product():
    """Of arrays of JAX: what NumPy multiplies is not in a region."""
    return jnp.asarray(x) @ w


def conv(x):
    return lax.conv_general_dilated(x[None], jnp.ones((4, 4, 3)), (1,), "SAME")[0]


def update(h):
    return lax.dynamic_update_slice(x, h[:1], (0, 0))


def scan(h):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h, None, length=2)[0]


def looped(h):
    return lax.fori_loop(0, 2, lambda i, c: c @ w, h)


def branches(h):
    return lax.cond(jnp.sum(h) > 0, lambda h: h @ w, lambda h: h, h)


def minimum(h):
    function = lambda v: jnp.sum((w @ v - 1) ** 2)
    return jax.scipy.optimize.minimize(function, h[0], method="BFGS").fun


def module(h):
    layer = eqx.nn.Conv1d(4, 4, 3, padding=1, key=jax.random.key(0))
    return eqx.filter_checkpoint(layer)(h)


def jitted_module(h):
    layer = eqx.nn.Conv1d(4, 4, 3, padding=1, key=jax.random.key(0))
    return eqx.filter_jit(layer)(h)


def has_no_kernel(h):
    if h.dtype != jnp.float32:
        raise NotImplementedError(f"Unsupported dtype {h.dtype}.")
    return h


BEGIN_AND_END = [
    scan,
    looped,
    branches,
    minimum,
    lambda h: odeint(lambda y, t: -(y @ w), h, times),
    lambda h: cg(lambda v: v + w @ v, h[0])[0],
]
REFUSED = [
    jax.jit(conv),
    jax.checkpoint(update),
    jnp.fft.rfft,
    has_no_kernel,
    jax.checkpoint(conv),
    jax.grad(lambda h: jnp.sum(jax.checkpoint(conv)(h))),
    jax.jit(update),
    module,
    jitted_module,
    jax.scipy.linalg.expm,
]


def note_of(function, *regions):
    """Runs a function on a product in nested regions; the note of its error."""

    def run():
        if not rest:
            return function(product())
        with rest.pop():
            return run()

    rest = list(regions)
    with pytest.raises(Exception) as raised:
        run()
    (note,) = (n for n in raised.value.__notes__ if "autocast region" in n)
    return note


@cover(quick=2)
@pytest.mark.parametrize("function", BEGIN_AND_END)
def test_dtypes_that_differ_where_a_function_begins_and_ends(function):
    assert "Start from float32" in note_of(function, half())
    with half():
        found = function(product().astype(jnp.float32))
    expected = function(product())
    assert jnp.allclose(found, expected, rtol=0.01, atol=0.01)
    with half():  # the other cure
        assert jnp.allclose(jax.jit(lambda: function(product()))(), expected, atol=0.01)


@cover(quick=5)
@pytest.mark.parametrize("function", REFUSED)
def test_a_function_that_refuses_half_precision(function):
    note = note_of(function, half())
    assert "return float16" in note and "`x.astype(jnp.float32)`" in note
    with half():
        found = function(product().astype(jnp.float32))
    assert jnp.allclose(found, function(product()), rtol=0.01, atol=0.02)


@jax.custom_vjp
def solved(h):
    """As `odeint`: its derivative has a loop, which mixes dtypes."""
    return 2 * h


solved.defvjp(
    lambda h: (solved(h), None),
    lambda _, g: (jax.jit(lambda g: lax.mul(jnp.full((4, 4), 2.0), g))(g),),
)


def test_a_derivative_outside_of_the_region_that_refuses_half_precision():
    loss = half()(lambda x, cast=lambda h: h: jnp.sum(solved(cast(x @ w))))
    with pytest.raises(TypeError, match=r"lax\.mul requires") as raised:
        jax.grad(loss)(x)
    (note,) = (n for n in raised.value.__notes__ if "autocast region" in n)
    assert "`x.astype(jnp.float32)`" in note
    found = jax.grad(loss)(x, lambda h: h.astype(jnp.float32))
    expected = jax.grad(lambda x: jnp.sum(solved(x @ w)))(x)
    assert jnp.allclose(found, expected, rtol=0.01, atol=0.01)


def test_a_note_names_the_dtype_and_is_given_once():
    regions = jamp.autocast(dtype=jnp.bfloat16), jamp.autocast(dtype=jnp.bfloat16)
    assert "return bfloat16" in note_of(jax.jit(conv), *regions)
    inner = jax.jit(lambda h: half()(jax.checkpoint(conv))(h))
    assert "return float16" in note_of(inner, half())


def test_other_errors_get_no_note():
    def fail(error):
        with pytest.raises(type(error)) as raised, half():
            raise error
        return getattr(raised.value, "__notes__", [])

    assert fail(ValueError("float16 is no word of mine")) != []
    for error in (
        ValueError("shapes differ: (2, 3) and (3, 3)"),
        TypeError("bfloat16 is of another region"),
        KeyError("float16"),
        ValueError("unlike dtypes"),
        AssertionError(),
        FileNotFoundError("/runs/float16/step"),
        RuntimeError("checkpoint directory structure is wrong"),
        RuntimeError("tokenizer version mismatch"),
    ):
        assert fail(error) == []
    with pytest.raises(ValueError, match="must be float16") as raised, half():
        jamp.autocast(dtype=jnp.float64)
    assert not hasattr(raised.value, "__notes__")
    with pytest.raises(ValueError, match="float16") as raised, half():
        jax.jit(lambda: jamp.get_policy("params=float16,compute=int32"))()
    assert not any("region" in note for note in raised.value.__notes__)


def test_a_mesh_is_set_around_the_region():
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(ValueError, match="set_mesh") as raised, half():
        with jax.set_mesh(mesh):
            pass
    assert any("Set the mesh first" in note for note in raised.value.__notes__)
    with jax.set_mesh(mesh), half():
        assert product().dtype == jnp.float16


@pytest.mark.slow
def test_the_last_state_of_an_encoder_starts_a_decoder():
    class Translator(nn.Module):
        @nn.compact
        def __call__(self, x, lengths):
            encoder = nn.RNN(nn.OptimizedLSTMCell(8), return_carry=True)
            carry, y = encoder(x, seq_lengths=lengths)
            decoder = nn.RNN(nn.OptimizedLSTMCell(8))
            return decoder(y, initial_carry=carry, seq_lengths=lengths)

    model, inputs = Translator(), jax.random.normal(jax.random.key(0), (2, 5, 8))
    lengths = jnp.array([3, 5])
    variables = jax.jit(model.init)(jax.random.key(1), inputs, lengths)
    expected = model.apply(variables, inputs, lengths)
    with half():
        found = model.apply(variables, inputs, lengths)
    assert found.dtype == jnp.float16
    assert jnp.allclose(found, expected, atol=0.01)


@pytest.mark.parametrize("within_jit", [False, True])
def test_a_refusal_of_jamps_own_has_no_note(within_jit):
    """Also where JAX takes its own frames, and those of the casting, from the error."""

    def fit(y):
        with jamp.autocast(jnp.float16):
            return jnp.polyfit(jnp.linspace(0, 1, 8), y, 2)

    with pytest.raises(TypeError, match="in an autocast region") as refused:
        (jax.jit(fit) if within_jit else fit)(jnp.ones(8, jnp.float16))
    notes = getattr(refused.value, "__notes__", [])
    assert not [note for note in notes if "In this autocast region" in note]


W = np.ones((4, 4), np.float32)
LOOPS = {
    "scan": lambda f: lax.scan(lambda c, _: (f(c), None), W, None, length=2),
    "fori": lambda f: lax.fori_loop(0, 2, lambda _, c: f(c), W),
    "while": lambda f: lax.while_loop(lambda c: c[0, 0] < 9, f, W),
    "cond": lambda f: lax.cond(W[0, 0] > 0, f, lambda c: c, W),
    "switch": lambda f: lax.switch(0, [f, lambda c: c], W),
}


@cover(quick=2)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_region_in_a_function_that_changes_what_is_carried(name, dtype):
    """JAX compares the dtypes when the region has been left, and its error says both.

    A note is added by a region that is open then.
    """
    loop = LOOPS[name]
    in_half = jamp.autocast(dtype)(lambda c: c @ W)

    def notes_of(run):
        with pytest.raises(TypeError, match=r"f32|float32") as caught:
            run()
        return "".join(getattr(caught.value, "__notes__", ()))

    run = lambda: loop(lambda c: in_half(c))  # JAX keeps what it has traced
    within = lambda: jamp.autocast(dtype)(loop)(lambda c: in_half(c))
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        assert "autocast" not in notes_of(wrap(run))
        assert "In an autocast" in notes_of(wrap(within))
    # What the page says to write.
    loop(lambda c: in_half(c).astype(c.dtype))
    jamp.autocast(dtype)(loop)(lambda c: c @ W)
