"""`with_policy` for Flax Linen.

The result is the same module with another class: its methods run under Flax's method
interceptors, which see every call of every module inside, with its path. While they
run, each parameter is in a box that casts it when a module reads it. So neither the
tree of parameters nor the modules change, and lifted transformations see the stored
parameters. `linen_call.py` describes what happens in a call.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
from flax import linen as nn

from .attention import in_flax
from .linen_call import ACTIVE, CALLER, RootCall, Seen
from .overrides import Plan, make_plan
from .policy import FLOAT32_FOR, Policy
from .surgery import change_class, methods_of, replaced, subclass


def with_policy(
    module: nn.Module,
    policy: Policy | str,
    overrides: Mapping[str | type, Policy | str] | None = None,
    *,
    float32_for: Collection[str] = FLOAT32_FOR,
) -> nn.Module:
    """The module with a policy for it and for all modules inside.

    Parameters are stored in `param_dtype`, in which `init` makes them, and cast to
    `compute_dtype` when a module reads them. Each module's inputs are cast to
    `compute_dtype`, and the results of the outermost one to `output_dtype`. Other
    collections, such as batch statistics, are not cast. The tree of variables is that
    of the plain module, so checkpoints load both ways.

    Overrides give other policies to modules inside, and to everything in those, up to
    the next override. If several match the same module, the first decides. Norms get a
    policy automatically: they store and compute in float32, and return the dtype that
    the modules around them compute in.

    A layer's own `dtype=` wins over its policy, as does a cast in the module's code.

    Args:
      module: a Linen module, bound or not.
      policy: a `Policy`, or a string for `get_policy`.
      overrides: maps module paths or classes to policies. A path is a regular
        expression that is searched for in names such as "encoder/Dense_0"; "^head$" is
        the outermost `head`, and "block_1" is not "block_10". A name or class stands
        for the module and everything inside.
      float32_for: functions that stay in float32 although their policy says half
        precision: "norms" (Flax's classes and those derived from them), "softmax",
        "losses" (optax's). `()` for none.

    Returns:
      A module of a subclass. Use it like the plain one: `init`, `apply`, `bind`, as a
      submodule. A module that is already part of another one is changed in place.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: the module already has a policy, or a policy is invalid. When the
        module is called: an override matches no module. The message has the nearest
        paths.

    Examples:
      >>> import jax, jax.numpy as jnp, flax.linen as nn, jamp
      >>> model = nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(2)])
      >>> model = jamp.linen.with_policy(model, "mixed_float16", {"layers_2": "full"})
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))  # float32
      >>> y, kept = model.apply(params, jnp.ones((1, 4)), capture_intermediates=True)
      >>> y.dtype, jax.tree.leaves(kept)[1].dtype
      (dtype('float32'), dtype('float16'))

    PyTorch: FSDP's `MixedPrecision` and apex's opt level O2. Keras's `DTypePolicyMap`
    maps paths in the same way.
    """
    plan = make_plan(CALLER, module, nn.Module, policy, overrides, float32_for)
    if module.parent is None:
        module = module.clone(name=module.name)
    change_class(module, policied_linen(type(module), plan))
    return module


@functools.cache
def policied_linen(base: type[nn.Module], plan: Plan) -> type[nn.Module]:
    """A subclass whose methods run under a policy."""
    seen: Seen = set()

    def call(module, name, function, args, kwargs):
        top = ACTIVE.innermost
        if module.scope is None or (top is not None and top.is_of(module)):
            return function(module, *args, **kwargs)
        return RootCall(plan, seen, module, name, function).run(module, args, kwargs)

    def governed(name, function):
        # Without nowrap Flax would run setup with the parameters as stored.
        return nn.nowrap(replaced(name, function, call))

    def enter(module, name, function, args, kwargs):
        """`apply` or `init`: `method=` may be any function, and is governed too."""
        given = kwargs.get("method")
        if isinstance(given, str):
            given = getattr(type(module), given, given)
        if callable(given):
            given = getattr(given, "__func__", given)
            kwargs["method"] = governed(getattr(given, "__name__", ""), given)
        return function(module, *args, **kwargs)

    methods = methods_of(base, nn.Module)
    namespace = {name: governed(name, f) for name, f in methods.items()}
    for name in ("apply", "init", "init_with_output"):
        namespace[name] = nn.nowrap(replaced(name, getattr(nn.Module, name), enter))
    rebuild = (policied_linen, (base, plan))
    return subclass(base, namespace | {"_jamp_plan": plan}, rebuild)


@functools.wraps(nn.dot_product_attention, assigned=())
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *args: Any,
    **kwargs: Any,
) -> jax.Array:
    """`flax.linen.dot_product_attention`, by the kernel that suits the device.

    It is what `nn.MultiHeadDotProductAttention` takes as `attention_fn=`, and is
    `jamp.dot_product_attention` with the arguments of Flax's function. That function
    itself runs where there is dropout (`dropout_rate`, without `deterministic`; with
    `dropout_rng` and `broadcast_dropout`), where the weights are asked for
    (`sow_weights` of the layer, which passes `module`), with a `precision`, and with a
    product of your own (`einsum_dot_general`, `qk_attn_weights_einsum`,
    `attn_weights_value_einsum`). The softmax is in float32, with
    `force_fp32_for_softmax` or without.

    Args:
      query: floating [batch..., length, heads, size].
      key: [batch..., other length, key heads, size].
      value: of the shape of `key`.
      bias: added to the scores; broadcast to [batch..., heads, length, other length].
      mask: bool, broadcast to the same shape.
      *args: further arguments of Flax's function, in its order.
      **kwargs: the same by name, among them `dtype` to cast the inputs to, by default
        their widest one.

    Returns:
      An array of the query's shape, [batch..., length, heads, size].

    Raises:
      ValueError: shapes do not fit.

    Examples:
      >>> import jamp, jax, jax.numpy as jnp
      >>> import flax.linen as nn
      >>> layer = nn.MultiHeadDotProductAttention(
      ...     4, attention_fn=jamp.linen.dot_product_attention
      ... )
      >>> x = jnp.ones((2, 8, 32))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> with jamp.autocast(dtype=jnp.float16):
      ...     layer.apply(variables, x).dtype
      dtype('float16')

    PyTorch: `torch.nn.functional.scaled_dot_product_attention`.
    """
    args = (query, key, value, bias, mask, *args)
    return in_flax(nn.dot_product_attention, args, kwargs)
