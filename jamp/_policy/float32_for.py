"""The names of the functions that a policy keeps in float32: norms, softmax, losses.

The functions of a name are plain data (`_autocast/ops.py`). The region that keeps them
in float32 is opened in `float32_region.py`, which needs JAX's private parts.
"""

import difflib
from collections.abc import Collection

from .._autocast.ops import KEPT

FLOAT32_FOR = tuple(KEPT)


def check_float32_for(names: Collection[str]) -> frozenset[str]:
    """The names as a set.

    Raises:
      TypeError: `names` is a string, or not a collection.
      ValueError: a name is unknown.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(
            f"float32_for must be a tuple of names, such as {FLOAT32_FOR}; got "
            f"{names!r}."
        )
    for name in names:
        if not isinstance(name, str) or name not in KEPT:
            near = difflib.get_close_matches(str(name), KEPT, n=1)
            raise ValueError(
                f"float32_for: unknown name {name!r}"
                + (f", did you mean {near[0]!r}?" if near else ".")
                + f" The names are {', '.join(map(repr, KEPT))}."
            )
    return frozenset(names)
