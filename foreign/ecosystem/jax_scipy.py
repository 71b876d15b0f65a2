"""Calls of jax.scipy and jax.experimental.ode."""

from importlib import import_module

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np

from .call import Call, Table
from .jax_numpy import FAR, MANY, SYMMETRIC, TABLE

LINE = np.concatenate([np.linspace(-8, 5, 56), [-0.5, 0.25]])  # the tails too
POSITIVE = {"positive": True, "shift": 0.5, "scale": 3.0}
BETWEEN = {"positive": True, "shift": 0.05, "scale": 0.9}


def calls() -> list[Call]:
    table = Table("jsp")
    special(table)
    distributions(table)
    discrete(table)
    statistics(table)
    signals(table)
    linear(table)
    solvers(table)
    return table.calls


def special(table: Table) -> None:
    def add(names: str, *inputs: object, **options: object) -> None:
        table.prefix = "jsp.special"
        table.each(jsp.special, names, *inputs, **{"counts": True} | options)

    add("log_ndtr ndtr erf erfc expit", LINE)
    add("erfinv logit entr ndtri", TABLE, **BETWEEN)
    add("gammaln digamma exp1 expi i0e i1e i1", TABLE, **POSITIVE)
    add("spence", TABLE, **POSITIVE)
    add("betaln xlogy xlog1py rel_entr kl_div", TABLE, TABLE, **POSITIVE)
    add("gammainc gammaincc", (32,), (32,), **POSITIVE)
    add("logsumexp", MANY)
    add("sici", (32,), gradient=False, counts=False, **POSITIVE)
    named = {
        "betainc": lambda h: jsp.special.betainc(2.0, 3.0, h),
        "polygamma": lambda h: jsp.special.polygamma(1, h + 1),
        "zeta": lambda h: jsp.special.zeta(h + 2, 1.5),
        "expn": lambda h: jsp.special.expn(2, h),
        "multigammaln": lambda h: jsp.special.multigammaln(h + 3, 2),
        "hyp1f1": lambda h: jsp.special.hyp1f1(1.5, 2.5, h),
        "bessel_jn": lambda h: jsp.special.bessel_jn(h, v=3),
    }
    for name, function in named.items():
        options = {"gradient": name != "bessel_jn"} | BETWEEN
        counts = name not in ("zeta", "bessel_jn")  # loops of a fixed length
        table(name, function, (32,), counts=counts, **options)


def distributions(table: Table) -> None:
    stats = jsp.stats
    table.prefix = "jsp.stats"
    names = "norm.logcdf norm.cdf norm.sf norm.logsf norm.logpdf cauchy.logpdf"
    names += " logistic.logpdf laplace.logpdf logistic.cdf laplace.cdf"
    table.each(stats, names, LINE, counts=True)
    table("cauchy.cdf", stats.cauchy.cdf, LINE)
    table.each(stats, "norm.ppf norm.isf", TABLE, counts=True, **BETWEEN)
    table.each(stats, "expon.logpdf", TABLE, counts=True, **POSITIVE)
    named = {
        "t.logpdf": lambda h: stats.t.logpdf(h, 3.0),
        "gamma.logpdf": lambda h: stats.gamma.logpdf(h, 2.0),
        "gamma.cdf": lambda h: stats.gamma.cdf(h, 2.0),
        "chi2.logpdf": lambda h: stats.chi2.logpdf(h, 3.0),
        "beta.logpdf": lambda h: stats.beta.logpdf(h / 8 + 0.1, 2.0, 3.0),
        "pareto.logpdf": lambda h: stats.pareto.logpdf(h + 1, 2.0),
        "vonmises.logpdf": lambda h: stats.vonmises.logpdf(h, 2.0),
        "gennorm.logpdf": lambda h: stats.gennorm.logpdf(h, 1.5),
        "truncnorm.logpdf": lambda h: stats.truncnorm.logpdf(h, -1.0, 5.0),
        "truncnorm.logcdf": lambda h: stats.truncnorm.logcdf(h, 0.0, 5.0),
        "wrapcauchy.logpdf": lambda h: stats.wrapcauchy.logpdf(h, 0.5),
        "uniform.logpdf": lambda h: stats.uniform.logpdf(h, 0.0, 4.0),
    }
    for name, function in named.items():
        table(name, function, (32,), counts=True, **POSITIVE)
    covariance = jnp.asarray(SYMMETRIC, jnp.float32)
    density = lambda h: stats.multivariate_normal.logpdf(h, jnp.zeros(6), covariance)
    table("multivariate_normal.logpdf", density, (16, 6), counts=True)
    far = lambda h: stats.multivariate_normal.logpdf(h + FAR, jnp.zeros(6), covariance)
    table("multivariate_normal.logpdf at 320", far, (16, 6), counts=True)
    past = jnp.linspace(1e5, 1.1e5, LINE.size)
    table("norm.logpdf at 1e5", lambda h: stats.norm.logpdf(h, past, 1e3), LINE)
    near = jnp.linspace(0.3, 0.4, 32)
    named = {
        "beta.logpdf of parameters": lambda h: stats.beta.logpdf(near, h, 2 * h),
        "gamma.logpdf of parameters": lambda h: stats.gamma.logpdf(near, h),
        "nbinom.logpmf of parameters": lambda h: stats.nbinom.logpmf(99, h, near),
        "t.logpdf of parameters": lambda h: stats.t.logpdf(near, h),
    }
    for name, function in named.items():
        table(name, function, (32,), positive=True, shift=90.0, scale=30.0)
    chances = lambda h: stats.dirichlet.logpdf(h / h.sum(), jnp.ones(8) * 2)
    table("dirichlet.logpdf", chances, (8,), counts=True, **POSITIVE)


