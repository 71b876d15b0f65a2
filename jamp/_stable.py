"""What pickles and checkpoints name, wherever the code lies.

A pickle holds the module and the name of each class and function in it. What is public
is named by the namespace that users import it from, and what is not public by this
module. So a file can move, and what was saved before can still be loaded: a name that
was ever here stays here.
"""

import sys

from ._checks import stand_ins as _stand_ins
from ._debug.packing import Packed as Packed
from ._scaling.grad_scaler import GradScaler as GradScaler
from ._scaling.iteration import Iteration as Iteration
from ._scaling.rule import LossScaleConfig as LossScaleConfig
from ._scaling.state import DynamicLossScaleState as DynamicLossScaleState
from ._scaling.state import MasterWeightsState as MasterWeightsState

try:
    from ._autocast.region import reopened as reopened
    from ._debug.findings import OpRow as OpRow
    from ._debug.findings import Promotion as Promotion
    from ._debug.findings import Reduction as Reduction
    from ._debug.marks import Branches as Branches
    from ._debug.marks import Inner as Inner
    from ._debug.marks import Loop as Loop
    from ._debug.marks import Marks as Marks
    from ._debug.marks import Node as Node
    from ._debug.marks import Program as Program
    from ._debug.nonfinite import Layout as Layout
    from ._debug.residuals import Saved as Saved
    from ._debug.sites import Site as Site
    from ._policy.linen import policied_linen as policied_linen
    from ._policy.nnx import cast_on_use as cast_on_use
    from ._policy.nnx import policied as policied
    from ._policy.overrides import Place as Place
    from ._policy.overrides import Plan as Plan
    from ._policy.scopes import scoped as scoped
except Exception as error:  # JAX's inside has moved: see `_checks.py`
    names = """
        Branches Inner Layout Loop Marks Node OpRow Place Plan Program Promotion
        Reduction Saved Site cast_on_use policied policied_linen
        reopened scoped
    """
    globals().update(_stand_ins(__name__, error, *names.split()))


def publish(*namespaces: str) -> None:
    """Gives classes and functions the namespace from which they are imported.

    Args:
      namespaces: names of modules that import what they export, and nothing else but
        under a name with an underscore.
    """
    for namespace in namespaces:
        for name, value in vars(sys.modules[namespace]).items():
            is_own = str(getattr(value, "__module__", "")).startswith("jamp._")
            if is_own and not name.startswith("_"):
                value.__module__ = namespace


publish(__name__)

# States that were pickled before these homes name the files of that time.
for _file in ("_grad_scaler", "_iteration", "_loss_scale", "_state"):
    sys.modules[f"{__package__}.{_file}"] = sys.modules[__name__]
