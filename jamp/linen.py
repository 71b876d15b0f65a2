"""Flax Linen: a policy for a model and its parts, and a train state for `jamp.step`."""

from ._policy.linen import with_policy as with_policy
from ._scaling.train_state import TrainState as TrainState
