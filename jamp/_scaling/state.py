"""The states of the optax wrappers, and how to find them in a nest."""

import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .._checks import shown
from .._tree import NUMBERS, PyTree, dtype_of, path_text
from .rule import SCALAR_DTYPES, LossScaleState

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

# Around a loss scale: where a state has the inner one, and what goes wrong.
REFUSED = {
    optax.ApplyIfFiniteState: ("inner_state", HIDDEN),
    optax.MultiStepsState: ("inner_opt_state", SUMMED),
    optax.ConditionallyTransformState: ("inner_state", PASSED_ON),
}

FRONT = """{}: {} stands in front of the loss scale, in a chain or as a count of its \
own, and gets scaled gradients. Put it inside: \
jamp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer))."""

PART = """{}: a mask or a partition around a loss scale passes scaled gradients on, as \
updates of what it leaves out. Put the loss scale around it: \
jamp.dynamic_loss_scale(optax.masked(...)). To freeze a parameter, give it \
optax.set_to_zero(), as one of the optimizers of optax.multi_transform."""

BEHIND = """{}: {} stands behind jamp.master_weights. An update takes the parameter to \
its master, rounded: what stands behind that in a chain (a scale, decayed weights, a \
mask) parts them. Put it inside: \
jamp.master_weights(optax.chain(optimizer, optax.scale(0.5)))."""

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
      hysteresis_tracker: int32 []: overflows forgiven since the last growth; -1 if
        disabled.
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


def keeps_master_weights(opt_state: PyTree) -> bool:
    return any(map(is_master, jax.tree.leaves(opt_state, is_leaf=is_master)))


def is_master(node: object) -> bool:
    return isinstance(node, MasterWeightsState)


def is_scale(node: object) -> TypeGuard[DynamicLossScaleState]:
    return isinstance(node, DynamicLossScaleState)


def find_states(tree: PyTree) -> dict[str, DynamicLossScaleState]:
    """The loss-scale states in a pytree, by path, except those inside others.

    It raises ValueError for one in a transformation that misuses gradients (`REFUSED`).
    """
    kinds = DynamicLossScaleState, *REFUSED
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, kinds)
    )
    for _, node in nodes:
        field, problem = REFUSED.get(type(node), ("", ""))
        if field and find_states(getattr(node, field)):
            raise ValueError(problem)
    return {path_text(path): node for path, node in nodes if is_scale(node)}


def check_places(opt_state: PyTree, caller: str) -> None:
    """Raises ValueError if a loss scale or masters stand in the wrong place of a nest.

    The state shows it: a chain's is a tuple, or an OrderedDict if its members have
    names. What changes no number there, such as `optax.identity()`, is refused too.
    """
    node: Any = opt_state
    several = isinstance(opt_state, tuple | dict)
    members = [*(node.values() if isinstance(node, dict) else node)] if several else []
    if isinstance(node, optax.transforms.PartitionState):
        groups: Any = node.inner_states.values()
        members = [group.inner_state for group in groups]
        if len({*map(bool, map(find_states, members))}) > 1:
            raise ValueError(PART.format(caller))
    elif isinstance(node, optax.MaskedState) and find_states(node):
        raise ValueError(PART.format(caller))
    elif type(node) in (tuple, OrderedDict):
        scaled = [place for place, m in enumerate(members) if find_states(m)]
        if scaled and scaled[0]:
            raise ValueError(FRONT.format(caller, describe(members[0])))
        masters = [place for place, m in enumerate(members) if keeps_master_weights(m)]
        if masters and masters[-1] + 1 < len(members):
            raise ValueError(BEHIND.format(caller, describe(members[-1])))
    for member in members:
        check_places(member, caller)


def check_not_scaled_yet(opt_state: PyTree, argument: str) -> None:
    if found := find_states(opt_state):
        raise ValueError(
            f"{argument} already holds a loss scale, at {', '.join(found)}, and would "
            "divide the gradients twice; use one of the two."
        )


def check_not_stacked(numbers: Mapping[str, jax.Array], caller: str) -> None:
    for name, value in numbers.items():
        if shape := jnp.shape(value):
            raise ValueError(
                f"{caller}: {name} of the state must be one number; got shape {shape}. "
                f"{STACKED}"
            )


def describe(tree: PyTree) -> str:
    """The named states in a pytree, for messages."""
    names = dict.fromkeys(classes_of_states(tree))
    return ", ".join(names) or f"a {type(tree).__name__}"


def classes_of_states(tree: PyTree) -> list[str]:
    states: list[str] = []

    def note(node: object) -> bool:
        if hasattr(node, "_fields") or hasattr(node, "__dataclass_fields__"):
            states.append(type(node).__name__)
        return False

    jax.tree.leaves(tree, is_leaf=note)
    return states
