"""`dot_product_attention`: JAX's, by cuDNN's kernel where a GPU and inputs allow it.

cuDNN's takes half precision alone, and has one derivative, in reverse mode. Which form
runs is chosen when the program is lowered, and JAX itself is asked whether it takes the
inputs (`refused`). One primitive stands for a function of arrays: attention, and what
JAX's transforms make of that (`Made`). So all that JAX asks about it (shapes, what is
sharded, what varies) is what it says about XLA's form.

The gradients are computed from the inputs alone, and so from the forward pass again.
XLA merges that with the first one, but not in the backward pass of a loop.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from .bias import within_range
from .decision import Settings
from .trace import DECIDED_AS, REGION, AutocastTrace

OTHERS = ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")
TRACED_SCALE = """scale must be a number that is known when the function is traced; \
got {}. Multiply the query by it, and pass scale=1."""
ATTENTION = "jamp_attention"
ONCE = """jamp.dot_product_attention has one derivative, in reverse mode, and a second \
one was asked for. jax.nn.dot_product_attention has all of them."""
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
    it for the default device. It has one derivative, in reverse mode, as torch's flash
    attention; `jax.nn.dot_product_attention` has those of any order, in both modes.

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
      NotImplementedError: a second derivative is taken.

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
    causal = flag("dot_product_attention(is_causal=...)", is_causal)
    others = bias, mask, query_seq_lengths, key_value_seq_lengths
    names = tuple(n for n, x in zip(OTHERS, others, strict=True) if x is not None)
    given = query, key, value, *others
    arrays = [jnp.asarray(x) for x in given if x is not None]
    if bias is not None and not is_moved(arrays[3]):
        arrays[3] = arrays[3].astype(jnp.float32)
    shape, four = arrays[0].shape, 3 + sum(name in ("bias", "mask") for name in names)
    arrays[:four] = [lax.expand_dims(x, range(4 - x.ndim)) for x in arrays[:four]]
    run = Attention(names, scale, causal)
    if local_window_size is not None or not all(map(is_moved, arrays[:3])):
        # cuDNN's takes neither, nor can a region run it as one op.
        form = Form(OP_BY_OP if REGION.value else XLA)
        (out,) = run(form, *arrays, local_window_size=local_window_size)
    else:
        (out,) = attention_p.bind(*alike(arrays), run=run, dtype=None)
    return lax.reshape(out, shape)


def alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays that vary over the same axes of a `shard_map`, as cuDNN's form needs.

    So JAX sums the gradients of those that did not.
    """
    types = [jax.typeof(x).manual_axis_type for x in arrays]
    known = [frozenset(() if t is None else t.varying) for t in types]
    more = [tuple(sorted(frozenset().union(*known) - names)) for names in known]
    return [lax.pcast(x, m, to="varying") for x, m in zip(arrays, more, strict=True)]


# Functions of arrays, in JAX's two forms.

CUDNN, XLA, OP_BY_OP = "cudnn", "xla", "op by op"


class Form(NamedTuple):
    """How a function runs."""

    name: str
    dtype: np.dtype | None = None  # of the products; None: that of the inputs
    maps: int = 0  # dimensions before the batch, in cuDNN's form


