"""Solvers and decompositions of a product run in float32, with every release of JAX.

JAX refuses half precision there: newer releases do while they trace a jitted function,
before a region sees any op of it.
"""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import pytest
from jax import lax

import jamp
from tests.marks import walk

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.every_release,
]

A = jax.ShapeDtypeStruct((4, 4), jnp.float32)
FUNCTIONS = {
    "eigh": lambda a: jnp.linalg.eigh(a),
    "eigvalsh": jnp.linalg.eigvalsh,
    "svd": lambda a: jnp.linalg.svd(a),
    "svdvals": jnp.linalg.svdvals,
    "qr": lambda a: jnp.linalg.qr(a),
    "cholesky": jnp.linalg.cholesky,
    "solve": lambda a: jnp.linalg.solve(a, a),
    "inv": jnp.linalg.inv,
    "pinv": jnp.linalg.pinv,
    "det": jnp.linalg.det,
    "slogdet": lambda a: jnp.linalg.slogdet(a),
    "lstsq": lambda a: jnp.linalg.lstsq(a, a)[:2],
    "nuc": lambda a: jnp.linalg.norm(a, "nuc"),
    "norm2": lambda a: jnp.linalg.norm(a, 2),
    "lu": lambda a: jsp.linalg.lu(a),
    "lu_factor": lambda a: jsp.linalg.lu_factor(a)[0],
    "cho_factor": lambda a: jsp.linalg.cho_factor(a)[0],
    "solve_triangular": lambda a: jsp.linalg.solve_triangular(a, a),
    "multivariate_normal": lambda a: jax.random.multivariate_normal(
        jax.random.key(0), jnp.zeros(4), a
    ),
}


# Called live, these return what JAX itself makes of half precision, or are refused.
LIVE_DIFFERS = {"solve", "inv", "pinv", "slogdet", "lstsq", "lu", "multivariate_normal"}


def scanned(function):
    return lambda a: lax.scan(lambda _, a: (_, function(a)), None, a[None])[1]


@walk("name", FUNCTIONS)
def test_the_result_is_float32(name):
    function = lambda a: FUNCTIONS[name](a @ a)
    ways = [jax.jit(function), scanned(function)]
    for run in ways if name in LIVE_DIFFERS else [function, *ways]:
        out = jax.eval_shape(jamp.autocast(jnp.float16)(run), A)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(out)} == {"float32"}
