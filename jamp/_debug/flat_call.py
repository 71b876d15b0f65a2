"""A user's call with modules and pytrees as a function of a flat list of named arrays.

Names come from the function's signature ("params/encoder/kernel"). What is not an array
is unchanged, so that `train=True` means the same as in the user's call.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from .._checks import imported
from .._tree import PyTree, partition

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)

ALONE = """{0}: pass the function alone, and its arguments to the function that this \
returns: {0}({1})(*args)."""

Given = ParamSpec("Given")
Out = TypeVar("Out")


def takes_a_function(
    caller: str, others: int = 0
) -> Callable[[Callable[Given, Out]], Callable[Given, Out]]:
    """For a report of a call: an error if it gets that call's arguments itself.

    Args:
      others: how many more arguments it takes by position, none of them an array.
    """

    def decorated(report: Callable[Given, Out]) -> Callable[Given, Out]:
        @functools.wraps(report)
        def checked(*args: Given.args, **kwargs: Given.kwargs) -> Out:
            more = args[1:]
            leaves = jax.tree.leaves(more)
            if len(more) > others or any(isinstance(x, ARRAYS) for x in leaves):
                name = getattr(args[0], "__name__", "fn")
                raise TypeError(ALONE.format(caller, name))
            return report(*args, **kwargs)

        return checked

    return decorated


class FlatCall(NamedTuple):
    run: Callable[[Iterable[jax.Array]], PyTree]  # arrays -> what the function returns
    arrays: list[Any]
    names: tuple[str, ...]  # one for each array
    function: str  # its name, for messages
    n_first: int  # how many of the arrays are in the first argument

    def params(self) -> dict[int, Any]:
        """The floating arrays of the first argument, by their places."""
        first = enumerate(self.arrays[: self.n_first])
        return {i: x for i, x in first if jnp.issubdtype(x.dtype, jnp.floating)}


def with_params(arrays: Sequence[Any], params: Mapping[int, Any]) -> list[Any]:
    return [params.get(i, array) for i, array in enumerate(arrays)]


def open_call(
    caller: str, fn: object, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> FlatCall:
    """Flattens a call. The arrays of a module that is called are arguments too."""
    if not callable(fn):
        raise TypeError(
            f"{caller}(fn)(*args): fn must be a function; got {fn!r} of type "
            f"{type(fn).__name__}. Pass the function, and its arguments to the result."
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    if _has_arrays(fn):
        labels, given, call = [name], [fn], lambda f, *a, **k: f(*a, **k)
    elif isinstance(fn, types.MethodType) and _has_arrays(fn.__self__):
        labels, given, call = [type(fn.__self__).__name__], [fn.__self__], fn.__func__
    else:
        labels, given, call = [], [], fn
    labels += argument_names(fn, len(args))
    values = [*given, *args, *kwargs.values()]
    labelled = list(zip([*labels, *kwargs], values, strict=True))
    n_kwargs = len(kwargs)

    def run(values):
        positional = values[: len(values) - n_kwargs]
        keywords = dict(zip(kwargs, values[len(positional) :], strict=True))
        return call(*positional, **keywords)

    return _flatten(run, labelled, name)


def _flatten(
    run: Callable[[list[PyTree]], PyTree],
    labelled: Sequence[tuple[str, PyTree]],
    name: str,
) -> FlatCall:
    values = [value for _, value in labelled]
    graph, modules = None, [i for i, v in enumerate(values) if _has_modules(v)]
    if modules:  # variables that two modules share stay shared
        from flax import nnx

        graph, state = nnx.split([values[i] for i in modules])
        for place, i in enumerate(modules):
            values[i] = state[place] if place in state else {}
    paths = [p for p, x in jax.tree_util.tree_leaves_with_path(values) if is_values(x)]
    arrays, rebuilt = partition(values, is_values)
    names = tuple(
        "/".join(filter(None, (labelled[path[0].idx][0], path_name(path[1:]))))
        for path in paths
    )

    def run_flat(arrays):
        values = rebuilt(arrays)
        if graph is not None:
            from flax import nnx

            parts = {p: values[i] for p, i in enumerate(modules) if len(values[i])}
            merged = nnx.merge(graph, nnx.State(parts))
            for place, i in enumerate(modules):
                values[i] = merged[place]
        return run(values)

    n_first = sum(path[0].idx == 0 for path in paths)
    return FlatCall(run_flat, arrays, names, name, n_first)


def argument_names(fn: Callable[..., object], n_args: int) -> list[str]:
    """The names of positional arguments, from the signature.

    >>> argument_names(lambda params, *batch: 0, 3)
    ['params', 'batch[0]', 'batch[1]']
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = n_args - len(names)
            names += [f"{parameter.name}[{i}]" for i in range(rest)]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return [*names[:n_args], *(f"args[{i}]" for i in range(len(names), n_args))]


def path_name(path: KeyPath) -> str:
    """The path of a leaf, such as "encoder/kernel".

    NNX keeps the array of a Variable one step deeper.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/value").removesuffix("/.value")


def _has_arrays(value: PyTree) -> bool:
    if isinstance(value, type) or inspect.isfunction(value):
        return False
    return _has_modules(value) or any(map(is_values, jax.tree.leaves(value)))


def _has_modules(value: PyTree) -> bool:
    classes = imported("flax.nnx", "Pytree", "Variable")
    is_module = lambda node: isinstance(node, classes)
    return any(map(is_module, jax.tree.leaves(value, is_leaf=is_module)))


def named_results(result: PyTree) -> tuple[list[str], list[Any]]:
    """The paths of the arrays and numbers that a call returned, and these.

    An Equinox model that a step returns also holds functions, for example.
    """
    leaves = jax.tree_util.tree_leaves_with_path(result)
    leaves = [(path, leaf) for path, leaf in leaves if is_array(leaf)]
    names = [path_name(path) or "the result" for path, _ in leaves]
    return names, [leaf for _, leaf in leaves]


def is_values(leaf: object) -> bool:
    """Whether a leaf of an argument becomes an argument of its own."""
    return isinstance(leaf, ARRAYS)


def is_array(value: object) -> bool:
    """Whether a leaf is an array or a number."""
    return isinstance(value, (*ARRAYS, float, int, complex))
