"""Calls of jraph, e3nn-jax, tinygp, quax and penzai."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import Call, Table
from .jax_numpy import SYMMETRIC, TABLE

NODES, EDGES, ROWS = 16, 4096, 10_000
SENDERS = np.arange(EDGES) % NODES
RECEIVERS = np.where(np.arange(EDGES) < 3900, 0, np.arange(EDGES) // 3 % NODES)  # a hub
IDS = np.where(np.arange(ROWS) < 9000, 0, np.arange(ROWS) % 7 + 1)
WEIGHTS = jnp.asarray(np.cos(np.arange(64.0)).reshape(8, 8), jnp.float32)
FEATURES = {"positive": True, "scale": 2.0, "shift": 0.8, "counts": True}


def jraph_calls() -> list[Call]:
    jraph = import_module("jraph")
    table = Table("jraph")
    for name in "sum mean variance normalize max min_or_constant softmax".split():
        function = getattr(jraph, f"segment_{name}")
        each = lambda h, f=function: f(h, jnp.asarray(IDS), 8)
        table(f"segment_{name}", each, (ROWS,), **FEATURES)
    degrees = lambda h: jraph.segment_sum(jnp.ones_like(h), jnp.asarray(IDS), 8)
    table("segment_sum of ones_like", degrees, (ROWS,), **FEATURES)

    def graph(nodes: jax.Array, edges: jax.Array | None = None) -> Any:
        size = jnp.array([NODES]), jnp.array([EDGES])
        ends = jnp.asarray(SENDERS), jnp.asarray(RECEIVERS)
        return jraph.GraphsTuple(nodes, edges, *ends[::-1], None, *size)

    layer = lambda x: x @ WEIGHTS
    both = lambda x: jax.nn.relu(layer(x))
    concat = lambda *parts: jnp.concatenate(
        [p for p in parts if p is not None and p.ndim == 2], -1
    )
    update = lambda *parts: both(concat(*parts)[:, :8])
    named = {
        "GraphConvolution": jraph.GraphConvolution(layer),
        "GraphConvolution(symmetric)": jraph.GraphConvolution(
            layer, add_self_edges=True, symmetric_normalization=True
        ),
        "GAT": jraph.GAT(
            layer, lambda s, r, e: jax.nn.leaky_relu((s + r) @ WEIGHTS[:, :1])
        ),
        "InteractionNetwork": jraph.InteractionNetwork(update, update),
        "GraphNetwork(mean)": jraph.GraphNetwork(
            update, update, aggregate_edges_for_nodes_fn=jraph.segment_mean
        ),
    }
    for name, net in named.items():
        needs = name.startswith(("Inter", "GraphNet"))
        run = lambda h, net=net, needs=needs: (
            net(graph(h, h[SENDERS] if needs else None)).nodes
        )
        table(name, run, (NODES, 8), counts=True, positive=True)
    pooled = lambda h: (
        jraph.DeepSets(lambda n, g: both(n), layer)(
            graph(h)._replace(globals=jnp.zeros((1, 8)))
        ).globals
    )
    table("DeepSets", pooled, (NODES, 8), counts=True, positive=True)
    return table.calls


def e3nn_calls() -> list[Call]:
    e3nn = import_module("e3nn_jax")
    table = Table("e3nn")
    irreps = "4x0e + 2x1o"
    array = lambda h, names=irreps: e3nn.IrrepsArray(names, h)
    named = {
        "spherical_harmonics": lambda h: (
            e3nn.spherical_harmonics("0e + 1o + 2e", h[:, :3], True).array
        ),
        "tensor_product": lambda h: e3nn.tensor_product(array(h), array(h)).array,
        "elementwise_tensor_product": lambda h: (
            e3nn.elementwise_tensor_product(array(h), array(h)).array
        ),
        "gate": lambda h: e3nn.gate(array(h, "4x0e + 2x0e + 1x1o + 1x0e")).array,
        "norm": lambda h: e3nn.norm(array(h)).array,
        "norm_activation": lambda h: (
            e3nn.norm_activation(array(h), [jax.nn.tanh, jax.nn.sigmoid]).array
        ),
        "scalar_activation": lambda h: (
            e3nn.scalar_activation(array(h, "4x0e + 6x0e"), [jax.nn.gelu] * 2).array
        ),
        "scatter_sum": lambda h: (
            e3nn.scatter_sum(array(h), dst=jnp.arange(len(h)) * 0, output_size=2).array
        ),
        "scatter_mean": lambda h: (
            e3nn.scatter_mean(array(h), dst=jnp.arange(len(h)) * 0, output_size=2).array
        ),
        "mean": lambda h: e3nn.mean(array(h), 0).array,
        "soft_one_hot_linspace": lambda h: e3nn.soft_one_hot_linspace(
            h[:, 0], start=-2.0, end=2.0, number=8, basis="gaussian", cutoff=False
        ),
        "bessel": lambda h: e3nn.bessel(jnp.abs(h[:, 0]) + 0.5, 4, 5.0),
        "angles_to_matrix": lambda h: e3nn.angles_to_matrix(*h[:, :3].T),
        "matrix_to_quaternion": lambda h: jnp.abs(
            e3nn.matrix_to_quaternion(e3nn.angles_to_matrix(*h[:, :3].T))
        ),
        "IrrepsArray.transform_by_angles": lambda h: (
            array(h).transform_by_angles(0.3, 0.8, 1.1).array
        ),
    }
    for name, function in named.items():
        many = name in ("scatter_sum", "scatter_mean", "mean")
        shape = (4096, 10) if many else (16, 10)
        table(name, function, shape, counts=name != "bessel", shift=30.0 * many)
    return table.calls


def tinygp_calls() -> list[Call]:
    tinygp = import_module("tinygp")
    kernels = tinygp.kernels
    table = Table("tinygp")
    places = jnp.linspace(0.0, 4.0, 16)
    makers = {
        "Matern32": lambda: kernels.Matern32(0.7),
        "ExpSquared": lambda: kernels.ExpSquared(0.7),
        "RationalQuadratic": lambda: kernels.RationalQuadratic(alpha=1.5),
        "quasisep.Matern52": lambda: kernels.quasisep.Matern52(0.7),
    }
    for name, make in makers.items():

        def likelihood(h: jax.Array, make: Any = make) -> jax.Array:
            return tinygp.GaussianProcess(make(), places, diag=0.1).log_probability(h)

        def mean(h: jax.Array, make: Any = make) -> jax.Array:
            process = tinygp.GaussianProcess(make(), places, diag=0.1)
            return process.condition(h, places + 0.1).gp.loc

        table(f"{name}.log_probability", likelihood, (16,), counts=True)
        if "quasisep" not in name:
            table(f"{name} condition", mean, (16,), counts=True)

    def deep(h: jax.Array) -> jax.Array:
        """The features of a layer as places, which deep kernels have."""
        kernel = kernels.ExpSquared(0.7)
        return tinygp.GaussianProcess(kernel, h, diag=0.1).log_probability(
            jnp.sin(jnp.arange(16.0))
        )

    table("log_probability at half places", deep, (16, 2), counts=True)
    return table.calls


def quax_calls() -> list[Call]:
    quax = import_module("quax")
    lora = import_module("quax.examples.lora")
    unitful = import_module("quax.examples.unitful")
    table = Table("quax")
    key = jax.random.key(0)

    def low_rank(h: jax.Array) -> jax.Array:
        matrix = lora.LoraArray(WEIGHTS, rank=2, key=key, stop_gradient=False)
        return quax.quaxify(lambda w, h: jnp.tanh(h @ w))(matrix, h)

    def with_units(h: jax.Array) -> jax.Array:
        meters = unitful.Unitful(h, {unitful.meters: 1})
        return quax.quaxify(lambda x: x * x + x * x)(meters).array

    table("quaxify(LoraArray)", low_rank, TABLE)
    table("quaxify(Unitful)", with_units, TABLE)
    table("quaxify", quax.quaxify(lambda h: jax.nn.softmax(h @ WEIGHTS)), TABLE)
    return table.calls


def penzai_calls() -> list[Call]:
    pz = import_module("penzai.pz")
    table = Table("penzai.pz")
    named = lambda h: pz.nx.wrap(h).tag("batch", "features")
    plain = lambda x: x.unwrap("batch", "features")
    key = jax.random.key(0)
    matrix = pz.nx.wrap(WEIGHTS).tag("features", "out")

    def normed(h: jax.Array, name: str) -> jax.Array:
        with jax.ensure_compile_time_eval():
            norm = getattr(pz.nn, name).from_config(
                "norm", init_base_rng=key, across_axes={"features": 8}
            )
            model, params = pz.unbind_params(norm)
        return plain(pz.bind_variables(model, params)(named(h)))

    for name in ("LayerNorm", "RMSLayerNorm"):
        each = lambda h, name=name: normed(h, name)
        table(f"nn.{name}", each, TABLE, counts=True)
        table(f"nn.{name} of 1e3", each, TABLE, scale=1e3, counts=True)
    alone = lambda h: plain(pz.nn.Standardize(across=("features",))(named(h)))
    table("nn.Standardize of 1e3", alone, TABLE, scale=1e3, counts=True)
    multiply = lambda h: pz.nx.nmap(jnp.dot)(
        named(h).untag("features"), matrix.untag("features")
    ).unwrap("batch", "out")
    table("nx.nmap(jnp.dot)", multiply, TABLE)
    table(
        "nn.Softmax",
        lambda h: plain(pz.nn.Softmax("features")(named(h))),
        TABLE,
        counts=True,
    )
    total = lambda h: pz.nx.nmap(jnp.sum)(named(h).untag("features")).unwrap("batch")
    table("nx.nmap(jnp.sum)", total, (8, 4096), shift=2.0, counts=True)
    solve = lambda a, b: pz.nx.nmap(jnp.linalg.solve)(
        pz.nx.wrap(a), pz.nx.wrap(b)
    ).unwrap()
    table("nx.nmap(jnp.linalg.solve)", solve, SYMMETRIC, (6,))
    return table.calls


LIBRARIES = {
    "jraph": jraph_calls,
    "e3nn-jax": e3nn_calls,
    "tinygp": tinygp_calls,
    "quax": quax_calls,
    "penzai": penzai_calls,
}
