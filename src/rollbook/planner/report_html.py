"""Pieces of HTML that all sections of the page are made of."""

from __future__ import annotations

import html
from collections.abc import Sequence


def esc(text: str) -> str:
    """Plain text as HTML."""
    return html.escape(text)


def section(title: str, lead: str, body: str) -> str:
    """A headed part of the page; `body` is HTML."""
    return f"<section>\n<h2>{esc(title)}</h2>\n<p>{esc(lead)}</p>\n{body}\n</section>"


def head_row(*names: str) -> str:
    """Of a table."""
    return "<tr>" + "".join(f"<th>{esc(name)}</th>" for name in names) + "</tr>"


def table_row(cells: Sequence[str]) -> str:
    """Cells of plain text, the last one a number."""
    *first, last = (esc(cell) for cell in cells)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in first) + f'<td class="n">{last}</td></tr>'


def scrolled(rows: str) -> str:
    """A table of such rows, which scrolls where it is wider than the page."""
    return f'<div class="scroll"><table>{rows}</table></div>'
