"""Links of README.md, CONTRIBUTING.md, the notebooks and the pages lead somewhere, on GitHub and under Sphinx."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*.ipynb")), *PAGES]
TO_A_FILE = re.compile(r'(?:\]\(|src=")(?![a-z]+:)([^)"#]*)#?([^)"]*)')


CODE = re.compile(r"^ *(```+).*?^ *\1", re.MULTILINE | re.DOTALL)


def text_of(file: Path) -> str:
    """Return the Markdown of a file, without its blocks of code."""
    if file.suffix == ".md":
        return CODE.sub("", file.read_text())
    return "\n".join("".join(cell["source"]) for cell in json.loads(file.read_text())["cells"])


def anchors(page: Path) -> set[str]:
    """Return what links may name in a page, as GitHub and Sphinx make it of headings, and labels of MyST."""
    text = text_of(page)
    slugs = [
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]
    again = [f"{slug}-{slugs[:i].count(slug)}" for i, slug in enumerate(slugs) if slug in slugs[:i]]
    return {*slugs, *again, *re.findall(r"^\((.+)\)=$", text, re.MULTILINE)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    links = TO_A_FILE.findall(text_of(file))
    assert links or file in PAGES
    for path, anchor in links:
        target = file.parent / path if path else file
        assert target.exists(), f"{file.name}: there is no {path}"
        assert not anchor or anchor in anchors(target), f"{file.name}: {path} has no heading for #{anchor}"
