"""What a row of the table of ops is: an op in torch beside the same op in JAX.

The rows are in `ops_lower`, `ops_float32` and `ops_promote`, by torch's lists. They
name torch's functions without importing torch, so that the golden file can be checked
on a machine without torch.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jamp._autocast.ops import Kind

HALVES = ("float16", "bfloat16")  # the dtypes of a region
# The dtypes of the first input and of the others; "half" is the region's.
INPUTS = {
    "float32": ("float32", "float32"),
    "half": ("half", "half"),
    "mixed": ("float32", "half"),
    "mixed, half first": ("half", "float32"),
}
Shape = tuple[int, ...]
# With values of one sign, sums of products do not cancel.
POSITIVE, SIGNED, SMALL = (0.25, 0.75), (-2.0, 2.0), (-0.5, 0.5)
# What cancels.
CENTERED = "what is left after a mean is subtracted"
DIFFERENCE = "a difference of two values that may be close"
SIGNS = "a sum of terms of both signs"
V, M, B = (5,), (4, 6), (2, 4, 6)  # a vector, a matrix, a batch of matrices


class Late:
    """A function or a module of torch, looked up when it is called."""

    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> "Late":
        return Late(f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root, *names = self._path.split(".")
        function: Any = functools.reduce(getattr, names, importlib.import_module(root))
        return function(*args, **kwargs)


torch, F = Late("torch"), Late("torch.nn.functional")


class Function(Protocol):
    """What `ops_torch` and `ops_jamp` ask of a row: of an `Op`, or an `Edge`."""

    @property
    def torch(self) -> Callable[..., Any]: ...

    @property
    def jax(self) -> Callable[..., Any]: ...

    @property
    def inputs(self) -> list[str]: ...

    def arrays(self, inputs: str, half: str) -> list[np.ndarray]: ...

    def cotangents(self, shapes: list[Shape]) -> list[np.ndarray]: ...


class Op(NamedTuple):
    """An op on both sides.

    Attributes:
      name: as in torch's header, with the overload.
      torch: the op in torch.
      written: how it reads in JAX.
      jax: the op in JAX.
      shapes: of its inputs.
      span: of its inputs' values, and of its cotangents'.
      mixed: whether JAX takes inputs of several dtypes.
      dtypes_only: why the values are not compared; empty if they are.
      cancels: why small results come from large terms, so that distances of results and
        gradients are counted in units of the largest element; empty if they do not.
      grad_cancels: the same for the gradients alone.
      condition: by what factor the result may amplify an error in its input, for ops
        that go through LAPACK, whose rounding differs between processors. The bound on
        distances grows with it.
    """

    name: str
    torch: Callable[..., Any]
    written: str
    jax: Callable[..., Any]
    shapes: tuple[Shape, ...]
    span: tuple[float, float] = POSITIVE
    mixed: bool = True
    dtypes_only: str = ""
    cancels: str = ""
    grad_cancels: str = ""
    condition: Callable[[np.ndarray], float] | None = None

    @property
    def base(self) -> str:
        """The name without the overload, as in jamp's tables."""
        return self.name.split(".")[0]

    @property
    def title(self) -> str:
        return f"{self.name}: {self.written}"

    @property
    def inputs(self) -> list[str]:
        """The keys of `INPUTS` that it runs with."""
        several = len(self.shapes) > 1 and self.mixed
        return list(INPUTS) if several else ["float32", "half"]

    def arrays(self, inputs: str, half: str) -> list[np.ndarray]:
        """The inputs, the same numbers for all dtypes except for rounding."""
        random = np.random.RandomState(0)
        first, rest = (half if d == "half" else d for d in INPUTS[inputs])
        values = [random.uniform(*self.span, shape) for shape in self.shapes]
        return [v.astype(jnp.dtype(rest if i else first)) for i, v in enumerate(values)]

    def cotangents(self, shapes: list[Shape]) -> list[np.ndarray]:
        """The cotangents, before they are cast to the results' dtypes."""
        random = np.random.RandomState(1)
        return [random.uniform(*self.span, shape) for shape in shapes]


