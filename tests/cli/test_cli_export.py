"""`osfl export`: what other programs get answers as the model does; and `osfl predict` on folders, to a file."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from osfl.core.errors import TrainingError
from osfl.roles import export
from osfl.roles.finished_model import open_model
from tests.cli.conftest import Osfl

RUN = "run --method {0} --clients 2 --partition iid --smoke --samples 100 --image-size 8 --out runs/a"


def picture(name: str = "a.png") -> torch.Tensor:
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(name)
    return torch.from_numpy(pixels)[None, None]


@pytest.mark.parametrize(("method", "suffix"), [("fedavg", "onnx"), ("onesum", "pt2")])
def test_the_file_answers_as_predict_does(osfl: Osfl, method: str, suffix: str) -> None:
    if suffix == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    osfl(RUN.format(method))
    pixels = picture()
    result = osfl(f"export runs/a --out model.{suffix} --format json")
    assert result.code == 0 and result.json["difference"] <= export.TOLERANCE
    ask, facts = (export.open_onnx if suffix == "onnx" else export.open_program)(Path(f"model.{suffix}"))
    row = osfl("predict --run runs/a a.png --format json").json["predictions"][0]
    expected = np.array(list(row["probabilities"].values()))
    assert np.allclose(ask(pixels).detach()[0], expected, atol=1e-4)
    classes = facts["classes"] if suffix == "pt2" else json.loads(facts["osfl.classes"])
    assert classes == list(row["probabilities"]) and ask(pixels.repeat(5, 1, 1, 1)).shape == (5, 10)
    assert not list(Path().glob(".model*"))


def test_what_cannot_be_traced_is_a_sentence(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such operation\nand many lines more")

    osfl(RUN.format("fedavg"))
    monkeypatch.setattr(export, "_program", fails)
    result = osfl("export runs/a --out model.pt2")
    assert result.code == 1 and "fedavg cannot be written" in result.err and "no such operation" in result.err
    assert "many lines" not in result.err and not Path("model.pt2").exists()


def test_a_file_that_answers_otherwise_is_not_kept(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    osfl(RUN.format("fedavg"))
    monkeypatch.setattr(export, "_write_program", lambda whole, task, facts, path: path.write_text("made up"))
    monkeypatch.setattr(export, "open_program", lambda path: (lambda images: torch.zeros(len(images), 10), {}))
    with pytest.raises(TrainingError, match="answers otherwise"):
        export.export_model(open_model(Path("runs/a")), Path("model.pt2"))
    assert not list(Path().glob("*.pt2")) and not list(Path().glob(".*.pt2"))


def test_formats_and_what_is_missing(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    osfl(RUN.format("fedavg"))
    result = osfl("export runs/a --out model.pth")
    assert result.code == 2 and ".onnx or .pt2" in result.err
    monkeypatch.setitem(sys.modules, "onnx", None)
    result = osfl("export runs/a --out model.onnx")
    assert result.code == 2 and "'osfl[onnx]'" in result.err


def test_predict_writes_a_table_and_mirrors_only_when_asked(osfl: Osfl) -> None:
    osfl(RUN.format("fedavg"))
    Path("images").mkdir()
    for number in range(3):
        picture(f"images/{number}.png")
    assert "3 images in out.csv" in osfl("predict --run runs/a images --batch 2 --out out.csv").out
    with Path("out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == ["images/0.png", "images/1.png", "images/2.png"]
    ask = "predict --run runs/a images/0.png --format json"
    plain, mirrored = osfl(ask).json, osfl(f"{ask} --tta").json
    Image.open("images/0.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save("images/flipped.png")
    other = osfl("predict --run runs/a images/flipped.png --format json").json
    parts = [found["predictions"][0]["probabilities"]["3"] for found in (plain, other, mirrored)]
    assert parts[2] == pytest.approx((parts[0] + parts[1]) / 2, abs=2e-6) and parts[0] != parts[1]
