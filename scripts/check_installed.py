"""Checks jamp where it is installed alone, with jax, flax, optax and what those need.

Imports jamp and its public faces, runs the Python blocks of a README, and looks for
libraries that jamp must do without.

Usage: python -P scripts/check_installed.py README
"""

import importlib
import importlib.util
import re
import sys
import tempfile
from contextlib import chdir
from importlib.metadata import files, version
from pathlib import Path

FACES = ("debug", "linen", "nnx", "sharding")
DO_WITHOUT = ("equinox", "haiku", "matplotlib", "sklearn", "tensorboardX", "torch")


def main(readme: Path) -> None:
    source = Path(__file__).parents[1]
    jamp = importlib.import_module("jamp")
    for face in FACES:
        assert importlib.import_module(f"jamp.{face}") is getattr(jamp, face)
    for name in dir(jamp):
        getattr(jamp, name)
    home = Path(str(jamp.__file__))
    assert source not in home.parents or "site-packages" in home.parts, home
    assert version("jamp-jax") == jamp.__version__
    shipped = {file.parts[0] for file in files("jamp-jax") or ()}
    assert shipped == {"jamp", f"jamp_jax-{jamp.__version__}.dist-info"}, shipped
    assert (home.parent / "py.typed").exists()

    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    assert blocks
    namespace = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for block in blocks:
            exec(compile(block, str(readme), "exec"), namespace)

    installed = [name for name in DO_WITHOUT if importlib.util.find_spec(name)]
    imported = [name for name in DO_WITHOUT if name in sys.modules]
    assert not installed and not imported, (installed, imported)
    libraries = " ".join(f"{name} {version(name)}" for name in ("jax", "flax", "optax"))
    print(
        f"jamp {jamp.__version__}, {libraries}: {len(blocks)} blocks of {readme.name}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
