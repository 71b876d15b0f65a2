"""Products of libraries that are not a layer's: they select, move, sum, solve.

Half precision is for the products of layers. A library that has none multiplies to
change coordinates, to solve, or to add up by a product with zeros and ones, and its
losses and log-densities are sums of large terms.

A row is for a module or a package, and for the ops that its own code calls. What it is
given, such as a network or the function to minimize, runs as the user's code does. A
test searches the sources of the libraries for products that have no row.

An installed package without a row may hold layers or anything else. Its products are
lowered, with one warning.
"""

import functools
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

from .._checks import JAMP
from .call_stack import JAX, LAYER_LIBRARIES, folder_of
from .decision import FLOAT32_DTYPE, Decision, Kind, Reason, Source

# "jax.scipy" stands for the private module of that name, too.
ALL_OPS = """
    distrax.distributions flowjax.distributions jax.scipy.stats jaxopt.loss
    keras.src.backend.jax.image numpyro.distributions optax.losses
    """.split()  # losses and log-densities
PRODUCTS_ALONE = """
    augmax brax cola dinosaur distrax dm_pix dynamax dynamiqs e3nn_jax.grad
    e3nn_jax.irreps e3nn_jax.irreps_array e3nn_jax.reduced_tensor_product
    e3nn_jax.rotation e3nn_jax.s2grid e3nn_jax.so3 e3nn_jax.spherical_harmonics
    equinox.nn._spectral_norm flax.linen.normalization flax.nnx.nn.normalization
    flowjax.bijections haiku.nets.vqvae haiku.spectral_norm
    jax.example_libraries.optimizers jax.experimental.ode jax.experimental.sparse.linalg
    jax.image jax.lax.linalg jax.scipy jax.third_party.scipy jax_cosmo jax_fem jax_md
    jaxlie jaxns jaxopt jaxsim keras.src.backend.jax.linalg keras.src.backend.jax.math
    kfac_jax matfree mujoco.mjx numpyro optax ott pennylane rlax tinygp
    """.split()
PROMOTED = """
    blackjax diffrax lineax optimistix tensorflow_probability.substrates.jax
    """.split()  # their products alone: they refuse two dtypes
LAYERS = """
    brax.training jax.example_libraries.stax jax_md._nn jax_md.nn numpyro.nn ott.neural
    tensorflow_probability.substrates.jax.experimental.joint_distribution_layers
    """.split()  # of these libraries


def row_of(name: str) -> Decision:
    """Reports count what a module does as one op, and not what a whole library does."""
    source = Source.FUNCTION if "." in name else Source.PRIMITIVE
    kind = Kind.PROMOTE if name in PROMOTED else Kind.FLOAT32
    why = Reason(kind.value, source, name)
    return Decision(kind, None if name in PROMOTED else FLOAT32_DTYPE, why=why)


ROWS = {name: row_of(name) for name in (*ALL_OPS, *PRODUCTS_ALONE, *PROMOTED)}
MODULES = sorted((*ROWS, *LAYERS), key=len, reverse=True)
# They write products for others, which say what these are for.
WRITERS = {"einops", "einx", "opt_einsum"}
# Packages of layers, or that run those of others in another dtype.
NETWORKS = "aqt haliax penzai quax qwix torchax transformer_engine".split()
KNOWN = {name.partition(".")[0] for name in MODULES}.union(LAYER_LIBRARIES, NETWORKS)


@functools.cache
def module_of(file: str) -> str | None:
    """Which of the modules a file is part of, the innermost.

    The files of JAX and jamp that are part of none have "": their callers say what they
    are for. All others have None.
    """
    for name in MODULES:
        root, *parts = name.split(".")
        for place in parts, ["_src", *parts]:
            path = os.path.join(folder_of(root), *place)
            if file.startswith((os.path.join(path, ""), f"{path}.py")):
                return name
    return "" if file.startswith((JAX, JAMP)) else None


def of_library(codes: Iterable[CodeType]) -> Decision | None:
    """The decision of the module whose code calls an op: of `ALL_OPS`, or products.

    The search goes outward, through JAX and the modules, up to any other code. What a
    log-density calls in another module is part of it.

    Args:
      codes: the functions that the op comes from, innermost first.
    """
    nearest = None
    for code in codes:
        name = module_of(code.co_filename)
        if name is None or name in LAYERS:
            break
        if name in ALL_OPS:
            return ROWS[name]
        nearest = nearest or name
    return ROWS[nearest] if nearest else None


UNKNOWN = """jamp.autocast runs products of {package} in half precision, such as those \
of {function} in {file}, and does not know this package. For layers this is right: \
`warnings.filterwarnings("ignore", "jamp.autocast runs products of {package} ")`. \
If it multiplies to change coordinates, to solve or to count, call it under \
`with jamp.autocast(enabled=False):`, or give a rule, \
`rules={{{package}.{function}: jnp.float32}}`."""
WARNED: set[str] = set()  # of these packages


@functools.cache
def holds_packages(folder: Path) -> bool:
    """Whether packages are installed in a folder, by pip's record of one."""
    is_usual = folder.name in ("site-packages", "dist-packages")
    return is_usual or any(folder.glob("*.dist-info"))


@functools.cache
def package_of(file: str) -> str | None:
    """The installed package that a file is part of, or None."""
    path = Path(file)
    folder = next(filter(holds_packages, path.parents), None)
    return folder and path.relative_to(folder).parts[0].removesuffix(".py")


def warn_of_unknown(codes: Iterable[CodeType]) -> None:
    """Warns of the package whose own code multiplies, once, if no table has it.

    Args:
      codes: the functions that the product comes from, innermost first.
    """
    package, called = None, None
    for code in codes:
        file = code.co_filename
        if file.startswith((JAX, JAMP)) or (found := package_of(file)) in WRITERS:
            continue
        if called is not None and found != package:
            break
        if found is None or found in KNOWN or found in WARNED:
            return
        package, called = found, code
    if called is not None:
        function = called.co_qualname.partition(".<locals>")[0]
        file, line = called.co_filename, called.co_firstlineno
        text = UNKNOWN.format(package=package, function=function, file=file)
        warnings.warn_explicit(text, UserWarning, file, line)
        WARNED.add(str(package))
