"""The notebook runs from top to bottom, and the site shows what is stored in it.

`python -m tests.test_notebook` runs examples/float16_in_ten_minutes.ipynb, stores its
outputs, and writes docs/float16-in-ten-minutes.md with its pictures.
"""

import base64
import contextlib
import io
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "float16_in_ten_minutes.ipynb"
PAGE = ROOT / "docs" / "float16-in-ten-minutes.md"
PICTURES = ROOT / "docs" / "images"
MADE = f"<!-- made by tests/test_notebook.py from examples/{NOTEBOOK.name} -->"


def read():
    return json.loads(NOTEBOOK.read_text())


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook):
    """Runs the code as a kernel does, cell by cell, and yields the outputs of each.

    Outputs are what is printed, and the figures that are open at the end of the cell.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"In[{number}]", "exec"), namespace)
        outputs = []
        if text := printed.getvalue():
            lines = text.splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
        for figure in map(plt.figure, plt.get_fignums()):
            picture = io.BytesIO()
            figure.savefig(picture, dpi=110, metadata={"Software": None})
            data = base64.b64encode(picture.getvalue()).decode()
            data = {"image/png": data, "text/plain": [f"<Figure {figure.number}>"]}
            kind = "display_data"
            outputs.append({"data": data, "metadata": {}, "output_type": kind})
        plt.close("all")
        yield outputs


def page_and_pictures(notebook):
    """The notebook as a page of the site, and the page's pictures by name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\(\.\./docs/", "](", source))
            continue
        parts.append(f"```py\n{source}\n```")  # not `python`: it runs in the notebook
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                name = f"ten-minutes-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![{cell['metadata']['alt']}](images/{name})")
    title, _, opening = parts[0].partition("\n\n")
    return "\n\n".join([title, MADE, opening, *parts[1:]]) + "\n", pictures


def kinds(outputs):
    return [output["output_type"] for output in outputs]


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(standard_promotion):
    pytest.importorskip("matplotlib")
    notebook, printed = read(), []
    for cell, outputs in zip(code_cells(notebook), run(notebook), strict=True):
        assert kinds(outputs) == kinds(cell["outputs"]), "".join(cell["source"])
        printed += [line for output in outputs for line in output.get("text", [])]
    assert re.search(r"skipped steps: [1-9]\d* of 300", "".join(printed))
    assert "skipped: True   parameters equal: True\n" in printed


def test_all_cells_were_run_in_order():
    cells = code_cells(read())
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert sum(kinds(cell["outputs"]).count("display_data") for cell in cells) >= 4


def test_the_notebook_uses_no_magic():
    for cell in code_cells(read()):
        assert not re.search(r"^\s*[%!]", "".join(cell["source"]), re.MULTILINE)


def test_the_site_shows_the_notebook():
    page, pictures = page_and_pictures(read())
    assert PAGE.read_text() == page, "run `python -m tests.test_notebook`"
    for name, picture in pictures.items():
        assert (PICTURES / name).read_bytes() == picture


def test_pictures_are_small():
    _, pictures = page_and_pictures(read())
    assert all(len(picture) < 100_000 for picture in pictures.values())


if __name__ == "__main__":
    made = read()
    done = zip(code_cells(made), run(made), strict=True)
    for number, (cell, outputs) in enumerate(done, start=1):
        cell |= {"execution_count": number, "outputs": outputs}
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    page, pictures = page_and_pictures(made)
    PAGE.write_text(page)
    for name, picture in pictures.items():
        (PICTURES / name).write_bytes(picture)
