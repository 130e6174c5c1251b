"""`osfl evaluate` and `osfl results`: any finished model, any labeled images, and signed summaries."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.cli.terminal import escape, on_one_line
from tests.cli.conftest import Osfl, round_with_bundles
from tests.roles.test_fusion import plain_models, tensors

RUN = "run --method fedavg --clients 2 --partition iid --smoke --samples 120 --out runs/a"


def pictures(folder: Path, per_class: int = 4, classes: int = 10) -> None:
    """Made-up 8 × 8 pictures in folders of the digits' names."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        (folder / str(label)).mkdir(parents=True)
        for number in range(per_class):
            pixels = rng.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")


def test_a_run_measured_again_has_the_scores_of_its_own_report(osfl: Osfl) -> None:
    ran = osfl(f"{RUN} --format json").json
    result = osfl("evaluate runs/a --data digits --out runs/m --format json")
    assert result.code == 0
    for name, value in ran["scores"]["global"].items():
        found = result.json["metrics"][name]
        assert found["value"] == pytest.approx(value, abs=1e-9) and found["low"] <= found["value"] <= found["high"]
    assert result.json["confusion"] == ran["scores"]["confusion"] and result.json["data"]["part"] == "test"
    page = Path("runs/m/report/index.html").read_text()
    assert "Class by class" in page and "Calibration" in page and "<script" not in page
    again = osfl(result.json["command"].removeprefix("osfl ") + " --format json").json
    assert again["metrics"] == result.json["metrics"]


def test_an_external_folder_and_what_to_know_about_it(osfl: Osfl, tmp_path: Path) -> None:
    osfl(RUN)
    pictures(tmp_path / "elsewhere", classes=9)
    result = osfl("evaluate runs/a --data elsewhere --out runs/m --resamples 50")
    assert result.code == 0 and "All images were used" in result.out and "no image of 9" in result.out
    (tmp_path / "elsewhere" / "nine").mkdir()
    (tmp_path / "elsewhere" / "0" / "0.png").rename(tmp_path / "elsewhere" / "nine" / "0.png")
    result = osfl("evaluate runs/a --data elsewhere")
    assert result.code == 1 and "classes that the plan does not know" in result.err and "nine" in result.err


