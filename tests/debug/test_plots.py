"""`jamp.debug.grad_histogram` and the pictures."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jamp import debug
from tests.marks import cover


def reference(values):
    """Exponents of float32 by NumPy, as {exponent: count}."""
    values = np.abs(np.asarray(values, np.float64))
    values = values[np.isfinite(values) & (values > 0)]
    exponents, counts = np.unique(np.frexp(values)[1] - 1, return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


@cover()
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_every_magnitude_lands_in_its_bin(dtype, wrap):
    info = jnp.finfo(dtype)
    rng = np.random.default_rng(0)
    exponents = rng.integers(info.minexp, info.maxexp, 500)
    values = np.float64(rng.choice([-1, 1], 500) * 1.75) * 2.0**exponents
    grads = np.asarray([*values, 0, -0.0, np.inf, -np.inf, np.nan], dtype)
    histogram = wrap(debug.grad_histogram)(grads)
    assert histogram.to_dict()["exponents"] == reference(grads)
    assert histogram.zeros == 2 and histogram.nonfinite == 3
    assert histogram.counts[255] == 0


@cover()
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_subnormals_of_float16_are_no_zeros(wrap):
    grads = np.float16([2.0**-24, 3 * 2.0**-24, 2.0**-15, 2.0**-14])
    histogram = wrap(debug.grad_histogram)(grads)
    expected = {-24: 1, -23: 1, -15: 1, -14: 1}
    assert histogram.to_dict()["exponents"] == expected and histogram.zeros == 0


@cover()
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_subnormals_of_float32_share_the_first_bin(wrap):
    subnormal = np.float32([1e-45, -1e-40, 0.0])
    grads = [subnormal, subnormal.astype(jnp.bfloat16)]  # 1e-45 becomes 0 in bfloat16
    histogram = wrap(debug.grad_histogram)(grads)
    assert histogram.to_dict()["exponents"] == {-127: 3} and histogram.zeros == 3


def test_float64_keeps_to_the_exponents_of_float32():
    values = [1e300, 1e-300, 1.0, 5e-324, 0.0, 2 - 1e-12, np.inf, np.nan]
    with jax.enable_x64(True):
        histogram = jax.jit(debug.grad_histogram)(np.float64(values))
        assert histogram.counts.dtype == jnp.uint32
        assert histogram.to_dict()["exponents"] == {-127: 2, 0: 2, 127: 1}
    assert histogram.zeros == 1 and histogram.nonfinite == 2


def test_what_is_not_floating_passes():
    grads = {
        "int": np.arange(3),
        "bool": np.ones(2, bool),
        "float0": np.zeros(3, jax.dtypes.float0),
        "none": None,
        "masked": optax.MaskedNode(),
        "complex": np.asarray([1 + 4j, 0 - 2j], np.complex64),
        "empty": np.zeros([0, 3], np.float32),
        "number": 8.0,
        "float8": np.asarray([0.5], jnp.float8_e5m2),
    }
    result = jax.jit(lambda: debug.grad_histogram(grads))().to_dict()
    assert result["exponents"] == {-1: 1, 0: 1, 1: 1, 2: 1, 3: 1}
    assert result["zeros"] == 1 and debug.grad_histogram({}).counts.sum() == 0


def test_the_exponents_are_those_of_the_unscaled_gradients():
    grads = np.float32([2.0**-14, 2.0**13])
    expected = {"exponents": {-30: 1, -3: 1}, "zeros": 0, "nonfinite": 0}
    result = jax.jit(debug.grad_histogram)(grads, np.float32(2.0**16)).to_dict()
    assert result == expected | {"scale": 2.0**16}
    assert json.loads(json.dumps(result))["exponents"] == {"-30": 1, "-3": 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_gradients_are_counted_where_they_are(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    values = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)
    grads = jax.device_put(values, NamedSharding(mesh, P("data")))
    counting = jax.jit(debug.grad_histogram)
    histogram = counting([grads, grads.astype(jnp.float16)])
    assert histogram.to_dict()["exponents"] == reference([values, values])
    assert "all-gather" not in counting.lower([grads]).compile().as_text()
    with jax.set_mesh(mesh):
        assert debug.grad_histogram(grads).counts.sum() == values.size


def wide_histogram(scale=2.0**12):
    rng = np.random.default_rng(0)
    values = np.exp2(rng.normal(-24, 7, 4998)) * scale
    return jax.jit(debug.grad_histogram)(np.float32([*values, 0, np.nan]), scale)


def test_as_text():
    text = str(wide_histogram())
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 90
    assert lines[0].startswith("5,000 gradients with a scale of 2^12: 0.02 % zero")
    assert "float16 with the scale:" in text and "█" in text
    assert "with the scale" not in str(wide_histogram(1.0))
    assert len(str(debug.grad_histogram(np.zeros(3, np.float32))).splitlines()) == 1
    jax.jit(lambda x: print(debug.grad_histogram(x)))(
        np.ones(3, np.float32)
    )  # traced, no error


def test_text_and_numbers_agree():
    grads = np.float32([2.0**-26, 2.0**-16, 16.0, 32.0])
    histogram = jax.jit(debug.grad_histogram)
    *_, without, scaled, room = str(histogram(grads, 16.0)).splitlines()
    assert without.endswith(": 25 % become zero, 25 % subnormal, 0 % overflow")
    assert scaled.endswith(": 25 % become zero, 25 % subnormal, 0 % overflow")
    assert room == "headroom to 65504: 10 doublings of the scale"
    assert 32 * 2**10 < 65504 < 32 * 2**11
    text = str(histogram(np.float32([1e5])))
    assert text.endswith("no headroom: some are above 65504")


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_a_histogram_is_drawn(matplotlib, tmp_path):
    for scale in (1.0, 2.0**12, 1000.0):
        ax = wide_histogram(scale).plot()
        ax.figure.savefig(tmp_path / "histogram.png")
        texts = {text.get_text() for text in ax.get_legend().get_texts()}
        assert {"become zero", "subnormal", "overflow"} <= texts
        dashed = [line for line in ax.lines if line.get_linestyle() == "--"]
        limits = () if scale == 1 else (-25, -14, 16)
        expected = [limit - np.log2(scale) for limit in limits]
        assert [line.get_xdata()[0] for line in dashed] == expected
    assert ax.get_yscale() == "log" and "0.02 % are zero" in ax.get_xlabel()
    empty = debug.grad_histogram(jnp.zeros(3), 1024.0).plot()
    empty.figure.savefig(tmp_path / "empty.png")
    assert "100 % are zero" in empty.get_xlabel()
    given = matplotlib.figure.Figure().subplots()
    assert wide_histogram().plot(given) is given


@pytest.mark.slow
def test_the_scale_is_drawn(matplotlib, tmp_path):
    history = debug.History(start=10)
    for scale, skipped in [(8.0, False), (4.0, True), (4.0, False)]:
        history.append({"loss_scale": jnp.float32(scale), "found_inf": skipped})
    ax = debug.plot_scale(history)
    ax.figure.savefig(tmp_path / "scale.png")
    line, skips = ax.lines
    assert line.get_xydata().tolist() == [[10, 8], [11, 4], [12, 4]]
    assert skips.get_xydata().tolist() == [[11, 4]]
    assert skips.get_label() == "skipped step (1 of 3)"
    columns = {"loss_scale": [8.0, 4.0], "found_inf": [False, False]}
    given = matplotlib.figure.Figure().subplots()
    assert debug.plot_scale(columns, given) is given
    debug.plot_scale({"loss_scale": [], "found_inf": []}).figure.savefig(
        tmp_path / "empty.png"
    )


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'plot_scale needs .*"jamp-jax\[plot\]"'):
        debug.plot_scale({"loss_scale": [1.0], "found_inf": [False]})
    with pytest.raises(ImportError, match=r"GradHistogram.plot needs matplotlib"):
        wide_histogram().plot()
