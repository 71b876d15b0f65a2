"""Checks that a tag can be released, and prepares the tree for PyPI.

The tag, `jamp.__version__`, CITATION.cff and the newest release in CHANGELOG.md must
name one version, and the last two one date. README's links to files then lead to
GitHub, and pyproject.toml names the repository. Prints `version=...` for the workflow.

Usage: python scripts/prepare_release.py TAG OWNER/REPOSITORY
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOST = "https://github.com"

# Where a version stands, and the date of its release.
PLACES = {
    "jamp/__init__.py": r'^__version__ = "(.+?)"',
    "CITATION.cff": r"^version: (.+)\ndate-released: (.+)$",
    "CHANGELOG.md": r"^## \[(\d.*?)\] - (.+)$",
}


def main(tag: str, repository: str, root: Path = ROOT) -> None:
    if wrong := disagreement(tag, root):
        sys.exit(wrong)
    readme, project = root / "README.md", root / "pyproject.toml"
    readme.write_text(with_absolute_links(readme.read_text(), repository, tag))
    project.write_text(with_urls(project.read_text(), repository, tag))
    print(f"version={tag.removeprefix('v')}")


def disagreement(tag: str, root: Path = ROOT) -> str:
    """How the tag and the files disagree; empty if they do not."""
    found: dict[str, tuple[str, ...]] = {"tag": (tag.removeprefix("v"),)}
    for name, pattern in PLACES.items():
        match = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        found[name] = match.groups() if match else ("none",)
    versions = {said[0] for said in found.values()}
    dates = {said[1] for said in found.values() if len(said) > 1}
    agree = tag.startswith("v") and len(versions) == 1 and len(dates) == 1
    lines = (f"{name}: {' of '.join(said)}" for name, said in found.items())
    return "" if agree else "These differ:\n" + "\n".join(lines)


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Markdown whose links to files of the repository lead to GitHub, at the tag."""

    def absolute(found: re.Match[str]) -> str:
        picture, title, target = found.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{title}]({HOST}/{repository}/{kind}/{tag}/{target})"

    link = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)  # code is every second one
    parts[::2] = [link.sub(absolute, part) for part in parts[::2]]
    return "".join(parts)


def with_urls(text: str, repository: str, tag: str) -> str:
    """A pyproject.toml that names the repository and its changelog."""
    urls = f"""[project.urls]
Repository = "{HOST}/{repository}"
Changelog = "{HOST}/{repository}/blob/{tag}/CHANGELOG.md"

"""
    before, table, after = text.partition("[project.optional-dependencies]")
    return before + urls + table + after


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
