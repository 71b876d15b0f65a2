"""Functions whose values and gradients are compared over the range of half precision.

As in `ops_table`, a row has a function in torch beside the same function in JAX. All
ops of autocast's tables that are functions of each element are here, with inputs that
the tables' values leave out: subnormals, the largest numbers, and what lies between.
bfloat16 begins at its smallest normal number, since XLA takes what is subnormal in
float32, which bfloat16's subnormals are, as zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import optax
from jax import lax

from .ops_float32 import FLOAT32
from .ops_promote import PROMOTE, UNLISTED
from .ops_table import F, Late, Shape, torch

Domain = Callable[[np.ndarray], np.ndarray]
SHAPE = (16, 8)
# The exponents of most numbers that are drawn; few of bfloat16's are beyond.
_USUAL = {"float16": (-24, 16), "bfloat16": (-20, 20)}
_N_ANYWHERE, _N_TIES = 12, 16


class Edge(NamedTuple):
    """A function on both sides.

    It has the attributes of an `Op` that `ops_jamp` and `ops_torch` ask for.

    Attributes:
      title: how it reads in JAX.
      torch: the function in torch.
      jax: the function in JAX.
      domains: for each operand, what maps numbers of the whole range into its domain.
    """

    title: str
    torch: Callable[..., Any]
    jax: Callable[..., Any]
    domains: tuple[Domain, ...]

    @property
    def inputs(self) -> list[str]:
        """The kinds of inputs that it runs with: the region's dtype."""
        return ["half"]

    def arrays(self, inputs: str, half: str) -> list[np.ndarray]:
        """The operands, in half precision."""
        dtype = jnp.dtype(half)
        both = numbers(half), partners(half)
        pairs = zip(self.domains, both, strict=False)
        largest = float(jnp.finfo(dtype).max)
        with np.errstate(over="ignore"):
            found = [np.clip(domain(x), -largest, largest) for domain, x in pairs]
        return [x.astype(dtype) for x in found]

    def cotangents(self, shapes: list[Shape]) -> list[np.ndarray]:
        """One for each number of the results."""
        return [np.ones(shape) for shape in shapes]


def numbers(half: str) -> np.ndarray:
    """Numbers of both signs over the whole range of a dtype, in float64.

    They are sorted by magnitude, so that each row of the matrix has its own.
    """
    info = jnp.finfo(jnp.dtype(half))
    least, normal, eps = (
        float(x) for x in (info.smallest_subnormal, info.smallest_normal, info.eps)
    )
    largest, (low, high) = float(info.max), _USUAL[half]
    if half == "bfloat16":  # as the module says
        edges = [normal, normal * (1 + eps), 2 * normal]
    else:
        edges = [least, 2 * least, 3 * least, normal - least, normal, normal + least]
    edges += [1 - eps / 2, 1.0, 1 + eps, 2048.0, largest * (1 - eps), largest]
    edges += [2.0**k for k in range(low, high, 4)]
    random = np.random.RandomState(0)
    ends = np.log2(min(edges)), np.log2(largest)
    few, n = _N_ANYWHERE, int(np.prod(SHAPE))
    usual = random.uniform(low, high, n - 2 * len(edges) - few)
    drawn = 2.0 ** np.concatenate([random.uniform(*ends, few), usual])
    signs = np.where(random.random_sample(len(drawn)) < 0.5, -1.0, 1.0)
    every = np.concatenate([edges, -np.array(edges), drawn * signs])
    # What is drawn is rounded here, so that a domain gets numbers of the dtype.
    every = every.astype(jnp.dtype(half)).astype(np.float64)
    return every[np.argsort(np.abs(every), kind="stable")].reshape(SHAPE)


def partners(half: str) -> np.ndarray:
    """The second operands: the same numbers in another order, and some ties."""
    random = np.random.RandomState(1)
    x = numbers(half).ravel()
    y = random.permutation(x)
    ties = random.choice(len(x), _N_TIES, replace=False)
    y[ties] = x[ties] * np.where(np.arange(_N_TIES) % 2, -1.0, 1.0)
    return y.reshape(SHAPE)


def anything(x: np.ndarray) -> np.ndarray:
    """No number is left out."""
    return x


def inside(x: np.ndarray) -> np.ndarray:
    """Numbers from -1 to 1: those beyond are inverted."""
    return np.where(np.abs(x) > 1, 1 / x, x)


