"""Links of README.md, CONTRIBUTING.md and the notebooks lead somewhere. Sphinx checks those of the pages."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*.ipynb"))]
TO_A_FILE = re.compile(r'(?:\]\(|src=")(?![a-z]+:)([^)"#]*)#?([^)"]*)')


def text_of(file: Path) -> str:
    """Return the Markdown of a file."""
    if file.suffix == ".md":
        return file.read_text()
    return "\n".join("".join(cell["source"]) for cell in json.loads(file.read_text())["cells"])


def anchors(page: Path) -> set[str]:
    """Return what links may name in a page, as GitHub and Sphinx make it of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    links = TO_A_FILE.findall(text_of(file))
    assert links
    for path, anchor in links:
        target = file.parent / path if path else file
        assert target.exists(), f"{file.name}: there is no {path}"
        assert not anchor or anchor in anchors(target), f"{file.name}: {path} has no heading for #{anchor}"
