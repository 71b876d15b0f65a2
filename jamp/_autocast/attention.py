"""`dot_product_attention`: JAX's, by cuDNN's kernel where a GPU and inputs allow it.

cuDNN's takes half precision alone, and has one derivative, in reverse mode. Which form
runs is chosen when the program is lowered, and JAX itself is asked whether it takes the
inputs (`refused`). There are three primitives: attention, its tangent, which is linear,
and the gradients, which are the tangent transposed. Derivatives of any other kind are
those of XLA's form.

The gradients are computed from the inputs alone, and so from the forward pass again.
XLA merges that with the first one, but not in the backward pass of a loop.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _compat
from .._checks import flag, is_traced, number, shown
from .._targets import default_device
from .._tree import HALVES
from .casting import Effects
from .decision import Settings, Values
from .trace import AutocastTrace

OPTIONAL = ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")
CUDNN, XLA, OP_BY_OP = "cudnn", "xla", "op by op"
TRACED_SCALE = """scale must be a number that is known when the function is traced; \
got {}. Multiply the query by it, and pass scale=1."""
REFUSALS = NotImplementedError, RuntimeError, ValueError


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
) -> jax.Array:
    """Attention as `jax.nn.dot_product_attention` computes it, by a fast kernel.

    A model that calls it stays in float32, and runs in float32 as before. In a region
    its inputs are cast to half precision, and on an NVIDIA GPU of compute capability
    8.0 or newer cuDNN's flash attention runs, which never writes the scores: JAX cannot
    choose that for a model that also runs in float32. Elsewhere XLA's form runs, with
    the same numbers as JAX's function, and so it does for what cuDNN does not take:
    float32, odd lengths, windows, heads of a size above 128 or not a multiple of 8.
    Which one it is, is known when the program is lowered, and `jamp.debug.explain` says
    it for the default device. Derivatives of any order work, in both modes.

    Args:
      query: floating [batch, length, heads, size], or without the batch.
      key: [batch, other length, key heads, size]. The number of heads is a multiple of
        that of key heads.
      value: of the shape of `key`.
      bias: added to the scores, [batch or 1, heads or 1, length, other length].
      mask: bool of the same shape; where it is false, a place is not attended to.
      scale: of the scores, by default 1 / sqrt(size).
      is_causal: whether no place attends to later ones.
      query_seq_lengths: int32 [batch], how many places of each sequence count.
      key_value_seq_lengths: the same for `key` and `value`.
      local_window_size: how far each place attends, to both sides or (left, right).

    Returns:
      An array of the query's shape; of the region's dtype in a region, else of the
      query's.

    Raises:
      TypeError: `scale` is not a number or is traced, or `is_causal` is not a bool.
      ValueError: shapes or dtypes do not fit, as from JAX's function.

    Examples:
      >>> import jamp, jax.numpy as jnp
      >>> x = jnp.ones((2, 8, 4, 16))
      >>> jamp.dot_product_attention(x, x, x, is_causal=True).dtype
      dtype('float32')
      >>> with jamp.autocast(dtype=jnp.float16):
      ...     jamp.dot_product_attention(x, x, x, is_causal=True).dtype
      dtype('float16')

    PyTorch: `torch.nn.functional.scaled_dot_product_attention`, which chooses a kernel
    by itself, with heads before lengths and without dropout here.
    """
    if scale is not None and is_traced(scale := number("scale", scale, float)):
        raise TypeError(TRACED_SCALE.format(shown(scale)))
    given = bias, mask, query_seq_lengths, key_value_seq_lengths
    names = tuple(n for n, x in zip(OPTIONAL, given, strict=True) if x is not None)
    arrays = [jnp.asarray(x) for x in (query, key, value, *given) if x is not None]
    if bias is not None and not jnp.issubdtype(arrays[3].dtype, jnp.floating):
        arrays[3] = arrays[3].astype(jnp.float32)
    shape = arrays[0].shape
    four = 3 + sum(name in ("bias", "mask") for name in names)
    arrays[:four] = [lax.expand_dims(x, range(4 - x.ndim)) for x in arrays[:four]]
    params = {
        "names": names,
        "scale": scale,
        "is_causal": flag("dot_product_attention(is_causal=...)", is_causal),
        "local_window_size": local_window_size,
    }
    out = attention_p.bind(*arrays, **params, trains=False)
    return lax.reshape(out, shape)


# The functions that the primitives stand for, in JAX's two forms.

Options = dict[str, Any]
Arrays = Sequence[Any]


def of_floats(form: str, arrays: Arrays, params: Options) -> tuple[Callable, Arrays]:
    """Attention as a function of the inputs that have gradients, and these."""
    names, others = params["names"], dict(params)
    del others["names"]
    count = 3 + ("bias" in names)
    fixed = dict(zip(names[count - 3 :], arrays[count:], strict=True))

    def attend(*floats: jax.Array) -> jax.Array:
        more = fixed | dict(zip(names, floats[3:], strict=False))
        call: Any = jax.nn.dot_product_attention
        implementation = CUDNN if form == CUDNN else XLA
        if form == CUDNN and "bias" in more:
            more["bias"] = more["bias"].astype(floats[0].dtype)
        with region_for(form, floats[0].dtype):
            return call(*floats[:3], **more, **others, implementation=implementation)

    return attend, arrays[:count]


@contextlib.contextmanager
def region_for(form: str, dtype: np.dtype) -> Iterator[None]:
    """XLA's form in half precision runs as in a region of its own.

    JAX's asks for an algorithm that compilers for a CPU or a TPU do not have. Op by op,
    the region around it decides.
    """
    region = contextlib.nullcontext()
    if form == XLA and dtype in HALVES:
        outer = _compat.current_trace()
        region = AutocastTrace(outer, Settings(dtype), Effects()).current()
    with region, jax.numpy_dtype_promotion("standard"):
        yield


def attention(form: str, *arrays: Any, trains: bool, **params: Any) -> jax.Array:
    attend, floats = of_floats(form, arrays, params)
    # With what cuDNN keeps for its gradients, so that XLA merges this call with theirs.
    return jax.vjp(attend, *floats)[0] if trains and form == CUDNN else attend(*floats)


def tangent(form: str, *args: jax.Array, **params: Any) -> jax.Array:
    count = 3 + ("bias" in params["names"])
    attend, floats = of_floats(form, args[count:], params)
    return jax.jvp(attend, (*floats,), (*args[:count],))[1]


def gradients(form: str, cotangent: jax.Array, *arrays: jax.Array, **params: Any):
    attend, floats = of_floats(form, arrays, params)
    return list(jax.vjp(attend, *floats)[1](cotangent))


def refused(arrays: Sequence[Any], params: Options) -> str:
    """Why cuDNN's kernel cannot run here, or "" if it can: what JAX says to it."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    if params["local_window_size"] is not None:
        return "it has no windows"
    try:
        given = jax.ShapeDtypeStruct(shapes[0].shape, shapes[0].dtype)
        run = functools.partial(gradients, CUDNN, **params)
        jax.eval_shape(run, given, *shapes)
    except REFUSALS as error:
        return str(error).partition("\n")[0]
    return ""


