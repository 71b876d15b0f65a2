"""Random programs in autocast regions, with jamp's caches and without.

A program is a tree of steps over a few arrays: ops, calls of jitted functions, regions
that nest and that are shared, derivatives, jit, scopes and settings of JAX. All
programs use the same functions and regions, so that one program finds what another has
left in a cache. Two threads run the programs, the second one in the reverse order.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import jamp
from jamp._autocast.retracing import without_caches

Step = tuple[Any, ...]
Row = tuple[str, str, bytes] | str

N = 16  # float8 wants multiples of it


def layer(x: Any, y: Any) -> Any:
    return jnp.tanh(x @ y / 4 + y[0])


def normed(x: Any, y: Any) -> Any:
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-3) * y[0]


def attention(x: Any, y: Any) -> Any:
    return jax.nn.softmax(jnp.einsum("ij,kj->ik", x, y) / 4) @ y


def looped(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, row: (c * 0.5, c @ row), x, y)[1]


def chosen(x: Any, y: Any) -> Any:
    return lax.cond(jnp.sum(x) > 0, layer, lambda x, y: x @ y * 0.125, x, y)


def dtype_of_product(x: Any, y: Any) -> Any:
    """Python reads a dtype, so that a stale trace would show."""
    product = x @ y
    return product * (0.25 if product.dtype == jnp.float16 else 0.5)


def enabled_here(x: Any, y: Any) -> Any:
    return x + y * (0.5 if jamp.is_autocast_enabled() else 0.25)


def scaled_by(factor: float) -> Callable[[Any, Any], Any]:
    """Functions with the same code, which close over different values."""
    return lambda x, y: jax.nn.gelu(x @ y) * factor


@jax.custom_jvp
def halved(x: Any, y: Any) -> Any:
    return x @ y * 0.125


@halved.defjvp
def halved_jvp(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    return halved(x, y), (dx @ y + x @ dy) * 0.0625  # a rule with a distinct result


BINARY: list[Callable[[Any, Any], Any]] = [
    *(layer, normed, attention, looped, chosen, dtype_of_product, enabled_here, halved),
    *(scaled_by(0.25), scaled_by(0.125)),
    *(jnp.add, jnp.matmul, lambda x, y: x * 2 - y, lambda x, y: jnp.where(x > y, x, y)),
    *(lambda x, _: jnp.exp(jnp.minimum(x, 3)), lambda x, _: x.T, lambda x, _: x + 1e-6),
    lambda x, y: x + y.sum(0) / 16,
]
JITTED = [jax.jit(function) for function in BINARY[:10]]
JITTED += [jax.jit(jax.checkpoint(layer)), jax.jit(layer, inline=True)]
JITTED += [jax.jit(jax.vmap(lambda row, y: jnp.tanh(row @ y), (0, None)))]
NARROW = [jnp.float32, jnp.float16, jnp.bfloat16]

REGIONS = [
    *(jamp.autocast(jnp.float16), jamp.autocast(jnp.bfloat16)) * 2,
    jamp.autocast(enabled=False),
    jamp.autocast(jamp.ScaledFloat16()),
    jamp.autocast("float8"),
    # A pattern that matches at least once in each program: see `run`.
    jamp.autocast(jnp.float16, rules={"head|mark": jnp.float32}),
    jamp.autocast(jnp.float16, rules={"head|mark": None}),
    jamp.autocast(
        jnp.bfloat16, rules={lax.exp_p: jnp.float16, lax.dot_general_p: None}
    ),
    jamp.autocast(jnp.float16, rules={layer: jnp.bfloat16, lax.dot_general_p: None}),
]
CAST_INPUTS = [
    jamp.autocast(cast_inputs=dtype)(function)
    for dtype in (jnp.float32, jnp.float16)
    for function in (layer, JITTED[2])
]
SETTINGS: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
    functools.partial(jax.named_scope, "head"),
    functools.partial(jax.named_scope, "body"),
    functools.partial(jax.default_matmul_precision, "highest"),
    functools.partial(jax.numpy_dtype_promotion, "strict"),
    functools.partial(jax.enable_x64, True),
    functools.partial(jax.disable_jit),
]

NUMBER = st.integers(0, 2**16 - 1)
LEAVES = ["op"] * 5 + ["jitted"] * 5 + ["cast", "fresh", "inputs"]
BLOCKS = ["region"] * 5 + ["setting"] * 2 + ["grad", "jit"]


def block(steps: st.SearchStrategy[Step]) -> st.SearchStrategy[list[Step]]:
    return st.lists(steps, min_size=1, max_size=3)


STEPS = st.recursive(
    st.tuples(st.sampled_from(LEAVES), NUMBER, NUMBER, NUMBER),
    lambda inner: st.tuples(st.sampled_from(BLOCKS), NUMBER, block(inner)),
    max_leaves=6,
)
IN_A_REGION = block(STEPS).flatmap(
    lambda steps: NUMBER.map(lambda number: [("region", number, steps)])
)
PROGRAMS = st.lists(IN_A_REGION | block(STEPS), min_size=1, max_size=10)


def run(steps: list[Step], values: list[Any]) -> None:
    """Runs the steps, and appends what each computes to the values."""
    for kind, number, *rest in steps:
        if kind == "region":
            with REGIONS[number % len(REGIONS)], jax.named_scope("mark"):
                # What the rules name comes once, so that each has matched an op.
                values.append(layer(values[0], values[1]))
                values.append(jnp.exp(values[0]))
                run(rest[0], values)
        elif kind == "setting":
            with SETTINGS[number % len(SETTINGS)]():
                run(rest[0], values)
        elif kind in ("grad", "jit"):
            values.append(transformed(kind, rest[0])(*values[:2]))
        else:
            x, y = (values[k % len(values)] for k in rest)
            values.append(computed(kind, number, x, y))


def transformed(kind: str, steps: list[Step]) -> Callable[[Any, Any], Any]:
    def block(x: Any, y: Any) -> Any:
        values = [x, y]
        run(steps, values)
        return values[-1]

    if kind == "jit":
        return jax.jit(block)
    return jax.grad(lambda x, y: jnp.sum(block(x, y).astype(jnp.float32)))


def computed(kind: str, number: int, x: Any, y: Any) -> Any:
    if kind == "cast":
        return x.astype(NARROW[number % len(NARROW)])
    if kind == "inputs":
        return CAST_INPUTS[number % len(CAST_INPUTS)](x, y)
    if kind == "fresh":  # dies with this step, so others reuse its memory
        return jax.jit(scaled_by(number % 7 / 8))(x, y)
    functions = JITTED if kind == "jitted" else BINARY
    return functions[number % len(functions)](x, y)


def rows(program: list[Step], arrays: np.ndarray) -> Iterator[Row]:
    """What the program computes, in dtypes and bits, and how it ends."""
    values: list[Any] = list(map(jnp.asarray, arrays))
    error, free = "", jax.numpy_dtype_promotion("standard")
    try:
        with free, jax.numpy_rank_promotion("allow"):
            run(program, values)
    # Strict promotion, mostly, and second derivatives of scaled products.
    except (TypeError, ValueError, NotImplementedError) as refused:
        error = f"{type(refused).__name__}: {str(refused)[:200]}"
    for value in values:
        aval = jax.typeof(value)
        yield str(aval), str(aval.weak_type), np.asarray(value).tobytes()
    yield error


def check_programs(programs: list[list[Step]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = rng.normal(size=(len(programs), 2, N, N)).astype(np.float32)
    orders = [range(len(programs)), range(len(programs))[::-1]]
    found: list[dict[int, list[Row]]] = [{} for _ in orders]
    failed: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for at in orders[i]:
                found[i][at] = list(rows(programs[at], arrays[at]))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(orders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    with without_caches():
        expected = [list(rows(*each)) for each in zip(programs, arrays, strict=True)]
    for at, want in enumerate(expected):
        for thread in range(len(orders)):
            got = found[thread][at]
            for k, (mine, its) in enumerate(zip(got, want, strict=False)):
                assert mine == its, (
                    f"thread {thread}, program {at}, value {k}: "
                    f"{mine[:2]} with caches, {its[:2]} without: {programs[at]}"
                )
            assert len(got) == len(want)
