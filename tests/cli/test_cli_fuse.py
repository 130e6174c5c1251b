"""`osfl fuse`: the options of a fusion, what it says, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from osfl.core.errors import TrainingError
from tests.cli.conftest import Osfl
from tests.roles.test_fusion import plain_models, tensors

COMMAND = "fuse one.safetensors two.safetensors --architecture vit-p4-w16-d1-h2 --classes classes.txt --out fused"


@pytest.fixture(autouse=True)
def _a_stall() -> None:
    plain_models(Path("one.safetensors"), tensors(0))
    plain_models(Path("two.safetensors"), tensors(1))
    plain_models(Path("bad.safetensors"), tensors(2, classes=4))
    Path("classes.txt").write_text("cat\ndog\nowl\n")


def test_models_are_fused_and_asked(osfl: Osfl, tmp_path: Path) -> None:
    result = osfl(f"{COMMAND} --method fedavg --smoke")
    assert result.code == 0, result.err
    assert "one.safetensors" in result.out and "timm" in result.out and "3 × 16" in result.out
    from PIL import Image

    Image.new("RGB", (16, 16)).save("dot.png")
    asked = osfl("predict --run fused dot.png --format json")
    assert asked.code == 0 and asked.json["classes"] == ["cat", "dog", "owl"]
    again = osfl(f"{COMMAND} --method fedavg --smoke")
    assert again.code == 0 and "nothing was computed again" in again.out


def test_a_refused_file_is_named_and_the_others_are_fused(osfl: Osfl) -> None:
    result = osfl(f"{COMMAND} bad.safetensors --method fedavg --smoke --format json")
    assert result.code == 1 and len(result.json["accepted"]) == 2
    assert result.json["refused"][0]["file"] == "bad.safetensors" and result.json["refused"][0]["tensor"] == "head.weight"
    result = osfl(f"{COMMAND} bad.safetensors --method fedavg --smoke")
    assert result.code == 1 and "bad.safetensors" in result.err and "expected F32 [3, 16], got F32 [4, 16]" in result.err


def test_what_is_refused_is_stated_though_the_others_were_fused_before(osfl: Osfl) -> None:
    first = osfl(f"{COMMAND} --method fedavg --smoke --format json")
    assert first.code == 0 and first.json["refused"] == []
    for command, refused in ((f"{COMMAND} bad.safetensors", ["bad.safetensors"]), (COMMAND, [])):
        result = osfl(f"{command} --method fedavg --smoke --format json")
        assert result.code == len(refused) and [one["file"] for one in result.json["refused"]] == refused
        assert result.json["release_digest"] == first.json["release_digest"]
        assert json.loads(Path("fused/fusion.json").read_text())["refused"] == result.json["refused"]
        for page in ("report/index.html", "model_card.md"):
            assert ("bad.safetensors" in Path("fused", page).read_text()) == bool(refused)


def test_another_key_is_not_the_servers(osfl: Osfl) -> None:
    assert osfl("keys one two --out keys").code == 0
    assert osfl(f"{COMMAND} --method fedavg --smoke --key keys/one.key").code == 0
    result = osfl(f"{COMMAND} --method fedavg --smoke --key keys/two.key")
    assert result.code == 2 and "this key is not the server's" in result.err


def test_what_was_forgotten_does_not_come_back(osfl: Osfl) -> None:
    plain_models(Path("three.safetensors"), tensors(3))
    command = f"{COMMAND} three.safetensors --method fedavg --smoke --format json"
    before = osfl(command).json
    client = before["accepted"][0]["client"]
    assert osfl(f"forget fused --client {client}").code == 0
    assert not Path("fused/model.safetensors").exists() and not Path("fused/fusion.json").exists()
    after = osfl(command).json
    assert client not in [one["client"] for one in after["accepted"]] and len(after["accepted"]) == 2
    assert after["release_digest"] != before["release_digest"] and osfl("forget fused --verify").code == 0


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("server", "Missing argument 'ROUND'"),
        ("server round", "Missing option '--key'"),
        ("fuse one.safetensors", "Missing option '--architecture'"),
        ("server round --key k --architecture cnn", "No such option '--architecture'"),
        (f"{COMMAND} --method fedavg --set epochz=3", "epochz"),
        ("fuse one.safetensors --architecture cnn --classes none.txt --out fused", "none.txt cannot be read"),
    ],
)
def test_missing_and_wrong_options(osfl: Osfl, command: str, result: str) -> None:
    answered = osfl(command)
    assert answered.code == 2 and result in answered.err


@pytest.mark.parametrize(
    ("listed", "result"),
    [
        ("", "the list of classes classes.txt is empty"),
        ("cat\n\ndog\ncat\n", "classes.txt, line 4: class 'cat' is in line 1 already"),
        ("cat\ndog\x1b[31m\nowl\n", r"classes.txt, line 2: 'dog\x1b[31m' holds a character that cannot be shown"),
    ],
)
def test_a_list_of_classes_that_cannot_be_one_is_named_with_its_line(listed: str, result: str, osfl: Osfl) -> None:
    Path("classes.txt").write_text(listed)
    answer = osfl(f"{COMMAND} --method fedavg --smoke")
    assert answer.code == 2 and result in " ".join(answer.err.split()) and "one class a line" in answer.err


def test_a_mark_before_the_first_class_is_no_part_of_it(osfl: Osfl) -> None:
    Path("classes.txt").write_text("cat\ndog\nowl\n", encoding="utf-8-sig")
    assert osfl(f"{COMMAND} --method fedavg --smoke --format json").json["task"]["classes"] == ["cat", "dog", "owl"]


def test_a_side_of_nothing_is_refused(osfl: Osfl) -> None:
    assert osfl(f"{COMMAND} --method fedavg --smoke --image-size 0").code == 2
    assert osfl(f"{COMMAND} --method fedavg --smoke --channels 0").code == 2
    assert osfl(f"{COMMAND} --method fedavg --smoke --image-size 2000").code == 2


def test_images_are_gray_or_rgb(osfl: Osfl) -> None:
    result = osfl(f"{COMMAND} --method fedavg --smoke --channels 2")
    assert (
        result.code == 2 and "'--channels'" in result.err and "expected 1, which is gray, or 3" in " ".join(result.err.split())
    )
    assert "Refused" not in result.err and osfl(f"{COMMAND} --method fedavg --smoke --channels 3").code == 0


def test_settings_are_judged_before_files_are_read(osfl: Osfl) -> None:
    result = osfl(f"{COMMAND} bad.safetensors gone.safetensors --smoke --set images=0 --set stops=often")
    assert result.code == 2 and "'images'" in result.err and "stops" in result.err and "Refused" not in result.err


@pytest.mark.parametrize("preset", ["paper", "nosuch", "cpu"])
def test_smoke_beside_another_preset_is_refused(preset: str, osfl: Osfl) -> None:
    for command in (f"{COMMAND} --method fedavg", "run --method fedavg", "check --method fedavg", "estimate --method fedavg"):
        result = osfl(f"{command} --preset {preset} --smoke")
        assert result.code == 2 and f"contradicts --preset {preset}" in " ".join(result.err.split()), command
    assert osfl(f"{COMMAND} --method fedavg --preset smoke --smoke").code == 0


def test_report_says_where_the_page_of_a_fusion_is(osfl: Osfl) -> None:
    assert osfl(f"{COMMAND} --method fedavg --smoke").code == 0
    result = osfl("report fused")
    assert result.code == 1 and "fused is a fusion of plain checkpoints, whose page is fused/report/index.html" in " ".join(
        result.err.split()
    )


def test_what_is_refused_is_stated_before_the_others_are_fused(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TrainingError("it went wrong after hours")

    monkeypatch.setattr("osfl.roles.fusion.run_server_phase", fails)
    result = osfl(f"{COMMAND} bad.safetensors --method fedavg --smoke")
    assert result.code == 1 and "it went wrong" in result.err and "Refused: bad.safetensors" in result.err
    assert "one.safetensors" in result.out and "model-" in result.out


def test_cautions_stand_on_stderr_and_what_was_assumed_is_stated(osfl: Osfl) -> None:
    result = osfl(f"{COMMAND} --method fedavg --smoke")
    assert result.code == 0 and "Caution: the weights are of 2 starts that have little in common" in " ".join(
        result.err.split()
    )
    assert "pixels in [-1, 1] are assumed (--pixels)" in " ".join(result.out.split())
    Path("preprocessor_config.json").write_text('{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}')
    reported = osfl(COMMAND.replace("fused", "reported") + " --method ensemble --smoke")
    assert (
        reported.code == 0
        and "Caution" not in reported.err
        and reported.out.count("as given by the files beside it: imagenet") == 2
    )
    assert "assumed" not in reported.out
