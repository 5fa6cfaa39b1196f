"""Tables in pages that a script writes: a block stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""

from pathlib import Path


def cells(*texts: str) -> str:
    """Return a row of a markdown table."""
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def write(page: Path, name: str, text: str) -> None:
    """Replace the block of this name in the page.

    Raises:
        ValueError: if the page does not have both comments, once each and in this order.
    """
    before, _, after = _parts(page, name)
    page.write_text(f"{before}\n{text.strip()}\n{after}")


def read(page: Path, name: str) -> str:
    """Return the block of this name. Raises `ValueError` as `write` does."""
    return _parts(page, name)[1].strip()


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    text, begin, end = page.read_text(), f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"{page}: expected {begin!r} and behind it {end!r}, once each. Add these two lines.")
    head, rest = text.split(begin)
    block, tail = rest.split(end)
    return head + begin, block, end + tail
