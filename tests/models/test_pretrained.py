"""Published weights: pinned, widened, and really the ones of the architecture."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.data import open_dataset
from osfl.models.build import Network, build_model, to_input
from osfl.models.naming import ModelError
from osfl.models.pretrained import expect_usual_range, load_pretrained, load_weights, start_from, weights_path
from osfl.models.weights_table import KNOWN

DATA = Path(os.environ.get("OSFL_DATA", "../shared/data"))


def task(classes: int = 3, channels: int = 3, side: int = 16) -> Task:
    return Task("t", tuple(f"c{i}" for i in range(classes)), (channels, side, side))


def saved(tmp_path: Path, name: str = "efficientnet_lite0", classes: int = 3, half: bool = True) -> Path:
    state = build_model(name, task(classes), torch_generator(0, "saved")).state_dict()
    tensors = {k: v.half().contiguous() if half and v.ndim > 1 else v.contiguous() for k, v in state.items()}
    save_file(tensors, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_half_precision_is_widened_and_pinned(tmp_path: Path) -> None:
    path = saved(tmp_path)
    pin = hashlib.sha256(path.read_bytes()).hexdigest()
    model = build_model("efficientnet_lite0", task())
    source = build_model("efficientnet_lite0", task(), torch_generator(0, "saved"))
    load_weights(model, path, pin)
    weight = model.state_dict()["_conv_stem.weight"]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, source.state_dict()["_conv_stem.weight"], rtol=1e-3, atol=1e-4)
    with pytest.raises(ModelError) as caught:
        load_weights(model, path, "0" * 64)
    assert "0" * 64 in str(caught.value) and pin in str(caught.value)


def _distinguished(model: Network) -> float:
    """How many digits a ridge classifier on a ViT's features tells apart, learned from every other one."""
    data = open_dataset("digits").train.dataset
    with torch.no_grad():
        z = model.features(to_input(data.images)).double()
    z = (z - z.mean(0)) / (z.std(0) + 1e-6)
    given, asked = z[::2], z[1::2]
    wanted = torch.nn.functional.one_hot(data.labels[::2], 10).double() - 0.1
    weights = torch.linalg.solve(given.T @ given + 10 * torch.eye(z.shape[1]), given.T @ wanted)
    return float(((asked @ weights).argmax(1) == data.labels[1::2]).double().mean())


def test_embedded_weights_need_no_data_folder_and_know_strokes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_DATA", "/nowhere")
    assert hashlib.sha256(weights_path("vit_signs").read_bytes()).hexdigest() == KNOWN["vit_signs"].sha256
    model = build_model("vit", task(10, 1), torch_generator(0, "init"))
    head, drawn = model.state_dict()["head.weight"].clone(), _distinguished(model)
    start_from(model, "vit_signs")
    assert torch.equal(model.state_dict()["head.weight"], head)  # signs are no classes of anybody's
    assert _distinguished(model) > 0.92 > 0.8 > drawn


def test_another_number_of_classes_is_stated_not_guessed(tmp_path: Path) -> None:
    path = saved(tmp_path, classes=7)
    model = build_model("efficientnet_lite0", task(), torch_generator(1, "fresh"))
    head = model.state_dict()["_fc.weight"].clone()
    with pytest.raises(ModelError, match=r"_fc\.weight") as caught:
        load_weights(model, path)
    assert "expected F32 [3, 1280], got F32 [7, 1280]" in str(caught.value)
    load_weights(model, path, own_head=True)
    assert torch.equal(model.state_dict()["_fc.weight"], head)


def test_gray_images_are_three_equal_channels(tmp_path: Path) -> None:
    path = saved(tmp_path, half=False)
    gray, color = (build_model("efficientnet_lite0", task(channels=c)).eval() for c in (1, 3))
    load_weights(gray, path)
    load_weights(color, path)
    x = torch.rand(2, 1, 16, 16, generator=torch_generator(0, "x")) * 2 - 1
    torch.testing.assert_close(gray(x), color(x.repeat(1, 3, 1, 1)), rtol=1e-4, atol=1e-4)


def test_positions_are_resized_on_loading(tmp_path: Path) -> None:
    name = "vit-p4-w16-d1-h2"
    path = saved(tmp_path, name)
    model = build_model(name, task(side=24))
    load_weights(model, path)
    assert model.state_dict()["pos_embed"].abs().sum() > 0