def discrete(table: Table) -> None:
    stats, k = jsp.stats, jnp.arange(32) % 5
    table.prefix = "jsp.stats"
    named = {
        "poisson.logpmf": lambda h: stats.poisson.logpmf(k, h * 4),
        "poisson.cdf": lambda h: stats.poisson.cdf(k, h * 4),
        "binom.logpmf": lambda h: stats.binom.logpmf(k, 9, h),
        "nbinom.logpmf": lambda h: stats.nbinom.logpmf(k, 3.0, h),
        "geom.logpmf": lambda h: stats.geom.logpmf(k + 1, h),
        "bernoulli.logpmf": lambda h: stats.bernoulli.logpmf(k % 2, h),
        "betabinom.logpmf": lambda h: stats.betabinom.logpmf(k, 9, h + 1, 2.0),
        "multinomial.logpmf": lambda h: stats.multinomial.logpmf(k, 62, h / h.sum()),
    }
    for name, function in named.items():
        counts = name not in ("poisson.cdf", "betabinom.logpmf")
        table(name, function, (32,), counts=counts, **BETWEEN)


def statistics(table: Table) -> None:
    stats = jsp.stats
    table.prefix = "jsp.stats"
    table("sem", stats.sem, (512,), counts=True)
    table("rankdata", stats.rankdata, (64,), gradient=False, counts=True)
    mode = lambda h: stats.mode(jnp.round(h)).count
    table("mode", mode, (4096,), gradient=False, counts=True)
    kernel = lambda h: stats.gaussian_kde(h)(jnp.linspace(-2, 2, 9))
    table("gaussian_kde", kernel, (64,), counts=True)
    far = lambda h: stats.gaussian_kde(h + jnp.linspace(319, 321, 64))(FAR)
    table("gaussian_kde at 300", far, (64,))


def signals(table: Table) -> None:
    signal = jsp.signal
    table.prefix = "jsp.signal"
    table.each(signal, "convolve correlate fftconvolve", (64,), (9,), counts=True)
    far = lambda h: signal.convolve(h, jnp.arange(9.0) * 1e4)
    table("convolve at 8e4", far, (64,), counts=True, gradient=False)
    table("convolve2d", signal.convolve2d, (8, 8), (3, 3), counts=True)
    table("detrend", signal.detrend, (64,), shift=3.0, counts=True)
    flat = lambda h: signal.detrend(h, type="constant")
    table("detrend(constant)", flat, (64,), shift=3.0, counts=True)
    spectrum = lambda h: jnp.abs(signal.stft(h, nperseg=32)[2])
    table("stft", spectrum, (256,), counts=True)
    there = lambda h: signal.istft(signal.stft(h, nperseg=32)[2], nperseg=32)[1]
    table("istft of stft", there, (256,), counts=True)
    table("welch", lambda h: signal.welch(h, nperseg=32)[1], (256,), counts=True)
    cross = lambda h, g: jnp.abs(signal.csd(h, g, nperseg=32)[1])
    table("csd", cross, (256,), (256,), counts=True)
    table.prefix = "jsp"
    where = [jnp.linspace(0.2, 6.4, 16), jnp.linspace(5.8, 0.3, 16)]
    sample = lambda h: jsp.ndimage.map_coordinates(h, where, order=1)
    table("ndimage.map_coordinates", sample, (8, 8))
    places = lambda h: jsp.ndimage.map_coordinates(
        jnp.arange(512.0), [h], order=1, mode="nearest"
    )
    table(
        "ndimage.map_coordinates at half",
        places,
        (32,),
        positive=True,
        scale=500.0,
        gradient=False,
        counts=True,
    )
    grid = (jnp.arange(8.0), jnp.arange(8.0))
    points = jnp.stack([jnp.linspace(0.2, 6.4, 16), jnp.linspace(5.8, 0.3, 16)], -1)
    inter = lambda h: jsp.interpolate.RegularGridInterpolator(grid, h)(points)
    table("interpolate.RegularGridInterpolator", inter, (8, 8), counts=True)
    table("integrate.trapezoid", jsp.integrate.trapezoid, MANY, shift=2.0, counts=True)
    near = lambda h: jsp.cluster.vq.vq(h, jnp.eye(8))[1]
    table("cluster.vq.vq", near, TABLE, counts=True)
    spatial = import_module("jax.scipy.spatial.transform")
    turn = lambda h: spatial.Rotation.from_quat(h).as_matrix()
    table("spatial.Rotation.as_matrix", turn, (8, 4), counts=True)


