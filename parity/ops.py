"""Every op of autocast's lists that JAX has: how it is written in torch and in JAX.

Each runs with inputs in float32, in float16, and if it has several with the first in
one of the two and the rest in the other. The dtype of jamp's result must be that of
torch's autocast on CUDA. Values are compared with torch's autocast on the CPU, in units
in the last place of the narrower of the two results' dtypes.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from flax import linen as nn
from jax import lax
from torch import Tensor

import jamp
from jamp._op_rules import DIFFERENCES, Kind

from . import torch_autocast

Shape = tuple[int, ...]


class Op(NamedTuple):
    """An op on both sides.

    Attributes:
      name: as in torch's header, with the overload.
      torch: the op in torch.
      written: how it reads in JAX.
      jax: the op in JAX.
      shapes: of its inputs.
      signed: whether the inputs are negative too, instead of in [0.25, 0.75).
      mixed: whether JAX takes inputs of several dtypes.
      values: whether the values are compared.
      note: why they are not, or lie far apart.
    """

    name: str
    torch: Callable[..., Any]
    written: str
    jax: Callable[..., Any]
    shapes: tuple[Shape, ...]
    signed: bool = False
    mixed: bool = True
    values: bool = True
    note: str = ""

    @property
    def base(self) -> str:
        """The name without the overload, as in jamp's tables."""
        return self.name.split(".")[0]

    @property
    def dtypes(self) -> list[str]:
        """The dtypes that it runs with, for `arrays`."""
        several = ["mixed", "mixed, float16 first"]
        return ["float32", "float16"] + several * (len(self.shapes) > 1 and self.mixed)


def arrays(op: Op, dtypes: str) -> list[np.ndarray]:
    """The inputs, the same numbers for all dtypes but for their rounding."""
    random = np.random.RandomState(0)
    low, high = (-2.0, 2.0) if op.signed else (0.25, 0.75)
    first, rest = {
        "float32": (np.float32, np.float32),
        "float16": (np.float16, np.float16),
        "mixed": (np.float32, np.float16),
        "mixed, float16 first": (np.float16, np.float32),
    }[dtypes]
    values = [random.uniform(low, high, shape) for shape in op.shapes]
    return [v.astype(rest if i else first) for i, v in enumerate(values)]


V, M, B = (5,), (4, 6), (2, 4, 6)  # a vector, a matrix, a batch of matrices
CELL = ((3, 4), (3, 5))  # input and state of an RNN cell


def _cell(gates: int, states: int = 1) -> tuple[Shape, ...]:
    """Shapes for an RNN cell: input, states, weights, bias."""
    width = gates * 5
    return (CELL[0], *[CELL[1]] * states, (width, 4), (width, 5), (width,))


def _dense(w: Any, b: Any = None) -> dict[str, Any]:
    return {"kernel": w.T} | ({} if b is None else {"bias": b})


def _lstm_torch(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor):
    return torch.lstm_cell(x, (h, c), w, u, torch.zeros_like(b), b)


def _lstm_flax(x, h, c, w, u, b):
    gates = zip("ifgo", *(jnp.split(p, 4) for p in (w, u, b)), strict=True)
    params = {}
    for gate, w_gate, u_gate, b_gate in gates:
        params |= {f"i{gate}": _dense(w_gate), f"h{gate}": _dense(u_gate, b_gate)}
    (c, h), _ = nn.LSTMCell(5).apply({"params": params}, (c, h), x)  # pyright: ignore
    return h, c


def _gru_torch(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor):
    return torch.gru_cell(x, h, w, u, b, torch.zeros_like(b))


def _gru_flax(x, h, w, u, b):
    gates = zip("rzn", *(jnp.split(p, 3) for p in (w, u, b)), strict=True)
    params = {}
    for gate, w_gate, u_gate, b_gate in gates:
        params |= {f"i{gate}": _dense(w_gate, b_gate), f"h{gate}": _dense(u_gate)}
    params["hn"]["bias"] = jnp.zeros_like(params["in"]["bias"])
    return nn.GRUCell(5).apply({"params": params}, h, x)[0]  # pyright: ignore


