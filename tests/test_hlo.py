"""What the benchmarks read from a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np

from shared import hlo

X = np.ones((256, 128), np.float32)
MATRIX = X.nbytes


def program(function, *args, donate=()):
    jitted = jax.jit(function, donate_argnums=donate)
    return hlo.summarize(jitted.lower(*args).compile())


def test_bytes_are_those_of_operands_and_results():
    one = program(lambda x, y: jnp.tanh(x) * y, X, X)
    assert (one.kernels, one.bytes) == (1, 3 * MATRIX)
    assert (one.copies, one.conditionals, one.host) == (0, 0, 0)
    assert one.peak_bytes == 3 * MATRIX
    assert program(lambda x: x + 1, X, donate=(0,)).peak_bytes == MATRIX


def test_a_sum_is_more_than_one_kernel_or_not_but_reads_once():
    figures = program(jnp.sum, X)
    assert MATRIX < figures.bytes < 1.1 * MATRIX


def test_of_a_conditional_the_true_branch_counts():
    sides = [lambda x: (x @ x.T) @ x, lambda x: x + 1]
    cond = lambda true, false: lambda flag, x: jax.lax.cond(flag, true, false, x)
    true, false = (program(cond(*s), True, X) for s in (sides, sides[::-1]))
    assert true.conditionals == false.conditionals == 1
    assert true.bytes > false.bytes + 2 * 256 * 256 * 4


def test_a_callback_is_seen():
    def report(x):
        jax.debug.callback(lambda value: None, x[0, 0])
        return x + 1

    assert program(report, X).host > 0


def test_shapes():
    assert hlo.size_of("f32[4,3]{1,0}") == 48
    assert hlo.size_of("(f16[4]{0}, pred[], /*index=5*/bf16[2,2]{1,0})") == 8 + 1 + 8
    assert hlo.size_of("f8e4m3fn[16]{0}") == 16
    assert hlo.size_of("token[]") == 0
    for dtype in (np.int8, np.uint32, np.complex64, np.float64, bool):
        short = {"int8": "s8", "uint32": "u32", "complex64": "c64", "float64": "f64"}
        name = short.get(np.dtype(dtype).name, "pred")
        assert hlo.size_of(f"{name}[3]") == 3 * np.dtype(dtype).itemsize
