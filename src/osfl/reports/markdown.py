"""A comparison as a markdown table, for a terminal, a README or an issue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from osfl.core.headline import SMOKE
from osfl.reports.columns import shown_columns, table_rows


def comparison_markdown(comparison: Mapping[str, object]) -> str:
    """The table of the comparison page; the best value of a column is bold."""
    rows = []
    for row in table_rows(comparison):
        cells = [f"**{cell.text}**" if cell.best else cell.text for cell in row.cells]
        spreads = [f" {cell.spread}" if cell.spread else "" for cell in row.cells]
        rows.append([safe(row.method), *(text + spread for text, spread in zip(cells, spreads, strict=True)), str(row.runs)])
    banner = f"\n{SMOKE}\n" if comparison.get("smoke") else ""
    return table(["Method", *(column.title for column in shown_columns(comparison)), "Seeds"], rows) + banner


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, first column left and the others right, padded so that it also reads as plain text."""
    widths = [max(len(line[index]) for line in (head, *rows)) for index in range(len(head))]
    rule = [f":{'-' * (width - 1)}" if not index else f"{'-' * (width - 1)}:" for index, width in enumerate(widths)]
    return "".join(_line(cells, widths) for cells in (head, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))]
    return f"| {' | '.join(padded)} |\n"


def safe(text: object) -> str:
    """Text that stays text in markdown: no HTML, no table bars, no line breaks, no formatting."""
    flat = re.sub(r"[\s\x00-\x1f\x7f]+", " ", str(text)).strip()
    return re.sub(r"([\\`*_\[\]|#<>!])", r"\\\1", flat).replace("\\<", "&lt;").replace("\\>", "&gt;")


def code(text: object) -> str:
    """Text in backticks, whatever backticks it holds."""
    flat = re.sub(r"[\s\x00-\x1f\x7f]+", " ", str(text)).strip()
    longest = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence, pad = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{pad}{flat}{pad}{fence}".replace("|", "\\|")
