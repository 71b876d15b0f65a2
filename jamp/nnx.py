"""Flax NNX: a policy for a model, and paths for rules to name its parts."""

from . import _stable
from ._checks import stand_ins as _stand_ins

try:
    from ._policy.nnx import dot_product_attention as dot_product_attention
    from ._policy.nnx import with_policy as with_policy
except Exception as _error:  # JAX's internals have moved
    _names = "dot_product_attention", "with_policy"
    globals().update(_stand_ins(__name__, _error, *_names))

from ._policy.scopes import named_scopes as named_scopes

_stable.publish(__name__)
