"""Policy: which dtypes parameters, computation and outputs have. jmp's names."""

import dataclasses
from collections.abc import Callable, Collection
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._autocast.ops import KEPT
from .._checks import DTYPE_NAMES, brief, did_you_mean, dtype_or_none, unavailable
from .._targets import half_dtype
from .._tree import cast_floating

Tree = TypeVar("Tree")

FLOAT32_FOR = tuple(KEPT)  # norms, softmax, losses

KEYS = {"p": "param_dtype", "c": "compute_dtype", "o": "output_dtype"}
KEYS |= {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
NAMED = {
    "mixed_float16": "p=f32,c=f16,o=f32",
    "mixed_bfloat16": "p=f32,c=bf16,o=f32",
}

BAD_STRING = """get_policy({!r}): {}
Write "params=float32,compute=float16,output=float32", or in short "c=float16,o=full", \
or one dtype for all three ("half"), or "mixed_float16"."""


def cast_to_full(tree: Tree) -> Tree:
    """A copy of a pytree with its floating leaves in float32.

    Args:
      tree: any pytree. Leaves that are not floating arrays pass, as in `Policy`'s
        casts.

    Returns:
      The same structure; arrays that are already float32 are not copied.

    Examples:
      >>> import jamp, jax.numpy as jnp
      >>> jamp.cast_to_full({"w": jnp.float16(1.0), "step": 3})
      {'step': 3, 'w': Array(1., dtype=float32)}

    PyTorch: `module.float()`, which changes a module. Source: jmp.
    """
    return cast_floating(tree, jnp.dtype("float32"))


def cast_to_half(tree: Tree) -> Tree:
    """A copy of a pytree with its floating leaves in `half_dtype()`.

    Args:
      tree: any pytree. Leaves that are not floating arrays pass, as in `Policy`'s
        casts.

    Returns:
      The same structure. In float16, numbers above 65504 become inf.

    Examples:
      >>> import jamp, jax.numpy as jnp
      >>> jamp.cast_to_half({"w": jnp.float32(1.0), "step": 3})
      {'step': 3, 'w': Array(1., dtype=float16)}

    PyTorch: `module.half()`, which changes a module. Source: jmp.
    """
    return cast_floating(tree, half_dtype())


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """The dtypes of a model's parameters, of its computation and of its outputs.

    A policy is frozen and hashable. A dtype is one that JAX accepts or a name: "half"
    is float16, or bfloat16 on TPU, and "full" is float32. `str(policy)` is jmp's short
    form, and `get_policy` reads it back.

    The casts change the floating arrays of a pytree: JAX's, NumPy's (which stay
    NumPy's) and `jax.ShapeDtypeStruct`. Integers, bools, complex numbers, PRNG keys,
    `None`, Python numbers (which follow the arrays that they meet) and other objects
    pass.

    Args:
      param_dtype: the dtype that parameters are stored in.
      compute_dtype: the dtype that parameters and inputs are cast to for computation.
      output_dtype: the dtype that results are cast to.

    Raises:
      ValueError: a dtype is not floating, or a name is unknown.

    Examples:
      >>> import jamp, jax.numpy as jnp
      >>> policy = jamp.Policy("float32", jnp.float16, "full")
      >>> policy
      get_policy('params=float32,compute=float16,output=float32')
      >>> str(policy)
      'p=full,c=f16,o=full'
      >>> policy.cast_to_compute({"w": jnp.ones(2), "step": 3})
      {'step': 3, 'w': Array([1., 1.], dtype=float16)}

    PyTorch: FSDP's `MixedPrecision(param_dtype=...)`, whose `param_dtype` is the
    compute dtype, and apex's opt levels O2 and O3. Names and results are jmp's.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype

    def __post_init__(self) -> None:
        for field in dataclasses.fields(Policy):
            dtype = _dtype(getattr(self, field.name), f"Policy({field.name}=...)")
            object.__setattr__(self, field.name, dtype)

    def cast_to_param(self, tree: Tree) -> Tree:
        """A copy of the pytree `tree` with its floating arrays in `param_dtype`."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """A copy of the pytree `tree` with its floating arrays in `compute_dtype`."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: Tree) -> Tree:
        """A copy of the pytree `tree` with its floating arrays in `output_dtype`."""
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """The same policy with `output_dtype`; ValueError if that is not floating."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def wrap(
        self, function: Callable, *, float32_for: tuple[str, ...] = FLOAT32_FOR
    ) -> Callable:
        """Applies the policy to a function of arrays: plain JAX, Equinox, Haiku.

        All floating arrays in the arguments, including parameters, are cast to
        `compute_dtype`, and those in the result to `output_dtype`. The casts are
        differentiable: gradients have the dtypes of the arguments. Arrays that the
        function gets from a closure or from an object's attributes are not cast.

        Args:
          function: any function of pytrees, such as an `equinox.Module`.
          float32_for: functions that stay in float32: "norms" (Equinox's, with their
            parameters, and Haiku's), "softmax", "losses" (optax's). In Python, the
            results of softmax and of Haiku's norms are float32, but ops that use them
            get half precision. Equinox's norms return the dtype that they got.

        Raises:
          TypeError: `function` cannot be called.
          ValueError: a name in `float32_for` is unknown.

        Examples:
          >>> import jamp, jax, jax.numpy as jnp
          >>> def model(params, x):
          ...     return x @ params["w"]
          >>> model = jamp.get_policy("mixed_float16").wrap(model)
          >>> params, x = {"w": jnp.full((2, 2), 0.1)}, jnp.ones((1, 2))
          >>> model(params, x)  # computed in float16
          Array([[0.19995117, 0.19995117]], dtype=float32)
          >>> jax.grad(lambda params: model(params, x).sum())(params)["w"].dtype
          dtype('float32')
        """
        try:
            from .wrap import wrap  # its region needs JAX's private parts; casts do not
        except Exception as error:
            raise unavailable("jamp.Policy.wrap", error) from error
        kept = check_float32_for(float32_for)
        return wrap(function, self.compute_dtype, self.output_dtype, kept)

    def __str__(self):
        dtypes = dataclasses.astuple(self)
        names = (DTYPE_NAMES.get(dtype.name, (dtype.name,))[0] for dtype in dtypes)
        return "p={},c={},o={}".format(*names)

    def __repr__(self):
        dtypes = "params={},compute={},output={}".format(*dataclasses.astuple(self))
        return f"get_policy({dtypes!r})"


def get_policy(policy_name: str | Policy) -> Policy:
    """The policy that a string describes.

    The string is a list such as `"params=float32,compute=float16,output=float32"` (or
    `p`, `c`, `o`), the name of one dtype for all three, or `"mixed_float16"` or
    `"mixed_bfloat16"`: float32 parameters and outputs, half-precision computation. In a
    list, the default of params is float32, that of compute is the dtype of params, and
    that of output the dtype of compute.

    Args:
      policy_name: the string, or a `Policy`, which is returned.

    Raises:
      ValueError: a key or dtype is unknown. The message has similar names.
      TypeError: `policy_name` is neither a string nor a policy.

    Examples:
      >>> import jamp
      >>> jamp.get_policy("c=f16")
      get_policy('params=float32,compute=float16,output=float16')
      >>> jamp.get_policy("mixed_float16").output_dtype
      dtype('float32')

    PyTorch: no counterpart. The grammar is jmp's; the last two names are Keras's.
    """
    return as_policy("policy_name", policy_name)


def as_policy(argument: str, value: str | Policy) -> Policy:
    if isinstance(value, Policy):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{argument} must be a jamp.Policy or a string for jamp.get_policy; got "
            f"{value!r}."
        )
    try:
        return _parsed(NAMED.get(value.strip(), value))
    except ValueError as error:
        raise ValueError(BAD_STRING.format(value, error)) from None


def _parsed(text: str) -> Policy:
    if "=" not in text:
        dtype = _dtype(text.strip(), "Policy")
        return Policy(dtype, dtype, dtype)
    found: dict[str, np.dtype] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        field = KEYS.get(key)
        if field is None or field in found:
            problem = "Unknown key" if field is None else "Second value for key"
            raise ValueError(
                f"{problem} {key!r}; the keys are 'params', 'compute', 'output'."
            )
        found[field] = _dtype(value, key)
    param = found.get("param_dtype", jnp.dtype("float32"))
    compute = found.get("compute_dtype", param)
    return Policy(param, compute, found.get("output_dtype", compute))


def _dtype(value: DTypeLike | None, where: str) -> np.dtype:
    """The floating dtype that a user means. Raises ValueError for anything else."""
    dtype = dtype_or_none(value)
    if dtype is None:
        problem = f"Unknown dtype {brief(value)}"
    elif not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 8:
        problem = f"{dtype} is not a floating dtype"
    else:
        return dtype
    names = [*DTYPE_NAMES, *(NAMED if where == "Policy" else ())]
    hint = did_you_mean(value, names)
    raise ValueError(f"{where}: {problem}; use one of {', '.join(names)}.{hint}")


def check_float32_for(names: Collection[str]) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(
            f"float32_for must be a tuple of names, such as {FLOAT32_FOR}; got "
            f"{names!r}."
        )
    for name in names:
        if not isinstance(name, str) or name not in KEPT:
            hint = did_you_mean(name, KEPT)
            raise ValueError(
                f"float32_for: unknown name {name!r}; the names are "
                f"{', '.join(map(repr, KEPT))}.{hint}"
            )
    return frozenset(names)
