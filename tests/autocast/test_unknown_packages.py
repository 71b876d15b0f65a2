"""A package that nobody has looked at: its products are lowered, with a warning."""

import importlib
import re
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp._autocast import libraries

from . import ways

half = jamp.autocast(jnp.float16)
x = np.full((4, 4), 1003, np.float32)
SOURCES = {
    "geometry": "import jax.numpy as jnp\ndef turned(x):\n    return inner(x)\n"
    "def solve(function, x):\n    return function(x)\n"
    "def inner(x):\n    return x @ x\n"
    "class Frame:\n    def __call__(self, x):\n        return jnp.dot(x, x)",
    "exact": "import jax.numpy as jnp\ndef highest(x):\n"
    "    return jnp.matmul(x, x, precision='highest')\n"
    "def dot(x):\n    return x[0] @ x[0]\n"
    "def outer(x):\n    return x[0][:, None] @ x[0][None]\n"
    "def integers(x):\n    return (x > 0).astype(int) @ (x > 0).astype(int)\n"
    "def halves(x):\n    return x.astype(jnp.float16) @ x.astype(jnp.float16)\n",
    # What says that there are layers here, in the words of three libraries.
    "layers": '"""As equinox.nn and `nn.Dense`."""\nimport flax.linen as nn\n'
    "from flax import nnx\nimport equinox as eqx\nimport opt_einsum\n"
    "class Layer(nn.Module):\n    pass\ndef turned(x):\n    return x @ x\n"
    "def written(x):\n    return opt_einsum.contract('ij,jk->ik', x, x)\n"
    "def dense(x):\n    return nn.Dense(4).apply({'params': {'kernel': x}}, x)\n"
    "def made(x):\n    return nn.Dense(4, use_bias=False).apply("
    "{'params': {'kernel': x}}, x)\n",
}


FOLDERS = "site-packages", "dist-packages", "target", "projects"


@pytest.fixture(params=FOLDERS)
def folder(request):
    return request.param


@pytest.fixture
def package(folder, tmp_path, monkeypatch):
    """A package that no row names, in a folder of installed ones or of projects."""
    root = tmp_path / folder / "unheard_of"
    root.mkdir(parents=True)
    if folder == "target":  # of `pip install --target`
        (root.parent / "unheard_of-1.0.dist-info").mkdir()
    (root / "__init__.py").touch()
    for name, text in SOURCES.items():
        (root / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(root.parent)
    monkeypatch.setattr(libraries, "WARNED", set())
    yield lambda name: importlib.import_module(f"unheard_of.{name}")
    for name in [name for name in sys.modules if name.startswith("unheard_of")]:
        del sys.modules[name]


def warned(function, *args):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(*map(jnp.asarray, args))
    return [str(each.message) for each in found]


@pytest.mark.parametrize("way", ways.WAYS)
def test_a_product_of_an_unknown_package_is_named_once(way, package, folder):
    geometry = package("geometry")
    found = warned(ways.WAYS[way](half, geometry.turned), x)
    if folder == "projects":  # the user's own code
        assert found == []
        return
    (text,) = found
    assert "products of unheard_of" in text and "does not know this package" in text
    assert "geometry.py" in text and "rules={unheard_of.turned: jnp.float32}" in text
    assert warned(ways.WAYS[way](half, geometry.Frame()), x) == []


@pytest.mark.parametrize("name", ("turned", "written"))
def test_what_its_source_mentions_does_not_matter(name, package, folder):
    """Also where another package writes the product."""
    found = warned(half(getattr(package("layers"), name)), x)
    assert len(found) == (folder != "projects")
    assert all(f"unheard_of.{name}" in text for text in found)


def test_a_product_of_another_librarys_layer_is_that_layers(package):
    assert warned(half(package("layers").made), x) == []


def test_the_line_in_the_warning_silences_it(package, folder):
    turned = package("geometry").turned
    found = warned(half(turned), x)
    if folder == "projects":
        assert not found
        return
    (line,) = re.findall(r"`(warnings\..*?)`", found[0])
    libraries.WARNED.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(line, {"warnings": warnings})
        half(turned)(jnp.asarray(x))
        libraries.WARNED.clear()
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="unheard_of"):
            half(turned)(jnp.asarray(x))


def test_no_source_is_read(package, folder):
    """Each file of the package could be gone by now."""
    turned = package("geometry").turned
    root = Path(sys.modules["unheard_of"].__file__).parent
    for path in root.glob("*.py"):
        path.unlink()
    assert len(warned(half(turned), x)) == (folder != "projects")


@pytest.mark.parametrize("name", ("highest", "dot", "outer", "integers", "halves"))
def test_a_product_that_a_region_leaves_as_it_is_is_not(name, package):
    function = getattr(package("exact"), name)
    for run in (half(function), half(jax.jit(function)), jax.jit(half(function))):
        assert warned(run, x) == []


def test_a_rule_and_a_region_without_casts_say_enough(package):
    turned = package("geometry").turned
    for region in (
        jamp.autocast(jnp.float16, rules={turned: jnp.float32}),
        jamp.autocast(jnp.float16, rules={turned: jnp.float16}),
        jamp.autocast(jnp.float16, enabled=False),
    ):
        assert warned(region(turned), x) == []


def test_what_the_package_is_given_is_not_of_it(package):
    """A solver that multiplies nothing itself calls the user's function."""
    solve = package("geometry").solve
    assert warned(half(lambda x: solve(lambda x: x @ x, x)), x) == []


def test_a_warning_that_is_an_error_is_raised_each_time(package, folder):
    if folder == "projects":
        pytest.skip("the user's own code")
    turned = package("geometry").turned
    for _ in range(2):
        with pytest.raises(UserWarning, match="unheard_of"):
            half(jax.jit(turned))(jnp.asarray(x))
