"""How many images of each class lie in the folders of several sites; names are read, no image is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from osfl.core.errors import DataError
from osfl.data.layout import arrange
from osfl.data.tree import open_tree


def count_images(sites: Path) -> Mapping[str, Counter[str]]:
    """Images of each class by site, of SITES/SITE/class/*: training images, where a site has parts."""
    if not sites.is_dir():
        raise DataError(f"there is no folder {sites}", field="folders", fix="Name the folder that holds one folder a site.")
    found = {place.name: _counted(place) for place in sorted(sites.iterdir()) if place.is_dir() and place.name[0] != "."}
    empty = [name for name, counts in found.items() if not counts]
    if not found or empty:
        raise DataError(
            f"no images in class folders of {', '.join(empty) if empty else 'any site'} in {sites}",
            field="folders",
            expected=f"{sites}/SITE/class/*.png",
            fix="Leave folders without images out.",
        )
    return found


def _counted(place: Path) -> Counter[str]:
    with open_tree(place) as tree:
        items, _ = arrange(tree.stamps)
    return Counter(item.label for item in items if item.part in ("", "train"))