def _rnn_torch(cell: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, h, w, u, b: cell(x, h, w, u, b, torch.zeros_like(b))


def _rnn_flax(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(x, h, w, u, b):
        params = {"i": _dense(w, b), "h": _dense(u)}
        cell = nn.SimpleCell(5, activation_fn=activation)
        return cell.apply({"params": params}, h, x)[0]

    return run


def _channels_last(layer: Callable[[Any], Any], x: Any) -> Any:
    return jnp.moveaxis(layer(jnp.moveaxis(x, 1, -1)), -1, 1)


def _conv(x, w, b):
    module = nn.Conv(w.shape[0], w.shape[2:], padding="VALID")
    params = {"kernel": jnp.moveaxis(w, (0, 1), (-1, -2)), "bias": b}
    return _channels_last(lambda x: module.apply({"params": params}, x), x)


def _conv_transpose(x, w, b):
    size, n = w.shape[2:], len(w.shape) - 2
    module = nn.ConvTranspose(
        w.shape[1], size, (2,) * n, padding="VALID", transpose_kernel=True
    )
    params = {"kernel": jnp.moveaxis(w, (0, 1), (-1, -2)), "bias": b}
    return _channels_last(lambda x: module.apply({"params": params}, x), x)


def _conv_shapes(n: int, transposed: bool = False) -> tuple[Shape, ...]:
    channels = (3, 4) if transposed else (4, 3)
    return ((2, 3, *(5,) * n), (*channels, *(2,) * n), (4,))


def _lax_conv(x, w):
    return lax.conv(x, w, (1,), "VALID")


def _conv_tbc(x, w, b):
    order = ("WNC", "WIO", "WNC")
    return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=order) + b


_CONV = ([1], [0], [1], False, [0], 1)  # what follows weight and bias in torch


def _resize(
    method: str, scale: int = 2, antialias: bool = False
) -> Callable[[Any], Any]:
    def resize(x):
        shape = (*x.shape[:2], *(scale * n for n in x.shape[2:]))
        return jax.image.resize(x, shape, method, antialias=antialias)

    return resize


def _interpolate(mode: str, antialias: bool = False) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, None, 2, mode, antialias=antialias)


def _labels_torch(x: Tensor) -> Tensor:
    return torch.tensor([1, 0, 3, 5], device=x.device)


_LABELS = np.array([1, 0, 3, 5])
_ROWS = np.array([2, 0])


def _rows_torch(x: Tensor) -> Tensor:
    return torch.tensor(_ROWS.tolist(), device=x.device)


def _scatter_add(x: Tensor, y: Tensor) -> Tensor:
    return torch.scatter_add(x, 0, _rows_torch(x).unsqueeze(1).expand(2, 6), y)


def _attention(*x):
    out = jax.nn.dot_product_attention(*(jnp.swapaxes(a, 1, 2) for a in x))
    return jnp.swapaxes(out, 1, 2)


def _params(module: nn.Module, **params: str) -> Callable[..., Any]:
    """Applies a Flax module to its input and to parameters in the order given."""

    def run(x, *values):
        named = dict(zip(params, values, strict=True))
        return module.apply({"params": named}, x)

    return run


_CUBIC = "torch's cubic has the coefficient -0.75, JAX's -0.5"

