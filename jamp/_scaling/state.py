"""The states of the optax wrappers: how to find them in a nest, and their dtypes."""

import contextlib
import operator
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .._checks import shown
from .._tree import (
    NUMBERS,
    PyTree,
    T,
    dtype_of,
    is_half,
    other_node,
    path_text,
    widen,
)
from .master_form import keep, master_of
from .rule import SCALAR_DTYPES, LossScaleState
from .skip import extended
from .traced import NEEDS_VALUES
from .transformation import is_hole

HIDDEN = """optax.apply_if_finite around a loss scale hides overflows from it, so that \
it cannot back off. Leave apply_if_finite out: jamp.dynamic_loss_scale itself skips \
these steps."""

SUMMED = """optax.MultiSteps around a loss scale adds up scaled gradients without a \
check, and an inf stays in its sum forever. Put the loss scale around it: \
jamp.dynamic_loss_scale(optax.MultiSteps(optimizer, every_k_schedule=k))."""

PASSED_ON = """optax.conditionally_transform around a loss scale passes scaled \
gradients on as updates, in each step in which its condition is false. Put the loss \
scale around it: jamp.dynamic_loss_scale(optax.conditionally_transform(...)). To move \
nothing in these steps, use optax.conditionally_mask."""

CONTINUE = """ To continue with the state of the optimizer inside it, pass \
init(params)._replace(inner_state=state)."""

# Around a loss scale: where a state has the inner one, and what goes wrong.
REFUSED = {
    optax.ApplyIfFiniteState: ("inner_state", HIDDEN),
    optax.MultiStepsState: ("inner_opt_state", SUMMED),
    optax.ConditionallyTransformState: ("inner_state", PASSED_ON),
}


