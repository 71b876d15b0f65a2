"""The ops that autocast runs in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from .ops_table import (
    CENTERED,
    DIFFERENCE,
    LABELS,
    SIGNED,
    SIGNS,
    B,
    F,
    M,
    Op,
    V,
    along,
    by_labels,
    channels_last,
    condition_number,
    params,
    same,
    torch,
)


def _resize(
    method: str, scale: int = 2, antialias: bool = False
) -> Callable[[Any], Any]:
    def resize(x):
        shape = (*x.shape[:2], *(scale * n for n in x.shape[2:]))
        return jax.image.resize(x, shape, method, antialias=antialias)

    return resize


def _interpolate(mode: str, antialias: bool = False) -> Callable[[Any], Any]:
    return lambda x: F.interpolate(x, None, 2, mode, antialias=antialias)


_CUBIC = "torch's cubic has the coefficient -0.75, JAX's -0.5"

FLOAT32 = (
    *same("acos asin cosh", torch, jnp, "jnp", M),
    Op("erfinv", torch.erfinv, "lax.erf_inv", lax.erf_inv, (M,)),
    *same("exp expm1 log log10 log2 log1p reciprocal", torch, jnp, "jnp", M),
    *same("rsqrt", torch, lax, "lax", M),
    *same("sinh tan", torch, jnp, "jnp", M),
    Op("pow.Tensor_Scalar", lambda x: x**2.5, "x ** 2.5", lambda x: x**2.5, (M,)),
    Op("pow.Tensor_Scalar", lambda x: x**2, "x ** 2", lambda x: x**2, (M,)),
    Op("pow.Tensor_Scalar", torch.square, "jnp.square", jnp.square, (M,)),
    Op("pow.Tensor_Tensor", torch.pow, "x ** y", jnp.power, (M, M)),
    Op("pow.Scalar", lambda x: 2.0**x, "2.0 ** x", lambda x: 2.0**x, (M,)),
    *same("softplus", F, jax.nn, "jax.nn", M, span=SIGNED),
    Op(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        "nn.LayerNorm",
        params(nn.LayerNorm(epsilon=1e-5), scale="", bias=""),
        (M, (6,), (6,)),
        span=SIGNED,
        cancels=CENTERED,
    ),
    Op(
        "native_layer_norm",
        lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5)[0],
        "nn.LayerNorm",
        params(nn.LayerNorm(epsilon=1e-5), scale="", bias=""),
        (M, (6,), (6,)),
        span=SIGNED,
        cancels=CENTERED,
    ),
    Op(
        "rms_norm",
        lambda x, w: F.rms_norm(x, (6,), w, 1e-5),
        "nn.RMSNorm",
        params(nn.RMSNorm(epsilon=1e-5), scale=""),
        (M, (6,)),
        span=SIGNED,
        grad_cancels=CENTERED,
    ),
    Op(
        "group_norm",
        lambda x, w, b: F.group_norm(x, 2, w, b),
        "nn.GroupNorm",
        lambda x, *p: channels_last(
            lambda x: params(nn.GroupNorm(2, epsilon=1e-5), scale="", bias="")(x, *p),
            x,
        ),
        (B, (4,), (4,)),
        span=SIGNED,
        cancels=CENTERED,
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
        ((2, 3),),
        span=SIGNED,
        grad_cancels=SIGNS,
        condition=condition_number,
    ),
    Op(
        "nuclear_norm.dim",
        lambda x: torch.nuclear_norm(x, (1, 2)),
        'jnp.linalg.norm(x, "nuc", axis)',
        lambda x: jnp.linalg.norm(x, "nuc", (1, 2)),
        ((4, 2, 3),),
        span=SIGNED,
        grad_cancels=SIGNS,
        condition=condition_number,
    ),
    Op(
        "cosine_similarity",
        F.cosine_similarity,
        "optax.cosine_similarity",
        optax.cosine_similarity,
        (M, M),
        span=SIGNED,
        cancels=SIGNS,
    ),
    Op(
        "cosine_embedding_loss",
        lambda x, y: F.cosine_embedding_loss(
            x, y, torch.ones(4, device=x.device), reduction="none"
        ),
        "optax.cosine_distance",
        optax.cosine_distance,
        (M, M),
        span=SIGNED,
        cancels=SIGNS,
    ),
    Op(
        "nll_loss",
        by_labels(F.nll_loss),
        "optax.softmax_cross_entropy_with_integer_labels",
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS),
        (M,),
        dtypes_only="torch's takes log-probabilities, optax's logits",
    ),
    Op(
        "nll_loss",
        lambda x: by_labels(F.nll_loss)(F.log_softmax(x, -1)),
        "optax.softmax_cross_entropy_with_integer_labels(log_softmax(x))",
        lambda x: optax.softmax_cross_entropy_with_integer_labels(
            jax.nn.log_softmax(x), LABELS
        ),
        (M,),
        span=SIGNED,
        grad_cancels=CENTERED,
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
        grad_cancels=DIFFERENCE,
    ),
    Op(
        "kl_div",
        lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True),
        "optax.losses.kl_divergence_with_log_targets",
        optax.losses.kl_divergence_with_log_targets,
        (V, V),
        grad_cancels=DIFFERENCE,
    ),
    *(
        Op(
            name,
            lambda x, y, name=name: getattr(F, name)(x, y, reduction="none"),
            "optax.huber_loss",
            optax.huber_loss,
            (M, M),
            grad_cancels=DIFFERENCE,
        )
        for name in ("smooth_l1_loss", "huber_loss")
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
        grad_cancels=DIFFERENCE,
    ),
    Op(
        "binary_cross_entropy_with_logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        "optax.sigmoid_binary_cross_entropy",
        optax.sigmoid_binary_cross_entropy,
        (M, M),
        grad_cancels=DIFFERENCE,
    ),
    Op(
        "logsumexp",
        lambda x: torch.logsumexp(x, 1),
        "jax.nn.logsumexp",
        lambda x: jax.nn.logsumexp(x, 1),
        (M,),
        span=SIGNED,
    ),
    *(
        Op(
            name,
            _interpolate(mode, name.endswith("_aa")),
            "jax.image.resize",
            _resize(method),
            shape,
            dtypes_only=_CUBIC if name == "upsample_bicubic2d" else "",
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
    *same("prod", torch, jnp, "jnp", M),
    *along({"prod.dim_int": "prod"}, torch, "(x, axis)"),
    *(
        Op(
            f"{name}.int",
            lambda x, name=name: getattr(torch, name)(x, -1),
            f"jax.nn.{name}",
            getattr(jax.nn, name),
            (M,),
            span=SIGNED,
            grad_cancels=CENTERED,
        )
        for name in ("softmax", "log_softmax")
    ),
    *along({"cumprod": "cumprod", "cumsum": "cumsum"}, torch),
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
    *same("sum", torch, jnp, "jnp", M),
    *along({"sum.dim_IntList": "sum"}, torch, "(x, axis)"),
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
)
