"""Gathers of one number a row: their gradients are masks, with the same numbers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp._autocast import picks, scatters
from jamp._autocast.retracing import without_caches
from jamp._jaxprs import equations
from tests.bits import check_same_bits
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROWS, WIDTH = 12, 37
RNG = np.random.default_rng(0)
LOGITS = 3 * RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
LABELS = RNG.integers(0, WIDTH, ROWS).astype(np.int32)
WEIGHTS = RNG.normal(size=ROWS).astype(np.float32)
QUICK = "along", "small labels", "vmap", "optax"
by_two = lambda x: x.reshape(3, 4, *x.shape[1:])
along = lambda x, y, mode=None: jnp.take_along_axis(x, y[:, None], 1, mode)[:, 0]
# The ways in which losses pick the logit of a label.
FORMS = {
    "along": along,
    "small labels": lambda x, y: along(x, y.astype(jnp.uint8)),
    "clipped": lambda x, y: along(x, y, "clip"),
    "filled": lambda x, y: along(x, y, "fill"),
    "negative": lambda x, y: along(x, y - WIDTH),
    "along the last": lambda x, y: jnp.take_along_axis(
        by_two(x), by_two(y)[..., None], -1
    ).ravel(),
    "along the first": lambda x, y: jnp.take_along_axis(x.T, y[None], 0)[0],
    "vmap": lambda x, y: jax.vmap(lambda x, i: x[i])(x, y),
    "vmap of take": lambda x, y: jax.vmap(jnp.take)(x, y),
    "vmap of a slice": lambda x, y: jax.vmap(
        functools.partial(lax.dynamic_index_in_dim, keepdims=False)
    )(x, y),
    "optax": lambda x, y: -optax.softmax_cross_entropy_with_integer_labels(x, y),
}
OTHERS = {
    "rows of a table": lambda x, y: x[y],
    "numbers of a table": lambda x, y: x[:, 0][y % ROWS],
    "a column of a table": lambda x, y: x[:, :1][y % ROWS],
    "two a row": lambda x, y: jnp.take_along_axis(x, jnp.stack([y, y], 1), 1),
    "places of two axes": lambda x, y: x[y % ROWS, y],
    "rows by an index": lambda x, y: x[jnp.arange(ROWS), y],
    "a few": lambda x, y: along(x[:3], y[:3]),
    "integers": lambda x, y: along((100 * x).astype(int), y) * x[:, 0],
    "one-hot": lambda x, y: (x * jax.nn.one_hot(y, WIDTH)).sum(1),
}


@pytest.fixture(scope="module")
def logits():
    return jnp.asarray(LOGITS)


@pytest.fixture(scope="module")
def labels():
    return jnp.asarray(LABELS)


def loss_of(pick, labels):
    return lambda x: jnp.sum(pick(x, labels) * WEIGHTS)


def is_masked(function, *args):
    found = []

    def pick_of(*given):
        found.append(picks.pick_of(*given))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch, without_caches():
        patch.setattr(scatters, "pick_of", pick_of)
        jax.make_jaxpr(function)(*args)
    return any(found)


@pytest.fixture
def scattered(monkeypatch):
    """Runs a call as if no gather were a pick."""

    def run(call, *args):
        with monkeypatch.context() as patch, without_caches():
            patch.setattr(scatters, "pick_of", lambda *args: None)
            return call(*args)

    return run


def twice(f):
    return jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))


CALLS = {
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad": jax.grad,
    "value": lambda f: f,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "grad of grad": twice,
}


@cover(quick=4, ci=120)
@pytest.mark.parametrize("name", sorted(FORMS, key=[*QUICK, *FORMS].index))
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8"])
@pytest.mark.parametrize("given", ["float32", "float16"])
def test_the_gradient_is_the_same(scattered, name, call, dtype, given, logits, labels):
    loss = loss_of(FORMS[name], labels)
    f = jamp.autocast(dtype)(lambda x: loss(x.astype(given)))
    assert is_masked(f, logits)
    run = CALLS[call](f)
    check_same_bits(run(logits), scattered(run, logits))


@pytest.mark.parametrize("name", OTHERS)
def test_other_gathers_are_what_they_were(name, logits, labels):
    loss = jamp.autocast(jnp.float16)(lambda x: jnp.sum(OTHERS[name](x, labels)))
    assert not is_masked(loss, logits)


def test_a_loop_keeps_no_mask(logits, labels):
    several = jnp.stack([labels, labels + 1, labels + 2]) % WIDTH

    def loss(x):
        with jamp.autocast(jnp.float16):
            step = lambda total, y: (total + jnp.sum(FORMS["along"](x, y)), None)
            return lax.scan(step, 0.0, several)[0]

    assert is_masked(loss, logits)
    loops = [e for e in equations(jax.make_jaxpr(jax.grad(loss))(logits)) if is_loop(e)]
    assert len(loops) == 2
    kept = [v.aval for v in loops[0].outvars]
    assert not [x for x in kept if x.dtype == bool or x.shape == (3, ROWS, WIDTH)]


def is_loop(eqn):
    return eqn.primitive.name == "scan"


# Any gather.

MODE = lax.GatherScatterMode
MODES = MODE.CLIP, MODE.FILL_OR_DROP, MODE.PROMISE_IN_BOUNDS
SEEDS = range(8)


def random_gather(rng, mode, spoiled):
    """A gather at random, its array, and whether it picks one number of each row."""
    kind = rng.choice(["int32", "int8", "uint8", "uint32"])
    length = 300 if kind == "uint8" else 7  # a byte does not count so far
    kinds = ["batch"] * rng.integers(0, 3)
    sizes = [int(n) for n in rng.integers(3, 6, len(kinds))]
    if spoiled:
        spoiled = rng.choice(["slice", "places", "axes", "integers"])
    else:
        kinds.append("batch")
        sizes.append(4)
    # The dimensions of the array, and of the indices, which are in another order.
    dims = [(kind, n, j) for j, (kind, n) in enumerate(zip(kinds, sizes, strict=True))]
    dims += [("axis", length, None)] * (1 + (spoiled == "axes"))
    dims += [("unit", 1, None)] * rng.integers(0, 2)
    dims = [dims[i] for i in rng.permutation(len(dims))]
    places = [*range(len(sizes))] + [None] * rng.integers(0, 2)
    places = [places[i] for i in rng.permutation(len(places))]
    if spoiled == "places":
        places.append("more")
    at = {j: d for d, j in enumerate(places) if isinstance(j, int)}
    shape = [1 if j is None else 3 if j == "more" else sizes[j] for j in places]
    slices = [1] * len(dims)
    if spoiled == "slice":
        slices[[kind for kind, *_ in dims].index("axis")] = 2
    indexed = [d for d, (kind, *_) in enumerate(dims) if kind == "axis"]
    indexed = [indexed[i] for i in rng.permutation(len(indexed))]
    free = [d for d, (kind, *_) in enumerate(dims) if kind != "batch"]
    gone = [d for d in free if slices[d] == 1 and rng.integers(2)]
    rank = len(shape) + len(free) - len(gone)
    offset = sorted(rng.choice(rank, len(free) - len(gone), replace=False).tolist())
    batch = [(d, at[j]) for d, (kind, _, j) in enumerate(dims) if kind == "batch"]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(offset),
        collapsed_slice_dims=tuple(gone),
        start_index_map=tuple(indexed),
        operand_batching_dims=tuple(d for d, _ in batch),
        start_indices_batching_dims=tuple(d for _, d in batch),
    )
    if mode == MODE.PROMISE_IN_BOUNDS:
        low, high = 0, 7
    else:
        low, high = (-9 if kind.startswith("i") else 0), 12
    x = rng.normal(size=[n for _, n, _ in dims]).astype(np.float32)
    found = {d: rng.integers(low, high, shape).astype(kind) for d in indexed}

    def gather(x):
        indices = jnp.stack([jnp.asarray(found[d]) for d in indexed], -1)
        if spoiled == "integers":
            x = (9 * x).astype(int)
        return lax.gather(x, indices, numbers, tuple(slices), mode=mode)

    return gather, jnp.asarray(x), not spoiled and math.prod(sizes) > picks.FEW


@cover(quick=2, ci=48)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spoiled", (0, 1))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.float16))
def test_any_gather(scattered, mode, spoiled, seed, dtype):
    rng = np.random.default_rng(seed)
    gather, x, is_pick = random_gather(rng, mode, spoiled)
    f = jamp.autocast(jnp.float16)(lambda x: gather(x.astype(dtype)))
    assert is_masked(f, x) == is_pick
    given = random_like(jax.eval_shape(f, x))
    back = lambda x: jax.vjp(f, x)[1](given)
    along = lambda x: jax.jvp(f, (x,), (jnp.cos(x),))
    for call in (f, back, along):
        check_same_bits(call(x), scattered(call, x))


def random_like(x):
    if jnp.issubdtype(x.dtype, jnp.integer):
        return np.zeros(x.shape, jax.dtypes.float0)
    numbers = np.random.default_rng(1).normal(size=x.shape)
    return jnp.asarray(numbers.astype(x.dtype))


@cover()
@pytest.mark.parametrize("mode", [None, "clip", "fill"])
def test_a_pick_of_a_mapped_function(scattered, mode, logits, labels):
    """Inside of `vmap` each example has one index, and the batch has many."""
    f = lambda x, y: x.at[jnp.array([0]), y].get(mode=mode)

    def loss(x):
        mapped = jax.vmap(jamp.autocast(jnp.float16)(f))
        return jnp.sum(mapped(x[:, None], labels) * WEIGHTS[:, None])

    for call in (jax.grad(loss), jax.jit(jax.grad(loss))):
        check_same_bits(call(logits), scattered(call, logits))
