"""Why a call may differ from float32: by its name, which faults, and the words."""

from collections.abc import Iterable, Mapping

from .compare import ERROR, FAULTS, GRADIENT, RAISES, Row

DRAWS = """the caller asks for noise in the dtype of `h`, which has few numbers, and \
others than in float32; write `jnp.float32`"""
TOLERANCE = """jamp refuses a tolerance that is taken from a half-precision dtype, and \
says what to write"""
NEAR_ZERO = "near 0 the derivative is the difference of two nearly equal numbers"
CONDITION = "the answer is a difference of large terms, so rounding `h` shows in it"

REASONS: dict[str, tuple[tuple[str, ...], str]] = {
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
    "jnp.linalg.matrix_rank": ((RAISES,), TOLERANCE),
    "jnp.linalg.lstsq": ((RAISES,), TOLERANCE),
    "jnp.polyfit": ((RAISES,), TOLERANCE),
    "jnp.roots": ((RAISES,), TOLERANCE),
    "jsp.signal.detrend": ((RAISES,), TOLERANCE),
    "jsp.linalg.funm": ((RAISES,), TOLERANCE),
    "jsp.sparse.linalg.gmres": ((RAISES,), TOLERANCE),
    "jsp.sparse.linalg.gmres of a float32 vector": ((RAISES,), TOLERANCE),
    "e3nn.matrix_to_quaternion": ((GRADIENT,), CONDITION),
    "tinygp.ExpSquared condition": ((ERROR,), CONDITION),
    "tinygp.RationalQuadratic condition": ((ERROR,), CONDITION),
    "tinygp.log_probability at half places": ((GRADIENT,), CONDITION),
}


def unexplained(
    row: Row, reasons: Mapping[str, tuple[tuple[str, ...], str]] = REASONS
) -> dict[str, str]:
    """The faults of a call that no reason covers, and what showed them."""
    covered = reasons[row.name][0] if row.name in reasons else ()
    return {fault: said for fault, said in row.faults.items() if fault not in covered}


def stale(
    rows: Iterable[Row], reasons: Mapping[str, tuple[tuple[str, ...], str]] = REASONS
) -> list[str]:
    """The reasons for calls that pass, a sentence for each."""
    found = []
    for row in rows:
        for fault in reasons[row.name][0] if row.name in reasons else ():
            if fault not in row.faults:
                found.append(f"{row.name} passes, and has a reason for '{fault}'.")
    return found


def unknown(
    names: Iterable[str],
    reasons: Mapping[str, tuple[tuple[str, ...], str]] = REASONS,
) -> list[str]:
    """The reasons that name no call, or no fault; `names` are those of all calls."""
    found = [
        f"A reason names {x}, which is not a call." for x in reasons.keys() - names
    ]
    for name, (faults, _) in reasons.items():
        if set(faults) - set(FAULTS) or not faults:
            found.append(f"The reason for {name} names another fault than {FAULTS}.")
    return sorted(found)
