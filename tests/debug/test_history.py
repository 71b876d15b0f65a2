"""`jamp.debug.History`: it never blocks, loses no row, and keeps values exact."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from jamp.debug import History

TX = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0**17, growth_interval=3)


def init_step():
    params = {"w": jnp.ones([4, 4], jnp.float32)}
    return params, TX.init(params), jnp.ones([2, 4], jnp.float16)


def step(params, opt_state, x):
    def loss_fn(params):
        return jnp.mean(jnp.square(x @ params["w"].astype(jnp.float16)))

    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
    params, opt_state = jamp.step(TX, grads, opt_state, params)
    return params, opt_state, loss


ROUNDS = 300 if jax.default_backend() == "cpu" else 30_000


@jax.jit
def long_running(x):
    return lax.fori_loop(0, ROUNDS, lambda i, x: jnp.tanh(x @ x), x)[0, 0]


@pytest.mark.gpu
@pytest.mark.slow
def test_nothing_waits_for_a_computation_that_is_still_running():
    # A callback that waits for an event would not do: the CPU backend runs callbacks
    # before the dispatch returns.
    x = jnp.full([500, 500], 1 / 500, jnp.float32)
    warm_up = History(every=2)
    for _ in range(4):
        warm_up.append({"loss": x[0, 0], "step": 0})  # compiles
    broadcast = jnp.broadcast_to(long_running(x).block_until_ready(), 500)
    warm_up.extend({"loss": broadcast, "step": np.arange(500)})

    seen = []
    history = History(every=2, on_row=lambda step, row: seen.append(step))
    running = long_running(x)
    stacked = jnp.broadcast_to(running, 500)
    for i in range(5):
        history.append({"loss": running, "step": i})
    history.extend({"loss": stacked, "step": np.arange(500)})
    text = repr(history)
    assert not running.is_ready()

    assert text == "History of 505 steps, 0 of them on the host"
    assert not seen and len(history) == 505
    history.fetch()
    assert running.is_ready() and seen == list(range(505))
    assert history["loss"][0] == np.asarray(running)


def test_rows_arrive_while_the_loop_runs():
    seen = []
    history = History(every=3, on_row=lambda step, row: seen.append((step, row["i"])))
    for i in range(8):
        history.append({"i": jnp.int32(i)})
        jax.block_until_ready([row.arrays for rows in history._pending for row in rows])
    assert seen == [(i, i) for i in range(6)]
    history.fetch()
    assert seen == [(i, i) for i in range(8)]
    history.fetch()
    assert len(seen) == 8


def test_few_scalars_are_held_on_the_device():
    history = History(every=4)
    for i in range(50):
        history.append({"i": jnp.int32(i)})
        jax.block_until_ready([row.arrays for rows in history._pending for row in rows])
        assert len(history._rows) < 4 and len(history._pending) <= 1
    assert history["i"].tolist() == list(range(50))


@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_loop_that_donates_its_state(every):
    """Outside jit, `jamp.metrics` returns arrays that the next step deletes."""
    donating = jax.jit(step, donate_argnums=(0, 1))
    params, opt_state, x = init_step()
    history, scales = History(every), []
    for _ in range(10):
        params, opt_state, loss = donating(params, opt_state, x)
        metrics = jamp.metrics(opt_state)
        history.append(metrics | {"loss": loss})
        scales.append(float(metrics["loss_scale"]))
    donating(params, opt_state, x)
    assert history["loss_scale"].tolist() == scales
    assert len(set(scales)) > 2
    assert history["skipped_steps"][-1] == history["found_inf"].sum() > 0


def test_a_value_that_is_gone_is_named():
    value = jnp.float32(1)
    value.delete()
    with pytest.raises(ValueError, match="'loss' was donated to a later step"):
        History().append({"loss": value})


def test_a_training_loop_under_a_transfer_guard():
    def step_and_metrics(params, opt_state, x):
        params, opt_state, loss = step(params, opt_state, x)
        return params, opt_state, jamp.metrics(opt_state) | {"loss": loss}

    jitted = jax.jit(step_and_metrics, donate_argnums=(0, 1))
    params, opt_state, x = init_step()
    rows = []
    history = History(every=4, on_row=lambda step, row: rows.append(row))
    with jax.transfer_guard("disallow"):
        for _ in range(10):
            params, opt_state, metrics = jitted(params, opt_state, x)
            history.append(metrics | {"epoch": 0})
        history.fetch()
    assert len(rows) == 10 and rows == history.rows()


def test_values_keep_exact():
    values = {
        "float32": np.float32(np.pi),
        "subnormal": np.float32(1e-42),
        "float16": np.float16(6e-8),
        "bfloat16": jnp.bfloat16(1.5).dtype.type(1.5),
        "inf": np.float32(-np.inf),
        "nan": np.float32(np.nan),
        "int32": np.int32(-(2**31)),
        "int8": np.int8(-3),
        "uint32": np.uint32(2**32 - 1),
        "bool": np.bool_(True),
        "complex64": np.complex64(1 - 2j),
        "float8_e4m3fn": jnp.float8_e4m3fn.dtype.type(0.5),
    }
    history = History(every=2)
    for _ in range(3):
        history.append({name: jnp.asarray(value) for name, value in values.items()})
    for name, value in values.items():
        column = history[name]
        assert column.dtype == value.dtype and column.shape == (3,), name
        assert {item.tobytes() for item in column} == {value.tobytes()}, name
    row = history.rows()[-1]
    types = [bool, int, float, complex]
    assert all(type(item) in types for item in row.values())
    assert row["bool"] is True and row["int32"] == -(2**31)


def test_values_keep_exact_in_x64_mode():
    with jax.enable_x64(True):
        history = History(every=2)
        for _ in range(3):
            history.append(
                {
                    "float": jnp.float64(np.pi),
                    "int": jnp.int64(2**62 + 1),
                    "complex": jnp.complex128(1 + np.pi * 1j),
                    "float16": jnp.float16(1.5),
                }
            )
        row = history.rows()[-1]
    assert row["float"] == np.pi and history["float"].dtype == np.float64
    assert row["int"] == 2**62 + 1 and row["complex"] == 1 + np.pi * 1j
    assert row["float16"] == 1.5


def test_python_and_numpy_numbers_beside_arrays():
    history, counter = History(every=2), np.zeros([], np.int64)
    for epoch in range(3):
        history.append(
            {"epoch": epoch, "lr": 0.5, "done": False, "n": counter, "x": jnp.ones([])}
        )
        counter += 1
    assert history.rows()[2] == {
        "epoch": 2,
        "lr": 0.5,
        "done": False,
        "n": 2,
        "x": 1.0,
    }
    assert history.keys() == ("epoch", "lr", "done", "n", "x")


@pytest.mark.devices(6)
def test_a_value_may_change_its_dtype_and_place():
    history = History(every=3)
    device = jax.devices()[5]
    values = [jnp.float32(0), jnp.float32(1), jnp.bfloat16(2), 3.0, jnp.int32(4)]
    for value in [*values, jax.device_put(jnp.int32(5), device), np.float64(6)]:
        history.append({"x": value})
    assert [float(row["x"]) for row in history.rows()] == list(range(7))


def test_reading_in_the_middle_and_going_on():
    history = History(every=4)
    for i in range(10):
        history.append({"i": jnp.int32(i)})
        if i in (1, 5):
            assert history["i"].tolist() == list(range(i + 1))
    assert history["i"].tolist() == list(range(10))


def test_extend_takes_what_scan_stacks():
    params, opt_state, x = init_step()

    @jax.jit
    def epoch(params, opt_state):
        def body(carry, _):
            params, opt_state, loss = step(*carry, x)
            return (params, opt_state), jamp.metrics(opt_state) | {"loss": loss}

        return lax.scan(body, (params, opt_state), length=7)

    seen = []
    history = History(every=3, on_row=lambda step, row: seen.append(step), start=100)
    for _ in range(2):
        (params, opt_state), stacked = epoch(params, opt_state)
        history.extend(stacked)
        history.append(jamp.metrics(opt_state) | {"loss": jnp.float32(0)})
    assert history["loss"].shape == (16,) and seen == list(range(100, 116))
    assert history.steps.tolist() == seen
    assert history["loss"][7] == 0 and history["skipped_steps"].max() > 0


def test_extend_with_host_values_and_none_at_all():
    history = History()
    history.extend({"a": [1, 2], "b": np.array([True, False])})
    history.extend({"a": jnp.zeros(0, jnp.int32), "b": jnp.zeros(0, jnp.bool_)})
    assert history.rows() == [{"a": 1, "b": True}, {"a": 2, "b": False}]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_replicated_arrays_beside_those_of_one_device(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    everywhere = NamedSharding(mesh, P())
    history = History(every=2)
    for i in range(5):
        history.append(
            {
                "everywhere": jax.device_put(jnp.float32(i), everywhere),
                "third": jax.device_put(jnp.float32(-i), jax.devices()[3]),
                "uncommitted": jnp.int32(i),
            }
        )
    history.extend(
        {
            "everywhere": jax.device_put(jnp.arange(5.0, 8), everywhere),
            "third": jnp.arange(5.0, 8),
            "uncommitted": jnp.arange(5, 8),
        }
    )
    assert history["everywhere"].tolist() == list(range(8))
    assert history["third"].tolist() == [0, -1, -2, -3, -4, 5, 6, 7]
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="'everywhere' is spread over devices"):
        history.extend(
            {"everywhere": sharded, "third": sharded, "uncommitted": sharded}
        )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_with_a_mesh_set(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    outside = jax.device_put(jnp.float32(2), jax.devices()[3])
    history = History(every=2)
    with jax.set_mesh(mesh):
        for i in range(5):
            loss = jax.jit(lambda x: x * 2)(jnp.float32(i))
            history.append({"loss": loss, "outside": outside})
        assert history["loss"].tolist() == [0, 2, 4, 6, 8]
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


def test_inside_an_autocast_region_and_with_debug_nans():
    history = History(every=2)
    values = [jnp.float32(1 / 3), jnp.float32(np.nan), jnp.float32(1e6)]
    region = jamp.autocast(dtype=jnp.float16, rules={".*": jnp.float16})
    with region, jax.debug_nans(True):
        for value in values:
            history.append({"loss": value})
    assert np.array_equal(history["loss"], np.stack(values), equal_nan=True)


def test_nnx_variables_are_read():
    history = History()
    history.append({"count": nnx.Variable(jnp.int32(3))})
    assert history.rows() == [{"count": 3}]


def test_a_value_that_a_trace_closes_over_is_refused():
    history, value = History(), jnp.float32(1)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda: history.append({"loss": value}))()
    assert len(history) == 0


def test_other_names_are_refused():
    history = History()
    history.append({"loss": 1.0, "scale": 2.0})
    with pytest.raises(ValueError, match=r"missing: \['scale'\], new: \['norm'\]"):
        history.append({"loss": 1.0, "norm": 2.0})
    history.append({"scale": 3.0, "loss": 1.0})  # in another order
    assert history["scale"].tolist() == [2, 3] and len(history) == 2


def test_an_interrupted_fetch_can_be_repeated(monkeypatch):
    history = History(every=2)
    for i in range(5):
        history.append({"i": jnp.int32(i)})

    def interrupted(x):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            history.append({"i": jnp.int32(5)})
            history.fetch()
    assert history["i"].tolist() == list(range(6))


def test_on_row_may_raise_and_read():
    seen = []

    def on_row(step, row):
        seen.append((step, len(history["i"])))
        if step == 1:
            raise RuntimeError("disk full")

    history = History(every=10, on_row=on_row)
    for i in range(4):
        history.append({"i": jnp.int32(i)})
    with pytest.raises(RuntimeError, match="disk full"):
        history.fetch()
    history.fetch()
    assert seen == [(i, 4) for i in range(4)]


def test_as_a_table_of_columns():
    history = History()
    for i in range(3):
        history.append({"a": i, "b": jnp.float32(i)})
    columns = dict(history)
    assert list(history) == list(columns) == ["a", "b"] and "a" in history
    assert columns["b"].dtype == np.float32 and len(history) == 3


def test_repr():
    history = History(every=2, start=40)
    assert repr(history) == "History of 0 steps"
    for i in range(6):
        history.append(
            {"loss": jnp.float32(1 / (i + 1)), "found_inf": jnp.bool_(i == 2)}
        )
    history.fetch()
    assert repr(history).splitlines() == [
        "History of 6 steps, 1 skipped (16.67 %)",
        "step       41     42        43     44     45",
        "loss       0.5    0.333333  0.25   0.2    0.166667",
        "found_inf  False  True      False  False  False",
    ]
