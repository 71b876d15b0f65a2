"""PyTorch's automatic mixed precision for JAX, equal to torch bit for bit."""

# ruff: isort: off
import typing as _typing
from importlib import import_module as _import

from . import _stable
from ._checks import stand_ins as _stand_ins

# autocast: op-level casting
try:
    from ._autocast.region import autocast as autocast
    from ._autocast.region import get_autocast_dtype as get_autocast_dtype
    from ._autocast.region import is_autocast_enabled as is_autocast_enabled

    # Recipes: other ways to run the matrix products of a region
    from ._autocast.float8 import Float8 as Float8
    from ._autocast.scaled_float16 import ScaledFloat16 as ScaledFloat16

    # Attention by the kernel that suits the device
    from ._autocast.attention import dot_product_attention as dot_product_attention

    _import("._policy.float32_region", __name__)  # a context of JAX
except Exception as _error:  # JAX's internals moved; the rest of jamp works without
    _names = "autocast", "get_autocast_dtype", "is_autocast_enabled"
    _recipes = "Float8", "ScaledFloat16", "dot_product_attention"
    globals().update(_stand_ins(__name__, _error, *_names, *_recipes))

# Loss scaling and float16 parameters in optax
from ._scaling.wrapper import dynamic_loss_scale as dynamic_loss_scale
from ._scaling.wrapper import static_loss_scale as static_loss_scale
from ._scaling.state import DynamicLossScaleState as DynamicLossScaleState
from ._scaling.step import step as step
from ._scaling.retry import retry as retry
from ._scaling.find_scale import find_loss_scale as find_loss_scale
from ._scaling.value_and_grad import value_and_grad as value_and_grad
from ._scaling.value_and_grad import scale_loss as scale_loss
from ._scaling.value_and_grad import unscale as unscale
from ._scaling.metrics import loss_scale as loss_scale
from ._scaling.metrics import metrics as metrics
from ._scaling.master_weights import master_params as master_params
from ._scaling.master_weights import master_weights as master_weights

# Policy: casting by module, with jmp's names
from ._policy.policy import Policy as Policy
from ._policy.policy import get_policy as get_policy
from ._policy.policy import cast_to_full as cast_to_full
from ._policy.policy import cast_to_half as cast_to_half
from ._targets import half_dtype as half_dtype

# Namespaces
from . import sharding as sharding

# Imported when they are first used: names that need Flax, and the reports
if _typing.TYPE_CHECKING:
    from . import debug as debug
    from . import linen as linen
    from . import nnx as nnx

    # GradScaler: the object as in PyTorch, for Flax NNX
    from ._scaling.grad_scaler import GradScaler as GradScaler

    # Which matrix products tolerate float8
    from ._debug.calibrate import calibrate as calibrate
else:
    _BY_NEED = {
        "debug": (".debug",),
        "linen": (".linen",),
        "nnx": (".nnx",),
        "GradScaler": ("._scaling.grad_scaler",),
        "calibrate": (".debug", "._debug.calibrate"),  # its report is in `debug`
    }

    def __getattr__(name):
        if name not in _BY_NEED:
            text = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(text, name=name)
        try:
            home = [_import(path, __name__) for path in _BY_NEED[name]][-1]
            value = getattr(home, name, home)
        except Exception as error:
            if name != "calibrate":
                raise  # Flax does not run here
            value = _stand_ins(__name__, error, name)[name]
        _stable.publish(__name__, {name: value})
        return globals().setdefault(name, value)

    def __dir__():
        return sorted({*globals(), *_BY_NEED})

    __all__ = [name for name in __dir__() if not name.startswith("_")]

__version__ = "0.3.0"  # the one place; pyproject.toml reads it

_stable.publish(__name__)
