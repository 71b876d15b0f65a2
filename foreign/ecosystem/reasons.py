"""Why a call may differ from float32: by its name, which faults, and the words."""

from collections.abc import Iterable, Mapping

from .compare import APART, DTYPE, ERROR, FAULTS, GRADIENT, RAISES, Row

DRAWS = """the caller asks for noise in the dtype of `h`, which has few numbers, and \
others than in float32; write `jnp.float32`"""
TOLERANCE = """jamp refuses a tolerance that is taken from a half-precision dtype, and \
says what to write"""
DETREND = """jamp refuses `detrend` of half precision, whatever its type, and says \
what to write"""
NEAR_ZERO = "near 0 the derivative is the difference of two nearly equal numbers"
CONDITION = "the answer is a difference of larger terms, whose rounding shows in it"

CLIPPED = """in `jax.jit` Keras's cast to float32 has no effect, and 1 - 1e-7 rounds \
to 1; write `from_logits=True`"""
STEEP = "at 0 the derivative is 1e7, above float16's largest number"
REFUSED = """the library refuses half precision, or two dtypes; the error has a note \
that says what to write"""

# JAX traces `mean(h)` and `mean(h, dtype=jnp.float32)` of a float32 `h` alike.
KEPT = """torch's mean of half precision is half precision; in code that was traced in \
float32 it stays float32, because a caller may have asked for it"""
MOMENTS = """Keras clips the moments of half precision at float16's largest number; \
write `x.astype("float32")`"""

MEANS = """jnp.mean optax.centralize.update keras.layers.GlobalAveragePooling2D \
keras.ops.mean e3nn.mean"""
WITH_TOLERANCE = """jnp.linalg.matrix_rank jnp.linalg.lstsq jnp.polyfit jnp.roots \
jsp.signal.detrend jsp.linalg.funm jsp.sparse.linalg.gmres"""
NOT_IN_HALF = """jnp.fft.rfft jnp.fft.rfft2 jnp.fft.rfftn jsp.special.ndtr \
jsp.special.ndtri jsp.special.spence jsp.stats.norm.ppf jsp.stats.truncnorm.logpdf \
jsp.stats.truncnorm.logcdf jsp.signal.fftconvolve jsp.signal.stft jsp.linalg.expm \
jsp.linalg.eigh_tridiagonal keras.ops.rfft \
optax.projections.projection_l1_ball jaxopt.FixedPointIteration \
blackjax.diagnostics.effective_sample_size tfp.StudentT.log_prob \
tfp.Normal(h).log_prob tfp.TransformedDistribution.log_prob \
tfp.kl_divergence(Normal) tfp.bijectors.NormalCDF tfp.Gamma(h).log_prob \
tfp.Beta(h).log_prob tfp.math.bessel_ive tfp.math.igammainv \
tfp.MultivariateNormalTriL.log_prob tfp.GaussianProcess.log_prob \
tfp.Normal(h).sample"""

# By the name of a call: the faults that are covered, and why.
Reasons = Mapping[str, tuple[tuple[str, ...], str]]
NO_REASON = ((), "")
REASONS: Reasons = {
    "jax.random.normal(h.dtype)": ((ERROR,), DRAWS),
    "jax.random.uniform(h.dtype)": ((ERROR,), DRAWS),
    "jax.random.gumbel(h.dtype)": ((ERROR,), DRAWS),
    "jax.random.laplace(h.dtype)": ((ERROR,), DRAWS),
    "jnp.arange(h.dtype)": (
        (GRADIENT,),
        "the caller asks for bfloat16, which rounds 257 to 299",
    ),
    "jnp.sinc": ((GRADIENT,), NEAR_ZERO),
    "jax.lax.associative_scan": (
        (GRADIENT,),
        "it adds in the dtype of `h`; `jnp.cumsum` adds in float32",
    ),
    "e3nn.matrix_to_quaternion": ((GRADIENT,), CONDITION),
    "jsp.signal.detrend(constant)": ((RAISES,), DETREND),
    "jsp.signal.welch": ((RAISES,), DETREND),
    "jsp.signal.csd": ((RAISES,), DETREND),
    "jaxopt.GradientDescent": (
        (GRADIENT,),
        "its equations have the condition 20, which multiplies bfloat16's rounding",
    ),
    "keras.ops.moments": ((ERROR, GRADIENT, DTYPE, APART), MOMENTS),
    "keras.losses.BinaryCrossentropy at 0 and 1": ((ERROR, GRADIENT), CLIPPED),
    "keras.losses.Poisson at 0 and 1": ((GRADIENT,), STEEP),
    "jnp.fft.irfft of rfft": ((RAISES,), REFUSED),
    "jsp.signal.istft of stft": ((RAISES,), REFUSED),
    "jax.experimental.ode.odeint": ((RAISES,), REFUSED),
    "jsp.sparse.linalg.gmres of a float32 vector": ((RAISES,), TOLERANCE),
    "tfp.Normal(h, h).log_prob": ((RAISES,), REFUSED),
    "blackjax.hmc.step of half": ((RAISES,), REFUSED),
    "lineax.LU of half and float32": ((RAISES,), REFUSED),
    **dict.fromkeys(MEANS.split(), ((DTYPE,), KEPT)),
    **dict.fromkeys(WITH_TOLERANCE.split(), ((RAISES,), TOLERANCE)),
    **dict.fromkeys(NOT_IN_HALF.split(), ((RAISES,), REFUSED)),
}


def unexplained(row: Row, reasons: Reasons = REASONS) -> dict[str, str]:
    """The faults of a call that no reason covers, and what showed them."""
    covered, _ = reasons.get(row.name, NO_REASON)
    return {fault: said for fault, said in row.faults.items() if fault not in covered}


def stale(rows: Iterable[Row], reasons: Reasons = REASONS) -> list[str]:
    """The reasons for calls that pass, a sentence for each."""
    return [
        f"{row.name} passes, and has a reason for '{fault}'."
        for row in rows
        for fault in reasons.get(row.name, NO_REASON)[0]
        if fault not in row.faults
    ]


def unknown(names: Iterable[str], reasons: Reasons = REASONS) -> list[str]:
    """The reasons that name no call, or no fault; `names` are those of all calls."""
    found = [
        f"A reason names {x}, which is not a call." for x in reasons.keys() - names
    ]
    for name, (faults, _) in reasons.items():
        if set(faults) - set(FAULTS) or not faults:
            found.append(f"The reason for {name} names another fault than {FAULTS}.")
    return sorted(found)