LISTED = (
    # Lower precision.
    Op(
        "_convolution.deprecated",
        lambda x, w: torch.ops.aten._convolution.deprecated(
            x, w, None, *_CONV, False, False, False
        ),
        "lax.conv",
        _lax_conv,
        ((2, 3, 5), (4, 3, 2)),
        mixed=False,
    ),
    Op(
        "_convolution",
        lambda x, w: torch.ops.aten._convolution(
            x, w, None, *_CONV, False, False, False, False
        ),
        "lax.conv",
        _lax_conv,
        ((2, 3, 5), (4, 3, 2)),
        mixed=False,
    ),
    Op(
        "convolution",
        lambda x, w: torch.convolution(x, w, None, *_CONV),
        "lax.conv",
        _lax_conv,
        ((2, 3, 5), (4, 3, 2)),
        mixed=False,
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
        lambda x, w: _params(nn.PReLU(), negative_slope="")(x, w[0]),
        (M, (1,)),
        signed=True,
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
        lambda *x: torch.ops.aten.chain_matmul(x),
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
    Op("lstm_cell", _lstm_torch, "nn.LSTMCell", _lstm_flax, _cell(4, states=2)),
    Op("gru_cell", _gru_torch, "nn.GRUCell", _gru_flax, _cell(3)),
    Op(
        "rnn_tanh_cell",
        _rnn_torch(torch.rnn_tanh_cell),
        "nn.SimpleCell",
        _rnn_flax(jnp.tanh),
        _cell(1),
    ),
    Op(
        "rnn_relu_cell",
        _rnn_torch(torch.rnn_relu_cell),
        "nn.SimpleCell",
        _rnn_flax(jax.nn.relu),
        _cell(1),
    ),
    Op(
        "scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        "jax.nn.dot_product_attention",
        _attention,
        ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
        mixed=False,
    ),
    # Float32.
    Op("acos", torch.acos, "jnp.acos", jnp.acos, (M,)),
    Op("asin", torch.asin, "jnp.asin", jnp.asin, (M,)),
    Op("cosh", torch.cosh, "jnp.cosh", jnp.cosh, (M,)),
    Op("erfinv", torch.erfinv, "lax.erf_inv", lax.erf_inv, (M,)),
    Op("exp", torch.exp, "jnp.exp", jnp.exp, (M,)),
    Op("expm1", torch.expm1, "jnp.expm1", jnp.expm1, (M,)),
    Op("log", torch.log, "jnp.log", jnp.log, (M,)),
    Op("log10", torch.log10, "jnp.log10", jnp.log10, (M,)),
    Op("log2", torch.log2, "jnp.log2", jnp.log2, (M,)),
    Op("log1p", torch.log1p, "jnp.log1p", jnp.log1p, (M,)),
    Op("reciprocal", torch.reciprocal, "jnp.reciprocal", jnp.reciprocal, (M,)),
    Op("rsqrt", torch.rsqrt, "lax.rsqrt", lax.rsqrt, (M,)),
    Op("sinh", torch.sinh, "jnp.sinh", jnp.sinh, (M,)),
    Op("tan", torch.tan, "jnp.tan", jnp.tan, (M,)),
    Op("pow.Tensor_Scalar", lambda x: x**2.5, "x ** 2.5", lambda x: x**2.5, (M,)),
    Op("pow.Tensor_Scalar", lambda x: x**2, "x ** 2", lambda x: x**2, (M,)),
    Op("pow.Tensor_Scalar", torch.square, "jnp.square", jnp.square, (M,)),
    Op("pow.Tensor_Tensor", torch.pow, "x ** y", jnp.power, (M, M)),
    Op("pow.Scalar", lambda x: 2.0**x, "2.0 ** x", lambda x: 2.0**x, (M,)),
    Op("softplus", F.softplus, "jax.nn.softplus", jax.nn.softplus, (M,), signed=True),
    Op(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        "nn.LayerNorm",
        _params(nn.LayerNorm(epsilon=1e-5), scale="", bias=""),
        (M, (6,), (6,)),
        signed=True,
    ),
    Op(
        "native_layer_norm",
        lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5)[0],
        "nn.LayerNorm",
        _params(nn.LayerNorm(epsilon=1e-5), scale="", bias=""),
        (M, (6,), (6,)),
        signed=True,
    ),
    Op(
        "rms_norm",
        lambda x, w: F.rms_norm(x, (6,), w, 1e-5),
        "nn.RMSNorm",
        _params(nn.RMSNorm(epsilon=1e-5), scale=""),
        (M, (6,)),
        signed=True,
    ),
    Op(
        "group_norm",
        lambda x, w, b: F.group_norm(x, 2, w, b),
        "nn.GroupNorm",
        lambda x, *p: _channels_last(
            lambda x: _params(nn.GroupNorm(2, epsilon=1e-5), scale="", bias="")(x, *p),
            x,
        ),
        (B, (4,), (4,)),
        signed=True,
    ),
    Op(
        "frobenius_norm.dim",
        lambda x: torch.frobenius_norm(x, (0, 1)),
        "jnp.linalg.norm",
        jnp.linalg.norm,
        (M,),
    ),
    Op(
        "nuclear_norm",
        torch.nuclear_norm,
        'jnp.linalg.norm(x, "nuc")',
        lambda x: jnp.linalg.norm(x, "nuc"),
        (M,),
    ),
    Op(
        "nuclear_norm.dim",
        lambda x: torch.nuclear_norm(x, (1, 2)),
        'jnp.linalg.norm(x, "nuc", axis)',
        lambda x: jnp.linalg.norm(x, "nuc", (1, 2)),
        (B,),
    ),
    Op(
        "cosine_similarity",
        F.cosine_similarity,
        "optax.cosine_similarity",
        optax.cosine_similarity,
        (M, M),
        note="the CPU divides the float16 input by its norm in float16",
    ),
    Op(
        "cosine_embedding_loss",
        lambda x, y: F.cosine_embedding_loss(
            x, y, torch.ones(4, device=x.device), reduction="none"
        ),
        "optax.cosine_distance",
        optax.cosine_distance,
        (M, M),
        signed=True,
    ),
    Op(
        "nll_loss",
        lambda x: F.nll_loss(x, _labels_torch(x), reduction="none"),
        "optax.softmax_cross_entropy_with_integer_labels",
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, _LABELS),
        (M,),
        values=False,
        note="torch's takes log-probabilities, optax's logits; see cross_entropy_loss",
    ),
    Op(
        "hinge_embedding_loss",
        lambda x: F.hinge_embedding_loss(x, -torch.ones_like(x), reduction="none"),
        "optax.hinge_loss",
        lambda x: optax.hinge_loss(x, jnp.ones_like(x)),
        (M,),
    ),
    Op(
        "kl_div",
        lambda x, y: F.kl_div(x, y, reduction="sum"),
        "optax.kl_divergence",
        optax.kl_divergence,
        (V, V),
    ),
    Op(
        "kl_div",
        lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True),
        "optax.losses.kl_divergence_with_log_targets",
        optax.losses.kl_divergence_with_log_targets,
        (V, V),
    ),
    Op(
        "smooth_l1_loss",
        lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
        "optax.huber_loss",
        optax.huber_loss,
        (M, M),
    ),
    Op(
        "huber_loss",
        lambda x, y: F.huber_loss(x, y, reduction="none"),
        "optax.huber_loss",
        optax.huber_loss,
        (M, M),
    ),
    Op(
        "mse_loss",
        lambda x, y: F.mse_loss(x, y, reduction="none"),
        "optax.squared_error",
        optax.squared_error,
        (M, M),
    ),
    Op(
        "soft_margin_loss",
        lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
        "optax.sigmoid_binary_cross_entropy",
        lambda x: optax.sigmoid_binary_cross_entropy(x, jnp.ones_like(x)),
        (M,),
    ),
    Op(
        "triplet_margin_loss",
        lambda *x: F.triplet_margin_loss(*x, eps=0.0, reduction="none"),
        "optax.losses.triplet_margin_loss",
        lambda *x: optax.losses.triplet_margin_loss(*x, eps=0.0),
        (M, M, M),
    ),
    Op(
        "binary_cross_entropy_with_logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        "optax.sigmoid_binary_cross_entropy",
        optax.sigmoid_binary_cross_entropy,
        (M, M),
    ),
    Op(
        "logsumexp",
        lambda x: torch.logsumexp(x, 1),
        "jax.nn.logsumexp",
        lambda x: jax.nn.logsumexp(x, 1),
        (M,),
        signed=True,
    ),
    *(
        Op(
            name,
            _interpolate(mode, name.endswith("_aa")),
            "jax.image.resize",
            _resize(method),
            shape,
            values=name != "upsample_bicubic2d",
            note=_CUBIC if name == "upsample_bicubic2d" else "",
        )
        for name, mode, method, shape in (
            ("upsample_nearest1d", "nearest", "nearest", ((2, 3, 5),)),
            ("upsample_nearest2d", "nearest", "nearest", ((2, 3, 5, 4),)),
            ("upsample_nearest3d", "nearest", "nearest", ((2, 3, 5, 4, 3),)),
            ("_upsample_nearest_exact1d", "nearest-exact", "nearest", ((2, 3, 5),)),
            ("_upsample_nearest_exact2d", "nearest-exact", "nearest", (B[:1] + B,)),
            (
                "_upsample_nearest_exact3d",
                "nearest-exact",
                "nearest",
                ((2, 3, 5, 4, 3),),
            ),
            ("upsample_linear1d", "linear", "linear", ((2, 3, 5),)),
            ("upsample_bilinear2d", "bilinear", "linear", ((2, 3, 5, 4),)),
            ("_upsample_bilinear2d_aa", "bilinear", "linear", ((2, 3, 5, 4),)),
            ("upsample_trilinear3d", "trilinear", "linear", ((2, 3, 5, 4, 3),)),
            ("upsample_bicubic2d", "bicubic", "cubic", ((2, 3, 5, 4),)),
            ("_upsample_bicubic2d_aa", "bicubic", "cubic", ((2, 3, 5, 4),)),
        )
    ),
    # Float32 unless a dtype is given.
    Op("prod", torch.prod, "jnp.prod", jnp.prod, (M,)),
    Op(
        "prod.dim_int",
        lambda x: torch.prod(x, 1),
        "jnp.prod(x, axis)",
        lambda x: jnp.prod(x, 1),
        (M,),
    ),
    Op(
        "softmax.int",
        lambda x: torch.softmax(x, -1),
        "jax.nn.softmax",
        jax.nn.softmax,
        (M,),
        signed=True,
    ),
    Op(
        "log_softmax.int",
        lambda x: torch.log_softmax(x, -1),
        "jax.nn.log_softmax",
        jax.nn.log_softmax,
        (M,),
        signed=True,
    ),
    Op(
        "cumprod",
        lambda x: torch.cumprod(x, 1),
        "jnp.cumprod",
        lambda x: jnp.cumprod(x, 1),
        (M,),
    ),
    Op(
        "cumsum",
        lambda x: torch.cumsum(x, 1),
        "jnp.cumsum",
        lambda x: jnp.cumsum(x, 1),
        (M,),
    ),
    Op(
        "linalg_vector_norm",
        torch.linalg.vector_norm,
        "jnp.linalg.vector_norm",
        jnp.linalg.vector_norm,
        (M,),
    ),
    Op(
        "linalg_matrix_norm",
        lambda x: torch.linalg.matrix_norm(x, 1),
        "jnp.linalg.matrix_norm(x, ord=1)",
        lambda x: jnp.linalg.matrix_norm(x, ord=1),
        (M,),
    ),
    Op(
        "linalg_matrix_norm.str_ord",
        torch.linalg.matrix_norm,
        "jnp.linalg.matrix_norm",
        jnp.linalg.matrix_norm,
        (M,),
    ),
    Op("sum", torch.sum, "jnp.sum", jnp.sum, (M,)),
    Op(
        "sum.dim_IntList",
        lambda x: torch.sum(x, 1),
        "jnp.sum(x, axis)",
        lambda x: jnp.sum(x, 1),
        (M,),
    ),
    Op(
        "norm.Scalar",
        lambda x: torch.ops.aten.norm.Scalar(x, 2),
        "jnp.linalg.norm",
        jnp.linalg.norm,
        (M,),
    ),
    Op(
        "norm.ScalarOpt_dim",
        lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 3, [1]),
        "jnp.linalg.norm(x, 3, axis)",
        lambda x: jnp.linalg.norm(x, 3, 1),
        (M,),
    ),
    # Promote.
    Op(
        "addcdiv",
        torch.addcdiv,
        "x + y / z",
        lambda x, y, z: x + y / z,
        (M, M, M),
        note="in JAX, the quotient of float16 y and z is rounded to float16",
    ),
    Op(
        "addcmul",
        torch.addcmul,
        "x + y * z",
        lambda x, y, z: x + y * z,
        (M, M, M),
        note="in JAX, the product of float16 y and z is rounded to float16",
    ),
    Op("atan2", torch.atan2, "jnp.atan2", jnp.atan2, (M, M)),
    Op(
        "cross",
        lambda x, y: torch.cross(x, y, 1),
        "jnp.cross",
        jnp.cross,
        ((4, 3), (4, 3)),
        note="a difference of products, which JAX rounds to float16 and torch does not",
    ),
    Op("dot", torch.dot, "jnp.dot", jnp.dot, (V, V)),
    Op("vdot", torch.vdot, "jnp.vdot", jnp.vdot, (V, V)),
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

