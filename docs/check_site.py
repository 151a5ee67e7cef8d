"""Check that the built pages load nothing from another host and that their links lead somewhere.

python docs/check_site.py docs/_build/html
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that make a browser load something. A link (`a`) is followed only by the reader.
_LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src")}
_NOT_LOADED = {"canonical", "next", "prev", "index", "search", "author", "license"}  # what a `link` may be besides
_URL_IN_CSS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""")


class Page(HTMLParser):
    """The addresses in a page: what it loads, what it links to, and the anchors it has."""

    def __init__(self, text: str):
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect addresses."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        for name, value in given.items():
            if (tag, name) in _LOADED and given.get("rel", "").split(" ")[0] not in _NOT_LOADED:
                self.loaded.append(value)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


def problems(folder: Path) -> list[str]:
    """Return one line for every request to another host and every dead link."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        found += [f"{name} loads {url}" for url in page.loaded if re.match(r"(https?:)?//", url)]
        for url in [*page.links, *page.loaded]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                found.append(f"{name} links to {url}, which does not exist")
    for style in sorted(folder.rglob("*.css")):
        text = style.read_text(encoding="utf-8")
        found += [f"{style.relative_to(folder)} loads {url}" for url in _URL_IN_CSS.findall(text)]
    return found


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1]))
    print(*lines, sep="\n")
    sys.exit(1 if lines else 0)