def above_minus_one(x: np.ndarray) -> np.ndarray:
    """Positive numbers stay as they are, negative ones come inside."""
    return np.where(x > 0, x, inside(x))


def above_one(x: np.ndarray) -> np.ndarray:
    """Numbers from 1 on."""
    return 1 + np.abs(x)


def from_zero_to_one(x: np.ndarray) -> np.ndarray:
    """Positive numbers up to 1."""
    return np.abs(inside(x))


def within(largest: float, least: float = 0.0) -> Domain:
    """Numbers of both signs in a range of magnitudes; others come to its ends."""
    return lambda x: np.sign(x) * np.clip(np.abs(x), least, largest)


def positive_within(largest: float, least: float = 0.0) -> Domain:
    """Positive numbers in a range; others come to its ends."""
    return lambda x: np.clip(np.abs(x), least, largest)


# Numbers whose squares float32 holds. The derivatives of some functions have squares,
# and beyond these JAX's own float32 differs from torch's too.
squared = within(2.0**60, 2.0**-60)
positive_squared = positive_within(2.0**60, 2.0**-60)
# In JAX 0.10 the derivative of sinc loses its digits close to 0, in float32 too.
not_small = within(2.0**60, 2.0**-4)

# Of the ops of autocast's tables, those that are functions of each element.
ELEMENTWISE: dict[str, tuple[Domain, ...]] = {
    # in float32
    "jnp.acos": (inside,),
    "jnp.asin": (inside,),
    "jnp.cosh": (anything,),
    "lax.erf_inv": (inside,),
    "jnp.exp": (anything,),
    "jnp.expm1": (anything,),
    "jnp.log": (np.abs,),
    "jnp.log10": (np.abs,),
    "jnp.log2": (positive_squared,),
    "jnp.log1p": (above_minus_one,),
    "jnp.reciprocal": (anything,),
    "lax.rsqrt": (np.abs,),
    "jnp.sinh": (anything,),
    "jnp.tan": (anything,),
    "x ** 2.5": (np.abs,),
    "x ** 2": (anything,),
    "jnp.square": (anything,),
    "x ** y": (np.abs, within(8.0)),
    "2.0 ** x": (anything,),
    "jax.nn.softplus": (anything,),
    "optax.hinge_loss": (anything,),
    "optax.huber_loss": (anything, anything),
    "optax.squared_error": (anything, anything),
    "optax.sigmoid_binary_cross_entropy": (anything, from_zero_to_one),
    # in the widest dtype of the inputs
    "jnp.atan2": (squared, squared),
    # on no list
    "jax.nn.gelu": (anything,),
    "jax.nn.silu": (anything,),
    "jax.nn.relu": (anything,),
    "jax.nn.elu": (anything,),
    "jnp.tanh": (anything,),
    "jax.nn.sigmoid": (anything,),
    "jnp.sqrt": (np.abs,),
    "jnp.sin": (anything,),
    "x + y": (anything, anything),
    "x - y": (anything, anything),
    "x * y": (anything, anything),
    "x / y": (squared, squared),
    "jnp.maximum": (anything, anything),
    "jnp.where": (anything, anything),
}
TABLES = FLOAT32 + PROMOTE + UNLISTED


def _of_the_tables() -> list[Edge]:
    ops = {op.written: op for op in TABLES}
    return [Edge(x, ops[x].torch, ops[x].jax, d) for x, d in ELEMENTWISE.items()]


def _same(names: str, torch: Late, jax: Any, module: str, *domains: Domain):
    """Functions that have the same name in torch and in a module of JAX."""
    domains = domains or (anything,)
    return [
        Edge(f"{module}.{x}", getattr(torch, x), getattr(jax, x), domains)
        for x in names.split()
    ]


def _sigmoid_of(x: Any) -> Any:
    """Numbers from 0 to 1, close to both ends: what logit inverts."""
    return 1 / (1 + np.exp(-np.clip(x, -80, 80)))


