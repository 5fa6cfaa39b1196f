"""Let the links of README.md lead to files of the repository, also from the page of a package index.

The address of the repository stands in pyproject.toml alone, under [project.urls].
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

TO_A_FILE = re.compile(r'(!\[[^]]*\]\(|<img src="|\]\()(?![a-z]+:|#)([^)"]+)')  # two ways to show a picture, and a link


def with_addresses(readme: str, repository: str, version: str) -> str:
    """Return the text with the address of this version in front of each path, for a picture that of the file itself."""

    def address(link: re.Match[str]) -> str:
        kind = "blob" if link[1] == "](" else "raw"
        return f"{link[1]}{repository}/{kind}/v{version}/{link[2]}"

    return TO_A_FILE.sub(address, readme)


class CustomMetadataHook(MetadataHookInterface):
    """Gives the distributions their long description; hatchling looks for this class."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the entry `readme`, which pyproject.toml calls dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_addresses(text, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