def test_scores_by_scanner_and_people_drawn_whole(osfl: Osfl, tmp_path: Path) -> None:
    osfl(RUN)
    pictures(tmp_path / "images")
    with (tmp_path / "table.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "scanner", "mrn"])
        for path in sorted((tmp_path / "images").rglob("*.png")):
            number = int(path.stem)
            table.writerow([path.relative_to(tmp_path), path.parent.name, f"CT{number % 2}", f"p{number}"])
    found = osfl("evaluate runs/a --data table.csv --by scanner --group mrn --out runs/m --resamples 50 --format json").json
    assert set(found["groups"]) == {"CT0", "CT1"} and found["groups"]["CT0"]["images"] == 20
    assert found["data"]["people"] == 4 and found["interval"]["of"] == "people" and found["data"]["column"] == "scanner"
    assert "Group by group: scanner" in Path("runs/m/report/index.html").read_text()
    result = osfl("evaluate runs/a --data images --by scanner")
    assert result.code == 2 and "is no table" in result.err


def test_a_plain_checkpoint(osfl: Osfl) -> None:
    osfl("run --method local_only --set architecture=cnn-w8 --clients 2 --samples 120 --smoke --out runs/l")
    Path("classes.txt").write_text("\n".join(map(str, range(10))))
    file = "runs/l/models/client-01.safetensors"
    result = osfl(f"evaluate {file} --data digits")
    assert result.code == 2 and "--architecture NAME and --classes" in result.err
    plain = osfl(
        f"evaluate {file} --architecture cnn-w8 --classes classes.txt --image-size 16 --channels 1 --data digits --format json"
    )
    ours = osfl("evaluate runs/l --client client-01 --data digits --format json")
    assert plain.code == 0 and plain.json["metrics"] == ours.json["metrics"]


def test_a_misspelled_metric_is_refused_before_any_work(osfl: Osfl) -> None:
    result = osfl("evaluate nowhere --data digits --metric auroq")
    assert result.code == 2 and "Did you mean 'auroc'" in result.err


def test_a_site_gets_results_and_the_coordinator_a_signed_summary(osfl: Osfl, tmp_path: Path) -> None:
    round_with_bundles(tmp_path, ["north", "south"])
    assert osfl("receive round usb").code == 0 and osfl("server round --key keys/server.key").code == 0
    take = "personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub"
    assert "Not measured" in osfl(f"{take} --out bare").out and "Not measured" in Path("bare/model_card.md").read_text()
    found = osfl(f"{take} --data sites/north --out model --format json").json
    assert found["evaluation"]["data"]["part"] in ("test", "validation")
    assert all(Path(f"model/{name}").exists() for name in ("evaluation.json", "report/index.html", "model_card.md"))
    assert "Balanced accuracy" in Path("model/model_card.md").read_text()

    result = osfl("evaluate model --data sites/north --client north --key keys/north.key --out measured")
    assert result.code == 0 and "All that it holds" in result.out
    table = osfl("results round measured --format json")
    assert table.code == 0 and [one["client"] for one in table.json["summaries"]] == ["north"]
    assert "north" in osfl("results round").out  # kept

    signed = json.loads(Path("measured/summary.json").read_text())
    signed["summary"]["metrics"]["accuracy"]["value"] = 1.0
    Path("summary-forged.json").write_text(json.dumps(signed))
    result = osfl("results round summary-forged.json")
    assert result.code == 1 and "not signed with the key that is enrolled" in result.err
    osfl("evaluate model --data sites/north --client north --key keys/south.key --out stolen")
    assert osfl("results round stolen").code == 1
    Path("junk.json").write_text("{}")
    assert "no signed summary" in osfl("results round junk.json").err


def test_few_images_of_a_class_stay_at_the_site(osfl: Osfl, tmp_path: Path) -> None:
    round_with_bundles(tmp_path, ["north"])
    osfl("receive round usb")
    osfl("server round --key keys/server.key")
    osfl("personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub --out model")
    pictures(tmp_path / "few", per_class=9)
    osfl("evaluate model --data few --client north --key keys/north.key --out measured --resamples 20")
    assert set(json.loads(Path("measured/summary.json").read_text())["summary"]["classes"].values()) == {None}


@pytest.mark.parametrize("preset", ["--smoke", "--preset cpu --set epochs=1"])
def test_a_smoke_run_is_called_so_wherever_its_model_is_measured(osfl: Osfl, preset: str) -> None:
    """On the page, the card and the terminal, also where only a plan is left; and not where it is none."""
    where = "--clients 2 --partition iid --samples 120 --image-size 8 --set architecture=cnn-w8"
    osfl(f"run --method fedavg {where} {preset} --out runs/a")
    trial = preset == "--smoke"
    measured = osfl("evaluate runs/a --data digits --resamples 20 --out m")
    assert measured.code == 0 and ("Smoke run" in measured.out) == trial and "Card" in measured.out
    osfl("audit runs/a --shadows 0 --canaries 0 --images 10")
    for name in ("m/report/index.html", "m/model_card.md", "runs/a/report/index.html", "runs/a/model_card.md"):
        assert ("Smoke run" in Path(name).read_text()) == trial, name
    assert "Membership" in Path("runs/a/report/index.html").read_text()
    card = Path("m/model_card.md").read_text()
    assert card.startswith("# Model card: fedavg\n") and "`DIR` is `runs/a`" in card and "Balanced accuracy" in card
    Path("runs/a/results.json").unlink()
    assert ("Smoke run" in osfl("evaluate runs/a --data digits --resamples 0 --out n").out) == trial


def test_a_fusion_is_measured(osfl: Osfl, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        plain_models(Path(f"{name}.safetensors"), tensors(seed))
    Path("classes.txt").write_text("cat\ndog\nowl\n")
    command = "fuse one.safetensors two.safetensors --architecture vit-p4-w16-d1-h2 --classes classes.txt --out fused"
    assert osfl(f"{command} --method fedavg --smoke").code == 0
    for label in ("cat", "dog", "owl"):
        (tmp_path / "animals" / label).mkdir(parents=True)
        for number in range(4):
            pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "animals" / label / f"{number}.png")
    found = osfl("evaluate fused --data animals --resamples 20 --out m --format json")
    assert found.code == 0, found.err
    assert found.json["data"]["images"] == 12 and found.json["model"]["method"] == "fedavg"
    assert "Smoke run" in Path("m/report/index.html").read_text() and "`fused`" in Path("m/model_card.md").read_text()
    asked = osfl("predict --run fused animals/cat/0.png --format json").json["predictions"][0]["class"]
    first = ["cat", "dog", "owl"].index(asked)
    assert found.json["confusion"][0][first] > 0  # the same model answers


def test_numbers_and_their_units_are_readable_in_a_terminal() -> None:
    """A narrow blank between them was shown as a question mark; what steers a terminal still is one."""
    assert escape("98.3\u202f% of 1\u00a0000, a\x1b[2J\n") == "98.3 % of 1 000, a?[2J\n"
    assert on_one_line("a\u202fb\nc\u2028d") == "a b?c?d"


def test_an_exported_model_is_not_taken_for_a_checkpoint(osfl: Osfl, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    refused = osfl(f"evaluate {tmp_path / 'm.onnx'} --data {tmp_path}")
    assert refused.code == 2 and "is an exported model" in refused.err and "give the folder" in refused.err
