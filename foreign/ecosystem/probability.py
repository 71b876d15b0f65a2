"""Calls of distrax, tensorflow-probability, numpyro and blackjax."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import Call, Table
from .jax_numpy import FAR, SYMMETRIC

LINE = np.linspace(-4, 4, 32)
POSITIVE = {"positive": True, "shift": 0.5, "scale": 3.0, "counts": True}
BETWEEN = {"positive": True, "shift": 0.05, "scale": 0.9, "counts": True}
FACTOR = np.linalg.cholesky(SYMMETRIC).astype(np.float32)
COUNTS = jnp.arange(32) % 5


def distrax_calls() -> list[Call]:
    distrax = import_module("distrax")
    table = Table("distrax")
    mean, spread = jnp.zeros(6), jnp.ones(6)
    zero, one = jnp.zeros(32), jnp.ones(32)
    named: dict[str, tuple[Any, Any]] = {
        "Normal.log_prob": (lambda h: distrax.Normal(zero, one).log_prob(h), LINE),
        "Normal(h).log_prob": (lambda h: distrax.Normal(h, one).log_prob(zero), LINE),
        "Normal.cdf": (lambda h: distrax.Normal(zero, one).cdf(h), LINE),
        "Normal.log_cdf": (lambda h: distrax.Normal(zero, one).log_cdf(h), LINE),
        "Normal(h).entropy": (lambda h: distrax.Normal(h, one).entropy(), LINE),
        "Laplace.log_prob": (lambda h: distrax.Laplace(zero, one).log_prob(h), LINE),
        "Logistic.log_prob": (lambda h: distrax.Logistic(zero, one).log_prob(h), LINE),
        "Gumbel.log_prob": (lambda h: distrax.Gumbel(zero, one).log_prob(h), LINE),
        "Categorical.log_prob": (
            lambda h: distrax.Categorical(logits=h).log_prob(3),
            LINE,
        ),
        "Categorical.entropy": (lambda h: distrax.Categorical(h).entropy(), LINE),
        "Categorical.kl_divergence": (
            lambda h: distrax.Categorical(h).kl_divergence(distrax.Categorical(zero)),
            LINE,
        ),
        "Bernoulli.log_prob": (lambda h: distrax.Bernoulli(h).log_prob(1), LINE),
        "Tanh.forward_and_log_det": (
            lambda h: distrax.Tanh().forward_and_log_det(h),
            LINE / 2,
        ),
        "Sigmoid.inverse": (
            lambda h: distrax.Sigmoid().inverse(jax.nn.sigmoid(h)),
            LINE / 2,
        ),
        "RationalQuadraticSpline": (
            lambda h: distrax.RationalQuadraticSpline(
                h[:25], range_min=-4.0, range_max=4.0
            ).forward(jnp.linspace(-3, 3, 9)),
            LINE,
        ),
    }
    for name, (function, inputs) in named.items():
        table(name, function, inputs, counts=True)
    full = lambda h: distrax.MultivariateNormalTri(mean, FACTOR).log_prob(h)
    table("MultivariateNormalTri.log_prob", full, (16, 6), counts=True)
    far = lambda h: distrax.MultivariateNormalTri(mean, FACTOR).log_prob(h + FAR)
    table("MultivariateNormalTri.log_prob at 320", far, (16, 6), counts=True)
    loc = lambda h: distrax.MultivariateNormalDiag(h, spread).log_prob(mean)
    table("MultivariateNormalDiag(h).log_prob", loc, (16, 6), counts=True)
    positive: dict[str, Any] = {
        "Gamma.log_prob": lambda h: distrax.Gamma(2.0, 1.0).log_prob(h),
        "Beta(h).log_prob": lambda h: distrax.Beta(h, 2.0).log_prob(0.3),
        "Dirichlet(h).log_prob": lambda h: distrax.Dirichlet(h).log_prob(
            jnp.full(32, 1 / 32)
        ),
        "VonMises.log_prob": lambda h: distrax.VonMises(0.0, 2.0).log_prob(h),
    }
    for name, function in positive.items():
        counts = name not in ("Beta(h).log_prob", "VonMises.log_prob")
        table(name, function, (32,), **POSITIVE | {"counts": counts})
    draw = lambda h: distrax.Normal(h, one).sample(seed=jax.random.key(0))
    table("Normal(h).sample", draw, LINE)
    draw = lambda h: distrax.Categorical(h).sample(seed=jax.random.key(0))
    table("Categorical(h).sample", draw, LINE, counts=True, gradient=False)
    return table.calls


def tfp_calls() -> list[Call]:
    tfp = import_module("tensorflow_probability.substrates.jax")
    tfd, tfb = tfp.distributions, tfp.bijectors
    table = Table("tfp")
    real: dict[str, Any] = {
        "Normal.log_prob": lambda h: tfd.Normal(0.0, 1.0).log_prob(h),
        "Normal(h).log_prob": lambda h: tfd.Normal(h, jnp.ones(32)).log_prob(0.5),
        "Normal(h, h).log_prob": lambda h: tfd.Normal(
            h, jax.nn.softplus(h) + 0.5
        ).log_prob(0.5),
        "Normal.log_cdf": lambda h: tfd.Normal(0.0, 1.0).log_cdf(h),
        "StudentT.log_prob": lambda h: tfd.StudentT(3.0, 0.0, 1.0).log_prob(h),
        "Categorical.log_prob": lambda h: tfd.Categorical(logits=h).log_prob(3),
        "Categorical.entropy": lambda h: tfd.Categorical(logits=h).entropy(),
        "Bernoulli.log_prob": lambda h: tfd.Bernoulli(logits=h).log_prob(1),
        "Poisson(log_rate).log_prob": lambda h: tfd.Poisson(log_rate=h).log_prob(
            jnp.arange(32.0) % 5
        ),
        "MixtureSameFamily.log_prob": lambda h: tfd.MixtureSameFamily(
            tfd.Categorical(logits=h[:4]),
            tfd.Normal(jnp.arange(4.0), jnp.ones(4)),
        ).log_prob(jnp.linspace(-1, 4, 9)),
        "TransformedDistribution.log_prob": lambda h: (
            tfd.TransformedDistribution(tfd.Normal(h, jnp.ones(32)), tfb.Exp())
        ).log_prob(jnp.full(32, 1.5)),
        "kl_divergence(Normal)": lambda h: tfd.kl_divergence(
            tfd.Normal(h, jnp.ones(32)), tfd.Normal(jnp.zeros(32), jnp.ones(32))
        ),
        "bijectors.Softplus": lambda h: tfb.Softplus().forward(h),
        "bijectors.FillScaleTriL": lambda h: tfb.FillScaleTriL().forward(h[:10]),
        "bijectors.NormalCDF": lambda h: tfb.NormalCDF().forward(h),
        "math.log_cosh": lambda h: tfp.math.log_cosh(h),
        "math.clip_by_value_preserve_gradient": lambda h: (
            tfp.math.clip_by_value_preserve_gradient(h, -1.0, 1.0)
        ),
    }
    for name, function in real.items():
        table(name, function, LINE, counts=True)
    table("stats.variance", tfp.stats.variance, (32,), scale=1e3, counts=True)
    positive: dict[str, Any] = {
        "Gamma.log_prob": lambda h: tfd.Gamma(2.0, 1.0).log_prob(h),
        "Gamma(h).log_prob": lambda h: tfd.Gamma(h, jnp.ones(32)).log_prob(1.5),
        "Beta(h).log_prob": lambda h: tfd.Beta(h, jnp.ones(32)).log_prob(0.3),
        "NegativeBinomial(h).log_prob": lambda h: tfd.NegativeBinomial(
            h, probs=0.3
        ).log_prob(2.0),
        "LogNormal.log_prob": lambda h: tfd.LogNormal(0.0, 1.0).log_prob(h),
        "math.lbeta": lambda h: tfp.math.lbeta(h, 2.0),
        "math.log_gamma_correction": lambda h: tfp.math.log_gamma_correction(h + 8),
        "math.bessel_ive": lambda h: tfp.math.bessel_ive(1.0, h),
        "math.igammainv": lambda h: tfp.math.igammainv(2.0, h / 4),
    }
    for name, function in positive.items():
        gradient = name != "math.igammainv"
        table(name, function, (32,), gradient=gradient, **POSITIVE)
    full = lambda h: tfd.MultivariateNormalTriL(jnp.zeros(6), FACTOR).log_prob(h)
    table("MultivariateNormalTriL.log_prob", full, (16, 6), counts=True)
    far = lambda h: tfd.MultivariateNormalTriL(jnp.zeros(6), FACTOR).log_prob(h + FAR)
    table("MultivariateNormalTriL.log_prob at 320", far, (16, 6), counts=True)
    kernels = tfp.math.psd_kernels
    matrix = lambda h: kernels.ExponentiatedQuadratic(1.0, 1.0).matrix(h, h)
    table("psd_kernels.ExponentiatedQuadratic", matrix, (8, 2), counts=True)
    process = lambda h: tfd.GaussianProcess(
        kernels.MaternThreeHalves(), h, observation_noise_variance=0.1
    ).log_prob(jnp.sin(jnp.arange(8.0)))
    table("GaussianProcess.log_prob", process, (8, 2), counts=True)
    draw = lambda h: tfd.Normal(h, jnp.ones(32)).sample(seed=jax.random.PRNGKey(0))
    table("Normal(h).sample", draw, LINE)
    return table.calls


def numpyro_calls() -> list[Call]:
    numpyro = import_module("numpyro")
    dist = numpyro.distributions
    table = Table("numpyro")
    zero, one = jnp.zeros(32), jnp.ones(32)
    real: dict[str, Any] = {
        "Normal.log_prob": lambda h: dist.Normal(zero, one).log_prob(h),
        "Normal(h).log_prob": lambda h: dist.Normal(h, one).log_prob(zero),
        "Normal.cdf": lambda h: dist.Normal(zero, one).cdf(h),
        "StudentT.log_prob": lambda h: dist.StudentT(3.0, h, one).log_prob(zero),
        "Cauchy.log_prob": lambda h: dist.Cauchy(zero, one).log_prob(h),
        "Bernoulli(logits).log_prob": lambda h: dist.Bernoulli(logits=h).log_prob(
            COUNTS % 2
        ),
        "Categorical(logits).log_prob": lambda h: dist.Categorical(logits=h).log_prob(
            jnp.array(3)
        ),
        "Poisson(exp).log_prob": lambda h: dist.Poisson(jnp.exp(h)).log_prob(COUNTS),
        "NegativeBinomialLogits.log_prob": lambda h: dist.NegativeBinomialLogits(
            3.0, h
        ).log_prob(COUNTS),
        "BinomialLogits.log_prob": lambda h: dist.Binomial(9, logits=h).log_prob(
            COUNTS
        ),
        "OrderedLogistic.log_prob": lambda h: dist.OrderedLogistic(
            h, jnp.array([-1.0, 0.0, 1.0])
        ).log_prob(COUNTS % 4),
        "TruncatedNormal.log_prob": lambda h: dist.TruncatedNormal(
            h, one, low=-1.0
        ).log_prob(zero),
        "MixtureSameFamily.log_prob": lambda h: dist.MixtureSameFamily(
            dist.Categorical(logits=h[:4]), dist.Normal(jnp.arange(4.0), 1.0)
        ).log_prob(jnp.linspace(-1, 4, 9)),
        "ZeroInflatedPoisson.log_prob": lambda h: dist.ZeroInflatedPoisson(
            0.3, jnp.exp(h)
        ).log_prob(COUNTS),
        "kl_divergence(Normal)": lambda h: dist.kl_divergence(
            dist.Normal(h, one), dist.Normal(zero, one)
        ),
        "StickBreakingTransform": lambda h: dist.transforms.StickBreakingTransform()(
            h[:6]
        ),
        "LowerCholeskyTransform": lambda h: dist.transforms.LowerCholeskyTransform()(
            h[:6]
        ),
        "OrderedTransform": lambda h: dist.transforms.OrderedTransform()(h[:6] / 4),
        "SoftplusTransform": lambda h: dist.transforms.SoftplusTransform()(h),
        "biject_to(positive)": lambda h: dist.biject_to(dist.constraints.positive)(
            h / 2
        ),
    }
    for name, function in real.items():
        table(name, function, LINE, counts=True)
    positive: dict[str, Any] = {
        "Gamma(h).log_prob": lambda h: dist.Gamma(h, one).log_prob(one),
        "HalfNormal.log_prob": lambda h: dist.HalfNormal(one).log_prob(h),
        "InverseGamma.log_prob": lambda h: dist.InverseGamma(2.0, 1.0).log_prob(h),
        "Beta(h).log_prob": lambda h: dist.Beta(h, one).log_prob(0.3 * one),
        "Dirichlet(h).log_prob": lambda h: dist.Dirichlet(h).log_prob(one / 32),
        "GammaPoisson.log_prob": lambda h: dist.GammaPoisson(h, one).log_prob(COUNTS),
        "VonMises.log_prob": lambda h: dist.VonMises(0.0, h).log_prob(one),
        "Weibull.log_prob": lambda h: dist.Weibull(one, 1.5).log_prob(h),
    }
    for name, function in positive.items():
        table(name, function, (32,), **POSITIVE)
    full = lambda h: dist.MultivariateNormal(
        h, scale_tril=jnp.asarray(FACTOR)
    ).log_prob(jnp.zeros(6))
    table("MultivariateNormal.log_prob", full, (16, 6), counts=True)
    far = lambda h: dist.MultivariateNormal(
        h + FAR, scale_tril=jnp.asarray(FACTOR)
    ).log_prob(jnp.zeros(6))
    table("MultivariateNormal.log_prob at 320", far, (16, 6), counts=True)
    low = lambda h: dist.LowRankMultivariateNormal(
        h + FAR, jnp.asarray(FACTOR)[:, :2], jnp.ones(6)
    ).log_prob(jnp.zeros(6))
    table("LowRankMultivariateNormal.log_prob at 320", low, (16, 6), counts=True)
    cholesky = lambda h: dist.LKJCholesky(6, 2.0).log_prob(
        dist.transforms.CorrCholeskyTransform()(h)
    )
    table("LKJCholesky.log_prob", cholesky, (15,), counts=True)
    table(
        "CorrCholeskyTransform",
        dist.transforms.CorrCholeskyTransform(),
        (6,),
        counts=True,
    )
    draw = lambda h: dist.Normal(h, one).sample(jax.random.key(0))
    table("Normal(h).sample", draw, LINE)
    draw = lambda h: dist.Gamma(h, one).sample(jax.random.key(0))
    table("Gamma(h).sample", draw, (32,), gradient=False, **POSITIVE)

    def model(x: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(6), 1.0).to_event(1))
        with numpyro.plate("n", 16):
            numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=jnp.ones(16))

    def density(x: jax.Array, w: jax.Array) -> jax.Array:
        return numpyro.infer.util.log_density(model, (x,), {}, {"w": w})[0]

    table("infer.util.log_density", density, (16, 6), (6,), counts=True)
    return table.calls


def blackjax_calls() -> list[Call]:
    blackjax = import_module("blackjax")
    table = Table("blackjax")
    target = jnp.asarray(SYMMETRIC, jnp.float32)
    logdensity = lambda x: -0.5 * x @ (target @ x)
    key = jax.random.key(1)
    mass = jnp.ones(6)
    makers: dict[str, Any] = {
        "hmc": lambda: blackjax.hmc(logdensity, 0.05, mass, 5),
        "mala": lambda: blackjax.mala(logdensity, 0.01),
        "nuts": lambda: blackjax.nuts(logdensity, 0.05, mass, max_num_doublings=2),
        "ghmc": lambda: blackjax.ghmc(logdensity, 0.05, mass, 0.1, 0.1),
        "rmh": lambda: blackjax.additive_step_random_walk(
            logdensity, blackjax.mcmc.random_walk.normal(jnp.ones(6) * 0.05)
        ),
    }
    for name, make in makers.items():

        def step(h: jax.Array, make: Any = make, name: str = name) -> jax.Array:
            kernel, start = make(), h.astype(jnp.float32)
            first = (start, key) if name == "ghmc" else (start,)
            return kernel.step(key, kernel.init(*first))[0].position

        table(f"{name}.step", step, (6,), gradient=False, counts=True)

    def step_from_half(h: jax.Array) -> jax.Array:
        kernel = makers["hmc"]()
        return kernel.step(key, kernel.init(h))[0].position

    table("hmc.step of half", step_from_half, (6,), gradient=False, counts=True)
    names = "effective_sample_size potential_scale_reduction"
    table.prefix = "blackjax.diagnostics"
    table.each(blackjax.diagnostics, names, (2, 256), gradient=False, counts=True)
    table.prefix = "blackjax"
    resampling = blackjax.smc.resampling
    for name in ("systematic", "stratified", "residual"):
        draw = getattr(resampling, name)
        table(
            f"smc.resampling.{name}",
            lambda h, d=draw: d(key, h / h.sum(), 4096),
            (256,),
            gradient=False,
            **POSITIVE,
        )
    table("smc.ess.ess", blackjax.smc.ess.ess, (4096,), counts=True)
    return table.calls


LIBRARIES = {
    "distrax": distrax_calls,
    "tfp-nightly": tfp_calls,
    "numpyro": numpyro_calls,
    "blackjax": blackjax_calls,
}
