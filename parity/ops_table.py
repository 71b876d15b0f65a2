"""What a row of `ops.txt` is: an op in torch beside the same op in JAX.

The rows name torch's functions without importing torch, so that the golden file can be
checked on a machine without torch. The options of a row:

- `one-dtype`: JAX does not take inputs of several dtypes.
- `signed`, `small`: the span of the inputs' values; otherwise they are positive.
- `all:REASON`: why small results come from large terms, so that distances of results
  and gradients are counted in units of the largest element.
- `gradient:REASON`: the same for the gradients alone.
- `dtypes:REASON`: why the values are not compared.
- `lapack`: the op goes through LAPACK, whose rounding differs between processors, so
  the bound on distances grows with the condition number of the input.
"""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from shared.cells import rows

from .cells import in_jax

HALVES = ("float16", "bfloat16")  # the dtypes of a region
# The dtypes of the first input and of the others; "half" is the region's.
INPUTS = {
    "float32": ("float32", "float32"),
    "half": ("half", "half"),
    "mixed": ("float32", "half"),
    "mixed, half first": ("half", "float32"),
}
Shape = tuple[int, ...]
SHAPES = {"V": (5,), "M": (4, 6), "B": (2, 4, 6)}
# With values of one sign, sums of products do not cancel.
POSITIVE = (0.25, 0.75)
SPANS = {"signed": (-2.0, 2.0), "small": (-0.5, 0.5)}
REASONS = {
    "centered": "what is left after a mean is subtracted",
    "difference": "a difference of two values that may be close",
    "signs": "a sum of terms of both signs",
    "products": "a difference of products, which JAX rounds and torch does not",
    "gelu": "1 + tanh(...), which is close to 0 for x < 0",
    "tanh": "1 - tanh(x) ** 2, which is close to 0",
    "cubic": "torch's cubic has the coefficient -0.75, JAX's -0.5",
    "logits": "torch's takes log-probabilities, optax's logits",
    "rounded": "torch rounds log-probabilities to the dtype of the logits",
}


class Function(Protocol):
    """What `ops_torch` and `ops_jamp` ask of a row: of an `Op`, or an `Edge`."""

    @property
    def torch(self) -> str: ...

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
      torch: the op in torch, as a cell.
      written: how it reads in JAX.
      jax: the op in JAX.
      shapes: of its inputs.
      listed: whether it is on one of torch's lists.
      span: of its inputs' values, and of its cotangents'.
      mixed: whether JAX takes inputs of several dtypes.
      dtypes_only: why the values are not compared; empty if they are.
      cancels: why distances are counted in units of the largest element, or empty.
      grad_cancels: the same for the gradients alone.
      lapack: whether the bound on distances grows with the condition number.
    """

    name: str
    torch: str
    written: str
    jax: Callable[..., Any]
    shapes: tuple[Shape, ...]
    listed: bool = True
    span: tuple[float, float] = POSITIVE
    mixed: bool = True
    dtypes_only: str = ""
    cancels: str = ""
    grad_cancels: str = ""
    lapack: bool = False

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

    @property
    def condition(self) -> float:
        """By what factor the result may amplify an error in its input."""
        if not self.lapack:
            return 1.0
        (matrices,) = self.arrays("float32", "float32")
        return float(np.linalg.cond(matrices.astype(np.float64)).max())

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


def _shape(text: str) -> Shape:
    return SHAPES.get(text) or tuple(map(int, text.split("x")))


def _ops() -> Iterator[Op]:
    path = pathlib.Path(__file__).with_name("ops.txt")
    for section, (names, torch, written, shapes, *rest) in rows(path):
        words = rest[0].split() if rest else []
        reasons = dict(word.split(":") for word in words if ":" in word)
        spans = [SPANS[word] for word in words if word in SPANS]
        why = {key: REASONS[reason] for key, reason in reasons.items()}
        for name in names.split():
            cell = written.replace(".*", f".{name}")
            yield Op(
                name,
                torch.replace(".*", f".{name}"),
                cell,
                in_jax(cell),
                tuple(map(_shape, shapes.split())),
                listed=section != "on none of the lists",
                span=spans[0] if spans else POSITIVE,
                mixed="one-dtype" not in words,
                dtypes_only=why.get("dtypes", ""),
                cancels=why.get("all", ""),
                grad_cancels=why.get("gradient", ""),
                lapack="lapack" in words,
            )


OPS = {op.title: op for op in _ops()}


class Side(NamedTuple):
    """One library's results and gradients of an op."""

    results: list[np.ndarray]
    grads: list[np.ndarray]  # with respect to each input; none outside jit


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