STACKED = """Of stacked states, and of one that is replicated for jax.pmap, call it \
inside the function that jax.vmap or jax.pmap maps."""


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`.

    It is a pytree of eight scalars and the state of the wrapped optimizer. Save it,
    shard it and donate it like any other state. `jamp.metrics` and `jamp.loss_scale`
    find it in a nested state, and `optax.tree.set` changes a field.

    Attributes:
      loss_scale: float32 []: the factor that the loss is multiplied by.
      growth_tracker: int32 []: finite steps in a row, 0 after a growth.
      found_inf: bool []: whether the last step was skipped.
      skipped_steps: int32 []: steps skipped so far.
      hysteresis_tracker: int32 []: -2, less the overflows forgiven since the last
        growth; -1 if disabled.
      recent_skips: uint32 []: the last 32 steps, the newest lowest; 1 is a skip.
      floor_steps: int32 []: steps at the floor since it overflowed there.
      inner_state: of the wrapped optimizer, held on a skipped step.
      retried_steps: int32 []: attempts that `retry` ran again so far.

    Raises:
      AttributeError: what is asked for is not a field. If the optimizer's own state has
        it, the message says where.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
      >>> state = tx.init({"w": jnp.ones(2)})
      >>> print(state.loss_scale, state.growth_tracker, state.found_inf)
      65536.0 0 False
      >>> state = optax.tree.set(state, loss_scale=jnp.float32(1024))
      >>> print(jamp.loss_scale(state))
      1024.0

    PyTorch: `_scale` and `_growth_tracker` of `GradScaler`, which does not count skips.
    """

    loss_scale: jax.Array
    growth_tracker: jax.Array
    found_inf: jax.Array
    skipped_steps: jax.Array
    hysteresis_tracker: jax.Array
    recent_skips: jax.Array
    floor_steps: jax.Array
    inner_state: optax.OptState
    retried_steps: ArrayLike = np.int32(0)  # last: older states are made without it

    def __getattr__(self, name: str) -> Any:
        raise of_inner(self, name)


class MasterWeightsState(NamedTuple):
    """State of `master_weights`."""

    # float32 copies or int16 remainders of half leaves; MaskedNode for others
    master: optax.Params
    inner_state: optax.OptState  # of the wrapped optimizer, for float32 parameters

    def __getattr__(self, name: str) -> Any:
        raise of_inner(self, name)


def of_inner(state: Any, name: str) -> AttributeError:
    """The error for an attribute that a state lacks: it may be the optimizer's own."""
    text = f"{type(state).__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):  # JAX and copy ask for many
        return AttributeError(text, name=name, obj=state)
    has_it = lambda node: name in getattr(type(node), "_fields", ())
    inner = jax.tree_util.tree_leaves_with_path(state.inner_state, is_leaf=has_it)
    found = [jax.tree_util.keystr(path) for path, node in inner if has_it(node)]
    if found:
        at = " or ".join(f".inner_state{path}.{name}" for path in found[:3])
        text += f". The optimizer's own state has it: {at} of this state."
    return AttributeError(text, name=name, obj=state)


def scalars_of(state: object) -> LossScaleState:
    """The eight scalars of a `DynamicLossScaleState` or a `GradScaler`.

    Numbers from elsewhere (NumPy, JSON) get the dtypes that init makes. NNX wraps each
    array of a state in a Variable with one leaf.

    Raises:
      ValueError: one is missing, or cannot have the dtype that init makes.
    """
    names = LossScaleState._fields
    return LossScaleState(*(_number(name, getattr(state, name)) for name in names))


def _number(name: str, value: object) -> jax.Array:
    leaves = jax.tree.leaves(value)
    leaf = leaves[0] if len(leaves) == 1 else None
    wanted = jnp.dtype(SCALAR_DTYPES[name])
    kinds = {"f": (jnp.floating, jnp.integer), "b": (jnp.bool_,)}
    is_number = isinstance(leaf, (jax.Array, np.ndarray, np.generic, *NUMBERS))
    given = dtype_of(leaf) if is_number else None
    if given == wanted and isinstance(leaf, jax.Array) and not leaf.weak_type:
        return leaf
    fits = kinds.get(wanted.kind, (jnp.integer,))
    if given is not None and any(jnp.issubdtype(given, kind) for kind in fits):
        with contextlib.suppress(OverflowError):  # an integer with too many bits
            return jnp.asarray(leaf, wanted)
    raise ValueError(
        f"{name} of the state must be {wanted}; got {shown(value)}. Pass the state "
        "that init made."
    )


def state_of(
    scalars: LossScaleState, inner_state: optax.OptState
) -> DynamicLossScaleState:
    """The state of a wrapper from its parts."""
    return DynamicLossScaleState(**scalars._asdict(), inner_state=inner_state)


def keeps_master_weights(opt_state: PyTree) -> bool:
    """Whether there is a `MasterWeightsState` anywhere in an optimizer state."""
    return any(map(is_master, jax.tree.leaves(opt_state, is_leaf=is_master)))


def is_master(node: object) -> bool:
    return isinstance(node, MasterWeightsState)


def find_states(tree: PyTree) -> dict[str, DynamicLossScaleState]:
    """The loss-scale states in a pytree, by path; those inside others are not searched.

    Raises:
      ValueError: a transformation around one hides overflows from it, adds up what it
        has not checked, or passes scaled gradients on.
    """
    kinds = DynamicLossScaleState, *REFUSED
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, kinds)
    )
    for _, node in nodes:
        field, problem = REFUSED.get(type(node), ("", ""))
        if field and find_states(getattr(node, field)):
            raise ValueError(problem)
    return {
        path_text(path): node
        for path, node in nodes
        if isinstance(node, DynamicLossScaleState)
    }


def check_not_scaled_yet(opt_state: PyTree, argument: str) -> None:
    """Raises ValueError if an optimizer state already scales gradients."""
    found = find_states(opt_state)
    if found:
        raise ValueError(
            f"{argument} already holds a loss scale, at {', '.join(found)}, and would "
            "divide the gradients twice; use one of the two."
        )


def check_not_stacked(numbers: Mapping[str, jax.Array], caller: str) -> None:
    """Raises ValueError if one of the numbers of a state has dimensions."""
    for name, value in numbers.items():
        if shape := jnp.shape(value):
            raise ValueError(
                f"{caller}: {name} of the state must be one number; got shape {shape}. "
                f"{STACKED}"
            )


def check_state(state: object, cls: type, caller: str) -> None:
    """Raises ValueError unless an optimizer state is of a class of this module."""
    if not isinstance(state, cls):
        is_own = lambda node: isinstance(node, DynamicLossScaleState | cls)
        has_own = any(map(is_own, jax.tree.leaves(state, is_leaf=is_own)))
        advice = CONTINUE if _states(state) and not has_own else ""
        raise ValueError(
            f"{caller}: the state must be a {cls.__name__}, as made by this "
            f"transformation's init; got {describe(state)}.{advice}"
        )


@contextlib.contextmanager
def explained(
    caller: str,
    init: Callable[..., PyTree],
    state: PyTree,
    params: PyTree,
    at: str = "",
) -> Generator[None]:
    """Raises ValueError if an optimizer fails because its state is another one's.

    Args:
      at: where the state is in the one that the user passed.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        problem = _not_its_own(caller, init, state, params, at)
        if problem is None:
            raise
        raise problem from error


def check_moved(
    caller: str,
    init: Callable[..., PyTree],
    new: PyTree,
    old: PyTree,
    params: PyTree,
    at: str = "",
) -> None:
    """Raises ValueError if an optimizer drops or hands on a state that is not its own.

    A stateless optimizer takes any state, and may return it as it is.
    """
    kinds = DynamicLossScaleState, MasterWeightsState
    is_own = lambda node: isinstance(node, kinds)
    nodes_of = lambda tree: filter(is_own, jax.tree.leaves(tree, is_leaf=is_own))
    given, got = list(nodes_of(old)), list(nodes_of(new))
    moved = len(got) == len(given) and all(map(operator.is_not, got, given))
    leaves, kept = jax.tree.leaves(old), jax.tree.leaves(new)
    if leaves and len(leaves) == len(kept):
        moved &= not all(map(operator.is_, leaves, kept))
    if not moved and (problem := _not_its_own(caller, init, old, params, at)):
        raise problem


def _not_its_own(
    caller: str,
    init: Callable[..., PyTree],
    state: PyTree,
    params: PyTree,
    at: str,
) -> ValueError | None:
    """The error for a state that differs from what `init` makes, or None."""
    if params is None:
        return None
    difference = _difference(state, jax.eval_shape(init, params), at)
    if difference is None:
        return None
    return ValueError(
        f"{caller}: the state belongs to another optimizer or to other parameters: "
        f"{difference}. Pass the state that this transformation's init made."
    )


def _difference(given: PyTree, made: PyTree, at: str) -> str | None:
    """How a state differs from what `init` makes."""
    place = lambda path: f"{at}{path}" if path or at else "the root"

    def shape(leaf: Any) -> str:
        is_array = hasattr(leaf, "shape") or isinstance(leaf, NUMBERS)
        return f"shape {jnp.shape(leaf)}" if is_array else f"a {type(leaf).__name__}"

    def shapes(state: PyTree) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {jax.tree_util.keystr(path): shape(leaf) for path, leaf in leaves}

    if node := other_node(given, made):
        path, has, wants = node
        types = f"of type {has}, but init makes one of type {wants}"
        return f"at {place(path)} it has a node {types}"
    found, expected = shapes(given), shapes(made)
    for path in expected | found:
        has, wants = found.get(path, "nothing"), expected.get(path, "nothing")
        if has != wants:
            return f"at {place(path)} it has {has}, but init makes {wants}"
    same = jax.tree.structure(given) == jax.tree.structure(made)
    return None if same else "its tree differs from the one that init makes"


def describe(tree: PyTree) -> str:
    """The named states in a pytree, for messages."""
    return ", ".join(dict.fromkeys(_states(tree))) or f"a {type(tree).__name__}"


def _states(tree: PyTree) -> list[str]:
    """The names of the classes of states in a pytree."""
    states: list[str] = []

    def note(node: object) -> bool:
        if hasattr(node, "_fields") or hasattr(node, "__dataclass_fields__"):
            states.append(type(node).__name__)
        return False

    jax.tree.leaves(tree, is_leaf=note)
    return states


def made_wide(init: Callable[[optax.Params], PyTree], params: optax.Params) -> PyTree:
    """`init(params)` with float32 in place of half precision.

    A loss scale gives its optimizer float32 gradients, so that a state in the dtypes of
    half-precision parameters would change its dtypes in the first step. A conditional,
    a scan and a donated buffer need a state that does not. Master weights must see the
    parameters themselves. What stands beside them gets float32 gradients too.
    """
    if not any(map(is_half, jax.tree.leaves(params))):
        return init(params)
    shapes = jax.eval_shape(init, params)
    if not keeps_master_weights(shapes):
        return init(widen(params))
    own = init(params)
    beside = jax.tree.leaves(shapes, is_leaf=is_master)
    if not any(is_half(leaf) for leaf in beside if not is_master(leaf)):
        return own
    choose = lambda own, wide: own if is_master(own) else wide
    return jax.tree.map(choose, own, init(widen(params)), is_leaf=is_master)


def as_made(
    state: T, init: Callable[[optax.Params], PyTree], params: optax.Params | None
) -> T:
    """A state of any run in the dtypes that `init` makes, as far as these are wider.

    Master weights take the form that `init` makes.
    """
    may_differ = lambda node: is_master(node) or _is_half_array(node)
    nodes = jax.tree.leaves(state, is_leaf=is_master)
    if params is None or not any(map(may_differ, nodes)):
        return state
    try:
        like = jax.eval_shape(init, params)
    except NEEDS_VALUES:
        return state
    like = extended(like, state)
    return _in_form_of(like, as_wide_as(like, state), params)


def _in_form_of(like: PyTree, state: T, params: optax.Params) -> T:
    """A state whose master weights have the form of those in another one."""

    def converted(kept: PyTree, like: Any, param: PyTree) -> PyTree:
        same = is_hole(kept) or dtype_of(kept) == like.dtype
        return kept if same else keep(master_of(kept, param), like.dtype)

    def node_of(node: PyTree, like: PyTree) -> PyTree:
        if not is_master(node):
            return node
        master = jax.tree.map(
            converted, node.master, like.master, params, is_leaf=is_hole
        )
        return node._replace(master=master)

    if jax.tree.structure(like) != jax.tree.structure(state):
        return state
    return jax.tree.map(node_of, state, like, is_leaf=is_master)


def as_wide_as(like: PyTree, state: T) -> T:
    """A state whose half-precision leaves have the wider dtypes of another one.

    It may have leaves that the other one lacks. If it lacks some, it does not change,
    and is refused elsewhere.
    """
    like = extended(like, state)

    def cast(leaf: PyTree, like: Any) -> PyTree:
        if not (_is_half_array(leaf) and jnp.issubdtype(like.dtype, jnp.floating)):
            return leaf
        dtype = jnp.promote_types(dtype_of(leaf), like.dtype)
        return leaf if dtype == dtype_of(leaf) else jnp.asarray(leaf, dtype)

    if jax.tree.structure(like) != jax.tree.structure(state):
        return state
    return jax.tree.map(cast, state, like)


def _is_half_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_half(leaf)
