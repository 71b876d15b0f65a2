"""PyTorch's automatic mixed precision for JAX, equal to torch bit for bit."""

from . import _stable
from . import debug as debug
from . import linen as linen
from . import nnx as nnx
from . import sharding as sharding

# autocast: op-level casting
from ._autocast import autocast as autocast
from ._autocast import get_autocast_dtype as get_autocast_dtype
from ._autocast import is_autocast_enabled as is_autocast_enabled

# GradScaler: the object as in PyTorch, for Flax NNX
from ._grad_scaler import GradScaler as GradScaler

# Loss scaling and float16 parameters in optax
from ._master_weights import master_weights as master_weights
from ._optax import dynamic_loss_scale as dynamic_loss_scale
from ._optax import static_loss_scale as static_loss_scale

# Policy: casting by module, with jmp's names
from ._policy import Policy as Policy
from ._policy import cast_to_full as cast_to_full
from ._policy import cast_to_half as cast_to_half
from ._policy import get_policy as get_policy
from ._policy import half_dtype as half_dtype
from ._scaled_grad import loss_scale as loss_scale
from ._scaled_grad import metrics as metrics
from ._scaled_grad import scale_loss as scale_loss
from ._scaled_grad import unscale as unscale
from ._scaled_grad import value_and_grad as value_and_grad
from ._state import DynamicLossScaleState as DynamicLossScaleState
from ._step import step as step

__version__ = "0.1.0"  # the one place; pyproject.toml reads it

_stable.publish(__name__, debug.__name__, linen.__name__, nnx.__name__)
