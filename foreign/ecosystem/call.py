"""What a call is, and the half-precision values that it gets."""

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BOUND = 5e-2  # of the relative error to float32
PROGRAM_BOUND = 1e-2
NATS = 5e-2  # the bound of the absolute error of a log-density
DENSITY = re.compile(r"log_?(prob|c?df|pdf|pmf|sf|likelihood)")
LOSS = re.compile(r"loss|divergence|entropy|ntxent|squared_error|log_cosh")


class Call(NamedTuple):
    """One call of a library.

    Attributes:
      name: as the table shows it.
      function: takes what the layer gives, and returns arrays.
      inputs: float32, and exact in both half-precision dtypes.
      gradient: whether the gradient is compared too.
      counts: whether it sums, counts or branches on a dtype, so that where `jax.jit`
        stands must not change its result.
      bound: of the relative error.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    gradient: bool = True
    counts: bool = False
    bound: float = BOUND

    @property
    def is_density(self) -> bool:
        return DENSITY.search(self.name) is not None

    @property
    def is_loss(self) -> bool:
        return self.is_density or LOSS.search(self.name) is not None


def layer(x: jax.Array) -> jax.Array:
    """A product with the identity: in a region `x` itself, in half precision."""
    width = next(n for n in (8, 6, 5, 4, 3, 2, x.size) if x.size % n == 0)
    return (x.reshape(-1, width) @ jnp.eye(width)).reshape(x.shape)


class Table:
    """Collects the calls of a library.

    Example: `table("var", lambda h: jnp.var(h), (64, 8), scale=3.0)`
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.calls: list[Call] = []

    def __call__(
        self,
        name: str,
        function: Callable[..., Any],
        *shapes: Sequence[int] | np.ndarray,
        scale: float = 1.0,
        shift: float = 0.0,
        positive: bool = False,
        **options: Any,
    ) -> None:
        """Adds a call; an input is a shape for normal numbers, or an array.

        Args:
          scale, shift: of the normal numbers, or with `positive` of uniform ones.
          options: the other fields of `Call`.
        """
        name = f"{self.prefix}.{name}" if self.prefix else name
        random = np.random.default_rng(zlib.crc32(name.encode()))
        made = []
        for shape in shapes:
            if not isinstance(shape, np.ndarray):
                shape = tuple(shape)
                normal = random.uniform if positive else random.standard_normal
                shape = np.asarray(normal(size=shape)) * scale + shift
            made.append(rounded(shape))
        self.calls.append(Call(name, function, tuple(made), **options))

    def each(
        self, module: Any, names: Iterable[str], *shapes: Any, **options: Any
    ) -> None:
        """Adds functions of a module that take the same inputs."""
        for name in names.split() if isinstance(names, str) else names:
            found = module
            for part in name.split("."):
                found = getattr(found, part)
            self(name, found, *shapes, **options)


def rounded(x: np.ndarray) -> np.ndarray:
    """To what bfloat16 has, which within its range float16 has too."""
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
