"""The libraries, and which of them are installed."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from .call import Call
from .compare import said
from .programs import PROGRAMS, Program


class Library(NamedTuple):
    """One library.

    Attributes:
      name: of its distribution.
      imported: the module that must import.
      calls: the module of this folder with its calls, in `LIBRARIES`.
    """

    name: str
    imported: str
    calls: str


ALL = (
    Library("jax", "jax", "jax_numpy"),
    Library("jax.scipy", "jax.scipy", "jax_scipy"),
    Library("optax", "optax", "optimizers"),
    Library("jaxopt", "jaxopt", "optimizers"),
    Library("dm-haiku", "haiku", "layers"),
    Library("keras", "keras", "layers"),
    Library("penzai", "penzai.pz", "graphs"),
    Library("jraph", "jraph", "graphs"),
    Library("e3nn-jax", "e3nn_jax", "graphs"),
    Library("quax", "quax", "graphs"),
    Library("tinygp", "tinygp", "graphs"),
    Library("numpyro", "numpyro", "probability"),
    Library("blackjax", "blackjax", "probability"),
    Library("distrax", "distrax", "probability"),
    Library("tfp-nightly", "tensorflow_probability.substrates.jax", "probability"),
    Library("diffrax", "diffrax", "solvers"),
    Library("lineax", "lineax", "solvers"),
    Library("optimistix", "optimistix", "solvers"),
)


def release(library: Library) -> str:
    """The installed version; jax.scipy has JAX's, and "" means that there is none."""
    try:
        return version(library.name.partition(".")[0])
    except PackageNotFoundError:
        return ""


def missing(library: Library) -> str:
    """Why a library is skipped, or ""."""
    if not release(library):
        return "it is not installed"
    try:
        import_module(library.imported)
    except Exception as error:  # whatever an import of another library raises
        return f"it does not import: {said(error)}"
    return ""


def calls(library: Library) -> list[Call]:
    module = import_module(f".{library.calls}", __package__)
    make: Callable[[], list[Call]] = module.LIBRARIES[library.name]
    return make()


def programs(library: Library) -> Iterable[Program]:
    return PROGRAMS.get(library.name, tuple)()
