"""What the calls in `calls.txt` use besides the library: arrays and small functions."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

SYMMETRIC = np.eye(6) * 4 + np.cos(np.add.outer(np.arange(6.0), np.arange(6.0)))
WEIGHTS = jnp.asarray(np.cos(np.arange(64.0)).reshape(8, 8), jnp.float32)
# bfloat16 has 318, 320, 322.
FAR = jnp.asarray(np.linspace(319, 321, 6), jnp.float32)
LABELS = np.arange(64) % 8
SHAPE = jax.ShapeDtypeStruct((6,), jnp.float32)
TARGET = jnp.asarray(np.cos(np.arange(6.0)), jnp.float32)
TIMES = jnp.linspace(0.0, 1.0, 16)


def common() -> dict[str, Any]:
    return {
        "ANGLES": np.mod(np.arange(32) * 0.9, 2 * np.pi),
        "COUNTS": jnp.arange(32) % 5,
        "COVARIANCE": jnp.asarray(SYMMETRIC, jnp.float32),
        "CTC_LABELS": jnp.asarray(LABELS[:12].reshape(4, 3) % 7 + 1),
        "CUBIC": np.array([1.0, -6.0, 11.0, -6.0]),
        "EXTREME": np.concatenate([np.zeros(8), np.ones(8), np.linspace(0, 1, 48)]),
        "FACTOR": jnp.asarray(np.linalg.cholesky(SYMMETRIC), jnp.float32),
        "FAR": FAR,
        "HOT": jax.nn.one_hot(LABELS, 8),
        "HOT_BUT_TWO": jax.nn.one_hot(LABELS % 6, 8),
        "IDS": np.append(np.zeros(9000, np.int32), np.arange(1000) % 7 + 1),
        "LABELS": LABELS,
        "LINE": np.linspace(-4, 4, 32),
        "LOWER": np.tril(SYMMETRIC),
        "MASK": jnp.where(jnp.arange(8) > 5, -1e9, 0.0),
        "NEAR": jnp.linspace(0.3, 0.4, 32),
        "NO_FRAME": 1.0 * (jnp.arange(16) >= jnp.array([[16], [3], [2], [0]])),
        "NO_LABEL": 1.0 * (jnp.arange(3) >= jnp.array([[3], [3], [1], [0]])),
        "ODD": jnp.asarray((LABELS % 2)[:, None] * np.ones((1, 8)), jnp.float32),
        "ONE": jnp.ones(32),
        "PAST": jnp.arange(64.0).reshape(1, 1, 8, 8) * 2049,
        "PLACES": jnp.arange(2040.0, 2104.0),
        "POINTS": jnp.stack(
            [jnp.linspace(0.2, 6.4, 16), jnp.linspace(5.8, 0.3, 16)], 1
        ),
        "ROW": jnp.asarray(np.arange(2400.0).reshape(1, 4, 600, 1) % 251, jnp.float32),
        "Rotation": import_module("jax.scipy.spatial.transform").Rotation,
        "SIGNS": jnp.where(LABELS[:, None] > 3, 1.0, -1.0),
        "SYMMETRIC": SYMMETRIC,
        "TAILS": np.concatenate([np.linspace(-8, 5, 56), [-0.5, 0.25]]),
        "WEIGHTS": WEIGHTS,
        "ZERO": jnp.zeros(32),
        "jax": jax,
        "jnp": jnp,
        "jsp": import_module("jax.scipy"),
        "key": jax.random.key(3),
        "lax": lax,
        "minimize": import_module("jax.scipy.optimize").minimize,
        "np": np,
        "odeint": import_module("jax.experimental.ode").odeint,
        "optax": optax,
        "updated": updated,
    }


def updated(optimizer: optax.GradientTransformation, grads: jax.Array) -> Any:
    """One update from half-precision gradients of float32 parameters."""
    weights = jnp.ones(grads.shape)
    return optimizer.update(grads, optimizer.init(weights), weights)[0]


def jaxopt_parts() -> dict[str, Any]:
    def residual(x: jax.Array, a: jax.Array) -> jax.Array:
        return a @ x - jnp.ones(6)

    def energy(x: jax.Array, a: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum(residual(x, a) ** 2) + 0.05 * jnp.sum(x**2)

    return {"jaxopt": import_module("jaxopt"), "residual": residual, "energy": energy}


def haiku_parts() -> dict[str, Any]:
    hk = import_module("haiku")

    def haiku(build: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
        """A network that starts with the half-precision value."""
        model = hk.transform_with_state(build)

        @functools.cache
        def variables(shape: tuple[int, ...]) -> Any:
            with jax.ensure_compile_time_eval():
                return model.init(jax.random.key(0), jnp.zeros(shape))

        return lambda h: model.apply(*variables(h.shape), jax.random.key(1), h)[0]

    def unrolled(core: Any, h: jax.Array) -> Any:
        return hk.dynamic_unroll(core, h, core.initial_state(h.shape[1]))[0]

    def stepped(core: Any, h: jax.Array) -> Any:
        return core(h, core.initial_state(len(h)))[0]

    return {"haiku": haiku, "hk": hk, "stepped": stepped, "unrolled": unrolled}


def keras_parts() -> dict[str, Any]:
    keras = import_keras()

    def built(layer: Any) -> Callable[[jax.Array], Any]:
        @functools.cache
        def variables(shape: tuple[int, ...]) -> Any:
            with jax.ensure_compile_time_eval():
                keras.utils.set_random_seed(0)
                layer.build(shape)
                groups = layer.trainable_variables, layer.non_trainable_variables
                return [[v.value for v in group] for group in groups]

        return lambda h: layer.stateless_call(*variables(h.shape), h)[0]

    return {"built": built, "keras": keras}


def jraph_parts() -> dict[str, Any]:
    jraph = import_module("jraph")
    senders = np.arange(4096) % 16
    hub = np.where(np.arange(4096) < 3900, 0, np.arange(4096) // 3 % 16)

    def graph(nodes: jax.Array, edges: jax.Array | None = None) -> Any:
        size = jnp.array([16]), jnp.array([4096])
        ends = jnp.asarray(hub), jnp.asarray(senders)
        return jraph.GraphsTuple(nodes, edges, *ends, None, *size)

    def layer(x: jax.Array) -> jax.Array:
        return x @ WEIGHTS

    def update(*parts: Any) -> jax.Array:
        known = [p for p in parts if p is not None and p.ndim == 2]
        return jax.nn.relu(layer(jnp.concatenate(known, -1)[:, :8]))

    names = {"SENDERS": senders, "graph": graph, "layer": layer, "update": update}
    return names | {"jraph": jraph}


def e3nn_parts() -> dict[str, Any]:
    e3nn = import_module("e3nn_jax")
    irreps = lambda h, names="4x0e + 2x1o": e3nn.IrrepsArray(names, h)
    return {"e3nn": e3nn, "irreps": irreps}


def tinygp_parts() -> dict[str, Any]:
    tinygp = import_module("tinygp")
    grid = jnp.linspace(0.0, 4.0, 16)
    return {"GRID": grid, "kernels": tinygp.kernels, "tinygp": tinygp}


def quax_parts() -> dict[str, Any]:
    names = {
        name: import_module(f"quax.examples.{name}") for name in ("lora", "unitful")
    }
    return names | {"quax": import_module("quax")}


def penzai_parts() -> dict[str, Any]:
    pz = import_module("penzai.pz")

    def norm(name: str) -> Callable[[Any], Any]:
        with jax.ensure_compile_time_eval():
            made = getattr(pz.nn, name).from_config(
                "norm", init_base_rng=jax.random.key(0), across_axes={"features": 8}
            )
            model, params = pz.unbind_params(made)
        return lambda h: pz.bind_variables(model, params)(h)

    return {
        "named": lambda h: pz.nx.wrap(h).tag("batch", "features"),
        "norm": norm,
        "plain": lambda x: x.unwrap("batch", "features"),
        "pz": pz,
    }


def distrax_parts() -> dict[str, Any]:
    return {"distrax": import_module("distrax")}


def tfp_parts() -> dict[str, Any]:
    tfp = import_module("tensorflow_probability.substrates.jax")
    return {"tfp": tfp, "tfd": tfp.distributions, "tfb": tfp.bijectors}


def numpyro_parts() -> dict[str, Any]:
    numpyro = import_module("numpyro")
    dist = numpyro.distributions

    def model(x: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(6), 1.0).to_event(1))
        with numpyro.plate("n", 16):
            numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=jnp.ones(16))

    return {"dist": dist, "model": model, "numpyro": numpyro}


def blackjax_parts() -> dict[str, Any]:
    target = jnp.asarray(SYMMETRIC, jnp.float32)

    def one_step(kernel: Any, *start: Any) -> jax.Array:
        return kernel.step(jax.random.key(1), kernel.init(*start))[0].position

    return {
        "blackjax": import_module("blackjax"),
        "log_density": lambda x: -0.5 * x @ (target @ x),
        "one_step": one_step,
    }


def diffrax_parts() -> dict[str, Any]:
    dfx = import_module("diffrax")
    path = dfx.VirtualBrownianTree(0.0, 1.0, 1e-2, (4,), jax.random.key(0))

    def solve(a: jax.Array, y: jax.Array, solver: Any, **options: Any) -> jax.Array:
        term = dfx.ODETerm(lambda t, y, a: -jnp.tanh(a @ y))
        given = {"dt0": 0.1, "max_steps": 256, "y0": y, "args": a} | options
        return dfx.diffeqsolve(term, solver, 0.0, 1.0, **given).ys

    def euler(term: Any, solver: Any, y: jax.Array) -> jax.Array:
        start = y.astype(jnp.float32)
        return dfx.diffeqsolve(term, solver, 0.0, 1.0, 0.1, start, max_steps=32).ys

    noise = dfx.ControlTerm(lambda t, y, _: jnp.eye(4) * 0.1, path)
    names = {"NOISE": noise, "TIMES": TIMES, "dfx": dfx}
    return names | {"euler": euler, "solve": solve}


def lineax_parts() -> dict[str, Any]:
    lx = import_module("lineax")

    def slope(a: jax.Array) -> Any:
        function = lambda x, _: a @ jnp.tanh(x)
        return lx.JacobianLinearOperator(function, jnp.zeros(6, jnp.float32))

    return {
        "SHAPE": SHAPE,
        "applied": lambda a: lx.FunctionLinearOperator(lambda x: a @ x, SHAPE),
        "lx": lx,
        "matrix": lambda a, tags=(): lx.MatrixLinearOperator(a.astype("f4"), tags),
        "slope": slope,
    }


def optimistix_parts() -> dict[str, Any]:
    def residual(y: jax.Array, a: jax.Array) -> jax.Array:
        return y + 0.5 * jnp.tanh(a @ y) - TARGET

    def energy(y: jax.Array, a: jax.Array) -> jax.Array:
        return jnp.sum(residual(y, a) ** 2)

    names = {"TARGET": TARGET, "energy": energy, "residual": residual}
    return names | {"optx": import_module("optimistix")}


def import_keras() -> Any:
    from shared.keras_on_jax import import_keras

    return import_keras()


# By the section of `calls.txt`.
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "jax": dict,
    "optax": dict,
    "jaxopt": jaxopt_parts,
    "haiku": haiku_parts,
    "keras": keras_parts,
    "jraph": jraph_parts,
    "e3nn_jax": e3nn_parts,
    "tinygp": tinygp_parts,
    "quax": quax_parts,
    "penzai": penzai_parts,
    "distrax": distrax_parts,
    "tensorflow_probability": tfp_parts,
    "numpyro": numpyro_parts,
    "blackjax": blackjax_parts,
    "diffrax": diffrax_parts,
    "lineax": lineax_parts,
    "optimistix": optimistix_parts,
}


@functools.cache
def names(section: str) -> dict[str, Any]:
    """What the calls of a section may name.

    Raises:
      ImportError: the library is not installed.
    """
    return common() | PARTS[section]()