# In none of the lists: they keep their dtype, or promote as they do without autocast.
UNLISTED = (
    Op(
        "gelu",
        lambda x: F.gelu(x, approximate="tanh"),
        "jax.nn.gelu",
        jax.nn.gelu,
        (M,),
        signed=True,
    ),
    Op("silu", F.silu, "jax.nn.silu", jax.nn.silu, (M,), signed=True),
    Op("relu", F.relu, "jax.nn.relu", jax.nn.relu, (M,), signed=True),
    Op("elu", F.elu, "jax.nn.elu", jax.nn.elu, (M,), signed=True),
    Op("tanh", torch.tanh, "jnp.tanh", jnp.tanh, (M,), signed=True),
    Op("sigmoid", torch.sigmoid, "jax.nn.sigmoid", jax.nn.sigmoid, (M,), signed=True),
    Op("sqrt", torch.sqrt, "jnp.sqrt", jnp.sqrt, (M,)),
    Op("sin", torch.sin, "jnp.sin", jnp.sin, (M,)),
    Op("mean", torch.mean, "jnp.mean", jnp.mean, (M,)),
    Op(
        "var",
        lambda x: torch.var(x, unbiased=False),
        "jnp.var",
        jnp.var,
        (M,),
    ),
    Op("amax", torch.amax, "jnp.max", jnp.max, (M,)),
    Op("add.Tensor", torch.add, "x + y", jnp.add, (M, M)),
    Op("sub.Tensor", torch.sub, "x - y", jnp.subtract, (M, M)),
    Op("mul.Tensor", torch.mul, "x * y", jnp.multiply, (M, M)),
    Op("div.Tensor", torch.div, "x / y", jnp.divide, (M, M)),
    Op("maximum", torch.maximum, "jnp.maximum", jnp.maximum, (M, M)),
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
        lambda x: F.cross_entropy(x, _labels_torch(x), reduction="none"),
        "optax.softmax_cross_entropy_with_integer_labels",
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, _LABELS),
        (M,),
        signed=True,
    ),
)


