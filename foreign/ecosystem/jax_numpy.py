"""Calls of jax.numpy, jax.nn, jax.ops and jax.random."""

import jax
import jax.numpy as jnp
import numpy as np

from .call import PROGRAM_BOUND, Call, Table

SYMMETRIC = np.eye(6) * 4 + np.cos(np.add.outer(np.arange(6.0), np.arange(6.0)))
MANY = (4096,)
FAR = jnp.asarray(np.linspace(319, 321, 6), jnp.float32)  # bfloat16 has 318, 320, 322
TABLE = (64, 8)
IDS = np.append(np.zeros(9000, np.int32), np.arange(1000, dtype=np.int32) % 7 + 1)


def calls() -> list[Call]:
    table = Table("jnp")
    reductions(table)
    counts(table)
    elementwise(table)
    linear(table)
    transforms(table)
    networks(table)
    far(table)
    return table.calls


def reductions(table: Table) -> None:
    """Sums and what is made from them, on enough values to overflow or stop."""
    names = "sum mean var std nansum nanmean nanvar nanstd cumsum nancumsum average"
    table.each(jnp, names, MANY, shift=2.0, counts=True)
    table("var of 1e3", jnp.var, TABLE, scale=1e3, counts=True)
    table("std of 1e3", jnp.std, TABLE, scale=1e3, counts=True)
    norm = lambda h: (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True)
    table("mean and std of a norm", norm, (16, 64), scale=1e3, shift=300.0, counts=True)
    variance = lambda h: (
        (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    )
    table("mean and var of a norm", variance, (16, 64), scale=1e3, counts=True)
    table.each(jnp, "prod cumprod nanprod", (32,), scale=0.05, shift=1.0, counts=True)
    table.each(jnp, "max min ptp argmax argmin median", (129,), counts=True)
    table("trace", jnp.trace, (64, 64), shift=2.0, counts=True)
    table("trapezoid", jnp.trapezoid, MANY, shift=2.0, counts=True)
    table("cumulative_sum", jnp.cumulative_sum, MANY, shift=2.0, counts=True)
    table("quantile", lambda h: jnp.quantile(h, 0.3), (129,), counts=True)
    table("percentile", lambda h: jnp.percentile(h, 80.0), (129,), counts=True)
    table("nanquantile", lambda h: jnp.nanquantile(h, 0.3), (129,), counts=True)
    table("cov", jnp.cov, (4, 4096), shift=2.0, counts=True)
    table("corrcoef", jnp.corrcoef, (4, 512), shift=2.0, counts=True)
    table("linalg.norm", jnp.linalg.norm, MANY, scale=10.0, counts=True)
    nuclear = lambda h: jnp.linalg.norm(h.astype(jnp.float32), "nuc")
    table("linalg.norm(nuc)", nuclear, (6, 6), counts=True)
    vector = lambda h: jnp.linalg.vector_norm(h, ord=3)
    table("linalg.vector_norm", vector, MANY, scale=10.0, counts=True)
    table("logaddexp.reduce", jnp.logaddexp.reduce, (64,), counts=True)
    table("add.reduce", jnp.add.reduce, MANY, shift=2.0, counts=True)
    table(
        "add.at",
        lambda h: jnp.zeros(4).at[jnp.arange(4096) % 4].add(h),
        MANY,
        shift=2.0,
        counts=True,
    )


def counts(table: Table) -> None:
    """Counts, bins and places, which are integers or should be."""
    plain = {"gradient": False, "counts": True}
    table("count_nonzero", lambda h: jnp.count_nonzero(h > 0), MANY, **plain)
    table("sum of a mask", lambda h: (h > 0).sum(), MANY, **plain)
    table("sum of a half mask", lambda h: (h > -9).astype(h.dtype).sum(), MANY, **plain)
    ones = lambda h: jnp.ones_like(h).sum()
    table("sum of ones_like", ones, MANY, **plain)
    table("mean of a mask", lambda h: jnp.mean(h > 0), MANY, **plain)
    groups = lambda h: jnp.bincount(jnp.arange(h.size) % 3, weights=h, length=3)
    table("bincount", groups, MANY, shift=2.0, counts=True)
    table("histogram", lambda h: jnp.histogram(h, 8)[0], MANY, **plain)
    table(
        "histogram(density)",
        lambda h: jnp.histogram(h, 8, density=True)[0],
        MANY,
        **plain,
    )
    table("histogram2d", lambda h, g: jnp.histogram2d(h, g, 4)[0], MANY, MANY, **plain)
    edges = jnp.linspace(-2, 2, 17)
    table("digitize", lambda h: jnp.digitize(h, edges), (256,), **plain)
    table("searchsorted", lambda h: jnp.searchsorted(edges, h), (256,), **plain)
    table(
        "argsort",
        lambda h: jnp.sort(h)[jnp.argsort(jnp.argsort(h))],
        (256,),
        counts=True,
    )
    table("unique(size)", lambda h: jnp.unique(h, size=64), (64,), **plain)
    table("isclose", lambda h: jnp.isclose(h, h * 1.02), (64,), **plain)
    table(
        "arange(h.dtype)", lambda h: jnp.arange(300, dtype=h.dtype) / 300 * h[0], (8,)
    )
    table("linspace", lambda h: jnp.linspace(h[0], h[1], 50), (8,))
    table(
        "geomspace",
        lambda h: jnp.geomspace(h[0], h[1], 50),
        (8,),
        positive=True,
        shift=1.0,
    )


def elementwise(table: Table) -> None:
    names = "exp exp2 expm1 sin cos tan tanh arctan arcsinh sinc cbrt square abs sign"
    table.each(jnp, names + " floor round i0 nan_to_num", TABLE)
    table.each(
        jnp, "log log2 log10 log1p sqrt reciprocal", TABLE, positive=True, shift=0.5
    )
    table.each(jnp, "arcsin arccos arctanh", TABLE, positive=True, scale=0.9)
    names = "hypot arctan2 logaddexp logaddexp2 maximum minimum copysign fmod"
    table.each(jnp, names, TABLE, TABLE, positive=True, shift=0.5)
    table.each(jnp, "power float_power divide", TABLE, TABLE, positive=True, shift=0.5)
    table("ldexp", lambda h: jnp.ldexp(h, 3), TABLE)
    table("frexp", lambda h: jnp.frexp(h)[0], TABLE, gradient=False)
    table("modf", lambda h: jnp.modf(h)[0], TABLE)
    table("unwrap", jnp.unwrap, np.mod(np.arange(32) * 0.9, 2 * np.pi))
    table(
        "interp",
        lambda h: jnp.interp(h, jnp.arange(5.0), jnp.arange(5.0) ** 2),
        (64,),
        positive=True,
        scale=4.0,
    )
    table("polyval", lambda h: jnp.polyval(jnp.array([1.0, -2.0, 0.5]), h), TABLE)
    table("where with -1e9", lambda h: jax.nn.softmax(jnp.where(h > 0, h, -1e9)), TABLE)
    table("clip", lambda h: jnp.clip(h, -0.75, 0.75), TABLE)
    table("diff", jnp.diff, (64,))
    table("gradient", jnp.gradient, (64,))


def linear(table: Table) -> None:
    square = SYMMETRIC
    table.each(jnp, "linalg.inv linalg.det linalg.slogdet linalg.cholesky", square)
    table.each(jnp, "linalg.eigvalsh linalg.cond", square)
    table(
        "linalg.matrix_rank",
        jnp.linalg.matrix_rank,
        square,
        gradient=False,
        counts=True,
    )
    table("linalg.solve", jnp.linalg.solve, square, (6, 2))
    table("linalg.svdvals", jnp.linalg.svdvals, (6, 4))
    table("linalg.qr", lambda h: jnp.abs(jnp.linalg.qr(h)[1]), (6, 4))
    table("linalg.pinv", jnp.linalg.pinv, (6, 4), counts=True)
    table(
        "linalg.lstsq",
        lambda a, b: jnp.linalg.lstsq(a, b)[0],
        (8, 3),
        (8,),
        counts=True,
    )
    table("linalg.matrix_power", lambda h: jnp.linalg.matrix_power(h, 3), square)
    table(
        "linalg.multi_dot", lambda a, b: jnp.linalg.multi_dot([a, b, a]), square, square
    )
    table(
        "polyfit",
        lambda h: jnp.polyfit(jnp.arange(64.0) / 32, h, 2),
        (64,),
        counts=True,
    )
    table(
        "roots",
        lambda h: jnp.abs(jnp.roots(h, strip_zeros=False)),
        np.array([1.0, -6.0, 11.0, -6.0]),
        gradient=False,
        counts=True,
    )
    table("einsum", lambda a, b: jnp.einsum("ij,kj->ik", a, b), TABLE, TABLE)
    table.each(jnp, "kron outer", (8,), (8,))
    table.each(jnp, "vdot inner", MANY, MANY)
    table("cross", jnp.cross, (8, 3), (8, 3))
    table.each(jnp, "convolve correlate", (64,), (8,))
    table("vander", lambda h: jnp.vander(h, 4), (16,))


def transforms(table: Table) -> None:
    magnitude = lambda function: lambda h: jnp.abs(function(h))
    for name in ("fft", "rfft", "ifft", "fft2", "rfft2", "rfftn"):
        table(f"fft.{name}", magnitude(getattr(jnp.fft, name)), (16, 32), counts=True)
    table(
        "fft.irfft of rfft",
        lambda h: jnp.fft.irfft(jnp.fft.rfft(h)),
        (64,),
        counts=True,
    )


def networks(table: Table) -> None:
    """jax.nn, jax.ops, jax.lax and jax.random."""
    table.prefix = "jax"
    names = "nn.softmax nn.log_softmax nn.logsumexp nn.softplus nn.gelu nn.silu nn.elu"
    table.each(jax, names + " nn.selu nn.standardize nn.glu nn.mish", TABLE)
    attend = lambda h: jax.nn.dot_product_attention(h, h, h)
    table("nn.dot_product_attention", attend, (2, 16, 2, 8))
    for name in ("segment_sum", "segment_max"):
        function = getattr(jax.ops, name)
        each = lambda h, function=function: function(h, IDS, 8)
        table(f"ops.{name}", each, IDS.shape, positive=True, shift=1.3, counts=True)
    degrees = lambda h: jax.ops.segment_sum(jnp.ones_like(h), IDS, 8)
    table("ops.segment_sum of ones_like", degrees, IDS.shape, counts=True)
    key = jax.random.key(3)
    table(
        "random.categorical",
        lambda h: jax.random.categorical(key, h),
        TABLE,
        gradient=False,
        counts=True,
    )
    table(
        "random.bernoulli",
        lambda h: jax.random.bernoulli(key, h),
        TABLE,
        positive=True,
        gradient=False,
        counts=True,
    )
    for name in ("normal", "uniform", "gumbel", "laplace"):
        draw = getattr(jax.random, name)
        noisy = lambda h, draw=draw: h + draw(key, h.shape, h.dtype)
        table(f"random.{name}(h.dtype)", noisy, (512,))
    for name in ("gamma", "poisson"):
        draw = getattr(jax.random, name)
        table(
            f"random.{name}",
            lambda h, draw=draw: draw(key, h),
            TABLE,
            positive=True,
            shift=1.0,
            gradient=False,
            counts=True,
        )
    table("lax.cumlogsumexp", jax.lax.cumlogsumexp, (64,), counts=True)
    table("lax.top_k", lambda h: jax.lax.top_k(h, 4)[0], (64,), counts=True)
    table(
        "lax.associative_scan",
        lambda h: jax.lax.associative_scan(jnp.add, h),
        MANY,
        shift=2.0,
        counts=True,
    )
    carry = lambda h: jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros(()), h)[0]
    table("lax.scan from zeros", carry, MANY, shift=2.0, counts=True)
    table(
        "lax.reduce_window",
        lambda h: jax.lax.reduce_window(h, 0.0, jax.lax.add, (512,), (512,), "VALID"),
        MANY,
        shift=2.0,
        counts=True,
    )
    start = jnp.zeros(16)
    index = jnp.arange(8)[:, None]
    dims = jax.lax.ScatterDimensionNumbers((), (0,), (0,))
    for name in ("scatter", "scatter_add"):
        write = getattr(jax.lax, name)
        table(
            f"lax.{name} to float32",
            lambda h, w=write: w(start, index, h, dims),
            (8,),
            counts=True,
        )
    table(
        "image.resize",
        lambda h: jax.image.resize(h, (16, 16), "cubic"),
        (8, 8),
        counts=True,
    )