def test_the_files_normalization_is_folded_into_the_patches() -> None:
    known, rng = KNOWN["vit_small_patch14_dinov2_saliency"], torch_generator(0, "patches")
    weight, bias = torch.randn(5, 3, 4, 4, generator=rng), torch.randn(5, generator=rng)
    tensors = {"patch_embed.proj.weight": weight.clone(), "patch_embed.proj.bias": bias.clone()}
    expect_usual_range(tensors, known)
    u = torch.rand(2, 3, 8, 8, generator=rng)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (known.mean, known.deviation))
    usual = torch.nn.functional.conv2d((u - mean) / deviation, weight, bias, stride=4)
    folded = torch.nn.functional.conv2d(
        2 * u - 1, tensors["patch_embed.proj.weight"], tensors["patch_embed.proj.bias"], stride=4
    )
    torch.testing.assert_close(folded, usual)


def test_missing_files_say_where_they_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OSFL_DATA", str(tmp_path))
    with pytest.raises(ModelError, match="OSFL_DATA"):
        weights_path("efficientnet_lite0_imagenet")


def need(*files: Path) -> None:
    for file in files:
        if not file.is_file():
            pytest.skip(f"{file} is not there; set OSFL_DATA to the folder of datasets")


def photos(side: int, train: int, test: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """PACS photos, `train` and `test` a class: images and labels of both."""
    with zipfile.ZipFile(DATA / "pacs-subset.zip") as archive:
        names = sorted(n for n in archive.namelist() if n.startswith("photo/") and n.endswith(".jpg"))
        classes = sorted({n.split("/")[1] for n in names})
        order = torch.randperm(40, generator=torch_generator(0, "photos"))[: train + test].tolist()
        chosen = [[[n for n in names if n.split("/")[1] == c][i] for i in order] for c in classes]

        def read(name: str) -> torch.Tensor:
            image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
            return torch.from_numpy(np.array(image.resize((side, side), Image.Resampling.BICUBIC))).permute(2, 0, 1)

        images = torch.stack([torch.stack([read(n) for n in group]) for group in chosen])
    labels = torch.arange(len(classes)).unsqueeze(1).expand(-1, train + test)
    return (
        images[:, :train].flatten(0, 1),
        labels[:, :train].flatten(),
        images[:, train:].flatten(0, 1),
        labels[:, train:].flatten(),
    )


def ridge_accuracy(train: torch.Tensor, y: torch.Tensor, test: torch.Tensor, truth: torch.Tensor) -> float:
    mean = train.mean(0)
    train, test = (torch.nn.functional.normalize(f - mean) for f in (train, test))
    onehot = torch.nn.functional.one_hot(y).float()
    dual = torch.linalg.solve(train @ train.T + 0.1 * torch.eye(len(train)), onehot - onehot.mean(0))
    return float(((test @ train.T @ dual).argmax(1) == truth).float().mean())


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "test", "floor"),
    [("efficientnet_lite0_imagenet", 28, 0.85), ("vit_small_patch14_dinov2_saliency", 8, 0.65)],
)
def test_frozen_features_distinguish_photos(name: str, test: int, floor: float) -> None:
    """0.88 and 0.78 on average over draws of 56 test images; random weights reach 0.34 and 0.25."""
    need(DATA / "weights" / KNOWN[name].file, DATA / "pacs-subset.zip")
    images, labels, unseen, truth = photos(98, 12, test)
    model = build_model(KNOWN[name].architecture, task(7, side=98), torch_generator(0, "head")).eval()
    load_pretrained(model, name)
    with torch.no_grad():
        known, new = model.features(to_input(images)), model.features(to_input(unseen))
    assert ridge_accuracy(known, labels, new, truth) >= floor


@pytest.mark.data
def test_the_whole_file_loads_exactly() -> None:
    name = "efficientnet_lite0_imagenet"
    need(DATA / "weights" / KNOWN[name].file)
    model = build_model("efficientnet_lite0", task(1000, side=32))
    load_weights(model, weights_path(name), KNOWN[name].sha256)
    assert sum(value.numel() for value in model.state_dict().values()) == 4_694_073


def test_a_misfit_of_a_gray_task_is_described_as_the_file_has_it(tmp_path: Path) -> None:
    color = build_model("vit-p8-w16-d1-h2", task(channels=3))
    save_file({name: value.contiguous() for name, value in color.state_dict().items()}, tmp_path / "rgb.safetensors")
    with pytest.raises(ModelError) as caught:
        load_weights(build_model("vit-p4-w16-d1-h2", task(channels=1)), tmp_path / "rgb.safetensors")
    assert caught.value.got == "F32 [16, 3, 8, 8]"
