"""Tables of text: for a terminal, and in Markdown."""

from collections.abc import Callable, Iterable, Sequence

Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns side by side; columns of numbers are aligned to the right.

    >>> print(text_table(("op", "count"), [("add", 12), ("dot_general", 3)]))
    op           count
    add             12
    dot_general      3
    """
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(_is_numeric(row[i]) for row in cells) for i in range(len(header))]

    def line(row):
        placed = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        return "  ".join(placed).rstrip()

    return "\n".join(map(line, [header, *cells]))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same for Markdown, as notebooks and GitHub show it.

    >>> print(markdown_table(("op", "count"), [("a|b", 3)]))
    | op | count |
    | --- | --- |
    | a\\|b | 3 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
        for cells in lines
    )


def _is_numeric(cell: str) -> bool:
    return (
        cell in ("", "inf", "nan")
        or cell[0].isdigit()
        or (cell[0] in "+-<" and cell[1:2].isdigit())
    )


def percent(share: float) -> str:
    """A share as text that never rounds a small share to 0, or nearly all to 100 %.

    >>> percent(0), percent(1e-9), percent(0.5), percent(0.99999), percent(1)
    ('0 %', '<0.01 %', '50 %', '>99.99 %', '100 %')
    """
    if 0 < share < 1e-4:
        return "<0.01 %"
    if 1 - 1e-4 < share < 1:
        return ">99.99 %"
    return f"{100 * share:.4g} %"


def shortened(text: str, width: int) -> str:
    """The end of a long text: in a path, it says more than the beginning.

    >>> shortened("encoder/layers/3/kernel", 12)
    '...s/3/kernel'
    """
    return text if len(text) <= width + 3 else "..." + text[-(width - 2) :]