def same(
    names: str, torch: Late, jax: Any, module: str, *shapes: Shape, **options: Any
) -> list[Op]:
    """Ops that have the same name in torch and in a module of JAX."""
    return [
        Op(x, getattr(torch, x), f"{module}.{x}", getattr(jax, x), shapes, **options)
        for x in names.split()
    ]


def along(names: Mapping[str, str], torch: Late, axis: str = "") -> list[Op]:
    """Reductions of a matrix along its rows, by torch's names with the overload."""
    return [
        Op(
            overload,
            lambda x, name=name: getattr(torch, name)(x, 1),
            f"jnp.{name}{axis}",
            lambda x, name=name: getattr(jnp, name)(x, 1),
            (M,),
        )
        for overload, name in names.items()
    ]


def condition_number(matrices: np.ndarray) -> float:
    """The largest condition number of some matrices, by their singular values."""
    return float(np.linalg.cond(matrices.astype(np.float64)).max())


class Side(NamedTuple):
    """One library's results and gradients of an op."""

    results: list[np.ndarray]
    grads: list[np.ndarray]  # with respect to each input; none outside jit


def by_labels(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A torch loss that takes labels beside its input."""
    return lambda x: function(
        x, torch.tensor(LABELS.tolist(), device=x.device), reduction="none"
    )


def channels_last(layer: Callable[[Any], Any], x: Any) -> Any:
    return jnp.moveaxis(layer(jnp.moveaxis(x, 1, -1)), -1, 1)


def params(module: Any, **names: str) -> Callable[..., Any]:
    """Applies a Flax module to its input and to parameters in the order given."""

    def run(x, *values):
        named: Mapping[str, jax.Array] = dict(zip(names, values, strict=True))
        return module.apply({"params": named}, x)

    return run


LABELS = np.array([1, 0, 3, 5])


class Found(NamedTuple):
    """What a case found, for the section and the golden file.

    Attributes:
      case: the op and the region's dtype.
      kind: the kind of torch's list that has the op, or None.
      torch: torch's results and gradients, by the inputs.
      jamp: the dtypes of jamp's results on each path.
      ulps: the largest distances of values and of gradients, by the dtype that they are
        counted in.
    """

    case: Any
    kind: Kind | None
    torch: Mapping[str, Side]
    jamp: dict[str, list[list[str]]]
    ulps: dict[str, dict[str, float]]


# The rest of torch's lists: what JAX lacks, and where jamp differs on purpose.
NO_COUNTERPART = {
    "_scaled_dot_product_flash_attention": "a kernel that torch chooses by itself",
    "_thnn_fused_gru_cell": "a kernel that torch chooses by itself",
    "_thnn_fused_lstm_cell": "a kernel that torch chooses by itself",
    "addcdiv": "no such function in JAX; x + y / z is a quotient and a sum",
    "addcmul": "no such function in JAX; x + y * z is a product and a sum",
    "addmv": "no such function in JAX; x + a @ v is a product and a sum",
    "addr": "no such function in JAX; jnp.outer multiplies, and so keeps its dtype",
    "baddbmm": "no such function in JAX; x + a @ b is a product and a sum",
    "bilinear": "no such layer in JAX, Flax or optax",
    "cdist": "no such function in JAX",
    "dist": "no such function in JAX; jnp.linalg.norm(x - y) is float32",
    "grid_sampler": "map_coordinates takes indices, not a normalized grid",
    "l1_loss": "no such function in optax",
    "margin_ranking_loss": "no such function in optax",
    "multi_margin_loss": "no such function in optax",
    "multilabel_margin_loss": "no such function in optax",
    "nll_loss2d": "a case of nll_loss that torch chooses by itself",
    "pdist": "no such function in JAX",
    "poisson_nll_loss": "no such function in optax",
    "renorm": "no such function in JAX",
}

DIFFERENCES = {
    "tensordot": "half precision, as any product in JAX, where torch promotes",
    "index_put": "x.at[i].set(y) keeps the dtype of x, where torch promotes",
    "scatter_add": "x.at[i].add(y) keeps the dtype of x, where torch promotes",
}
# Of ops that are not on torch's lists.
UNLISTED_DIFFERENCES = {
    "var": "float32, where torch's float16 overflows from a deviation of 256 on",
}
