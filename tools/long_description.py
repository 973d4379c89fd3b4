"""The README as the packages' long description, which is shown far from its files."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Markdown's links and pictures, whose targets are no addresses and no headings.
_TARGET = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|#)")


class LongDescription(MetadataHookInterface):
    """Fills in `readme` when hatchling builds a package."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_addresses(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_addresses(text: str, repository: str) -> str:
    """Returns Markdown whose links and pictures lead into the repository."""

    def absolute(match: re.Match) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[0]}{repository.rstrip('/')}/{kind}/main/"

    return _TARGET.sub(absolute, text)
