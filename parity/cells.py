"""What the cells of `ops.txt` and `edges.txt` mean in JAX.

The inputs of a function are called x, y, z, u, v and w (`shared/cells.py`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import optax
from flax import linen as nn
from jax import lax

from shared import cells

INPUTS = "xyzuvw"


def in_jax(cell: str) -> Callable[..., Any]:
    return cells.function(cell, _JAX, INPUTS)


# What cells of JAX use besides its modules.

LABELS = np.array([1, 0, 3, 5])
ROWS = np.array([2, 0])


def channels_last(layer: Callable[[Any], Any], x: Any) -> Any:
    return jnp.moveaxis(layer(jnp.moveaxis(x, 1, -1)), -1, 1)


def flax(module: nn.Module, x: Any, **params: Any) -> Any:
    """A Flax module with the parameters that are given."""
    return module.apply({"params": params}, x)


def doubled(x: Any, method: str) -> Any:
    """Images of twice the size."""
    shape = (*x.shape[:2], *(2 * n for n in x.shape[2:]))
    return jax.image.resize(x, shape, method, antialias=False)


def swapped(attention: Callable[..., Any], *x: Any) -> Any:
    """Attention with the heads before the rows, as in torch."""
    return jnp.swapaxes(attention(*(jnp.swapaxes(a, 1, 2) for a in x)), 1, 2)


def nn_conv(x: Any, w: Any, b: Any) -> Any:
    module = nn.Conv(w.shape[0], w.shape[2:], padding="VALID")
    kernel = jnp.moveaxis(w, (0, 1), (-1, -2))
    return channels_last(lambda x: flax(module, x, kernel=kernel, bias=b), x)


def nn_conv_transpose(x: Any, w: Any, b: Any) -> Any:
    size, strides = w.shape[2:], (2,) * (w.ndim - 2)
    module = nn.ConvTranspose(
        w.shape[1], size, strides, padding="VALID", transpose_kernel=True
    )
    kernel = jnp.moveaxis(w, (0, 1), (-1, -2))
    return channels_last(lambda x: flax(module, x, kernel=kernel, bias=b), x)


def _dense(w: Any, b: Any = None) -> dict[str, Any]:
    return {"kernel": w.T} | ({} if b is None else {"bias": b})


def nn_lstm(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any) -> Any:
    params = {}
    for gate, *of_gate in zip(
        "ifgo", *(jnp.split(p, 4) for p in (w, u, b)), strict=True
    ):
        w, u, b = of_gate
        params |= {f"i{gate}": _dense(w), f"h{gate}": _dense(u, b)}
    cell: Any = nn.LSTMCell(5)
    (c, h), _ = cell.apply({"params": params}, (c, h), x)
    return h, c


def nn_gru(x: Any, h: Any, w: Any, u: Any, b: Any) -> Any:
    params = {}
    for gate, *of_gate in zip(
        "rzn", *(jnp.split(p, 3) for p in (w, u, b)), strict=True
    ):
        w, u, b = of_gate
        params |= {f"i{gate}": _dense(w, b), f"h{gate}": _dense(u)}
    params["hn"]["bias"] = jnp.zeros_like(params["in"]["bias"])
    cell: Any = nn.GRUCell(5)
    return cell.apply({"params": params}, h, x)[0]


def nn_simple(activation: Any, x: Any, h: Any, w: Any, u: Any, b: Any) -> Any:
    cell: Any = nn.SimpleCell(5, activation_fn=activation)
    return cell.apply({"params": {"i": _dense(w, b), "h": _dense(u)}}, h, x)[0]


_JAX: dict[str, Any] = {
    "LABELS": LABELS,
    "channels_last": channels_last,
    "doubled": doubled,
    "flax": flax,
    "i": ROWS,
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "nn": nn,
    "nn_conv": nn_conv,
    "nn_conv_transpose": nn_conv_transpose,
    "nn_gru": nn_gru,
    "nn_lstm": nn_lstm,
    "nn_simple": nn_simple,
    "optax": optax,
    "special": special,
    "swapped": swapped,
}