def linear(table: Table) -> None:
    table.prefix = "jsp.linalg"
    linalg, square = jsp.linalg, SYMMETRIC
    triangle = lambda a, b: linalg.solve_triangular(a, b, lower=True)
    factors = lambda a, b: linalg.cho_solve(linalg.cho_factor(a), b)
    table("solve_triangular", triangle, np.tril(square), (6, 2))
    table("cho_solve", factors, square, (6, 2))
    table(
        "lu_solve", lambda a, b: linalg.lu_solve(linalg.lu_factor(a), b), square, (6, 2)
    )
    table("eigh", lambda h: linalg.eigh(h)[0], square)
    table("svd", lambda h: linalg.svd(h, compute_uv=False), (6, 4))
    table("expm", linalg.expm, square / 4, counts=True)
    table("sqrtm", lambda h: linalg.sqrtm(h).real, square, gradient=False, counts=True)
    table(
        "funm",
        lambda h: linalg.funm(h, jnp.exp).real,
        square / 4,
        gradient=False,
        counts=True,
    )
    table("polar", lambda h: linalg.polar(h)[0], square, gradient=False)
    table("toeplitz", linalg.toeplitz, (6,))
    ends = lambda d, e: linalg.eigh_tridiagonal(d, e, eigvals_only=True)
    table("eigh_tridiagonal", ends, (8,), (7,), gradient=False, counts=True)


def solvers(table: Table) -> None:
    """That iterate until a tolerance is met."""
    minimize = import_module("jax.scipy.optimize").minimize
    sparse, square = jsp.sparse.linalg, SYMMETRIC
    table.prefix = "jsp.sparse.linalg"
    for name in ("cg", "gmres", "bicgstab"):
        solve = getattr(sparse, name)
        table(
            name,
            lambda a, b, s=solve: s(lambda x: a @ x, b, tol=1e-3)[0],
            square,
            (6,),
            counts=name == "gmres",
        )
        start = lambda a, b, s=solve: s(
            lambda x: a @ x, b.astype(jnp.float32), tol=1e-3
        )[0]
        table(f"{name} of a float32 vector", start, square, (6,), counts=True)
    table.prefix = "jsp"

    def least(h: jax.Array) -> jax.Array:
        objective = lambda x: jnp.sum((h @ x - 1.0) ** 2) + jnp.sum(x**2)
        found = minimize(objective, jnp.zeros(6), method="BFGS", tol=1e-3)
        return found.x

    table("optimize.minimize", least, square / 4, gradient=False, counts=True)
    table.prefix = "jax.experimental"
    odeint = import_module("jax.experimental.ode").odeint
    times = jnp.linspace(0.0, 1.0, 4)

    def flow(a: jax.Array, y: jax.Array) -> jax.Array:
        field = lambda y, t, a: -jnp.tanh(a @ y)
        return odeint(field, y, times, a, rtol=1e-3, atol=1e-3)

    def flow_float32(a: jax.Array, y: jax.Array) -> jax.Array:
        return flow(a.astype(jnp.float32), y.astype(jnp.float32))

    table("ode.odeint", flow, square / 4, (6,), counts=True)
    table("ode.odeint of float32", flow_float32, square / 4, (6,), counts=True)


LIBRARIES = {"jax.scipy": calls}
