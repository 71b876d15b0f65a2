"""`named_scopes` for Flax NNX: modules run in name scopes with their own paths.

Linen and Haiku write the module path of each op into JAX's name stack, where autocast's
rules, `jamp.debug` and profilers read it. NNX does not. Here, each module of a copy
gets a subclass of its class, whose methods open the scope.
"""

import functools
from typing import TypeVar

import jax
from flax import nnx

from .._checks import shown
from .surgery import Calls, change_class, methods_of, replaced, subclass

M = TypeVar("M", bound=nnx.Module)


def named_scopes(model: M) -> M:
    """A copy of the model whose modules write their paths into JAX's name stack.

    Linen and Haiku do so themselves. With a path, `jamp.autocast(rules={"head":
    jnp.bfloat16})` and the rules of `jamp.calibrate` can name a part of a model, and
    `jamp.debug.explain` and profilers show it. The path consists of attributes:
    "blocks/0/mlp". If several attributes hold the same module, the first one counts.

    The copy shares arrays with `model`. The state, its paths and the results are the
    same, so checkpoints load both ways.

    Args:
      model: an NNX module, with or without a policy.

    Returns:
      The copy. Make the optimizer for it, not for `model`.

    Raises:
      TypeError: `model` is not an NNX module.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> from flax import nnx
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.body = nnx.Linear(4, 4, rngs=rngs)
      ...         self.head = nnx.Linear(4, 2, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.head(self.body(x))
      >>> model = jamp.nnx.named_scopes(Net(nnx.Rngs(0)))
      >>> with jamp.autocast(jnp.bfloat16, rules={"head": jnp.float32}):
      ...     model(jnp.ones((1, 4))).dtype
      dtype('float32')

    PyTorch: the names of `torch.nn.Module.named_modules`.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"jamp.nnx.named_scopes takes an NNX module; got {shown(model)}. Linen, "
            "Haiku and the layers of eqx.nn write paths themselves."
        )
    model = nnx.clone(model)
    for path, module in list(nnx.iter_modules(model)):
        if path and not isinstance(module, nnx.List | nnx.Dict):
            own = vars(type(module))  # scopes below a policy are not removed
            base = own.get("_jamp_unscoped", type(module))
            change_class(module, scoped(base, "/".join(map(str, path))))
    return model


ACTIVE = Calls()  # the module that is being called, and its path


@functools.cache
def scoped(base: type, path: str) -> type:
    """A subclass of a module's class whose methods run in the scope of a path."""

    def call(module, name, function, args, kwargs):
        caller, around = ACTIVE.innermost or (None, "")
        if caller is module:  # a method that calls another one, or that of a base
            return function(module, *args, **kwargs)
        scope = jax.named_scope(path.removeprefix(f"{around}/"))
        with ACTIVE.inside((module, path)), scope:
            return function(module, *args, **kwargs)

    methods = methods_of(base, nnx.Module)
    namespace = {name: replaced(name, f, call) for name, f in methods.items()}
    rebuild = (scoped, (base, path))
    return subclass(base, namespace | {"_jamp_unscoped": base}, rebuild)
