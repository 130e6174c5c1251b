"""Networks of timm by name. timm is a module of the tests here: it is not installed, and it would bring torchvision."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from osfl.core.errors import UsageError
from osfl.core.types import Task
from osfl.models.architectures import architecture_for, architectures_in
from osfl.models.build import build_model
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation

TASK = Task("toy", ("a", "b", "c"), (1, 8, 8))
asked: list[dict[str, Any]] = []


class Stand(nn.Module):
    """What timm's networks answer to, and no more."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, classes)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.stem(x)).relu()
        return found

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        pooled = x.mean((2, 3))
        return pooled if pre_logits else self.head(pooled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def create_model(name: str, pretrained: bool, num_classes: int, in_chans: int, **others: Any) -> nn.Module:
    if others and name != "sized":
        raise TypeError(f"unexpected {others}")
    asked.append({"name": name, "pretrained": pretrained, **others})
    return Stand(num_classes, in_chans)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("timm")
    module.__dict__.update(
        create_model=create_model,
        is_model=lambda name: name in ("small.a1_in1k", "sized"),
        list_models=lambda pattern: ["small.a1_in1k"],
        __version__="1.0",
    )
    monkeypatch.setitem(sys.modules, "timm", module)
    asked.clear()


def test_first_weights_follow_from_the_generator(timm: None) -> None:
    built = [build_model("timm:small.a1_in1k", TASK, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    first, again, other = (model.state_dict()["network.stem.weight"] for model in built)
    assert torch.equal(first, again) and not torch.equal(first, other)
    x = torch.zeros(2, 1, 8, 8)
    assert built[0](x).shape == (2, 3) and built[0].features(x).shape == (2, 4)
    build_model("timm:sized", TASK)
    assert asked[0] == {"name": "small.a1_in1k", "pretrained": False}  # its download is nobody's seed
    assert asked[-1] == {"name": "sized", "pretrained": False, "img_size": (8, 8)}


def test_a_name_of_timm_stands_beside_others() -> None:
    spec = "client-01:timm:small.a1_in1k,*:cnn-w4"
    assert architectures_in("timm:small.a1_in1k") == ("timm:small.a1_in1k",)
    assert architectures_in(spec) == ("cnn-w4", "timm:small.a1_in1k")
    assert architecture_for(spec, "client-01") == "timm:small.a1_in1k" and architecture_for(spec, "client-02") == "cnn-w4"
    assert architecture_for("timm:sized", "client-07") == "timm:sized"


@pytest.mark.parametrize("method", ["fedavg", "dense", "fol"])
def test_a_round_with_networks_of_timm(method: str, timm: None, tmp_path: Path) -> None:
    spec = "timm:small.a1_in1k" if method == "fedavg" else "client-01:timm:small.a1_in1k,*:cnn-w4"
    changes = {"architecture": spec, **({"student": "cnn-w4"} if method == "dense" else {})}
    simulation = Simulation(method, "digits", 2, "iid", "smoke", samples=50, image_size=8, test_samples=10, changes=changes)
    first, again = (run(simulation, tmp_path / name) for name in ("first", "again"))
    assert first["models_digest"] == again["models_digest"]


def test_what_timm_does_not_have_is_named(timm: None) -> None:
    with pytest.raises(UsageError, match=r"(?s)timm 1.0 has no network 'smal'.*such as small.a1_in1k"):
        build_model("timm:smal", TASK)
    with pytest.raises(UsageError, match="unknown architecture 'timm:Big Model'"):
        build_model("timm:Big Model", TASK)


def test_without_timm_a_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError, match=r"pip install 'osfl\[timm\]'"):
        build_model("timm:small.a1_in1k", TASK)
