"""`with_policy` for Flax NNX.

Each module of the copy gets a subclass of its class, whose methods cast. Each parameter
gets a subclass of its Variable type, which casts when one of these methods reads it.
Attributes, paths and metadata do not change, and `isinstance` and NNX's filters work.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from .._tree import cast_floating
from .attention import in_flax
from .float32_region import COMPUTE_DTYPE
from .module_call import ModuleCall
from .overrides import (
    Path,
    Plan,
    check_all_used,
    has_policy,
    joined,
    make_plan,
    nearest,
    policy_of,
)
from .policy import FLOAT32_FOR, Policy
from .surgery import Calls, change_class, methods_of, replaced, subclass

M = TypeVar("M", bound=nnx.Module)
CALLER = "jamp.nnx.with_policy"

ROUNDED_WRITE = """{}: {} writes a parameter while it is called, which it reads in {}: \
each call would round the value, which is stored in {}. If no optimizer trains it, as \
with a running average, make it a Variable that is not an nnx.Param: policies leave \
those alone. Otherwise give the module an override in which it reads the stored value: \
{{{}: "full"}}."""


def with_policy(
    model: M,
    policy: Policy | str,
    overrides: Mapping[str | type, Policy | str] | None = None,
    *,
    float32_for: Collection[str] = FLOAT32_FOR,
) -> M:
    """A copy of the model with a policy for it and for all modules inside.

    Parameters (`nnx.Param` and its subclasses) are stored in `param_dtype` and cast to
    `compute_dtype` when they are read in a call of a module. Outside of calls they read
    as stored. Each module's inputs are cast to `compute_dtype`, and the results of the
    outermost one to `output_dtype`. Other Variables, such as batch statistics, are not
    cast. The state has the same paths as the plain model's, so checkpoints load both
    ways. The copy shares arrays with `model` where no cast is needed.

    Overrides give other policies to modules inside, and to everything in those, up to
    the next override. If several match the same module, the first decides. Norms get a
    policy automatically: they store and compute in float32, and return the dtype that
    the modules around them compute in.

    A layer's own `dtype=` wins over its policy, as does a cast in the module's code. If
    several modules share a parameter, the one that reads it casts it, and the first
    path that leads to it decides how it is stored.

    Args:
      model: an NNX module.
      policy: a `Policy`, or a string for `get_policy`.
      overrides: maps module paths or classes to policies. A path is a regular
        expression that is searched for in names such as "blocks/0/attention"; "^head$"
        is the outermost `head`, and "blocks/1" is not "blocks/10". A name or class
        stands for the module and everything inside.
      float32_for: functions that stay in float32 although their policy says half
        precision: "norms" (Flax's classes and those derived from them), "softmax",
        "losses" (optax's). `()` for none.

    Returns:
      The copy. Make the optimizer for it, not for `model`.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: the model already has a policy, a policy is invalid, or an override
        matches no module: the message has the nearest paths. In a call: a module writes
        a parameter that it has read in fewer bits, such as a running average.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> layers = nnx.Linear(4, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
      >>> model = jamp.nnx.with_policy(nnx.Sequential(*layers), "c=float16")
      >>> model(jnp.ones((1, 4))).dtype, model.layers[0].kernel.dtype
      (dtype('float16'), dtype('float32'))

    PyTorch: FSDP's `MixedPrecision` and apex's opt level O2. Keras's `DTypePolicyMap`
    maps paths in the same way.
    """
    plan = make_plan(CALLER, model, nnx.Module, policy, overrides, float32_for)
    nodes = (node for _, node in nnx.iter_graph(model))
    if any(isinstance(v, nnx.Param) and getattr(v, "hijax", False) for v in nodes):
        raise NotImplementedError(
            f"{CALLER}: the model has hijax Variables, which cannot be cast when they "
            "are read; make it without them (nnx.use_hijax(False))."
        )
    model = nnx.clone(model)
    policies = govern(model, plan)
    for path, variable in list(nnx.iter_graph(model)):
        if isinstance(variable, nnx.Param) and (own := nearest(path, policies)):
            raw = cast_floating(variable.get_raw_value(), own.param_dtype)
            variable.set_raw_value(raw)
    cast_parameters_on_use(model)
    return model


Policies = dict[Path, Policy | None]


def govern(model: nnx.Module, plan: Plan) -> Policies:
    """Gives each module its policy, unless it is or is in one that has one already.

    Returns:
      The policies, and None for a module that keeps its own.
    """
    policies: Policies = {}
    modules = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))
    seen = {(joined(path), type(module)) for path, module in modules}
    check_all_used(CALLER, (key for key, _ in plan.overrides), seen)
    for path, module in modules:
        outer = nearest(path[:-1], policies) if path else plan.policy
        if outer is None or has_policy(module):
            policies[path] = None
            continue
        policies[path] = own = policy_of(plan, joined(path), module, outer)
        ends = not path or own != outer
        change_class(module, policied(type(module), plan, own, ends))
        if isinstance(module, nnx.Embed) and module.dtype == module.embedding.dtype:
            module.dtype = None  # by default it is the stored parameter's dtype
    return policies


ACTIVE = Calls()  # the module that is being called, and its policy


@functools.cache
def policied(base: type, plan: Plan, policy: Policy, ends: bool) -> type:
    """A subclass whose methods run under a policy, which perhaps ends at the module."""
    if issubclass(base, nnx.List | nnx.Dict):
        return base  # containers

    def call(module, name, function, args, kwargs):
        inside, around = ACTIVE.innermost or (None, None)
        if inside is module or (ends and type(inside) is type(module)):
            return function(module, *args, **kwargs)  # itself, or a copy under jit
        if inside is None:  # perhaps just merged from a plain model's state
            cast_parameters_on_use(module)
        with ACTIVE.inside((module, policy)):
            governed = ModuleCall(plan, module, name, policy, around, ends)
            return governed.run(functools.partial(function, module), args, kwargs)

    methods = methods_of(base, nnx.Module)
    namespace = {name: replaced(name, f, call) for name, f in methods.items()}
    rebuild = (policied, (base, plan, policy, ends))
    return subclass(base, namespace | {"_jamp_plan": plan}, rebuild)


def cast_parameters_on_use(model: nnx.Module) -> None:
    nodes = [node for _, node in nnx.iter_graph(model)]
    bridges = [node for node in nodes if isinstance(node, nnx.bridge.ToNNX)]
    foreign = {id(v) for bridge in bridges for _, v in nnx.iter_graph(bridge)}
    for variable in nodes:
        # Linen's parameters stay: it does not know these types.
        if isinstance(variable, nnx.Param) and id(variable) not in foreign:
            change_class(variable, cast_on_use(type(variable)))


@functools.cache
def cast_on_use(base: type[nnx.Variable]) -> type[nnx.Variable]:
    """A subclass of a Variable type that casts when it is read in a call."""
    if hasattr(base, "_jamp_rebuild"):
        return base  # it is one already

    def get_value(self, **kwargs):
        dtype, value = COMPUTE_DTYPE.value, base.get_value(self, **kwargs)
        return value if dtype is None else cast_floating(value, dtype)

    def set_value(self, value, **kwargs):
        stored, read = self.get_raw_value(), COMPUTE_DTYPE.value
        is_array = isinstance(stored, jax.Array)
        if read is not None and is_array and jnp.issubdtype(stored.dtype, jnp.floating):
            if read.itemsize < stored.dtype.itemsize:
                kind = type(ACTIVE.innermost[0]).__name__
                text = ROUNDED_WRITE.format(CALLER, kind, read, stored.dtype, kind)
                raise ValueError(text)
            value = cast_floating(value, stored.dtype)
        base.set_value(self, value, **kwargs)

    def __getattr__(self, name):
        value = base.__getattr__(self, name)  # metadata, or an attribute of the array
        if COMPUTE_DTYPE.value is None or name in self.get_metadata():
            return value
        return getattr(self.get_value(), name)

    methods = {f.__name__: f for f in (get_value, set_value, __getattr__)}
    made = subclass(base, methods, (cast_on_use, (base,)))
    made.__module__ = "jamp.nnx"  # tells the two apart in messages
    return made


@functools.wraps(nnx.dot_product_attention, assigned=())
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *args: Any,
    **kwargs: Any,
) -> jax.Array:
    """`flax.nnx.dot_product_attention`, by the kernel that suits the device.

    It is what `nnx.MultiHeadAttention` takes as `attention_fn=`, and is
    `jamp.dot_product_attention` with the arguments of Flax's function. That function
    itself runs where there is dropout (`dropout_rate`, without `deterministic`; with
    `dropout_rng` and `broadcast_dropout`), where the weights are asked for
    (`sow_weights` of the layer, which passes `module`), and with a `precision` or
    `promote_dtype`.

    Args:
      query: floating [batch..., length, heads, size].
      key: [batch..., other length, key heads, size].
      value: of the shape of `key`.
      bias: added to the scores; broadcast to [batch..., heads, length, other length].
      mask: bool, broadcast to the same shape.
      *args: further arguments of Flax's function, in its order.
      **kwargs: the same by name, among them `dtype` to cast the inputs to, by default
        their widest one, and `is_causal`, whether no place attends to later ones.

    Returns:
      An array of the query's shape, [batch..., length, heads, size].

    Raises:
      ValueError: shapes do not fit.

    Examples:
      >>> import jamp, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = nnx.MultiHeadAttention(
      ...     4, 32, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=jamp.nnx.dot_product_attention,
      ... )
      >>> with jamp.autocast(dtype=jnp.float16):
      ...     layer(jnp.ones((2, 8, 32))).dtype
      dtype('float16')

    PyTorch: `torch.nn.functional.scaled_dot_product_attention`.
    """
    args = (query, key, value, bias, mask, *args)
    return in_flax(nnx.dot_product_attention, args, kwargs)
