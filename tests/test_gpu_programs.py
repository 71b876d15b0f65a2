"""What XLA's GPU compiler does with products in float8, scaled ones, and retries.

The tests need JAX's CUDA plugin but not a GPU; without the plugin they are skipped.
"""

import functools
import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jamp
from benchmarks import gpu_float8, gpu_programs
from shared import float8, hlo
from tests.autocast.test_float8_hlo import (
    ROWWISE,
    W,
    X,
    both_ways,
    in_float8,
    plain,
    wide,
)


def with_bias(x, w, bias):
    y = jnp.matmul(x, w)
    return y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)


BIAS = jax.ShapeDtypeStruct((48,), jnp.float32)
STACKED = jax.ShapeDtypeStruct((2, *X.shape), X.dtype)
FLOAT16 = {"dtype": jnp.float16, "rules": {lax.dot_general_p: jamp.Float8()}}
COMPILED = {
    "forward": (in_float8(plain), X, W),
    "float32 result": (in_float8(wide), X, W),
    "float16": (in_float8(plain, **FLOAT16), X, W),
    "backward": (both_ways(in_float8(plain)), X, W),
    "rowwise": (both_ways(in_float8(plain, ROWWISE)), X, W),
    "vmap": (jax.vmap(in_float8(plain), (0, None)), STACKED, W),
    "vmap, backward": (
        jax.vmap(both_ways(in_float8(plain)), (0, None)),
        STACKED,
        W,
    ),
    "bias": (in_float8(with_bias), X, W, BIAS),
}
PRODUCTS = {"backward": 3, "rowwise": 3, "vmap, backward": 3}


compiles_for_a_gpu = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None
    or os.environ.get("JAX_PLATFORMS") != "cpu",
    reason="needs jax-cuda12-plugin, and JAX_PLATFORMS=cpu so that it asks for no GPU",
)


@compiles_for_a_gpu
@pytest.mark.parametrize("gemm", gpu_float8.GEMMS)
@pytest.mark.parametrize("name", COMPILED)
def test_xla_makes_float8_kernels_of_all_products(name, gemm):
    text = compiled(*COMPILED[name], gemm=gemm)
    found = float8.compiled_products(text)
    assert found.float8 == found.all == PRODUCTS.get(name, 1)
    if (name, gemm) == ("bias", "cuBLAS"):
        assert '"epilogue":"BIAS"' in text, "the bias is added by the product's kernel"


def compiled(function, *args, gemm, **options):
    """The optimized HLO of a function for an H100."""
    mesh = jax.sharding.Mesh(gpu_programs.h100s(), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    args = jax.tree.map(place, args)
    with gpu_programs.as_on_a_gpu():
        lowered = jax.jit(function, **options).trace(*args).lower()
        return lowered.compile(compiler_options=gpu_float8.GEMMS[gemm]).as_text()


@compiles_for_a_gpu
def test_scaled_products_are_cublas_products_of_float16_with_float32_results():
    within = functools.partial(jamp.autocast, jamp.ScaledFloat16())
    loss = lambda x, w: jnp.mean(within()(jnp.matmul)(x, w) ** 2)
    text = compiled(jax.grad(loss, (0, 1)), X, W, gemm="cuBLAS")
    instructions = hlo.parse(text)["ENTRY"]
    shapes = {i.name: i.shape for i in instructions}
    calls = [i for i in instructions if "__cublas$" in i.text]
    assert len(calls) == 3
    for call in calls:
        assert call.shape.startswith("(f32[")
        assert all(shapes[name].startswith("f16[") for name in call.operands)


@compiles_for_a_gpu
@pytest.mark.usefixtures("standard_promotion")
def test_retry_copies_nothing_more_than_the_step_does():
    tx = jamp.dynamic_loss_scale(optax.adam(1e-3))

    def loss_fn(weights, x):
        with jamp.autocast(jnp.float16):
            return jnp.mean(jnp.float32(x @ weights[0] @ weights[1]) ** 2)

    def step(state, x):
        weights, opt_state = state
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(weights, x)
        return jamp.step(tx, grads, opt_state, weights), loss

    def start():
        shapes = W.shape, W.shape[::-1]
        weights = [jnp.zeros(shape, W.dtype) for shape in shapes]
        return weights, tx.init(weights)

    arguments = jax.eval_shape(start), X
    copies, loops = {}, {}
    for name, function in {"plain": step, "retry": jamp.retry(step)}.items():
        text = compiled(function, *arguments, gemm="cuBLAS", donate_argnums=0)
        copies[name] = re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", text)
        loops[name] = text.count(" while(")
    assert len(copies["retry"]) <= len(copies["plain"])
    assert loops == {"plain": 0, "retry": 1}
