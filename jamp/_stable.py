"""What pickles and checkpoints name, wherever the code lies.

A pickle holds the module and the name of each class and function in it. What is public
is named by the namespace that users import it from, and what is not public by this
module. So a file can move, and what was saved before can still be loaded: a name that
was ever here stays here.
"""

import sys

from ._autocast import reopened as reopened
from ._explanation import OpRow as OpRow
from ._explanation import Promotion as Promotion
from ._explanation import Reduction as Reduction
from ._iteration import Iteration as Iteration
from ._loss_scale import LossScaleConfig as LossScaleConfig
from ._marks import Branches as Branches
from ._marks import Inner as Inner
from ._marks import Loop as Loop
from ._marks import Marks as Marks
from ._marks import Node as Node
from ._marks import Program as Program
from ._nnx_policy import cast_on_use as cast_on_use
from ._nnx_policy import policied as policied
from ._nonfinite import Layout as Layout
from ._overrides import Place as Place
from ._overrides import Plan as Plan
from ._packing import Packed as Packed
from ._residuals import Saved as Saved
from ._sources import Site as Site
from ._state import MasterWeightsState as MasterWeightsState


def publish(*namespaces: str) -> None:
    """Gives classes and functions the namespace from which they are imported.

    Args:
      namespaces: names of modules that import nothing but what they export.
    """
    for namespace in namespaces:
        for value in vars(sys.modules[namespace]).values():
            if str(getattr(value, "__module__", "")).startswith("jamp._"):
                value.__module__ = namespace


publish(__name__)
