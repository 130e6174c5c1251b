"""What every one-shot method makes can be written in both formats of `osfl export`, and answers alike on real images."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from osfl.core.registry import is_reference, load, names
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Task
from osfl.methods.onesum import OneSum
from osfl.methods.onesum.features import draw_filters
from osfl.methods.onesum.settings import Settings
from osfl.models.inputs import to_input
from osfl.roles import export
from osfl.roles.finished_model import FinishedModel, open_model
from osfl.runtime.machine import Machine
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run_federation

OPEN = {"onnx": export.open_onnx, "pt2": export.open_program}


@pytest.fixture
def onnx() -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)


def networks() -> dict[tuple[str, ...], list[str]]:
    """One-shot methods that build the same network, by the functions that build it and its architecture."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names():
        method = load(name)
        if not is_reference(method):
            built = [one.__qualname__ for one in method.__mro__ if "build" in one.__dict__]
            settings = resolve_settings(method, "smoke", {})
            found[(*built, getattr(settings, "architecture", ""))].append(name)
    return found


def answers_alike(model: FinishedModel, images: torch.Tensor, folder: Path, *suffixes: str) -> None:
    """The files are written and asked about more images than they were made with."""
    with torch.inference_mode():
        expected = model.module(to_input(images)).softmax(-1)
    for suffix in suffixes:
        file = export.export_model(model, folder / f"model.{suffix}")
        assert file.difference <= export.TOLERANCE
        assert (OPEN[suffix](file.path)[0](images).detach() - expected).abs().max() <= export.TOLERANCE, (suffix, model.about)


@pytest.mark.usefixtures("onnx")
def test_every_one_shot_method_is_exported(tmp_path: Path) -> None:
    """One method stands for those that build the same network: they differ in its numbers only."""
    written = set()
    for methods in networks().values():
        folder, federation = tmp_path / methods[-1], small_federation(methods[-1])
        result = run_federation(federation, folder, {"preset": "smoke", "command": ""}, machine=Machine(workers=1))
        model = open_model(folder, "client-01" if result["scores"]["personalized"] else None)
        if str(model.module) not in written:  # several methods of different builds end in the same network
            written.add(str(model.module))
            answers_alike(model, federation.test.images[:9], folder, "onnx", "pt2")
    assert len(written) >= 6  # of convolutions, ensembles, transformers, sums, and on tokens


def test_no_one_shot_method_is_left_out() -> None:
    covered = {name for methods in networks().values() for name in methods}
    assert covered == {name for name in names() if not is_reference(load(name))} and len(covered) > 15


@pytest.mark.usefixtures("onnx")
@pytest.mark.parametrize(
    "options",
    [{"symmetry": "flip", "scales": 2, "side": 8}, {"dimensions": 8, "head": "qda", "by_class": True}],
    ids=str,
)
def test_one_sums_other_maps_and_heads(options: dict[str, object], tmp_path: Path) -> None:
    """Two sizes of color images and their mirrors; few dimensions and a covariance for each class."""
    task, rng = Task("colors", ("a", "b", "c"), (3, 12, 12)), torch.Generator().manual_seed(0)
    settings = Settings(filters=2, **options)  # type: ignore[arg-type]
    method = OneSum(task, settings)
    width, base = method.width(), settings.width_for(3)

    def drawn(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=rng, dtype=torch.float64)

    tensors = {"head/weight": drawn(3, width), "head/bias": drawn(3), "head/prior": drawn(3), "head/temperature": drawn(1) + 1}
    tensors["map/filters"] = draw_filters(settings.filters * settings.scales, 3, rng)
    if settings.dimensions:
        tensors |= {"map/mean": drawn(base), "map/basis": drawn(base, width)}
    if settings.head == "qda":
        tensors["head/factors"] = drawn(3, width, width)
    model = FinishedModel(method.build(Payload(tensors)), task, {"method": "onesum"})
    images = torch.randint(0, 256, (4, *task.image), generator=rng, dtype=torch.uint8)
    answers_alike(model, images, tmp_path, "onnx")
