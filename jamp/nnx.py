"""Flax NNX: a policy for a model, paths for rules to name its parts, and retries."""

from . import _stable
from ._checks import stand_ins as _stand_ins

try:
    from ._policy.nnx import with_policy as with_policy
except Exception as _error:  # JAX's internals have moved
    globals().update(_stand_ins(__name__, _error, "with_policy"))

from ._policy.scopes import named_scopes as named_scopes
from ._scaling.nnx_retry import find_loss_scale as find_loss_scale
from ._scaling.nnx_retry import retry as retry

_stable.publish(__name__)
