"""What `osfl estimate` says before a run, against what the run then needs."""

from __future__ import annotations

import torch

from osfl.core.types import Dataset
from osfl.simulate.estimate import few_of


def test_a_rehearsal_has_what_each_class_needs() -> None:
    """Class 0 has 6 images, class 1 has 2: of both as many as count with the method, and then the first ones."""
    data = Dataset(torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))
    assert few_of(data, 2, 0).images.flatten().tolist() == [0, 1]
    assert few_of(data, 2, 4).images.flatten().tolist() == [0, 1, 2, 3, 6, 7]
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    assert few_of(Dataset(data.images[:3], labels), 1, 1).images.flatten().tolist() == [0, 1]
