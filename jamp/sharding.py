"""Parameters inside `shard_map`, and gradients averaged over devices in few bytes."""

from . import _stable
from ._scaling.error_feedback import ErrorFeedbackState as ErrorFeedbackState
from ._scaling.error_feedback import error_feedback as error_feedback
from ._scaling.gather import gather as gather
from ._scaling.mean import mean as mean

_stable.publish(__name__)
