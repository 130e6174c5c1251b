"""Images as files and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from osfl.core.errors import DataError
from osfl.core.types import Dataset, Task
from osfl.data.export import write_images
from osfl.data.site import open_site


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_written_is_read_back(tmp_path: Path, channels: int) -> None:
    images = torch.randint(0, 256, (6, channels, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    write_images(tmp_path / "site", Dataset(images, labels), ("cat", "dog"))
    found = open_site(tmp_path / "site", Task("pets", ("cat", "dog"), (channels, 8, 8))).train.dataset
    assert torch.equal(found.images, images) and torch.equal(found.labels, labels)


def test_classes_that_are_no_folders_and_folders_of_others(tmp_path: Path) -> None:
    data = Dataset(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.tensor([0]))
    with pytest.raises(DataError, match="T-shirt/top"):
        write_images(tmp_path / "site", data, ("T-shirt/top", "bag"))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt"):
        write_images(tmp_path, data, ("cat", "dog"))
