"""Ops that autocast runs in their inputs' widest dtype, and ops that are not listed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .ops_table import CENTERED, LABELS, SIGNED, F, M, Op, V, by_labels, same, torch

_ROWS = np.array([2, 0])


def _rows_torch(x: Any) -> Any:
    return torch.tensor(_ROWS.tolist(), device=x.device)


def _scatter_add(x: Any, y: Any) -> Any:
    return torch.scatter_add(x, 0, _rows_torch(x).unsqueeze(1).expand(2, 6), y)


PROMOTE = (
    *same("atan2", torch, jnp, "jnp", M, M),
    Op(
        "cross",
        lambda x, y: torch.cross(x, y, 1),
        "jnp.cross",
        jnp.cross,
        ((4, 3), (4, 3)),
        cancels="a difference of products, which JAX rounds and torch does not",
    ),
    *same("dot vdot", torch, jnp, "jnp", V, V),
    Op(
        "index_put",
        lambda x, y: torch.index_put(x, (_rows_torch(x),), y),
        "x.at[i].set(y)",
        lambda x, y: x.at[_ROWS].set(y),
        (M, (2, 6)),
    ),
    Op(
        "tensordot",
        lambda x, y: torch.tensordot(x, y, dims=1),
        "jnp.tensordot",
        lambda x, y: jnp.tensordot(x, y, axes=1),
        (M, (6, 3)),
    ),
    Op(
        "scatter_add",
        _scatter_add,
        "x.at[i].add(y)",
        lambda x, y: x.at[_ROWS].add(y),
        (M, (2, 6)),
    ),
)

TANH = "1 - tanh(x) ** 2, which is close to 0"

# Ops on none of the lists: they keep their dtype, or promote as without autocast.
UNLISTED = (
    Op(
        "gelu",
        lambda x: F.gelu(x, approximate="tanh"),
        "jax.nn.gelu",
        jax.nn.gelu,
        (M,),
        span=SIGNED,
        cancels="1 + tanh(...), which is close to 0 for x < 0",
    ),
    *same("silu relu elu", F, jax.nn, "jax.nn", M, span=SIGNED),
    *same("tanh", torch, jnp, "jnp", M, span=SIGNED, grad_cancels=TANH),
    *same("sigmoid", torch, jax.nn, "jax.nn", M, span=SIGNED),
    *same("sqrt sin mean", torch, jnp, "jnp", M),
    Op(
        "var",
        lambda x: torch.var(x, unbiased=False),
        "jnp.var",
        jnp.var,
        (M,),
        grad_cancels=CENTERED,
    ),
    Op("amax", torch.amax, "jnp.max", jnp.max, (M,)),
    Op("add.Tensor", torch.add, "x + y", jnp.add, (M, M)),
    Op("sub.Tensor", torch.sub, "x - y", jnp.subtract, (M, M)),
    Op("mul.Tensor", torch.mul, "x * y", jnp.multiply, (M, M)),
    Op("div.Tensor", torch.div, "x / y", jnp.divide, (M, M)),
    *same("maximum", torch, jnp, "jnp", M, M),
    Op(
        "cat",
        lambda *x: torch.cat(x),
        "jnp.concatenate",
        lambda *x: jnp.concatenate(x),
        (M, M),
    ),
    Op(
        "stack", lambda *x: torch.stack(x), "jnp.stack", lambda *x: jnp.stack(x), (M, M)
    ),
    Op(
        "where.self",
        lambda x, y: torch.where(x > y, x, y),
        "jnp.where",
        lambda x, y: jnp.where(x > y, x, y),
        (M, M),
    ),
    Op(
        "cross_entropy_loss",
        by_labels(F.cross_entropy),
        "optax.softmax_cross_entropy_with_integer_labels",
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS),
        (M,),
        span=SIGNED,
        dtypes_only="torch rounds log-probabilities to the dtype of the logits",
    ),
)
