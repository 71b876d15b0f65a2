"""What the compilers for GPUs and TPUs make of training steps, products and retries.

The tests need JAX's CUDA plugin or libtpu, but neither a GPU nor a TPU. Without one of
the two, its tests are skipped. CI compiles a small step for two GPUs, the night all.
"""

import functools
import os
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export, lax

import jamp
from benchmarks import devices, targets
from benchmarks.model_sizes import COMPILED
from benchmarks.train_rows import ALL, SCALED
from jamp._autocast.bias import prepared
from jamp._autocast.low_precision import quantized
from jamp._scaling import eight_bits
from shared import hlo, products
from tests.autocast.test_float8_hlo import (
    E4M3,
    E5M2,
    ROWWISE,
    W,
    X,
    both_ways,
    in_float8,
    plain,
    wide,
)
from tests.marks import cover


def with_bias(x, w, bias):
    y = jnp.matmul(x, w)
    return y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)


BIAS = jax.ShapeDtypeStruct((48,), jnp.float32)
STACKED = jax.ShapeDtypeStruct((2, *X.shape), X.dtype)
FLOAT16 = {"dtype": jnp.float16, "rules": {lax.dot_general_p: jamp.Float8()}}
FLOAT8 = {
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


def needs(target):
    return pytest.mark.skipif(
        bool(devices.missing(target)) or os.environ.get("JAX_PLATFORMS") != "cpu",
        reason=f"compiling for a {target} needs {devices.package(target)} in JAX's "
        "version, and JAX_PLATFORMS=cpu so that it looks for no device",
    )


@pytest.fixture(autouse=True, scope="module")
def looks_for_no_device():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in devices.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


compiles_for_a_gpu = needs("h100")
GEMMS = {"cuBLAS": False, "Triton": True}


@pytest.mark.nightly
@compiles_for_a_gpu
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", FLOAT8)
def test_xla_makes_float8_kernels_of_all_products(name, gemm):
    text = compiled(*FLOAT8[name], gemm=gemm)
    assert products.compiled(text) == {"f8": PRODUCTS.get(name, 1)}
    if (name, gemm) == ("bias", "cuBLAS"):
        assert '"epilogue":"BIAS"' in text, "the bias is added by the product's kernel"


def compiled(function, *args, gemm, **options):
    """The optimized HLO of a function for an H100."""
    args = targets.place(args, devices.of("h100")[0])
    lowered = jax.jit(function, **options).lower(*args)
    return lowered.compile(compiler_options={targets.TRITON: GEMMS[gemm]}).as_text()


@pytest.mark.nightly
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


@pytest.mark.nightly
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


# Every place where a rounding is promised, as a function of float32 numbers in which
# nothing else is narrow. If XLA drops the cast, no narrow number is left.
PLACES = {
    "bias": lambda dtype: lambda x: prepared(x, dtype=dtype, masks=False),
    "gradient of a bias": lambda dtype: (
        lambda x: jax.vjp(lambda x: prepared(x, dtype=dtype, masks=True), x)[1](x)[0]
    ),
    "tangent of a bias": lambda dtype: (
        lambda x: jax.jvp(lambda x: prepared(x, dtype=dtype, masks=True), (x,), (x,))[1]
    ),
    "bias under vmap": lambda dtype: (
        lambda x: jax.vmap(lambda x: prepared(x, dtype=dtype, masks=False))(x)
    ),
    "input of a product in low precision": lambda dtype: (
        lambda x: quantized(x.astype(dtype), dtype=jnp.dtype(E4M3), axes=None).inverse
    ),
    "mean in eight bits": lambda dtype: (
        lambda x: x - eight_bits.decode(eight_bits.encode(x, dtype), dtype)
    ),
}
HALVES, EIGHT_BITS = ("float16", "bfloat16"), ("float8_e4m3fn", "int8")
ROUNDINGS = [
    (place, dtype)
    for place in PLACES
    for dtype in (EIGHT_BITS if "eight" in place else HALVES)
]
# How HLO writes the dtypes, and the mantissas that stand for two of them.
NARROW = {
    "float16": r"\bf16\[|exponent_bits=5, mantissa_bits=10",
    "bfloat16": r"\bbf16\[|exponent_bits=8, mantissa_bits=7",
    "float8_e4m3fn": r"\bf8e4m3fn\[",
    "float8_e5m2": r"\bf8e5m2\[",
    "int8": r"\bs8\[",
}
EVERYWHERE = [
    "cpu",
    *(
        pytest.param(t, marks=[needs(t), pytest.mark.nightly])
        for t in ("t4", "a100", "h100", "v5e")
    ),
]


def program_for(target, function, *args):
    """Optimized HLO, compiled as XLA does unless it is told otherwise."""
    if target == "cpu":
        options = {"xla_backend_optimization_level": "3"}
        return jax.jit(function).lower(*args).compile(options).as_text()
    args = targets.place(args, devices.of(target)[0])
    return jax.jit(function).lower(*args).compile().as_text()


@pytest.mark.parametrize("target", EVERYWHERE)
def test_xla_keeps_each_rounding_that_is_promised(target):
    lost = []
    for place, dtype in ROUNDINGS:
        text = program_for(target, PLACES[place](jnp.dtype(dtype)), X)
        if not re.search(NARROW[dtype], text):
            lost.append((place, dtype))
    assert not lost


# docs/float8.md says what happens where a target has no units for float8: XLA drops
# the rounding with the cast.
WITHOUT_FLOAT8 = {"t4": "f16", "a100": "bf16"}


@pytest.mark.parametrize("target", EVERYWHERE)
def test_products_are_of_float8_numbers_where_there_are_units(target):
    backward = lambda x, w, ct: jax.vjp(in_float8(plain), x, w)[1](ct)
    cotangent = jax.ShapeDtypeStruct((64, 48), jnp.bfloat16)
    text = program_for(target, backward, X, W, cotangent)
    formats = {found for found in (E4M3, E5M2) if re.search(NARROW[found], text)}
    without = WITHOUT_FLOAT8.get(target)
    assert formats == (set() if without else {E4M3, E5M2})
    if target != "cpu":
        assert set(products.compiled(text)) == {without or "f8"}


@pytest.mark.nightly
@compiles_for_a_gpu
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_error_feedback_sends_and_keeps_on_eight_gpus(dtype):
    """What each device has not sent needs the narrow numbers that it sends."""
    mesh = jax.sharding.Mesh(devices.of("h100", 8), "data")
    tx = jamp.sharding.error_feedback("data", 8, dtype=dtype)
    spec = jax.P("data")
    step = jax.shard_map(tx.update, mesh=mesh, in_specs=spec, out_specs=(jax.P(), spec))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    grads = jax.ShapeDtypeStruct((8 * 1024,), jnp.float32, sharding=sharding)
    state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct((1024,), jnp.float32))
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
    )
    text = jax.jit(step).lower(grads, state).compile().as_text()
    narrow = {"float8_e4m3fn": "f8e4m3fn", "int8": "s8"}[dtype]
    to, back = (
        len(re.findall(rf"= {d}\[\S* convert\(", text)) for d in (narrow, "f32")
    )
    assert (to, back) == (2, 4)


