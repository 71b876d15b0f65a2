"""The ops that autocast runs in half precision."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from .ops_table import (
    SIGNED,
    SIGNS,
    SMALL,
    B,
    F,
    M,
    Op,
    Shape,
    V,
    channels_last,
    params,
    torch,
)

_CELL = ((3, 4), (3, 5))  # input and state of an RNN cell


def _cell(gates: int, states: int = 1) -> tuple[Shape, ...]:
    """Shapes for an RNN cell: input, states, weights, bias."""
    width = gates * 5
    return (_CELL[0], *[_CELL[1]] * states, (width, 4), (width, 5), (width,))


def _dense(w: Any, b: Any = None) -> dict[str, Any]:
    return {"kernel": w.T} | ({} if b is None else {"bias": b})


def _lstm_torch(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any):
    return torch.lstm_cell(x, (h, c), w, u, torch.zeros_like(b), b)


def _lstm_flax(x, h, c, w, u, b):
    gates = zip("ifgo", *(jnp.split(p, 4) for p in (w, u, b)), strict=True)
    params = {}
    for gate, w_gate, u_gate, b_gate in gates:
        params |= {f"i{gate}": _dense(w_gate), f"h{gate}": _dense(u_gate, b_gate)}
    (c, h), _ = nn.LSTMCell(5).apply({"params": params}, (c, h), x)  # pyright: ignore
    return h, c


def _gru_torch(x: Any, h: Any, w: Any, u: Any, b: Any):
    return torch.gru_cell(x, h, w, u, b, torch.zeros_like(b))


def _gru_flax(x, h, w, u, b):
    gates = zip("rzn", *(jnp.split(p, 3) for p in (w, u, b)), strict=True)
    params = {}
    for gate, w_gate, u_gate, b_gate in gates:
        params |= {f"i{gate}": _dense(w_gate, b_gate), f"h{gate}": _dense(u_gate)}
    params["hn"]["bias"] = jnp.zeros_like(params["in"]["bias"])
    return nn.GRUCell(5).apply({"params": params}, h, x)[0]  # pyright: ignore


def _rnn(of_torch: Callable[..., Any], activation: Callable[[Any], Any]):
    """torch's cell, and Flax's with its name."""
    zeros = lambda x, h, w, u, b: of_torch(x, h, w, u, b, torch.zeros_like(b))

    def of_flax(x, h, w, u, b):
        params = {"i": _dense(w, b), "h": _dense(u)}
        cell = nn.SimpleCell(5, activation_fn=activation)
        return cell.apply({"params": params}, h, x)[0]

    return zeros, "nn.SimpleCell", of_flax


def _conv(x, w, b):
    module = nn.Conv(w.shape[0], w.shape[2:], padding="VALID")
    params = {"kernel": jnp.moveaxis(w, (0, 1), (-1, -2)), "bias": b}
    return channels_last(lambda x: module.apply({"params": params}, x), x)


def _conv_transpose(x, w, b):
    size, n = w.shape[2:], len(w.shape) - 2
    module = nn.ConvTranspose(
        w.shape[1], size, (2,) * n, padding="VALID", transpose_kernel=True
    )
    params = {"kernel": jnp.moveaxis(w, (0, 1), (-1, -2)), "bias": b}
    return channels_last(lambda x: module.apply({"params": params}, x), x)


def _conv_shapes(n: int, transposed: bool = False) -> tuple[Shape, ...]:
    # XLA on the CPU sums bfloat16 in bfloat16, and torch does not, so sums here are
    # short.
    size, *channels = (2, 3, 4) if transposed else (5, 4, 3)
    return ((2, 3, *(size,) * n), (*channels, *(2,) * n), (4,))


def _conv_tbc(x, w, b):
    order = ("WNC", "WIO", "WNC")
    return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=order) + b


_CONV = ([1], [0], [1], False, [0], 1)  # torch's arguments after weight and bias


def _attention(*x):
    out = jax.nn.dot_product_attention(*(jnp.swapaxes(a, 1, 2) for a in x))
    return jnp.swapaxes(out, 1, 2)


LOWER = (
    *(
        Op(
            name,
            lambda x, w, f=function, rest=rest: f(x, w, None, *_CONV, *rest),
            "lax.conv",
            lambda x, w: lax.conv(x, w, (1,), "VALID"),
            ((2, 3, 5), (4, 3, 2)),
            mixed=False,
        )
        for name, function, rest in (
            (
                "_convolution.deprecated",
                torch.ops.aten._convolution.deprecated,
                (False,) * 3,
            ),
            ("_convolution", torch.ops.aten._convolution, (False,) * 4),
            ("convolution", torch.convolution, ()),
        )
    ),
    Op("conv1d", F.conv1d, "nn.Conv", _conv, _conv_shapes(1)),
    Op("conv2d", F.conv2d, "nn.Conv", _conv, _conv_shapes(2)),
    Op("conv3d", F.conv3d, "nn.Conv", _conv, _conv_shapes(3)),
    Op(
        "conv_tbc",
        torch.conv_tbc,
        "lax.conv_general_dilated + b",
        _conv_tbc,
        ((5, 2, 3), (2, 3, 4), (4,)),
        mixed=False,
    ),
    *(
        Op(
            f"conv_transpose{n}d{overload}",
            functools.partial(getattr(F, f"conv_transpose{n}d"), stride=2),
            "nn.ConvTranspose",
            _conv_transpose,
            _conv_shapes(n, transposed=True),
        )
        for n, overload in ((1, ""), (2, ".input"), (3, ".input"))
    ),
    Op(
        "prelu",
        F.prelu,
        "nn.PReLU",
        lambda x, w: params(nn.PReLU(), negative_slope="")(x, w[0]),
        (M, (1,)),
        span=SIGNED,
    ),
    Op(
        "addmm",
        torch.addmm,
        "a @ b + bias",
        lambda x, a, b: a @ b + x,
        ((3,), M, (6, 3)),
    ),
    Op(
        "addbmm",
        torch.addbmm,
        'jnp.einsum("bij,bjk->ik", a, b) + bias',
        lambda x, a, b: jnp.einsum("bij,bjk->ik", a, b) + x,
        ((3,), B, (2, 6, 3)),
    ),
    Op("matmul", torch.matmul, "x @ y", jnp.matmul, (M, (6, 3))),
    Op(
        "einsum",
        lambda x, y: torch.einsum("ij,kj->ik", x, y),
        "jnp.einsum",
        lambda x, y: jnp.einsum("ij,kj->ik", x, y),
        (M, (3, 6)),
    ),
    Op("mm", torch.mm, "jnp.dot", jnp.dot, (M, (6, 3))),
    Op("mv", torch.mv, "jnp.dot", jnp.dot, (M, (6,))),
    Op("linalg_vecdot", torch.linalg.vecdot, "jnp.vecdot", jnp.vecdot, (M, M)),
    Op(
        "linalg_vecdot",
        torch.linalg.vecdot,
        "jnp.linalg.vecdot",
        jnp.linalg.vecdot,
        (V, V),
    ),
    Op(
        "linear",
        F.linear,
        "nn.Dense",
        lambda x, w, b: nn.Dense(3).apply({"params": _dense(w, b)}, x),
        (B, (3, 6), (3,)),
    ),
    Op("bmm", torch.bmm, "x @ y", jnp.matmul, (B, (2, 6, 3))),
    Op(
        "chain_matmul",
        torch.chain_matmul,
        "x @ y @ z",
        lambda x, y, z: x @ y @ z,
        (M, (6, 3), (3, 2)),
    ),
    Op(
        "linalg_multi_dot",
        lambda *x: torch.linalg.multi_dot(x),
        "jnp.linalg.multi_dot",
        lambda *x: jnp.linalg.multi_dot(x),
        (M, (6, 3), (3, 2)),
    ),
    *(
        Op(name, of_torch, written, of_flax, shapes, span=SMALL, cancels=SIGNS)
        for name, of_torch, written, of_flax, shapes in (
            ("lstm_cell", _lstm_torch, "nn.LSTMCell", _lstm_flax, _cell(4, states=2)),
            ("gru_cell", _gru_torch, "nn.GRUCell", _gru_flax, _cell(3)),
            ("rnn_tanh_cell", *_rnn(torch.rnn_tanh_cell, jnp.tanh), _cell(1)),
            ("rnn_relu_cell", *_rnn(torch.rnn_relu_cell, jax.nn.relu), _cell(1)),
        )
    ),
    Op(
        "scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        "jax.nn.dot_product_attention",
        _attention,
        ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
        mixed=False,
        span=SIGNED,
        cancels=SIGNS,
    ),
)
