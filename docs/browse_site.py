"""Open every built page in a browser, on a wide screen and on a phone, light and dark, and report what is wrong.

    pip install playwright
    python docs/browse_site.py docs/_build/html [--shots FOLDER] [--only PART]

It reports requests to other hosts, errors of scripts, images that do not load, pages that scroll sideways, and text
with too little contrast. It uses an installed Chromium or Chrome, or else the browser of `playwright install chromium`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS = (1300, 390)
SCHEMES = ("light", "dark")

# WCAG 2, level AA: a contrast of 4.5, or 3 for large text. Text over a picture is left out.
_MEASURE = """() => {
  const problems = [];
  const wide = document.documentElement;
  if (wide.scrollWidth > wide.clientWidth) problems.push(`scrolls sideways: ${wide.scrollWidth} > ${wide.clientWidth}`);
  for (const image of document.images)
    if (image.complete && !image.naturalWidth) problems.push(`image does not load: ${image.getAttribute("src")}`);
  const channels = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (element.closest("svg, script, style, mjx-assistive-mml, .visually-hidden")) continue;
    let behind = element, ground = [255, 255, 255];
    for (; behind; behind = behind.parentElement) {
      const style = getComputedStyle(behind), [r, g, b, alpha = 1] = channels(style.backgroundColor);
      if (style.backgroundImage !== "none") { ground = null; break; }
      if (alpha > 0.5) { ground = [r, g, b]; break; }
    }
    if (!ground) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const text = channels(style.color), [light, dark] = [luminance(text), luminance(ground)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    const needed = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700) ? 3 : 4.5;
    const what = `${element.tagName.toLowerCase()}.${element.className}`;
    if (ratio < needed && !seen.has(what)) {
      seen.add(what);
      problems.push(`contrast ${ratio.toFixed(1)} of "${walker.currentNode.data.trim().slice(0, 30)}" (${what})`);
    }
  }
  return problems;
}"""


def look(page: Page, path: Path, name: str, shots: Path | None) -> list[str]:
    """Return one line for everything that is wrong with a page; save screenshots if `shots` is given."""
    found: list[str] = []

    def requested(url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            found.append(f"{name}: request to {url}")

    page.on("request", lambda request: requested(request.url))
    page.on("pageerror", lambda error: found.append(f"{name}: {error}"))
    page.on("console", lambda line: line.type == "error" and found.append(f"{name}: {line.text}"))
    page.goto(path.as_uri())
    page.evaluate("window.MathJax?.startup?.promise")
    page.evaluate("document.querySelectorAll('img[loading=lazy]').forEach(image => image.loading = 'eager')")
    page.wait_for_load_state("networkidle")
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            found += [f"{name}, {scheme}, {width} pixels: {line}" for line in page.evaluate(_MEASURE)]
            if shots:
                shot = shots / f"{name.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
                page.screenshot(path=shot, full_page=True)
    return found


def main() -> int:
    """Return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", type=Path, help="write screenshots into this folder")
    parser.add_argument("--only", default="", help="pages whose names contain this")
    options = parser.parse_args()
    if options.shots:
        options.shots.mkdir(parents=True, exist_ok=True)
    installed = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        for path in sorted(options.site.resolve().rglob("*.html")):
            name = path.relative_to(options.site.resolve()).as_posix()
            if options.only in name and not name.startswith("_"):
                page = browser.new_page()
                found += look(page, path, name, options.shots)
                page.close()
        browser.close()
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
