"""Weights for clients to start from: the same bytes twice, no head, and they load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import pretrain_vit
from osfl.models.build import build_model
from osfl.models.pretrained import read_weights, start_from
from osfl.protocol import Dataset, Task
from osfl.seeds import torch_generator

TINY = replace(pretrain_vit.RECIPE, architecture="vit-p4-w8-d1-h2", epochs=1)


def test_the_same_bytes_twice_and_a_start_for_other_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pretrain_vit.STARTS, "toy", pretrain_vit.Start(8, ("digits",)))
    one, two = (pretrain_vit.pretrain("toy", tmp_path / f"{i}.safetensors", TINY, 128) for i in range(2))
    assert one["sha256"] == two["sha256"] and one["pool"]["digits"]["images"] > 1000
    assert not any(name.startswith("head") for name in read_weights(tmp_path / "0.safetensors"))
    model = build_model("vit-p4-w8-d1-h2", Task("t", ("a", "b"), (3, 8, 8)), torch_generator(0, "init"))
    start_from(model, str(tmp_path / "0.safetensors"), one["sha256"])


def test_small_datasets_are_drawn_more_often() -> None:
    labels = torch.cat([torch.zeros(900), torch.ones(100)]).long()
    data = pretrain_vit.drawn(Dataset(torch.zeros(1000, 1, 1, 1, dtype=torch.uint8), labels), [900, 100], 4000)
    assert 0.2 < float(data.labels.float().mean()) < 0.3  # 10 / (30 + 10), not 0.1


def test_no_start_has_images_of_its_task() -> None:
    assert "cifar10-subset" not in pretrain_vit.STARTS["cifar"].pool
    assert not any("blood" in name for name in pretrain_vit.STARTS["blood"].pool)
