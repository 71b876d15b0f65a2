"""Flax Linen: a policy for a model and its parts, and a train state for `jamp.step`."""

from . import _stable
from ._checks import stand_ins as _stand_ins
from ._scaling.train_state import TrainState as TrainState

try:
    from ._policy.linen import dot_product_attention as dot_product_attention
    from ._policy.linen import with_policy as with_policy
except Exception as _error:  # JAX's internals have moved
    _names = "dot_product_attention", "with_policy"
    globals().update(_stand_ins(__name__, _error, *_names))

_stable.publish(__name__)
