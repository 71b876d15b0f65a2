"""What a release needs: `python -m jamp`, and one version in all files."""

import platform
import re
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

import jamp
from jamp import __main__ as command
from scripts import prepare_release

ROOT = Path(__file__).parents[1]


def run(capsys):
    status = command.main()
    return status, capsys.readouterr().out.splitlines()


@contextmanager
def casts_nothing(*args, **kwargs):
    yield


def refuses(*args, **kwargs):
    raise ImportError("this JAX is too new")


@pytest.mark.slow
@pytest.mark.every_release
def test_the_command_says_what_runs_here(capsys):
    status, lines = run(capsys)
    assert status == 0
    assert lines[0] == f"jamp {jamp.__version__}, in {Path(jamp.__file__).parent}"
    assert lines[1].startswith(f"Python {platform.python_version()} on ")
    assert re.match(rf"jax {jax.__version__}, (not )?a tested release", lines[2])
    assert f"numpy {np.__version__}" in lines[3].split(", ")
    assert f"backend: {jax.default_backend()}" in lines
    count = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    assert f"devices: {count}" in lines
    steps = dict(line.split(": ", 1) for line in lines[-5:-1])
    assert list(steps) == ["float16", "bfloat16", "scaled float16", "float8"]
    assert all(said.startswith("works; ") for said in steps.values())
    assert "65536 to 32768" in steps["float16"]


def test_the_tested_releases_are_those_of_the_table():
    page = (ROOT / "docs/libraries.md").read_text()
    table = page.partition("<!-- releases: begin -->")[2]
    tested = re.findall(r"^\| (\d[\d.]+) \|", table, re.MULTILINE)
    assert list(dict.fromkeys(tested)) == command.TESTED


def test_the_command_names_a_jamp_that_it_hides(monkeypatch, tmp_path, capsys):
    metadata = tmp_path / "jamp_jax-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.3\nName: jamp-jax\nVersion: 0.1.0\n")
    (tmp_path / "jamp").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    status, lines = run(capsys)
    warned = [line for line in lines if line.startswith("warning: ")]
    assert status == 0 and warned == [command.SHADOWED.format(tmp_path / "jamp")]


@pytest.mark.parametrize("there", [True, False])
def test_the_command_warns_of_another_project_of_that_name(
    there, monkeypatch, tmp_path, capsys
):
    if there:
        metadata = tmp_path / "jamp-0.0.6.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.3\nName: jamp\nVersion: 0.0.6\n")
        monkeypatch.syspath_prepend(tmp_path)
    status, lines = run(capsys)
    warned = [line for line in lines if line.startswith("warning: ")]
    assert status == 0 and len(warned) == there
    if there:
        assert "jamp 0.0.6" in warned[0] and "pip uninstall jamp" in warned[0]


def without_skipping(tx, scaled=jamp.dynamic_loss_scale):
    return scaled(tx, enabled=False)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "text"),
    [
        (jamp, "autocast", refuses, "ImportError: this JAX is too new"),
        (jamp, "autocast", casts_nothing, "the product is float32, not float16"),
        (jamp, "dynamic_loss_scale", without_skipping, "overflow"),
        (jax, "devices", refuses, "ImportError"),
        (command, "distance", lambda *_: 1.0, "the step differs from float32's by 1"),
    ],
)
def test_the_command_fails_if_a_part_does(
    owner, name, broken, text, monkeypatch, capsys
):
    monkeypatch.setattr(owner, name, broken)
    status, lines = run(capsys)
    assert status == 1 and text in lines[-1]
    if owner is not jax:
        assert lines[-1].startswith("autocast: does not work here; ")


@pytest.mark.parametrize("name", command.PRECISIONS)
def test_the_command_looks_for_each_precision(name, monkeypatch, capsys):
    loss_in, (broken, text, _) = command.loss_in, command.PRECISIONS[name]
    without = lambda dtype: loss_in(None if dtype is broken else dtype)
    monkeypatch.setattr(command, "loss_in", without)
    status, lines = run(capsys)
    said = f"{name}: does not work here; RuntimeError: nothing is in {text}"
    assert status == 0 and said in lines


def test_the_command_does_without_a_precision(monkeypatch, capsys):
    monkeypatch.setattr(command, "step_in", refuses)
    status, lines = run(capsys)
    assert status == 0
    assert lines[-2].startswith("float8: does not work here; ImportError")
    assert lines[-1] == command.MEASURE


@pytest.mark.slow
def test_the_command_runs():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jamp"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "float16: works" in done.stdout


def test_the_citation_has_the_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", jamp.__version__)
    assert f"\nversion: {jamp.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture
def tree(tmp_path):
    """The files that name a version, all the same one."""
    (tmp_path / "jamp").mkdir()
    (tmp_path / "jamp/__init__.py").write_text('x = 1\n__version__ = "1.2.3"  # here\n')
    (tmp_path / "CITATION.cff").write_text(
        "version: 1.2.3\ndate-released: 2030-01-02\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(
        "## [Unreleased]\n\n## [1.2.3] - 2030-01-02\n\n## [1.2.2] - 2029-01-02\n"
    )
    (tmp_path / "README.md").write_text("[a](docs/a.md)")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    return tmp_path


def test_a_release_is_prepared(tree, capsys):
    prepare_release.main("v1.2.3", "owner/name", tree)
    assert capsys.readouterr().out == "version=1.2.3\n"
    link = "[a](https://github.com/owner/name/blob/v1.2.3/docs/a.md)"
    assert (tree / "README.md").read_text() == link
    old, new = (
        tomllib.loads((folder / "pyproject.toml").read_text())
        for folder in (ROOT, tree)
    )
    urls = new["project"].pop("urls")
    assert urls["Repository"] == "https://github.com/owner/name" and new == old


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("jamp/__init__.py", "1.2.3", "1.2.4"),
        ("CITATION.cff", "1.2.3", "1.2.4"),
        ("CITATION.cff", "2030-01-02", "2030-01-03"),
        ("CHANGELOG.md", "1.2.3", "1.2.4"),
        ("CHANGELOG.md", "2030-01-02", "2030-01-03"),
        ("CHANGELOG.md", "## [1", "## 1"),
    ],
)
def test_a_release_with_two_versions_or_dates_is_refused(file, old, new, tree):
    text = (tree / file).read_text().replace(old, new)
    (tree / file).write_text(text)
    with pytest.raises(SystemExit, match=file):
        prepare_release.main("v1.2.3", "owner/name", tree)


@pytest.mark.parametrize("tag", ["v1.2.4", "1.2.3"])
def test_another_tag_is_refused(tag, tree):
    with pytest.raises(SystemExit, match="tag"):
        prepare_release.main(tag, "owner/name", tree)


def test_links_lead_to_the_repository():
    text = """
![picture](docs/a.png) and [page](docs/a.md#part), [web](https://x.org), [here](#part).
```python
y = [f](x)
```
"""
    base = "https://github.com/o/r"
    assert prepare_release.with_absolute_links(text, "o/r", "v1") == text.replace(
        "(docs/a.png)", f"({base}/raw/v1/docs/a.png)"
    ).replace("(docs/a.md#part)", f"({base}/blob/v1/docs/a.md#part)")
