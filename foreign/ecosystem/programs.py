"""Programs that draw or train, with three seeds in float32 and in regions."""

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jamp

from .compare import said

SEEDS = (0, 1, 2)
ERRORS = 3.0  # how many standard errors the means may be apart


class Program(NamedTuple):
    """What is run three times in each dtype.

    Attributes:
      what: the figures that are compared, in words.
      run: gives a row of figures for each seed; it enters the region that it is given.
    """

    name: str
    what: str
    run: Callable[[contextlib.AbstractContextManager[Any]], np.ndarray]


class Outcome(NamedTuple):
    """How a program went.

    Attributes:
      mean: of the first figure of each seed's row, in float32.
      noise: the standard error of the difference of two means, in float32.
      apart: from float32's mean, the largest of the figures, by half-precision dtype.
    """

    name: str
    what: str
    mean: float
    noise: float
    apart: dict[str, float]
    raised: str = ""

    @property
    def wrong(self) -> bool:
        far = (not x <= ERRORS * self.noise for x in self.apart.values())
        return bool(self.raised) or any(far)


def measure(program: Program, dtypes: tuple[str, ...]) -> Outcome:
    plain = program.run(contextlib.nullcontext())
    noise = float(np.sqrt(plain.var(0, ddof=1).mean() * 2 / len(SEEDS)))
    mean, apart = float(plain.mean(0)[0]), {}
    for dtype in dtypes:
        try:
            given = program.run(jamp.autocast(dtype=jnp.dtype(dtype)))
        except Exception as error:  # of any library
            raised = f"{dtype}: {said(error)}"
            return Outcome(program.name, program.what, mean, noise, apart, raised)
        apart[dtype] = float(np.abs(given.mean(0) - plain.mean(0)).max())
    return Outcome(program.name, program.what, mean, noise, apart)


def data() -> tuple[jax.Array, jax.Array]:
    """Of a regression with four weights."""
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 4))
    y = x @ np.array([1.0, -0.5, 0.25, 2.0]) + 0.5 * random.standard_normal(64)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def numpyro_programs() -> Iterator[Program]:
    numpyro = import_module("numpyro")
    dist, infer = numpyro.distributions, numpyro.infer
    x, y = data()

    def model(x: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 2.0).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        hidden = jnp.tanh(x @ (0.2 * w)) * 5.0
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(hidden, noise), obs=y)

    def variational(region: Any) -> np.ndarray:
        guide = infer.autoguide.AutoNormal(model)
        loss = infer.Trace_ELBO(num_particles=4)
        svi = infer.SVI(model, guide, numpyro.optim.Adam(0.03), loss)

        @jax.jit
        def run(key: jax.Array) -> jax.Array:
            with region:
                found = svi.run(key, 1500, x, y, progress_bar=False)
            return found.params["w_auto_loc"]

        return np.stack([run(jax.random.PRNGKey(seed)) for seed in SEEDS])

    def sampled(region: Any) -> np.ndarray:
        mcmc = infer.MCMC(
            infer.NUTS(model),
            num_warmup=150,
            num_samples=300,
            num_chains=len(SEEDS),
            chain_method="vectorized",
            progress_bar=False,
        )
        with region:
            mcmc.run(jax.random.PRNGKey(0), x, y)
        return np.asarray(mcmc.get_samples(group_by_chain=True)["w"]).mean(1)

    yield Program("numpyro SVI", "posterior means of four weights", variational)
    yield Program("numpyro NUTS", "posterior means of four weights", sampled)


def blackjax_programs() -> Iterator[Program]:
    blackjax = import_module("blackjax")
    x, y = data()

    def logdensity(w: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ (0.2 * w)) * 5.0
        return -2.0 * jnp.sum((y - hidden) ** 2) - jnp.sum(w**2) / 8

    def sampled(region: Any) -> np.ndarray:
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

    yield Program("blackjax HMC", "posterior means of four weights", sampled)


def keras_programs() -> Iterator[Program]:
    keras = import_module("keras")
    layers = keras.layers
    random = np.random.default_rng(0)
    images = random.standard_normal((96, 8, 8, 1)).astype(np.float32)
    labels = (images[:, :4].mean((1, 2, 3)) > images[:, 4:].mean((1, 2, 3))).astype(int)

    def convolutional() -> Any:
        x = start = keras.Input((8, 8, 1))
        x = layers.Conv2D(8, 3, activation="relu")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Conv2D(8, 3, activation="relu")(x)
        return keras.Model(start, layers.Dense(2)(layers.Flatten()(x)))

    def recurrent() -> Any:
        x = start = keras.Input((8, 8, 1))
        x = layers.LSTM(16)(layers.Reshape((8, 8))(x))
        return keras.Model(start, layers.Dense(2)(x))

    def attentive() -> Any:
        x = start = keras.Input((8, 8, 1))
        x = layers.Dense(16)(layers.Reshape((8, 8))(x))
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
        return keras.Model(start, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))

    def fitted(build: Callable[[], Any], region: Any) -> np.ndarray:
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

    for name, build in (
        ("CNN", convolutional),
        ("LSTM", recurrent),
        ("attention", attentive),
    ):
        run = lambda region, build=build: fitted(build, region)
        yield Program(
            f"Keras `fit`, {name}", "losses of four epochs, the last first", run
        )


PROGRAMS = {
    "numpyro": numpyro_programs,
    "blackjax": blackjax_programs,
    "keras": keras_programs,
}