def is_moved(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class Attention:
    """JAX's function, of three inputs and of some others."""

    names: tuple[str, ...]  # of the others
    scale: float | None
    is_causal: bool

    products, is_derived = 2, False

    def __call__(self, form: Form, *arrays: jax.Array, **more: Any) -> list[jax.Array]:
        out, batch = arrays[0], arrays[0].shape[: form.maps + 1]
        if form.maps:  # these dimensions become a part of the batch
            pairs = [(x, x.shape[len(batch) :]) for x in arrays]
            wide = [
                jnp.broadcast_to(x, batch + rest).reshape(-1, *rest)
                for x, rest in pairs
            ]
            arrays = tuple(wide)
        floats = [x.astype(form.dtype or x.dtype) for x in arrays[:3]]
        dtype, is_cudnn = floats[0].dtype, form.name == CUDNN
        more |= dict(zip(self.names, arrays[3:], strict=True))
        if is_cudnn and "bias" in more:  # in half precision, where a mask stays finite
            bias = within_range(more["bias"], float(jnp.finfo(dtype).max))
            more["bias"] = bias.astype(dtype)
        more |= {"scale": self.scale, "is_causal": self.is_causal}
        call, region = jax.nn.dot_product_attention, contextlib.nullcontext()
        if form.name == XLA and dtype in HALVES:
            # JAX's asks for an algorithm that compilers for a CPU or a TPU do not have,
            # and a region for one that they have.
            trace = AutocastTrace(_compat.current_trace(), Settings(dtype), set())
            region = trace.current()
        with region, jax.numpy_dtype_promotion("standard"):
            result = call(*floats, **more, implementation=CUDNN if is_cudnn else XLA)
        result = result.reshape(out.shape)
        return [result if form.dtype is None else result.astype(out.dtype)]


class Made(NamedTuple):
    """A function that is made of another one."""

    by: Callable[..., list[jax.Array]]  # one of the three below
    of: Any
    how: tuple[Any, ...] = ()  # which inputs are mapped, or have gradients

    @property
    def products(self) -> float:
        return self.of.products * (5 / 2 if self.by is gradients else 1)

    @property
    def is_derived(self) -> bool:
        return self.by is not mapped or self.of.is_derived

    def __call__(self, form: Form, *arrays: jax.Array) -> list[jax.Array]:
        return self.by(functools.partial(self.of, form), self.how, form, *arrays)


def mapped(run, dims, form, *arrays):
    if form.name != CUDNN:
        return jax.vmap(run, dims)(*arrays)
    dims = tuple(dim if dim is None else form.maps for dim in dims)
    arrays = jax.vmap(lambda *arrays: arrays, dims)(*arrays)  # all of them get it
    run = functools.partial(run.func, form._replace(maps=form.maps + 1))
    return [jnp.moveaxis(x, 0, form.maps) for x in run(*arrays)]


def trained(run, _, form, *arrays):
    """The same. With what cuDNN keeps for gradients, so that XLA merges both calls."""
    return jax.vjp(run, *arrays)[0] if form.name == CUDNN else run(*arrays)


def gradients(run, moved, form, *arrays):
    """Of the cotangents of all results, and of all inputs."""
    n = len(arrays) - len(moved)
    grads = jax.vjp(run, *arrays[n:])[1]([*arrays[:n]])
    return [x for x, moves in zip(grads, moved, strict=True) if moves]


# The primitive that stands for each of them.

attention_p = Primitive(ATTENTION)
attention_p.multiple_results = True
DECIDED_AS[ATTENTION] = lax.dot_general_p  # its products are products


@functools.lru_cache(maxsize=256)
def jitted(function: Callable, *args: Any, **params: Any) -> Callable:
    return jax.jit(functools.partial(function, *args, **params))


def batched(arrays, dims, *, run, dtype):
    pairs = [*zip(arrays, dims, strict=True)]
    arrays = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
    run = Made(mapped, run, tuple(None if dim is None else 0 for dim in dims))
    outs = attention_p.bind(*arrays, run=run, dtype=dtype)
    return outs, [0] * len(outs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_gradients(run, dtype, *arrays):
    return attention_p.bind(*arrays, run=run, dtype=dtype)


def fwd(run, dtype, *arrays):
    return attention_p.bind(*arrays, run=Made(trained, run), dtype=dtype), arrays


def bwd(run, dtype, arrays, cotangents):
    moved = tuple(map(is_moved, arrays))
    run, args = Made(gradients, run, moved), (*cotangents, *arrays)
    grads = iter(attention_p.bind(*args, run=run, dtype=dtype))
    return tuple(next(grads) if moves else None for moves in moved)


with_gradients.defvjp(fwd, bwd)


def differentiated(primals, along, *, run, dtype):
    if run.is_derived:
        raise NotImplementedError(ONCE)
    none = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    pairs = zip(primals, along, strict=True)
    along = [ad.instantiate_zeros(t) if is_moved(x) else none(x) for x, t in pairs]
    function = functools.partial(with_gradients, run, dtype)
    return jax.jvp(function, (*primals,), (*along,))


def lowered(ctx, *args, run, dtype, name=XLA):
    run = functools.partial(run, Form(name, dtype))
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def lowered_for_cuda(ctx, *args, run, dtype):
    context = ctx.module_context.axis_context
    # It is not known in a program that is exported, and JAX's kernel asks for it.
    has_devices = getattr(context, "device_assignment", ()) is not None
    takes = has_devices and not refused(run, ctx.avals_in, dtype)
    return lowered(ctx, *args, run=run, dtype=dtype, name=CUDNN if takes else XLA)


def typed(*avals, run, dtype):
    return jax.make_jaxpr(jitted(run, Form(XLA, dtype)))(*avals).out_avals


attention_p.def_impl(lambda *xs, **params: jitted(attention_p.bind, **params)(*xs))
attention_p.def_abstract_eval(typed)
ad.primitive_jvps[attention_p] = differentiated
batching.primitive_batchers[attention_p] = batched
mlir.register_lowering(attention_p, lowered)
mlir.register_lowering(attention_p, lowered_for_cuda, platform="cuda")
_compat.requires_devices(attention_p)


def op_by_op(*arrays: jax.Array, run: Callable, dtype: None) -> list[jax.Array]:
    """As the region around it decides about each op of JAX's function."""
    return run(Form(OP_BY_OP, dtype), *arrays)


def products_in(run: Attention | Made, dtype: np.dtype | None) -> float:
    """How many matrix products it holds, of queries and keys or as many numbers."""
    return run.products


def refused(run: Callable, arrays: Sequence[Any], dtype: np.dtype | None) -> str:
    """Why cuDNN's kernel cannot run here, or "" if it can: what JAX says to it."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    try:
        jax.eval_shape(functools.partial(run, Form(CUDNN, dtype)), *shapes)
    except REFUSALS as error:
        return str(error).partition("\n")[0]
    return ""


def chosen(*arrays: Any, run: Callable, dtype: np.dtype | None) -> str:
    """Which form an attention takes on the default device, and why not the other."""
    if default_device().platform != "gpu":
        return "XLA's form, as for any device but an NVIDIA GPU"
    trains = isinstance(run, Attention)  # or may
    why = refused(Made(trained, run) if trains else run, arrays, dtype)
    return f"XLA's form, as cuDNN's says: {why}" if why else "cuDNN's form"
