"""The names in pickles and checkpoints, which do not depend on where the code is.

A pickle holds the module and the name of each class and function in it. A public one is
named by the namespace that users import it from, and a private one by this module. So a
file can move, and older pickles can still be loaded: a name that was here in a release
stays here.

Files are imported when a name in them is looked up. Other imports get their public name
from the namespace that shows them: each namespace calls `publish`.
"""

import sys
from collections.abc import Mapping
from importlib import import_module

from ._checks import unavailable

# The names that are here, by the files that define them.
HOMES = {
    "_autocast.region": ("reopened",),
    "_debug.explanation": (
        "HalfResult",
        "OpRow",
        "Promotion",
        "Reduction",
        "Saved",
        "Square",
    ),
    "_debug.marks": ("Branches", "Inner", "Loop", "Marks", "Node", "Program"),
    "_debug.nonfinite": ("Layout",),
    "_debug.op_location": ("Site",),
    "_policy.linen": ("policied_linen",),
    "_policy.nnx": ("cast_on_use", "policied"),
    "_policy.overrides": ("Plan",),
    "_policy.scopes": ("scoped",),
    "_scaling.optimizer_stages": ("Iteration",),
    "_scaling.rule": ("LossScaleConfig",),
    "_scaling.state": ("MasterWeightsState",),
}
HOME_OF = {name: home for home, names in HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f".{HOME_OF[name]}", __package__)
    except Exception as error:  # JAX's internals have moved: see `_checks.py`
        raise unavailable(f"{__name__}.{name}", error) from error
    publish(__name__, {})
    return getattr(home, name)


def publish(namespace: str, contents: Mapping[str, object] | None = None) -> None:
    """Gives classes and functions the namespace from which they are imported.

    It does so for the names of this module too, as far as they are already imported.

    Args:
      namespace: name of a module that imports what it exports, and other names only
        with an underscore.
      contents: the contents to publish; by default, all of the module.
    """
    for name, home in HOME_OF.items():
        value = getattr(sys.modules.get(f"{__package__}.{home}"), name, None)
        if value is not None:  # or the file is not imported, or not completely
            value.__module__ = __name__
    if contents is None:
        contents = dict(vars(sys.modules[namespace]))
    for name, value in contents.items():
        is_own = str(getattr(value, "__module__", "")).startswith("jamp._")
        if is_own and not name.startswith("_"):
            value.__module__ = namespace
