"""HTML elements. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def text(value: object) -> str:
    """Escape a value as text."""
    return escape(str(value))


def element(tag: str, content: str = "", **attributes: object) -> str:
    """Return an element around `content`, which is HTML. `class_` sets the attribute class.

    >>> element("td", text("a < b"), class_="best")
    '<td class="best">a &lt; b</td>'
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}>{content}</{tag}>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", class_: str | None = None) -> str:
    """Return a table that scrolls horizontally if it is too wide. Cells are HTML: a `<td>` element or its content."""
    head = element("tr", "".join(element("th", cell, scope="col") for cell in header))
    body = "".join(element("tr", element("th", row[0], scope="row") + "".join(map(_cell, row[1:]))) for row in rows)
    title = element("caption", text(caption)) if caption else ""
    return element(
        "div", element("table", title + element("thead", head) + element("tbody", body), class_=class_), class_="scroll"
    )


def card(title: str, content: str) -> str:
    """Return a box with a title."""
    return element("section", element("h3", title) + content, class_="card")


def section(anchor: str, title: str, explanation: str, content: str) -> str:
    """Return a section of the page, with an explanation of what it shows."""
    about = element("p", text(explanation), class_="soft") if explanation else ""
    return element("section", element("h2", text(title)) + about + content, id=anchor)


def _cell(content: str) -> str:
    return content if content.startswith("<td") else element("td", content)
