"""What autocast keeps of eager ops makes them quick, and changes no result."""

import functools
import gc
import sys
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp import _compat
from jamp._autocast import eager, notes, rules
from jamp._autocast.caches import without_caches
from jamp._autocast.casting import OBSERVED

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALF, FLOAT32 = jnp.float16, jnp.float32
REGION = jamp.autocast(dtype=HALF)


@pytest.fixture(autouse=True)
def nothing_kept():
    eager.table.cache_clear()
    yield
    eager.table.cache_clear()


def calls(function, *args):
    """How many Python functions a call runs.

    JAX's caches compare shardings as often as other tests left some there: not counted.
    """
    count = 0

    def count_call(frame, event, arg):
        nonlocal count
        is_comparison = frame.f_code.co_filename.endswith("sharding_impls.py")
        count += event == "call" and not is_comparison

    outer = sys.getprofile()
    sys.setprofile(count_call)
    try:
        function(*args)
    finally:
        sys.setprofile(outer)
    return count


def array(*shape, dtype=FLOAT32):
    n = int(np.prod(shape))
    return jnp.asarray(np.linspace(-1, 2, n).reshape(shape), dtype)


W, X = array(4, 4), array(4, 4, dtype=HALF)
LAYERS = [array(4, 4) for _ in range(20)]


@jax.jit
def model(x, layers):
    for w in layers:
        x = jnp.tanh(x @ w)
    return x


# The most that an op may take on the JAX that takes more, and what it took before.
OPS = {
    "x @ w": (lambda: X @ W, 112, 408),
    "x + x": (lambda: X + X, 108, 351),
    "tanh": (lambda: jnp.tanh(X), 80, 243),
    "jitted": (lambda: model(X, LAYERS), 480, 1400),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="takes a few calls more")
@pytest.mark.parametrize("name", OPS)
def test_an_eager_op_takes_few_calls(name):
    op, most, before = OPS[name]
    with REGION:
        counts = [calls(op) for _ in range(4)]
        assert counts[-1] <= most < before, counts
        with without_caches():
            op()
            assert calls(op) > most


def test_an_op_is_decided_on_once(monkeypatch):
    played, decided = eager.Counts.played, []
    original = rules.Decider.__call__

    def decide(self, *args):
        decided.append(args)
        return original(self, *args)

    monkeypatch.setattr(rules.Decider, "__call__", decide)
    for _ in range(5):  # also in a region that is new
        with REGION:
            outs = [jnp.tanh(X @ W) for _ in range(3)]
    assert eager.Counts.played - played >= 24
    assert len(decided) <= 8
    assert all(out.dtype == HALF for out in outs)


def test_each_program_is_compiled_once(caplog):
    def compiled():
        caplog.clear()
        with jax.log_compiles(), REGION:
            jax.nn.softmax(jnp.tanh(array(3, 7)) + array(7)).sum()
        return [r.message for r in caplog.records if r.message.startswith("Compiling")]

    assert len(compiled()) > 5
    assert [compiled() for _ in range(3)] == [[]] * 3


def test_a_jitted_function_is_traced_once():
    traces = []

    @jax.jit
    def function(x, w):
        traces.append(x)
        return jnp.tanh(x @ w)

    for _ in range(3):
        with REGION:
            outs = [function(X, W) for _ in range(3)]
    assert len(traces) == 1
    assert all(out.dtype == HALF for out in outs)


# Mutations: for each part of a key, a program that would give a stale answer without.


def adding(amount):
    return jax.jit(lambda x: x + amount)


def plain(x, w):
    return lax.dot(x, w)


def precise(x, w):
    return lax.dot(x, w)


def primitives():
    with REGION:
        return [p.bind(X, accuracy=None) for p in (lax.sin_p, lax.cos_p)]


def params():
    with REGION:
        return [lax.integer_pow_p.bind(X, y=n) for n in (2, 3)]


def jaxprs():
    with REGION:
        return [function(X) for function in (adding(W), adding(W + 1))]


def dtypes():
    with REGION:
        return [lax.mul_p.bind(x, W) for x in (W + 1, X)]


def numbers():
    with REGION:
        return [X * n for n in (2.0, 3.0, 0.0, -0.0)]


def biases():
    with REGION:
        return [x + W[0] for x in (X, X @ W)]


def inputs_that_are_one():
    with REGION:
        return [lax.mul_p.bind(x, X) for x in (X, X + 1)]


def functions():
    with jamp.autocast(dtype=HALF, rules={precise: FLOAT32}):
        return [function(W, W) for function in (precise, plain)]


def paths():
    outs = []
    with jamp.autocast(dtype=HALF, rules={"head": FLOAT32}):
        for name in ("head", "body"):
            with jax.named_scope(name):
                outs.append(W @ W)
    return outs


def settings():
    outs = []
    for dtype in (HALF, jnp.bfloat16):
        with jamp.autocast(dtype=dtype):
            outs.append(lax.dot(W, W))
    return outs


def contexts():
    outs = []
    with REGION:
        for default in (None, "highest"):
            with jax.default_matmul_precision(default):
                outs.append(dot_of_highest())
    return outs


def dot_of_highest():
    sides, precision = (((1,), (0,)), ((), ())), (lax.Precision.HIGHEST,) * 2
    wishes = {"preferred_element_type": jnp.dtype(FLOAT32), "out_sharding": None}
    return lax.dot_general_p.bind(
        W, W, dimension_numbers=sides, precision=precision, **wishes
    )


def modules():
    outs = []
    for found in (frozenset(), rules.loaded()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rules, "loaded", lambda found=found: found)
            with REGION:
                outs.append(jax.nn.gelu(X))
    return outs


