"""A hook of mkdocs: the first page of the site is README.md."""

import re
from pathlib import Path

from mkdocs.structure.files import File

README = Path(__file__).parents[1] / "README.md"


def on_files(files, config):
    text = re.sub(r"\[([^]]+)\]\(([^)\s]+)\)", shown, README.read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def shown(link):
    """A link to a page, or the words alone where the target is not on the site."""
    words, target = link.groups()
    if target.startswith(("https:", "#", "docs/")):
        return f"[{words}]({target.removeprefix('docs/')})"
    return words