def chosen(arrays: Values, params: Options) -> str:
    """Which form an attention takes on the default device, and why not the other."""
    if default_device().platform != "gpu":
        return "XLA's form, as for any device but an NVIDIA GPU"
    why = refused(arrays, {k: v for k, v in params.items() if k != "trains"})
    return f"XLA's form, as cuDNN's says: {why}" if why else "cuDNN's form"


# The primitives.


def primitive(name: str, function: Callable, first: int | None) -> Primitive:
    """A primitive that stands for a function, in the form that suits the platform.

    Args:
      first: where the inputs of the attention begin, or None after the tangents.
    """
    p = Primitive(name)
    p.multiple_results = function is gradients
    xla = functools.partial(function, XLA)
    p.def_impl(lambda *args, **params: jitted(p, tuple(params.items()))(*args))

    def inputs(args, params):
        return args[3 + ("bias" in params["names"]) if first is None else first :]

    def on_cuda(ctx, *args, **params):
        options = {k: v for k, v in params.items() if k != "trains"}
        context = ctx.module_context.axis_context
        # It is not known in a program that is exported, and JAX's kernel asks for it.
        has_devices = getattr(context, "device_assignment", ()) is not None
        given = inputs(ctx.avals_in, params)
        form = CUDNN if has_devices and not refused(given, options) else XLA
        run = functools.partial(function, form)
        return mlir.lower_fun(run, p.multiple_results)(ctx, *args, **params)

    mlir.register_lowering(p, mlir.lower_fun(xla, p.multiple_results))
    if function is not tangent:  # of which cuDNN has none
        mlir.register_lowering(p, on_cuda, platform="cuda")
        _compat.requires_devices(p)
    batching.primitive_batchers[p] = functools.partial(batched, p)
    return p


