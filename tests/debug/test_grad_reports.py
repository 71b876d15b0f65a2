"""`overflow_report` and `underflow_report`: counts by path, on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from jamp import debug
from jamp._debug.grad_numbers import total
from tests.marks import cover

GRADS = {
    "embed": np.float32([1.0, np.inf, -np.inf, np.nan]),
    "blocks": [{"w": np.ones((2, 3), np.float16)}, {"w": np.float32([np.nan] * 2)}],
    "steps": np.arange(3),
    "frozen": None,
    "masked": optax.MaskedNode(),
    "phase": np.complex64([1 + 1j, complex(np.inf, 0)]),
    "empty": np.zeros((0, 4), np.float32),
}
FOUND = {
    "blocks/1/w": {"inf": 0, "nan": 2, "size": 2},
    "embed": {"inf": 2, "nan": 1, "size": 4},
    "phase": {"inf": 1, "nan": 0, "size": 2},
}


@cover()
@pytest.mark.parametrize("jit", [True, False])
def test_overflow_is_counted_by_path(jit):
    report = (jax.jit if jit else lambda f: f)(debug.overflow_report)(GRADS)
    assert report.to_dict() == FOUND
    assert report.found == ["blocks/1/w", "embed", "phase"]
    text = str(report)
    assert text.startswith("3 of 5 gradients hold an inf or nan\n")
    assert "| embed | 2 | 1 | 4 |" in report.to_markdown()


def test_clean_gradients_are_said_to_be_clean():
    report = debug.overflow_report({"w": np.ones(3, np.float32)})
    assert report.found == [] and report.to_dict() == {}
    assert str(report) == "none of 1 gradients holds an inf or nan"


def test_nnx_gradients_have_the_paths_of_the_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return jnp.sum(x)

    x = np.full((1, 2), np.float32(np.inf))
    grads = nnx.jit(lambda: nnx.grad(lambda model: model(x))(Model(nnx.Rngs(0))))()
    report = debug.overflow_report(grads)
    assert "layers/0/kernel" in report.found


def test_nothing_is_counted_when_nothing_was_skipped():
    grads = {"w": jnp.array([jnp.inf, 1.0])}
    report = jax.jit(lambda grads, when: debug.overflow_report(grads, when=when))
    assert report(grads, True).found == ["w"]
    assert report(grads, False).found == []
    jaxpr = jax.make_jaxpr(report)(grads, True)
    (call,) = jaxpr.jaxpr.eqns
    names = [eqn.primitive.name for eqn in call.params["jaxpr"].jaxpr.eqns]
    assert not {"is_finite", "reduce_sum", "eq"} & set(names)
    assert "cond" in names  # the counting is in there, and nowhere else


def test_a_report_of_each_step_of_a_scan():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}

    @jax.jit
    def train(opt_state, infs):
        def body(opt_state, is_bad):
            grads = {"a": jnp.ones(2), "b": jnp.where(is_bad, jnp.inf, jnp.ones(2))}
            _, opt_state = jamp.step(tx, grads, opt_state, params)
            skipped = jamp.metrics(opt_state)["found_inf"]
            report = debug.overflow_report(grads, when=skipped)
            return opt_state, (report, debug.grad_histogram(grads, 0.25))

        return jax.lax.scan(body, opt_state, infs)

    infs = jnp.arange(50) % 20 == 7
    _, (reports, histograms) = train(tx.init(params), infs)
    assert "of 50 steps, something found in 3: 7, 27, 47" in str(reports)
    assert reports[7].found == ["b"] and reports[8].found == []
    assert len(list(reports)) == len(reports) == 50 and reports[-3].found == ["b"]
    for out_of_range in (50, -51):
        with pytest.raises(
            IndexError, match=f"{out_of_range}. is out of range: .* has 50 steps"
        ):
            reports[out_of_range]
    with pytest.raises(TypeError, match=r"ask for report\.found"):
        assert reports[7]
    for stacked in (reports, histograms):
        with pytest.raises(ValueError, match=r"is stacked, of 50 steps; index it"):
            stacked.to_dict()
    assert isinstance(histograms, debug.GradHistogram)
    assert histograms.counts.shape == (50, 256) and len(histograms) == 50
    for single in histograms[0], next(iter(histograms)):
        assert single.to_dict()["exponents"] == {2: 4} and single.scale == 0.25
    skipped = histograms[7].to_dict()
    assert (skipped["exponents"], skipped["nonfinite"]) == ({2: 2}, 2)
    assert str(histograms).startswith("GradHistogram of 50 steps, something found in 3")


def test_the_host_is_not_needed_until_somebody_reads():
    grads = jax.device_put({"w": jnp.array([1.0, jnp.inf])})
    scale = jax.device_put(jnp.float32(8.0))
    run = jax.jit(lambda grads, scale: [report(grads, scale) for report in REPORTS])
    run(grads, scale)
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        run(grads, scale)


def test_printing_inside_a_trace_says_so():
    @jax.jit
    def f(grads):
        report = debug.overflow_report(grads)
        assert str(report) == "OverflowReport, inside a trace"
        return report.inf

    f({"w": jnp.ones(2)})


SIZES = [2.0**-24, 2.0**-25, 2.0**-26, 0.0, 1.0, -(2.0**-26), 60000.0, 2.0**-149]


@pytest.mark.gpu
@cover(quick=3, ci=6)
@pytest.mark.parametrize("scale", [1024.0, 1.0, 2.0, 2.0**16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_flushed_elements_are_those_that_float16_makes_zero(scale, dtype):
    x = np.asarray(SIZES, np.float32).astype(dtype).astype(np.float64)
    flushed = np.sum((x.astype(np.float16) == 0) & (x != 0))
    unscaled = np.sum(((x / scale).astype(np.float16) == 0) & (x != 0))
    report = jax.jit(debug.underflow_report)({"w": x.astype(dtype)}, scale)
    row = report.to_dict()["w"]
    assert row["flushed"] == flushed / len(SIZES)
    assert row["flushed_unscaled"] == unscaled / len(SIZES)


def test_head_room_counts_the_doublings_to_the_largest_float16():
    grads = {"w": np.float32([1.0, -4.0]), "inf": np.float32([np.inf, 2.0])}
    rows = jax.jit(debug.underflow_report)(grads, 8.0).to_dict()
    assert rows["w"]["headroom_bits"] == pytest.approx(np.log2(65504 / 4), abs=1e-3)
    assert rows["inf"]["largest"] == 2.0


def test_a_gradient_of_zeros_is_found():
    grads = {"w": np.ones(4, np.float32), "dead": np.zeros(4, np.float32)}
    assert jax.jit(debug.underflow_report)(grads, 1.0).found == ["dead"]


def test_what_the_scale_saves_is_shown():
    grads = np.random.default_rng(0).normal(size=1000) * 1e-8 * 2**16
    underflow = jax.jit(debug.underflow_report)
    report = underflow({"w": np.float32(grads)}, np.float32(2**16))
    row = report.to_dict()["w"]
    assert row["flushed"] < 0.01 and row["flushed_unscaled"] > 0.9
    assert report.found == []
    assert "with a scale of 65536" in str(report) and "| w |" in report.to_markdown()


REPORTS = [debug.overflow_report, debug.underflow_report, debug.grad_histogram]


@cover(quick=4)
@pytest.mark.parametrize(
    "kind",
    [
        debug.overflow_report,
        debug.underflow_report,
        debug.explain,
        debug.find_nonfinite,
        debug.grad_histogram,
        jamp.calibrate,
    ],
)
def test_a_report_of_one_step_has_no_steps(kind):
    x, loss = np.ones((16, 16), np.float32), lambda x: jnp.sum(x @ x)
    report = kind({"w": x}) if kind in REPORTS else kind(loss)(x)
    for steps in (len, iter, lambda report: report[0]):
        with pytest.raises(TypeError, match="is of one step"):
            next(steps(report))


@pytest.mark.parametrize("report", REPORTS[:2])
def test_no_gradients_at_all(report):
    assert report({"n": None}).to_dict() == {} and str(report({"n": None}))


@cover(quick=2)
@pytest.mark.parametrize("report", REPORTS)
def test_the_reports_take_the_same_arguments(report):
    grads = {"w": np.float32([np.inf, 3e-9, 0.0]), "n": np.arange(2)}
    made = jax.jit(lambda when, scale: report(grads, scale, when=when))
    assert made(True, 8.0).scale == made(False, 8.0).scale == 8.0
    pairs = zip(
        *map(jax.tree.leaves, (report(grads, 8.0), made(True, 8.0))), strict=True
    )
    assert all(np.array_equal(a, b) for a, b in pairs)
    *counts, _ = jax.tree.leaves(made(False, 8.0))
    assert not any(map(np.any, counts))
    assert report(grads).scale == 1.0
    assert str(debug.overflow_report(grads, 8.0)).splitlines()[0] == (
        "1 of 1 gradients hold an inf or nan, with a scale of 8"
    )


def test_sums_over_gradients_stop_at_the_largest_number():
    most = 2**32 - 1
    columns = [[2**31, 2**31], [most, 1], [most, 0], [70_000, 2**31], [65_535, 65_535]]
    column = jnp.array(columns, jnp.uint32).T
    expected = [most, most, most, 2**31 + 70_000, 131_070]
    assert total(column).tolist() == expected


def test_sharded_gradients(standard_promotion):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    grads = {"w": jax.device_put(jnp.ones(64).at[40].set(jnp.inf), spread)}
    assert jax.jit(debug.overflow_report)(grads).to_dict()["w"]["inf"] == 1


KINDS = ["complex64", "float32", jnp.bfloat16, "float64", "complex128"]
SMALL = {1.0: [1e-9] * 4, 0.5: [1e-9, 1e-9, 1.0, 1.0], 0.0: [1.0] * 4}


@cover()
@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_of_all_that_is_counted(kind):
    """A complex number counts as two, in what is found and in what it is found of."""
    parts = 2 if "complex" in str(kind) else 1

    def leaf(values):
        values = np.asarray(values)
        return np.asarray(values + 1j * values if parts == 2 else values, kind)

    underflow, histogram = map(jax.jit, (debug.underflow_report, debug.grad_histogram))
    with jax.enable_x64(True):
        for share, values in SMALL.items():
            grads = {"w": leaf(values)}
            row = underflow(grads, 1.0).to_dict()["w"]
            assert (row["flushed"], row["flushed_unscaled"]) == (share, share)
            counted = histogram(grads).to_dict()["exponents"]
            assert sum(counted.values()) == 4 * parts
            zeros = {"w": leaf(np.where(np.asarray(values) < 1, 0.0, values))}
            assert underflow(zeros, 1.0).to_dict()["w"]["zeros"] == share
            assert histogram(zeros).to_dict()["zeros"] == 4 * parts * share
        row = debug.overflow_report({"w": leaf([np.nan, 1.0])}).to_dict()["w"]
        assert (row["inf"] + row["nan"], row["size"]) == (1, 2)


@cover()
@pytest.mark.parametrize("optimized", [False, True])
def test_subnormals_of_float32_are_no_zeros_however_they_are_compiled(optimized):
    grads = np.float32([2.0**-24, 2.0**-25, 2.0**-26, 2.0**-127, -(2.0**-140)])
    options = {"xla_backend_optimization_level": 3 * optimized}
    if jax.__version_info__ < (0, 11):  # later ones always use them
        options["xla_cpu_use_fusion_emitters"] = optimized
    report = lambda x: debug.underflow_report(x, 1.0)
    compiled = jax.jit(report, compiler_options=options)
    for dtype, lost in ((np.float32, 4), (jnp.bfloat16, 3)):  # -0 for the last
        found = compiled(grads.astype(dtype))
        assert found.flushed.tolist() == [lost]
        assert found.zeros.tolist() == [4 - lost]