def without(field):
    """What makes a key without one of its parts."""
    original = eager.key_of

    def key_of(*args):
        key = original(*args)
        return key and key._replace(**{field: None})

    return eager, "key_of", key_of


def without_value(op, *args, original=eager.key_of):
    key = original(op, *args)
    arrays = [x if isinstance(x, jax.Array) else None for x in op.args]
    pairs = zip(key.inputs, arrays, strict=True)
    return key._replace(inputs=tuple(i for i, x in pairs if x is not None))


def without_sign(op, *args, original=eager.key_of):
    key = original(op, *args)
    return key._replace(inputs=tuple(i[:3] if len(i) == 4 else i for i in key.inputs))


def in_table(*places):
    original = eager.table

    def table(*parts):
        return original(*(None if i in places else x for i, x in enumerate(parts)))

    return eager, "table", table


def of_aval(self, x, places, depth=2):
    return x.aval


MUTATIONS = {
    "primitive": (primitives, without("primitive")),
    "params": (params, without("params")),
    "inputs": (dtypes, without("inputs")),
    "number": (numbers, (eager, "key_of", without_value)),
    "notes": (biases, (notes.Notes, "signature", of_aval)),
    "same": (inputs_that_are_one, without("same")),
    "source": (functions, without("source")),
    "path": (paths, without("path")),
    # JAX's context has the settings too.
    "settings": (settings, in_table(0, 2)),
    "modules": (modules, in_table(1)),
    "context": (contexts, in_table(2)),
}


def bits(program):
    return [(x.dtype, x.weak_type, np.asarray(x).tobytes()) for x in program()]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_key_holds_all_that_decides(name, monkeypatch):
    """Without a part of its key an op gets the answer of another one."""
    program, mutation = MUTATIONS[name]
    with without_caches():
        expected = bits(program)
    for _ in range(3):
        assert bits(program) == expected
    eager.table.cache_clear()
    monkeypatch.setattr(*mutation)
    stale = []
    for _ in range(3):
        try:
            stale.append(bits(program))
        except (TypeError, ValueError) as error:
            stale.append(error)
    assert any(found != expected for found in stale)


def test_a_jaxpr_in_the_place_of_another_is_noticed(monkeypatch):
    with without_caches():
        expected = bits(jaxprs)
    monkeypatch.setattr(*without("params"))
    assert [bits(jaxprs) for _ in range(3)] == [expected] * 3


def test_parameters_are_known_by_their_names():
    given = [
        {"start_indices": (1,), "limit_indices": (5,), "strides": (2,)},
        {"start_indices": (1,), "strides": (5,), "limit_indices": (2,)},
    ]
    with REGION:
        for _ in range(3):
            slices = [lax.slice_p.bind(jnp.arange(6), **params) for params in given]
            assert [x.tolist() for x in slices] == [[1, 3], [1]]


def test_a_reference_inside_a_jitted_function_is_not_kept():
    @functools.partial(jax.jit, inline=True)
    def function(x):
        ref = jax.new_ref(x)
        ref[0] = x[1]
        return ref[...]

    def alive():
        gc.collect()
        return sum(x.size >= 1000 for x in jax.live_arrays())

    before = alive()
    with REGION:
        function(jnp.ones(1000))
    assert alive() == before


def test_a_library_without_a_file_has_no_layers(monkeypatch):
    """Such as a directory of that name, which Python takes for a package."""
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    with REGION:
        assert (X[:1] @ W + array(1, 4)).dtype == FLOAT32


def test_nothing_outlives_a_jitted_function():
    held = [array(64, 64)]
    functions = [jax.jit(lambda x: x + held[0])]
    with REGION:
        for _ in range(3):
            functions[0](X[:1, :1])
        kept = kept_now()
    alive, n_kept = weakref.ref(held.pop()), len(kept)
    functions.clear()
    gc.collect()
    assert alive() is None
    assert len(kept) < n_kept


def kept_now():
    return _compat.current_trace().tapes.current()


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(eager, "LIMIT", 3)
    with REGION:
        for n in range(1, 20):
            X * (n / 4)
            assert 0 < len(kept_now()) <= 3


def test_regions_that_are_watched_keep_nothing():
    recorded = eager.Counts.recorded
    with OBSERVED(True), REGION:
        X @ W
    with jamp.autocast(dtype="float8"):
        W @ W
    with jax.debug_nans(True), REGION:
        X @ W
    assert eager.Counts.recorded == recorded


def test_nans_are_found_where_a_tape_was_kept():
    with REGION:
        for _ in range(3):
            jnp.log(X)
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            jnp.log(X)


def test_rules_are_used_where_a_tape_is_played():
    for _ in range(3):  # a rule that is not used is an error
        with jamp.autocast(dtype=HALF, rules={lax.dot_general_p: FLOAT32}):
            assert (X @ W).dtype == FLOAT32


def test_a_weight_is_cast_once_in_a_region():
    for _ in range(3):
        with REGION:
            X @ W
            memory = _compat.current_trace().notes
            copy = memory.copies(W)[jnp.dtype(HALF)]
            X @ W
            assert memory.copies(W)[jnp.dtype(HALF)] is copy


def test_threads_play_the_same_tapes():
    def program():
        with jax.numpy_dtype_promotion("standard"), REGION:
            return [jax.nn.softmax(jnp.tanh(X @ W) + n) for n in range(4)]

    with without_caches():
        expected = bits(program)
    found = []
    many = [
        threading.Thread(target=lambda: found.append(bits(program))) for _ in range(8)
    ]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    assert found == [expected] * 8