class Result(NamedTuple):
    """What an op gave, by the dtypes of its inputs.

    Attributes:
      kind: of the list of torch that it is in, or None.
      on_cpu: whether it is in one of the CPU's lists too.
      cuda: the dtype of torch's autocast on CUDA.
      cpu: the same on the CPU, or None where torch cannot run the op there.
      jamp: jamp's dtypes, outside jit and inside.
      ulps: the largest distance from torch on the CPU, by the dtype it is counted in.
    """

    op: Op
    kind: Kind | None
    on_cpu: bool
    cuda: dict[str, str]
    cpu: dict[str, str | None]
    jamp: dict[str, tuple[str, str]]
    ulps: dict[str, int]

    @property
    def agrees(self) -> bool:
        """Whether jamp's dtypes are those of CUDA."""
        return all(self.jamp[k] == (dtype, dtype) for k, dtype in self.cuda.items())

    @property
    def expected(self) -> bool:
        """Whether it agrees, unless jamp says that it does not."""
        return self.agrees != (self.op.base in DIFFERENCES)


def run_jamp(op: Op, inputs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Results under `jamp.autocast`, outside jit and inside."""
    values = [jnp.asarray(x) for x in inputs]
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
        jamp.autocast(dtype=jnp.float16),
    ):
        # JAX is to refuse one day what `x.at[i].set(y)` does with a wider y.
        warnings.filterwarnings("ignore", "scatter inputs have incompatible types")
        results = op.jax(*values), jax.jit(op.jax)(*values)
    return [[np.asarray(x) for x in jax.tree.leaves(r)] for r in results]


def _dtype(results: Iterable[np.ndarray]) -> str:
    return ", ".join(sorted({x.dtype.name for x in results}))


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers that count the floating numbers from zero to x."""
    integer = np.dtype(f"int{8 * x.itemsize}")
    bits = x.view(integer).astype(np.int64)
    return np.where(bits < 0, np.iinfo(integer).min - bits, bits)


def ulps(x: np.ndarray, y: np.ndarray) -> tuple[str, int]:
    """The narrower of two arrays' dtypes, and their largest distance in it.

    Raises:
      ValueError: the shapes differ, or not all is finite.
    """
    dtype = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
    if x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"not comparable: {x}, {y}")
    x, y = _ordered(x.astype(dtype)), _ordered(y.astype(dtype))
    return dtype.name, int(np.abs(x - y).max())


def compare(op: Op) -> Result:
    """Runs an op in torch and in jamp with each of its dtypes."""
    kind = torch_autocast.lists().get(op.name)
    on_cpu = torch_autocast.is_listed(op.name, "CPU")
    result = Result(op, kind, on_cpu, {}, {}, {}, {})
    for dtypes in op.dtypes:
        inputs = arrays(op, dtypes)
        result.cuda[dtypes] = torch_autocast.cuda_dtype(op.torch, inputs)
        eager, jitted = run_jamp(op, inputs)
        result.jamp[dtypes] = _dtype(eager), _dtype(jitted)
        reference = torch_autocast.run_on_cpu(op.torch, inputs)
        result.cpu[dtypes] = reference[0].dtype.name if reference else None
        if reference is None or not op.values:
            continue
        for x, y in zip(reference * 2, eager + jitted, strict=True):
            dtype, distance = ulps(x, y)
            result.ulps[dtype] = max(result.ulps.get(dtype, 0), distance)
    return result
