"""What pickles and checkpoints name, wherever the code lies.

A pickle holds the module and the name of each class and function in it. What is public
is named by the namespace that users import it from, and what is not public by this
module. So a file can move, and what was saved before can still be loaded: a name that
was ever here stays here.

Files are imported when a name in them is looked for. What is imported otherwise gets
its public name from the face that it is seen through: each one calls `publish`.
"""

import sys
from collections.abc import Mapping
from importlib import import_module

from ._checks import unavailable

# The names that are here, by the files that they lie in.
HOMES = {
    "_autocast.region": ("reopened",),
    "_debug.findings": ("OpRow", "Promotion", "Reduction"),
    "_debug.marks": ("Branches", "Inner", "Loop", "Marks", "Node", "Program"),
    "_debug.nonfinite": ("Layout",),
    "_debug.packing": ("Packed",),
    "_debug.residuals": ("Saved",),
    "_debug.sites": ("Site",),
    "_policy.linen": ("policied_linen",),
    "_policy.nnx": ("cast_on_use", "policied"),
    "_policy.overrides": ("Place", "Plan"),
    "_policy.scopes": ("scoped",),
    "_scaling.iteration": ("Iteration",),
    "_scaling.rule": ("LossScaleConfig",),
    "_scaling.state": ("MasterWeightsState",),
}
HOME_OF = {name: home for home, names in HOMES.items() for name in names}
ARE_PUBLIC = ("DynamicLossScaleState", "GradScaler")  # and were saved from here


def __getattr__(name: str) -> object:
    if name in ARE_PUBLIC:
        return getattr(sys.modules["jamp"], name)
    if name not in HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f".{HOME_OF[name]}", __package__)
    except Exception as error:  # JAX's inside has moved: see `_checks.py`
        raise unavailable(f"{__name__}.{name}", error) from error
    publish(__name__, {})
    return getattr(home, name)


def publish(namespace: str, contents: Mapping[str, object] | None = None) -> None:
    """Gives classes and functions the namespace from which they are imported.

    Those of this module too, as far as they are imported by now.

    Args:
      namespace: name of a module that imports what it exports, and nothing else but
        under a name with an underscore.
      contents: what is published of it; by default all that it holds.
    """
    for name, home in HOME_OF.items():
        value = getattr(sys.modules.get(f"{__package__}.{home}"), name, None)
        if value is not None:  # else the file is not imported, or not to its end
            value.__module__ = __name__
    if contents is None:
        contents = dict(vars(sys.modules[namespace]))
    for name, value in contents.items():
        is_own = str(getattr(value, "__module__", "")).startswith("jamp._")
        if is_own and not name.startswith("_"):
            value.__module__ = namespace


# States that were pickled before these homes name the files of that time.
for _file in ("_grad_scaler", "_iteration", "_loss_scale", "_state"):
    sys.modules[f"{__package__}.{_file}"] = sys.modules[__name__]