_BOTH = (anything, anything)
EDGES = (
    *_of_the_tables(),
    # Another op of the tables, which is written as its neighbor is.
    Edge(
        "optax.sigmoid_binary_cross_entropy(x, 1)",
        lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
        lambda x: optax.sigmoid_binary_cross_entropy(x, jnp.ones_like(x)),
        (anything,),
    ),
    # Activations.
    Edge(
        "jax.nn.gelu(x, approximate=False)",
        F.gelu,
        lambda x: jax.nn.gelu(x, approximate=False),
        (anything,),
    ),
    *_same("mish celu selu leaky_relu relu6", F, jax.nn, "jax.nn"),
    Edge("jax.nn.soft_sign", F.softsign, jax.nn.soft_sign, (anything,)),
    Edge("jax.nn.log_sigmoid", F.logsigmoid, jax.nn.log_sigmoid, (anything,)),
    Edge("jax.nn.hard_sigmoid", F.hardsigmoid, jax.nn.hard_sigmoid, (anything,)),
    Edge("jax.nn.hard_silu", F.hardswish, jax.nn.hard_silu, (anything,)),
    Edge("jax.nn.hard_tanh", F.hardtanh, jax.nn.hard_tanh, (anything,)),
    Edge(
        "jax.nn.squareplus",
        lambda x: (x + torch.sqrt(x * x + 4)) / 2,
        jax.nn.squareplus,
        (squared,),
    ),
    # Functions of one number.
    *_same("erf erfc", torch, lax, "lax"),
    *_same("atan asinh cos", torch, jnp, "jnp"),
    *_same("sinc", torch, jnp, "jnp", not_small),
    *_same("acosh", torch, jnp, "jnp", above_one),
    *_same("atanh", torch, jnp, "jnp", inside),
    *_same("exp2", torch, jnp, "jnp"),
    *_same("lgamma", torch, lax, "lax"),
    *_same("digamma", torch, lax, "lax", np.abs),
    *_same("logit", torch, special, "special", _sigmoid_of),
    Edge(
        "jnp.cbrt",
        lambda x: torch.sign(x) * torch.abs(x) ** (1 / 3),
        jnp.cbrt,
        (anything,),
    ),
    # torch's own 1 / x is a reciprocal, which is on the list of float32.
    Edge(
        "1 / x",
        lambda x: torch.div(torch.ones_like(x), x),
        lambda x: 1 / x,
        (anything,),
    ),
    Edge("x ** 3", lambda x: x**3, lambda x: x**3, (anything,)),
    # Functions of two.
    *_same("logaddexp logaddexp2 remainder fmod", torch, jnp, "jnp", *_BOTH),
    *_same("hypot", torch, jnp, "jnp", squared, squared),
    *_same("xlogy", torch, special, "special", squared, positive_squared),
    # Compositions.
    Edge(
        "x / max(abs(x))",
        lambda x: x / torch.amax(torch.abs(x), -1, keepdim=True),
        lambda x: x / jnp.max(jnp.abs(x), -1, keepdims=True),
        (squared,),
    ),
    Edge(
        "x / y[:1]",
        lambda x, y: x / y[:1],
        lambda x, y: x / y[:1],
        _BOTH,
    ),
    Edge(
        "x / (y * y + 1)",
        lambda x, y: x / (y * y + 1),
        lambda x, y: x / (y * y + 1),
        _BOTH,
    ),
    Edge(
        "x * sigmoid(x)",
        lambda x: x * torch.sigmoid(x),
        lambda x: x * jax.nn.sigmoid(x),
        (anything,),
    ),
    Edge(
        "x * sigmoid(y)",
        lambda x, y: x * torch.sigmoid(y),
        lambda x, y: x * jax.nn.sigmoid(y),
        _BOTH,
    ),
    Edge(
        "gelu(x) * y",
        lambda x, y: F.gelu(x, approximate="tanh") * y,
        lambda x, y: jax.nn.gelu(x) * y,
        (anything, within(1.0)),
    ),
    Edge(
        "jax.nn.glu",
        lambda x, y: F.glu(torch.cat((x, y), -1)),
        lambda x, y: jax.nn.glu(jnp.concatenate((x, y), -1)),
        _BOTH,
    ),
    Edge(
        "jnp.linalg.norm",
        lambda x: torch.linalg.norm(x, dim=-1),
        lambda x: jnp.linalg.norm(x, axis=-1),
        (squared,),
    ),
    Edge(
        "jax.nn.softmax",
        lambda x: torch.softmax(x, -1),
        jax.nn.softmax,
        (anything,),
    ),
    Edge(
        "jax.nn.logsumexp",
        lambda x: torch.logsumexp(x, -1),
        lambda x: jax.nn.logsumexp(x, -1),
        (anything,),
    ),
)