@functools.lru_cache(maxsize=256)
def jitted(p: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable:
    return jax.jit(functools.partial(p.bind, **dict(params)))


def batched(p: Primitive, args: Arrays, dims: Sequence[Any], **params: Any):
    """Under `vmap`, the new dimension becomes a part of the batch."""
    (size,) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}

    def folded(x: jax.Array, dim: int | None) -> jax.Array:
        if dim is None:
            x = jnp.broadcast_to(x, (size, *x.shape))
        else:
            x = jnp.moveaxis(x, dim, 0)
        if x.shape[1] == 1 and x.shape[1] != batch:  # a bias or mask for the batch
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * x.shape[1], *x.shape[2:])

    lengths = [
        x.shape[(0 if d is None or d > 0 else 1)]
        for x, d in zip(args, dims, strict=True)
    ]
    batch = max(lengths)
    out = p.bind(*map(folded, args, dims), **params)
    unfolded = lambda x: x.reshape(size, batch, *x.shape[1:])
    if not p.multiple_results:
        return unfolded(out), 0
    outs = []
    for x, n in zip(out, lengths[1:], strict=False):
        x = unfolded(x)
        outs.append(jnp.sum(x, 1, keepdims=True) if n == 1 != batch else x)
    return outs, [0] * len(outs)


attention_p = primitive("jamp_attention", attention, 0)
tangent_p = primitive("jamp_attention_tangent", tangent, None)
gradients_p = primitive("jamp_attention_gradients", gradients, 1)
# How many matrix products each holds, of queries and keys or of as many numbers.
PRODUCTS_IN = {attention_p.name: 2, tangent_p.name: 6, gradients_p.name: 5}


@attention_p.def_abstract_eval
def _(*avals, trains, **params):
    shapes = tuple((x.shape, x.dtype) for x in avals)
    dtype = result_dtype(shapes, tuple(params.items()))
    return avals[0].update(dtype=dtype, weak_type=False)


@functools.lru_cache(maxsize=256)
def result_dtype(shapes: tuple[tuple, ...], params: tuple[tuple, ...]) -> np.dtype:
    """The dtype of the result; JAX's function says what does not fit."""
    run = functools.partial(attention, XLA, trains=False, **dict(params))
    return jax.eval_shape(run, *(jax.ShapeDtypeStruct(*x) for x in shapes)).dtype


@tangent_p.def_abstract_eval
def _(*avals, **params):
    return avals[0].update(weak_type=False)


@gradients_p.def_abstract_eval
def _(cotangent, *avals, **params):
    return [x.update(weak_type=False) for x in avals[: 3 + ("bias" in params["names"])]]


def _jvp(primals, tangents, *, trains, **params):
    del trains
    count = 3 + ("bias" in params["names"])
    out = attention_p.bind(*primals, **params, trains=True)
    moved = [*map(ad.instantiate_zeros, tangents[:count])]
    return out, tangent_p.bind(*moved, *primals, **params)


def _jvp_of(function):
    """The rule of a function whose derivative is that of XLA's form."""

    def rule(primals, tangents, **params):
        is_moved = [jnp.issubdtype(x.dtype, jnp.floating) for x in primals]
        moved = [x for x, moves in zip(primals, is_moved, strict=True) if moves]
        along = [t for t, moves in zip(tangents, is_moved, strict=True) if moves]

        def run(*floats):
            rest = iter(floats)
            args = [
                next(rest) if m else x for x, m in zip(primals, is_moved, strict=True)
            ]
            return function(XLA, *args, **params)

        return jax.jvp(run, (*moved,), (*map(ad.instantiate_zeros, along),))

    return rule


def _transpose(cotangent, *args, **params):
    count = 3 + ("bias" in params["names"])
    arrays = args[count:]
    if type(cotangent) is ad.Zero:
        return [None] * len(args)
    grads = gradients_p.bind(cotangent, *arrays, **params)
    return [*grads, *[None] * len(arrays)]


ad.primitive_jvps[attention_p] = _jvp
ad.primitive_jvps[tangent_p] = _jvp_of(tangent)
ad.primitive_jvps[gradients_p] = _jvp_of(gradients)
ad.primitive_transposes[tangent_p] = _transpose
