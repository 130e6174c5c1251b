"""Weights for clients to start from: the same bytes twice, no head, and they load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import pretrain_vit
from benchmarks.distilled_start import Distillation, Lessons, crop, distilled, lessons
from benchmarks.signs import STROKES, Drawing, Signs, draw, drawn_signs, invented
from osfl.core.result import write_json
from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Task
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.naming import ModelError
from osfl.models.pretrained import read_weights, start_from, weights_path

TINY = replace(pretrain_vit.RECIPE, architecture="vit-p4-w8-d1-h2", epochs=1)
DISTILLATION = Distillation("vit-p4-w8-d1-h2", crops=96, epochs=3, batch_size=16, lr=0.01, warmup=2)


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
    assert not any("cifar" in name for name in pretrain_vit.STARTS["cifar"].pool)
    assert not any("blood" in name for name in pretrain_vit.STARTS["blood"].pool)


# --- labels by a network from ImageNet ---


def test_a_crop_is_a_part_of_one_picture() -> None:
    pictures = torch.arange(2).view(2, 1, 1, 1).expand(2, 3, 60, 60) * 100 + torch.arange(60).view(1, 1, 1, 60)
    rng = torch_generator(0, "crops")
    found = [crop(pictures.to(torch.uint8), 0.25, rng) for _ in range(200)]
    assert all(len(part[..., 0].unique()) == 1 for part in found)  # columns are as they were, all of one picture
    steps = [part[0, 0, 0].diff() for part in found]
    assert all(bool((step == step[0]).all()) and abs(float(step[0])) == 1 for step in steps)
    assert 60 < sum(float(step[0]) < 0 for step in steps) < 140  # mirrored half of the time
    assert 60 < sum(float(part.mean()) >= 100 for part in found) < 140  # either picture
    shares = [part.shape[2] * part.shape[3] / 3600 for part in found]
    assert min(shares) > 0.2 and max(shares) > 0.9
    assert all(0.7 < part.shape[2] / part.shape[3] < 1.4 for part in found)


def _painted(count: int) -> Lessons:
    """Answers that can be seen: the brightness of each patch, and that of the whole."""
    rng = torch_generator(0, "painted")
    light = torch.randint(0, 256, (count, 1, 2, 2), generator=rng)
    images = light.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1).to(torch.uint8)
    return Lessons(images.contiguous(), light.half(), light.float().mean((1, 2, 3))[:, None].half())


def test_a_vit_learns_what_is_stated_of_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _painted(256)
    losses: list[torch.Tensor] = []
    squared = torch.nn.functional.mse_loss

    def spy(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        losses.append(squared(output, wanted))
        return losses[-1]

    monkeypatch.setattr("torch.nn.functional.mse_loss", spy)
    model = distilled(reported, replace(DISTILLATION, epochs=60, crops=256))
    first, places, whole = (float(loss.detach()) for loss in (losses[0], *losses[-2:]))
    assert first > 0.7 and places < 0.05 and whole < 0.3  # of standardized numbers, so at first near 1
    assert not model.training
    left_is_light = torch.tensor([[255, 0], [255, 0]]).view(1, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    with torch.no_grad():
        tokens = model.forward_features(to_input(left_is_light.expand(-1, 3, -1, -1).to(torch.uint8)))[0, 1:]
    assert torch.dist(tokens[0], tokens[1]) > 5 * torch.dist(tokens[0], tokens[2])  # the columns differ


def test_reported_twice_it_is_the_same() -> None:
    one, two = (distilled(_painted(96), DISTILLATION).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.data
def test_the_teacher_says_something_of_each_patch() -> None:
    try:
        weights_path("efficientnet_lite0_imagenet")
    except ModelError as error:
        pytest.skip(f"EfficientNet-Lite0's weights are not here: {error}")
    pictures = torch.randint(0, 256, (3, 3, 60, 60), dtype=torch.uint8, generator=torch_generator(0, "pictures"))
    reported = lessons(pictures, 16, 4, replace(DISTILLATION, crops=70))
    assert (
        reported.images.shape == (70, 3, 16, 16)
        and reported.places.shape == (70, 112, 4, 4)
        and reported.whole.shape == (70, 1280)
    )
    again = lessons(pictures, 16, 4, replace(DISTILLATION, crops=70))
    assert torch.equal(reported.places, again.places) and torch.equal(reported.whole, again.whole)
    assert float(reported.places.float().std()) > 0.1


# --- drawn signs ---

STILL = Drawing(thinnest=0.15, thickest=0.15, shake=0, turn=0, slant=0, grow=0, move=0)


def _line(*points: tuple[float, float]) -> Signs:
    """One stroke; the others are not there."""
    curves = torch.zeros(1, STROKES, 3, 2)
    curves[0, 0] = torch.tensor(points)
    return Signs(curves, torch.arange(STROKES)[None] < 1)


def test_a_stroke_is_drawn_where_it_goes_and_nothing_else_is() -> None:
    down = draw(_line((0.125, -0.9), (0.125, 0.0), (0.125, 0.9)), STILL, torch_generator(0, "pen"))[0]
    assert down.shape == (8, 8) and bool((down[:, 4] > 200).all())  # x = 0.125 is the middle of the fifth column
    assert int(down[:, :3].max()) == int(down[:, 6:].max()) == 0
    across = draw(_line((-0.9, 0.125), (0.0, 0.125), (0.9, 0.125)), STILL, torch_generator(0, "pen"))[0]
    assert torch.equal(across, down.T)  # y goes down, x to the right


def test_two_hands_draw_a_sign_differently_and_one_hand_twice_the_same() -> None:
    sign = _line((-0.5, -0.8), (0.9, 0.0), (-0.5, 0.8))
    shaken = [draw(sign, Drawing(), torch_generator(0, "hand", hand)) for hand in (1, 2, 1)]
    assert not torch.equal(shaken[0], shaken[1]) and torch.equal(shaken[0], shaken[2])
    still = [draw(sign, STILL, torch_generator(0, "hand", hand)) for hand in (1, 2)]
    assert torch.equal(still[0], still[1])


def test_signs_fill_their_box_and_most_strokes_are_joined() -> None:
    signs = invented(400, torch_generator(0, "signs"))
    assert signs.there[:, 0].all() and {int(n) for n in signs.there.sum(1)} == {1, 2, 3, 4}
    reach = signs.points.masked_fill(~signs.there[:, :, None, None], 0).abs().flatten(1, 2).amax(1)
    assert bool((reach[:, 0] <= 0.6501).all()) and bool((reach[:, 1] <= 0.9501).all()) and float(reach[:, 1].median()) > 0.6
    joined = (signs.points[:, 1:, 0] - signs.points[:, :-1, 2]).abs().amax(-1) < 1e-6
    assert 0.65 < float(joined[signs.there[:, 1:]].float().mean()) < 0.85


def test_drawn_signs_are_a_dataset_that_can_be_learned(tmp_path: Path) -> None:
    few = Drawing(signs=6, drawings=32)
    data = drawn_signs(16, few)
    assert data.images.shape == (192, 1, 16, 16) and data.images.dtype == torch.uint8
    assert torch.equal(data.labels.bincount(), torch.full((6,), 32))
    path = tmp_path / "small-fp16.safetensors"
    one = pretrain_vit.pretrain("signs", path, replace(TINY, epochs=2), few)
    assert one["drawing"]["signs"] == 6 and one["pool"] == {}
    model = build_model("vit-p4-w8-d1-h2", Task("t", ("a", "b"), (1, 16, 16)), torch_generator(0, "init"))
    start_from(model, str(path), one["sha256"])  # half precision is widened
    assert torch.equal(model.state_dict()["cls_token"].half().float(), model.state_dict()["cls_token"])


def test_what_another_processor_made_before_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain_vit, "RECORDS", tmp_path)
    assert pretrain_vit.earlier("toy", "b" * 64) == []
    output = {"date": "2026-01-01", "environment": {"processor": "one"}, "cpu_seconds": 1.0}
    write_json(tmp_path / "pretrain-toy.json", {"sha256": "a" * 64, **output, "side": 8})
    before = pretrain_vit.earlier("toy", "b" * 64)
    assert before == [{"sha256": "a" * 64, **output}]
    assert pretrain_vit.earlier("toy", "a" * 64) == []  # the same bytes again
    write_json(tmp_path / "pretrain-toy.json", {"sha256": "b" * 64, **output, "earlier": before})
    assert [one["sha256"][0] for one in pretrain_vit.earlier("toy", "c" * 64)] == ["a", "b"]
