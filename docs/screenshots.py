"""Take screenshots of each page as a desktop and a phone show it, by day and by night, and list what does not fit.

    make screenshots                        # builds the pages, and writes docs/_build/screenshots/PAGE-WIDTH-SCHEME.png

Needs playwright (`pip install playwright`) and an installed Chromium or Chrome. The exit code is 1 if something is cut
off.
"""

import argparse
import shutil
import sys
from pathlib import Path

HTML = Path(__file__).parent / "_build" / "html"
OUT = Path(__file__).parent / "_build" / "screenshots"
WIDTHS = (1280, 390)  # a laptop, a phone
SCHEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LEFT_OUT = ("genindex", "search", "py-modindex")

# What the reader would have to scroll to the side, drawings and tables of many columns apart, and what is wider than
# the screen.
CUT_OFF = """() => {
    const MAY_SCROLL = ":scope > img, :scope > table th:nth-child(5)";
    const name = e => e.tagName.toLowerCase() + ": " + (e.innerText || e.alt || "").trim().slice(0, 60);
    const scrolled = [...document.querySelectorAll("article *")].filter(e =>
        e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== "visible");
    const wide = [...document.querySelectorAll("article *")].filter(e =>
        e.getBoundingClientRect().right > innerWidth + 1 && !scrolled.some(outer => outer.contains(e)));
    return [...scrolled.filter(e => !e.querySelector(MAY_SCROLL)), ...wide].map(name);
}"""


def main() -> int:
    """Write the screenshots, print each thing that is cut off, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", help="names of pages, such as capture; default: all")
    pages = parser.parse_args().pages or [
        str(page.relative_to(HTML).with_suffix(""))
        for page in sorted(HTML.rglob("*.html"))
        if page.stem not in LEFT_OUT and "_static" not in page.parts
    ]
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise SystemExit("screenshots need playwright: pip install playwright") from error
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        raise SystemExit(f"screenshots need a browser; none of {', '.join(BROWSERS)} is installed")
    OUT.mkdir(parents=True, exist_ok=True)
    found = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path)
        for width in WIDTHS:
            tab = browser.new_page(viewport={"width": width, "height": 900})
            for name in pages:
                tab.goto((HTML / f"{name}.html").as_uri())
                for scheme in SCHEMES:
                    tab.emulate_media(color_scheme=scheme)
                    tab.screenshot(path=OUT / f"{name.replace('/', '-')}-{width}-{scheme}.png", full_page=True)
                cut_off = tab.evaluate(CUT_OFF)
                found += len(cut_off)
                for what in cut_off:
                    print(f"{name}, {width} px wide: cut off: {what!r}")
        browser.close()
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} px in {OUT}; {found} things are cut off")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
