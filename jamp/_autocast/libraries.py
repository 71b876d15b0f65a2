"""Products of libraries that are not a layer's: they select, move, sum, solve.

Half precision is for the products of layers. A library that has none multiplies to
change coordinates, to solve, or to add up by a product with zeros and ones, and its
losses and log-densities are sums of large terms.

A row is for a module or a package, and for the ops that its own code calls. What it is
given, such as a network or the function to minimize, runs as the user's code does. A
test searches the sources of the libraries for products that have no row.

An installed package without a row may hold layers or anything else. Its products are
lowered, with a warning if no file that they come from mentions layers.
"""

import functools
import os
import re
import sys
import warnings
from collections.abc import Container, Iterable, Sequence
from types import CodeType

from .._checks import JAMP
from .call_stack import JAX, LAYER_LIBRARIES, is_library
from .decision import FLOAT32_DTYPE, Decision, Kind, Reason, Source

# "jax.scipy" stands for the private module of that name, too.
ALL_OPS = dict.fromkeys(  # losses and log-densities
    """
    distrax.distributions jax.scipy.stats jaxopt.loss keras.src.backend.jax.image
    numpyro.distributions optax.losses
    """.split(),
    Kind.FLOAT32,
)
PRODUCTS_ALONE = dict.fromkeys(
    """
    augmax brax cola dinosaur distrax dm_pix dynamax dynamiqs e3nn_jax.grad
    e3nn_jax.irreps e3nn_jax.irreps_array e3nn_jax.reduced_tensor_product
    e3nn_jax.rotation e3nn_jax.s2grid e3nn_jax.so3 e3nn_jax.spherical_harmonics
    equinox.nn._spectral_norm flax.linen.normalization flax.nnx.nn.normalization
    haiku.nets.vqvae haiku.spectral_norm jax.example_libraries.optimizers
    jax.experimental.ode jax.experimental.sparse.linalg jax.image jax.lax.linalg
    jax.scipy jax.third_party.scipy jax_cosmo jax_fem jax_md jaxlie jaxns jaxopt jaxsim
    keras.src.backend.jax.linalg keras.src.backend.jax.math kfac_jax matfree mujoco.mjx
    numpyro optax ott pennylane rlax tinygp
    """.split(),
    Kind.FLOAT32,
)
PRODUCTS_ALONE |= dict.fromkeys(  # they refuse two dtypes
    """
    blackjax diffrax lineax optimistix tensorflow_probability.substrates.jax
    """.split(),
    Kind.PROMOTE,
)
LAYERS = (  # of these libraries
    "brax.training",
    "jax.example_libraries.stax",
    "jax_md._nn",
    "jax_md.nn",
    "numpyro.nn",
    "ott.neural",
    "tensorflow_probability.substrates.jax.experimental.joint_distribution_layers",
)
ROWS = PRODUCTS_ALONE | ALL_OPS
MODULES = (*ROWS, *LAYERS)


# Reports count what a module does as one op, and not what a whole library does.
BY_MODULE = {
    name: Decision(
        kind,
        FLOAT32_DTYPE if kind is Kind.FLOAT32 else None,
        why=Reason(
            kind.value, Source.FUNCTION if "." in name else Source.PRIMITIVE, name
        ),
    )
    for name, kind in ROWS.items()
}


class Places(dict[str, str | None]):
    """Which of the modules a file is part of, the innermost.

    The files of JAX and jamp that are part of none have "", and all others None.

    Args:
      modules: the names of those that are imported, or whose parents are.
    """

    def __init__(self, modules: Container[str]) -> None:
        super().__init__()
        known = [name for name in MODULES if name.partition(".")[0] in modules]
        self.modules = sorted(known, key=len, reverse=True)

    def __missing__(self, file: str) -> str | None:
        other = "" if file.startswith((JAX, JAMP)) else None
        self[file] = next((n for n in self.modules if is_part(file, n)), other)
        return self[file]


def is_part(file: str, module: str) -> bool:
    root, *parts = module.split(".")
    if (init := getattr(sys.modules.get(root), "__file__", None)) is None:
        return False
    folder = os.path.dirname(init)
    places = os.path.join(folder, *parts), os.path.join(folder, "_src", *parts)
    return file.startswith(tuple(p + end for p in places for end in (os.sep, ".py")))


def of_library(
    codes: Iterable[CodeType], places: Places, source: str | None, is_product: bool
) -> Decision | None:
    """The decision for an op that the code of one of the modules calls, or None.

    The search goes outward, through JAX and the modules, up to any other code. What a
    log-density calls in another module is part of it.

    Args:
      codes: the functions that the op comes from, innermost first.
      source: of an op that stands for a jitted function: what that function is.
    """
    if source is not None and not is_library(source):
        return None  # its ops say whose they are
    nearest = None
    for code in codes:
        name = places[code.co_filename]
        if name is None or name in LAYERS:
            break
        if name in ALL_OPS:
            return BY_MODULE[name]
        nearest = nearest or name
    return BY_MODULE[nearest] if nearest and is_product else None


# Packages that nobody has looked at.

UNKNOWN = """jamp.autocast runs products of {package} in half precision, such as those \
of {function} in {file}, and does not know this package. Layers are to run so. If it \
multiplies to change coordinates, to solve or to count, call it under \
`with jamp.autocast(enabled=False):`, or give a rule, \
`rules={{{package}.{function}: jnp.float32}}`."""
INSTALLED = re.compile(r".*[\\/](?:site|dist)-packages[\\/](\w+)")
# How a file says that it holds layers, of whichever library.
MENTIONED = re.compile(
    r"\b(?:hk|linen|nn|nnx|pz|snt)\.(?:Conv|Dense|Embed|Linear|Module|Param|compact)"
    r"|\(Module\)|\bhk\.get_parameter\b|\beqx\.nn\b|\bequinox\.nn\b|\bkeras\.layers\b"
)
# They write products for others, which say what these are for, or are networks.
WRITERS = (
    "aqt einops einx haliax opt_einsum penzai quax qwix torchax transformer_engine"
)
KNOWN = {name.partition(".")[0] for name in MODULES}.union(
    LAYER_LIBRARIES, WRITERS.split()
)
WARNED: set[str] = set()  # of these packages


@functools.cache
def unknown(file: str) -> str | None:
    """The installed package that a file is part of; None if its products are known."""
    match = INSTALLED.match(file)
    return match[1] if match and match[1] not in KNOWN else None


@functools.cache
def mentions_layers(file: str) -> bool:
    try:
        with open(file, encoding="utf-8") as source:
            return MENTIONED.search(source.read()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def warn_of_unknown(codes: Sequence[CodeType]) -> None:
    """Warns, once for each package, if nothing says that a product is a layer's.

    Args:
      codes: the functions that the product comes from, innermost first.
    """
    places = (
        i for i, c in enumerate(codes) if not c.co_filename.startswith((JAX, JAMP))
    )
    codes = codes[next(places, len(codes)) :]
    package = unknown(codes[0].co_filename) if codes else None
    if package is None or package in WARNED:
        return
    called = codes[0]
    for code in codes:
        file = code.co_filename
        if unknown(file) == package:
            called = code
            if mentions_layers(file):
                return
        elif not file.startswith((JAX, JAMP)):
            break
    text = UNKNOWN.format(
        package=package,
        function=called.co_qualname.partition(".<locals>")[0],
        file=called.co_filename,
    )
    line = called.co_firstlineno
    warnings.warn_explicit(text, UserWarning, called.co_filename, line)
    WARNED.add(package)
