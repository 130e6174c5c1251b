"""The Python API: plain functions, results that show themselves, and methods, data and networks of one's own."""

from __future__ import annotations

import builtins
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import osfl
from osfl.cli.main import answer
from osfl.core.errors import DataError, UsageError
from osfl.core.registry import _OWN
from osfl.methods.fedavg import FedAvg

SMALL: dict[str, Any] = {"clients": 2, "partition": "iid", "preset": "smoke", "samples": 60, "image_size": 8}


class Mine(FedAvg):
    """FedAvg under another name."""


@pytest.fixture(autouse=True)
def _forget_own_methods() -> Any:
    yield
    _OWN.clear()


def test_the_names_are_listed_without_importing_torch() -> None:
    wanted = ("run", "Result", "compare", "from_torch")
    code = f"import osfl, sys; print([name for name in {wanted} if name not in dir(osfl)], 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[] False"
    assert "dataset" in inspect.signature(osfl.run).parameters and "_HOMES" not in dir(osfl)


def test_a_result_shows_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = osfl.run("fedavg", tmp_path / "run", **SMALL)
    assert result == json.loads((tmp_path / "run" / "results.json").read_text())
    assert result.accuracy == result["scores"]["global"]["accuracy"] and result.report.exists()
    assert len(repr(result)) < 200 and "fedavg" in repr(result) and "2 clients" in repr(result)
    assert "<table>" in result._repr_html_() and "Smoke run" in result._repr_html_()
    assert isinstance(result.model(), nn.Module)
    saved = result.save_figures(tmp_path / "figures", ("svg", "png", "csv"))
    assert {path.name for path in saved} >= {"accuracy.svg", "accuracy.png", "accuracy.csv", "confusion-matrix.csv"}
    real = builtins.__import__

    def without_pandas(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ImportError
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(UsageError, match=r"needs pandas(.|\n)*osfl\[pandas\]"):
        result.to_frame()


def test_frames(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    frame = osfl.run("fedavg", tmp_path / "run", **SMALL).to_frame()
    assert list(frame.index) == ["client-01", "client-02"] and (frame["upload_bytes"] > 0).all()


def test_a_class_of_ones_own_needs_no_package(tmp_path: Path) -> None:
    mine = osfl.run(Mine, tmp_path / "mine", **SMALL)
    theirs = osfl.run("fedavg", tmp_path / "fedavg", **SMALL)
    assert mine["method"] == "mine" and mine["scores"] == theirs["scores"]
    both = osfl.compare([Mine, "fedavg"], tmp_path / "both", **SMALL)
    assert "accuracy-by-method.svg" in {path.name for path in both.save_figures(tmp_path / "figures")}
    assert list(both["methods"]) == ["mine", "fedavg"] and "mine" in repr(both) and "<table>" in both._repr_html_()


def test_a_file_of_ones_own_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from osfl.cli.main import answer

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        '"""Mine."""\nfrom osfl.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    """FedAvg again."""\n'
    )
    command = "run --method ./mine.py --clients 2 --partition iid --smoke --samples 60 --image-size 8 --out a"
    assert answer(command.split()) == 0
    command = json.loads(Path("a/results.json").read_text())["command"]
    assert "--method ./mine.py" in command or "--method mine.py" in command
    _OWN.clear()
    assert answer(["predict", "--run", "a", "a.png"]) == 2  # nobody loads a file that a folder names
    assert answer(["new", "--method", "./mine.py", "--dataset", "digits", "--clients", "north"]) == 2


def test_a_name_that_is_taken_is_refused() -> None:
    taken = type("Fedavg", (FedAvg,), {})
    with pytest.raises(UsageError, match="already"):
        osfl.run(taken)


class Pictures:
    """A torch dataset, to the letter."""

    def __init__(self, count: int, kind: str) -> None:
        self.count, self.kind = count, kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        label = index % 2
        pixels = np.full((8, 8), 40 + 150 * label + index % 7, np.uint8)
        if self.kind == "pil":
            return Image.fromarray(pixels), label
        tensor = torch.from_numpy(pixels)[None]
        return (tensor.float() / 255 if self.kind == "float" else tensor), label


@pytest.mark.parametrize("kind", ["float", "uint8", "pil"])
def test_any_torch_dataset_is_read_alike(kind: str) -> None:
    source = osfl.from_torch(Pictures(40, kind), Pictures(20, "uint8"), classes=["dark", "bright"])
    assert source.classes == ("dark", "bright") and source.image == (1, 8, 8)
    assert source.train.dataset.images[1, 0, 0, 0] == 191


def test_normalized_images_are_refused() -> None:
    class Normalized(Pictures):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            image, label = super().__getitem__(index)
            return image * 2 - 1, label

    with pytest.raises(DataError, match="Normalize out of the transform"):
        osfl.from_torch(Normalized(4, "float"), Pictures(4, "float"))


def test_one_torch_dataset_is_cut_into_training_and_test(tmp_path: Path) -> None:
    """It was read by iteration before, which never ends where a dataset answers every index."""
    source = osfl.from_torch(Pictures(40, "uint8"))
    assert (len(source.train), len(source.test)) == (32, 8) and np.bincount(source.test.labels).tolist() == [4, 4]
    assert osfl.run("local_only", tmp_path / "a", dataset=Pictures(40, "uint8"), clients=2, preset="smoke").accuracy >= 0
    with pytest.raises(UsageError, match="two of them, \\(train, test\\), got int"):
        osfl.run("local_only", tmp_path / "b", dataset=3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="one image cannot"):
        osfl.from_torch(Pictures(1, "uint8"))


def test_a_dataset_and_a_network_of_ones_own(tmp_path: Path) -> None:
    def build(classes: int, image: tuple[int, int, int]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(image[0] * image[1] * image[2], 16), nn.Tanh(), nn.Linear(16, classes))

    osfl.register_model("tiny_mlp", build)
    how: dict[str, Any] = {
        "clients": 2,
        "partition": "iid",
        "preset": "smoke",
        "settings": {"architecture": "tiny_mlp", "epochs": 5},
    }
    data = (Pictures(80, "float"), Pictures(20, "float"))
    first = osfl.run("fedavg", tmp_path / "a", dataset=data, **how)
    assert first.accuracy > 0.9 and first["settings"]["architecture"] == "tiny_mlp"
    again = osfl.run("fedavg", tmp_path / "b", dataset=data, machine=None, workers=1, **how)
    assert again["release_digest"] == first["release_digest"]
    assert isinstance(first.model(), nn.Sequential)
    with pytest.raises(UsageError, match="one of ours"):
        osfl.register_model("cnn", build)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": "a"}, "seed: expected a whole number, got 'a'"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"clients": "3", "samples": 2.5}, "clients: expected .*(.|\n)*samples: expected"),
        ({"clients": -2}, "clients: expected a whole number of at least 1, got -2"),
        ({"image_size": True}, "image_size: expected"),
        ({"evaluate_on": "train"}, "evaluate_on: expected 'test' or 'val', got 'train'"),  # was silently the validation part
        ({"partition": None}, "partition: expected text"),
        ({"settings": ["epochs=2"]}, "settings: expected a dict"),
        ({"workers": -1}, "workers: expected"),
        ({"workers": "2"}, "workers: expected"),
    ],
)
def test_an_option_of_another_kind_is_refused_before_anything_starts(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        osfl.run("fedavg", tmp_path / "run", **{**SMALL, **wrong})
    assert not (tmp_path / "run").exists()


def test_one_method_and_one_seed_are_a_comparison_too_but_none_is_not(tmp_path: Path) -> None:
    assert list(osfl.compare("fedavg", tmp_path / "one", seeds=0, **SMALL)["methods"]) == ["fedavg"]
    for methods, seeds, message in (([], 0, "no method"), ("fedavg", [], "no seed")):
        with pytest.raises(UsageError, match=message):
            osfl.compare(methods, tmp_path / "none", seeds=seeds, **SMALL)


def test_python_and_the_command_line_put_a_run_into_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert osfl.run("fedavg", **{**SMALL, "partition": "dirichlet:0.5"}).folder == Path(
        "runs/fedavg-digits-dirichlet-0.5-seed0"
    )
    command = "run --method fedavg --clients 2 --partition dirichlet:0.5 --smoke --samples 60 --image-size 8"
    assert answer(command.split()) == 0  # and so it is the same run
    assert [path.name for path in Path("runs").iterdir()] == ["fedavg-digits-dirichlet-0.5-seed0"]


@pytest.mark.parametrize("wrong", [nn.Linear(3, 3), lambda task: nn.Flatten(), 3])
def test_a_network_is_registered_by_a_function_that_builds_it(wrong: Any) -> None:
    """Each of these was accepted, and failed in the run with a TypeError."""
    with pytest.raises(UsageError, match=r"not built by build\(classes, image\)"):
        osfl.register_model("wrongly_built", wrong)
