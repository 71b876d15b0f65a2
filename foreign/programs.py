"""Training loops and samplers of other libraries, with three seeds each."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp

from .parts import import_keras

SEEDS = (0, 1, 2)
ERRORS = 3.0  # how many standard errors the means may be apart
Region = contextlib.AbstractContextManager[Any]
# Gives a row of figures for each seed; it enters the region that it is given.
Program = Callable[[Region], np.ndarray]


def measure(program: Program, dtypes: Sequence[str]) -> dict[str, float]:
    """By how many standard errors the means differ, of the dtypes where they do."""
    plain = program(contextlib.nullcontext())
    noise = float(np.sqrt(plain.var(0, ddof=1).mean() * 2 / len(SEEDS)))
    far = {}
    for dtype in dtypes:
        given = program(jamp.autocast(dtype=jnp.dtype(dtype)))
        apart = float(np.abs(given.mean(0) - plain.mean(0)).max())
        if not apart <= ERRORS * noise:
            far[dtype] = apart / noise
    return far


def data() -> tuple[jax.Array, jax.Array]:
    """Of a regression with four weights."""
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 4))
    y = x @ np.array([1.0, -0.5, 0.25, 2.0]) + 0.5 * random.standard_normal(64)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def regression(numpyro: Any) -> Callable[..., None]:
    dist = numpyro.distributions

    def model(x: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 2.0).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        hidden = jnp.tanh(x @ (0.2 * w)) * 5.0
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(hidden, noise), obs=y)

    return model


def numpyro_svi(region: Region) -> np.ndarray:
    numpyro = import_module("numpyro")
    infer, model = numpyro.infer, regression(numpyro)
    guide = infer.autoguide.AutoNormal(model)
    loss = infer.Trace_ELBO(num_particles=4)
    svi = infer.SVI(model, guide, numpyro.optim.Adam(0.03), loss)

    @jax.jit
    def run(key: jax.Array) -> jax.Array:
        with region:
            found = svi.run(key, 1500, *data(), progress_bar=False)
        return found.params["w_auto_loc"]

    return np.stack([run(jax.random.PRNGKey(seed)) for seed in SEEDS])


def numpyro_nuts(region: Region) -> np.ndarray:
    numpyro = import_module("numpyro")
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(regression(numpyro)),
        num_warmup=150,
        num_samples=300,
        num_chains=len(SEEDS),
        chain_method="vectorized",
        progress_bar=False,
    )
    with region:
        mcmc.run(jax.random.PRNGKey(0), *data())
    return np.asarray(mcmc.get_samples(group_by_chain=True)["w"]).mean(1)


def blackjax_hmc(region: Region) -> np.ndarray:
    blackjax = import_module("blackjax")
    x, y = data()

    def logdensity(w: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ (0.2 * w)) * 5.0
        return -2.0 * jnp.sum((y - hidden) ** 2) - jnp.sum(w**2) / 8

    def chain(key: jax.Array) -> jax.Array:
        kernel = blackjax.hmc(logdensity, 0.03, jnp.ones(4), 8)

        def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            state, _ = kernel.step(key, state)
            return state, state.position

        keys = jax.random.split(key, 600)
        start = kernel.init(jnp.zeros(4))
        return jax.lax.scan(step, start, keys)[1][200:].mean(0)

    @jax.jit
    def run(keys: jax.Array) -> jax.Array:
        with region:
            return jax.vmap(chain)(keys)

    return np.asarray(run(jax.random.split(jax.random.key(0), len(SEEDS))))


def keras_fit(middle: str, region: Region) -> np.ndarray:
    """The losses of four epochs of a small classifier, the last first."""
    keras = import_keras()
    layers = keras.layers
    random = np.random.default_rng(0)
    images = random.standard_normal((96, 8, 8, 1)).astype(np.float32)
    labels = (images[:, :4].mean((1, 2, 3)) > images[:, 4:].mean((1, 2, 3))).astype(int)

    def convolutional(x: Any) -> Any:
        x = layers.Conv2D(8, 3, activation="relu")(x)
        x = layers.BatchNormalization()(x)
        return layers.Flatten()(layers.Conv2D(8, 3, activation="relu")(x))

    def recurrent(x: Any) -> Any:
        return layers.LSTM(16)(layers.Reshape((8, 8))(x))

    def attentive(x: Any) -> Any:
        x = layers.Dense(16)(layers.Reshape((8, 8))(x))
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
        return layers.GlobalAveragePooling1D()(x)

    parts = {"CNN": convolutional, "LSTM": recurrent, "attention": attentive}

    def build() -> Any:
        start = keras.Input((8, 8, 1))
        return keras.Model(start, layers.Dense(2)(parts[middle](start)))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss)
    model.optimizer.build(model.trainable_variables)
    fresh = [np.asarray(v) for v in model.optimizer.variables]
    rows = []
    for seed in SEEDS:  # the same compiled step, with weights of another seed
        keras.utils.set_random_seed(seed)
        model.set_weights(build().get_weights())
        for variable, value in zip(model.optimizer.variables, fresh, strict=True):
            variable.assign(value)
        with region:
            history = model.fit(
                images, labels, batch_size=32, epochs=4, verbose=0, shuffle=False
            )
        rows.append(history.history["loss"][::-1])
    return np.array(rows)


# By the library's name and what is compared.
PROGRAMS: dict[str, Program] = {
    "numpyro SVI, posterior means": numpyro_svi,
    "numpyro NUTS, posterior means": numpyro_nuts,
    "blackjax HMC, posterior means": blackjax_hmc,
    "keras fit of a CNN, losses": functools.partial(keras_fit, "CNN"),
    "keras fit of an LSTM, losses": functools.partial(keras_fit, "LSTM"),
    "keras fit of attention, losses": functools.partial(keras_fit, "attention"),
}
