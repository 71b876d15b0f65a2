"""What a program becomes for a device that is not the local one."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jamp
from jamp import _targets

pytestmark = pytest.mark.usefixtures("standard_promotion")


def gpu(capability, kind="NVIDIA GPU"):
    return types.SimpleNamespace(
        platform="gpu", device_kind=kind, compute_capability=capability
    )


def tpu(kind):
    return types.SimpleNamespace(platform="tpu", device_kind=kind)


ALL = {"float16", "bfloat16", "float8"}
T4 = gpu("7.5", "Tesla T4")
A100 = gpu("8.0", "NVIDIA A100-SXM4-80GB")
H100 = gpu("9.0", "NVIDIA H100 80GB HBM3")
UNITS = [
    (gpu("6.1"), set()),
    (gpu("7.0"), {"float16"}),
    (T4, {"float16"}),
    (A100, {"float16", "bfloat16"}),
    (gpu("8.6"), {"float16", "bfloat16"}),
    (gpu("8.9"), ALL),
    (H100, ALL),
    (gpu("10.0"), ALL),
    (gpu("12.0"), ALL),
    (gpu("gfx942"), None),
    (tpu("TPU v5 lite"), {"bfloat16"}),
    (tpu("TPU7x"), {"bfloat16", "float8"}),
]


@pytest.fixture
def local(monkeypatch):
    """Makes a device the default one, and forgets which warnings were given."""
    monkeypatch.setattr(_targets, "_warned", set())
    return lambda device: monkeypatch.setattr(
        _targets, "default_device", lambda: device
    )


@pytest.mark.cpu
def test_the_units_of_a_device():
    for device, expected in UNITS:
        assert _targets.units(device) == expected, device
    assert _targets.units(jax.devices()[0]) == frozenset()


X = np.ones((16, 16), np.float32)
ASKED = {"float8": "float8", "rowwise": jamp.Float8("rowwise"), "bfloat16": "bfloat16"}


@pytest.mark.parametrize(
    "device, asked, says",
    [
        (T4, "bfloat16", r"Tesla T4 \(compute capability 7.5\) .*jamp.GradScaler"),
        (T4, "float8", r"Tesla T4 .* no units for float8.*float16"),
        (A100, "float8", r"A100.* no units for float8.*jnp.bfloat16"),
        (A100, "rowwise", r"A100.* no units for float8.*jnp.bfloat16"),
        (tpu("TPU v5 lite"), "float8", r"TPU v5 lite has no units for float8"),
    ],
)
def test_a_dtype_that_the_device_lacks_is_warned_of_once(device, asked, says, local):
    local(device)
    with pytest.warns(UserWarning, match=says) as given:
        for _ in range(2):
            jax.jit(jamp.autocast(ASKED[asked])(jnp.matmul)).trace(X, X)
    assert len(given) == 1


def test_a_rule_is_warned_of_too(local):
    local(A100)
    region = jamp.autocast(jnp.bfloat16, rules={".*": jamp.Float8()})
    with pytest.warns(UserWarning, match="float8"):
        jax.jit(region(jnp.matmul)).trace(X, X)


@pytest.mark.parametrize("asked", [*ASKED, "float16"])
@pytest.mark.parametrize("device", [H100, gpu("gfx942"), jax.devices()[0]])
def test_no_warning_where_a_dtype_is_there_or_it_is_not_known(device, asked, local):
    local(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(jamp.autocast(ASKED.get(asked, asked))(jnp.matmul)).trace(X, X)


def lowered(function, *args, platforms):
    exported = export.export(jax.jit(function), platforms=platforms)(*args)
    return exported.mlir_module()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("platforms", [["cpu"], ["cuda"], ["tpu"], ["cuda", "tpu"]])
def test_attention_asks_no_compiler_for_an_algorithm(dtype, platforms, monkeypatch):
    """No TPU's compiler knows the one that `jax.nn` names for float16."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    q = jnp.ones((1, 4, 2, 8), dtype)
    loss = lambda q: jamp.autocast(dtype)(jax.nn.dot_product_attention)(q, q, q).sum()
    text = lowered(jax.grad(loss), q, platforms=platforms)
    assert "algorithm = <" not in text
    assert ("f16" in text and "bf16" in text) or dtype == "float16"


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_is_a_cast_and_so_is_its_derivative(dtype, jit):
    # Each number of the format, the ties, their neighbors, and others at random.
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype)).astype("f4")
    random = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32).view("f4")
    with np.errstate(invalid="ignore", over="ignore"):
        ties = (numbers + np.roll(numbers, 1)) / 2
        sides = [np.nextafter(ties, np.float32(end)) for end in (np.inf, -np.inf)]
        x = np.concatenate([numbers, ties, *sides, random])
        is_flushed = (np.abs(x) < np.finfo(np.float32).tiny) & (x != 0)  # on a CPU
        x = x[~is_flushed]
        expected = x.astype(dtype).astype(np.float32)
    wrap = jax.jit if jit else lambda f: f
    round_ = lambda x: _targets.rounded(x, jnp.dtype(dtype))
    forward = wrap(lambda t: jax.jvp(round_, (jnp.ones(t.shape),), (t,))[1])
    backward = wrap(lambda t: jax.vjp(round_, jnp.ones(t.shape))[1](t)[0])
    for function in (wrap(round_), forward, backward):
        found = np.asarray(function(jnp.asarray(x)))
        assert found.dtype == np.float32
        same = found.view(np.uint32) == expected.view(np.uint32)
        assert np.all(same | np.isnan(found) & np.isnan(expected))
