"""The states of the optax wrappers, and how to find them in a nest of states."""

from typing import Any, NamedTuple

import jax
import optax


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`."""

    loss_scale: jax.Array  # float32 []: what the loss is multiplied by
    growth_tracker: jax.Array  # int32 []: finite steps in a row, 0 after a growth
    found_inf: jax.Array  # bool []: whether the last step was skipped
    skipped_steps: jax.Array  # int32 []: steps skipped so far
    hysteresis_tracker: jax.Array  # int32 []: overflows left before backing off
    recent_skips: jax.Array  # uint32 []: the last 32 steps, the newest lowest; 1: skip
    floor_steps: jax.Array  # int32 []: steps at the floor since it overflowed there
    inner_state: optax.OptState  # of the wrapped optimizer, held on a skipped step


class MasterWeightsState(NamedTuple):
    """State of `master_weights`."""

    master: (
        optax.Params
    )  # float32 copies of half-precision leaves; MaskedNode for others
    inner_state: optax.OptState  # of the wrapped optimizer, for float32 parameters


def part(state: Any, fields: Any) -> list[Any]:
    """The values of those fields that another NamedTuple has too.

    NNX wraps each array of a state in a Variable of one leaf.
    """
    return [jax.tree.leaves(getattr(state, name))[0] for name in fields._fields]


def keeps_master_weights(opt_state: Any) -> bool:
    """Whether there is a `MasterWeightsState` anywhere in an optimizer state."""

    def is_master(node):
        return isinstance(node, MasterWeightsState)

    return any(map(is_master, jax.tree.leaves(opt_state, is_leaf=is_master)))


def find_states(tree: Any) -> dict[str, DynamicLossScaleState]:
    """The loss-scale states in a pytree, by path; those inside one are not searched."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, DynamicLossScaleState)
    )
    return {
        jax.tree_util.keystr(path) or "the root": node
        for path, node in nodes
        if isinstance(node, DynamicLossScaleState)
    }


def check_not_scaled_yet(opt_state: Any, argument: str) -> None:
    """Raises ValueError if an optimizer state scales gradients already."""
    found = find_states(opt_state)
    if found:
        raise ValueError(
            f"{argument} already holds a loss scale, at {', '.join(found)}, and would "
            "divide the gradients twice; use one of the two."
        )


def describe(tree: Any) -> str:
    """The named states in a pytree, for messages."""
    states = []

    def note(node):
        if hasattr(node, "_fields") or hasattr(node, "__dataclass_fields__"):
            states.append(type(node).__name__)
        return False

    jax.tree.leaves(tree, is_leaf=note)
    return ", ".join(dict.fromkeys(states)) or f"a {type(tree).__name__}"