def far(table: Table) -> None:
    """Numbers that half precision rounds or does not have, in float32 beside `h`."""
    table.prefix = "jax"
    past = jnp.arange(64.0).reshape(1, 1, 8, 8) * 2049
    mask = jnp.where(jnp.arange(8) > 5, -1e9, 0.0)
    places = jnp.arange(2040.0, 2104.0)
    rates = jnp.array([1.0, 0.5, 1e-3, 1e-4])
    named = {
        "lax.conv_general_dilated_patches at 1e5": lambda h: (
            jax.lax.conv_general_dilated_patches(past, (2, 2), (1, 1), "VALID")
            + h.sum()
        ),
        "numpy.convolve at 7e4": lambda h: jnp.convolve(h[0], places * 1e3),
        "numpy.correlate at 7e4": lambda h: jnp.correlate(h[0], places[:8] * 1e3),
        "numpy.polymul at 7e4": lambda h: jnp.polymul(h[0], places[:8] * 1e3),
        "numpy.linalg.matrix_power at 1e5": lambda h: (
            jnp.linalg.matrix_power(10 * jnp.eye(8), 5) + h[:8]
        ),
        "rotary angles at 2048": lambda h: (
            jnp.sin(places[:, None] @ rates[None]) + h[:, :4]
        ),
        "nn.log_softmax at -1e9": lambda h: jax.nn.log_softmax(h + mask)[:, :6],
        "nn.logsumexp at -1e9": lambda h: jax.nn.logsumexp(h + mask, -1),
        "nn.softmax at -1e9": lambda h: jax.nn.softmax(jnp.where(mask < 0, mask, h)),
    }
    for name, function in named.items():
        gradient = "7e4" not in name  # float16 has none so large
        table(name, function, TABLE, gradient=gradient, bound=PROGRAM_BOUND)


LIBRARIES = {"jax": calls}