# The dtypes of the compiled products, where those are not the ones asked for.
INSTEAD = {("t4", "bfloat16"): {"f32"}, ("t4", "float8"): {"f16"}}
TARGETS = [pytest.param(name, marks=needs(name)) for name in ("t4", "h100", "v5e")]


@pytest.mark.usefixtures("standard_promotion")
@cover(quick=0, ci=2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("row", [SCALED, "bfloat16", "float8"])
def test_a_step_traced_on_a_cpu_is_the_targets_own(target, row):
    """Products in the dtype asked for, no conditional, and no call of the host."""
    figures = targets.measure(row, COMPILED["small"]["mlp"], target)
    assert "error" not in figures
    asked, compiled = set(figures["asked"]), set(figures["compiled"])
    assert compiled == INSTEAD.get((target, row), asked)
    assert figures["conditionals"] == figures["host"] == 0


@pytest.mark.nightly
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "row", [SCALED, "policy + loss scale", "jamp.autocast + GradScaler"]
)
def test_a_step_exported_for_several_platforms_is_the_targets_own(row, target):
    step = targets.Step(ALL[row], COMPILED["small"]["mlp"], flash=False)
    exported = export.export(step.jitted, platforms=["cpu", "cuda", "tpu"])(*step.args)
    args = targets.place(step.args, devices.of(target)[0])
    jitted = jax.jit(exported.call, donate_argnums=0)
    program = jitted.lower(*args).compile()
    assert set(products.compiled(program.as_text())) == {"f16"}
    figures = hlo.summarize(program)
    assert figures.conditionals == figures.host == 0
