"""Finished multi-label models on labeled images: scores, thresholds, the site's summary, pages, and what `compare` takes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.evaluation.intervals import estimates, label_scores_of
from osfl.evaluation.multilabel import label_scores, metrics
from tests.cli.conftest import Osfl
from tests.several import CLASSES, several, several_npz

RUN = "run --method fedavg --dataset chest.npz --clients 2 --partition iid --smoke --set epochs=6 --set lr=0.1"


def test_scores_with_weights_of_one_are_those_of_a_run() -> None:
    """And drawing an image twice is the same as having it twice."""
    rng = np.random.default_rng(0)
    truth = (rng.random((40, 3)) < (0.5, 0.3, 0.1)).astype(np.int64)
    answers = np.clip(0.4 * truth + rng.random((40, 3)).round(1) * 0.6, 0, 1)  # with ties
    cuts = np.array([0.5, 0.4, 0.6])
    once = label_scores_of(answers, truth, cuts, np.ones((1, 40)))
    for name, value in metrics(answers, truth, cuts).items():
        assert once[name][0] == pytest.approx(value), name
    for c, row in enumerate(label_scores(answers, truth, cuts)):
        assert once["class_recall"][0, c] == pytest.approx(row["sensitivity"])
        assert once["class_ap"][0, c] == pytest.approx(row["ap"])
        assert once["class_specificity"][0, c] == pytest.approx(row["specificity"])
    times = rng.integers(0, 3, 40)
    drawn = label_scores_of(answers, truth, cuts, times[None].astype(float))
    twice = metrics(np.repeat(answers, times, 0), np.repeat(truth, times, 0), cuts)
    assert {name: drawn[name][0] for name in twice} == pytest.approx(twice)
    found = estimates(answers, truth, resamples=200, cuts=cuts).overall["auroc"]
    assert found["low"] is not None and found["value"] is not None and found["low"] < found["value"]


def test_a_finished_run_is_measured_on_a_table(osfl: Osfl) -> None:
    several_npz(Path("chest.npz"))
    ran = osfl(f"{RUN} --out runs/a --format json").json
    again = osfl("evaluate runs/a --data chest.npz --resamples 50 --out m --format json").json
    for name, value in ran["scores"]["global"].items():
        assert again["metrics"][name]["value"] == pytest.approx(value, abs=1e-9)
    for name, row in ran["scores"]["labels"].items():
        assert again["per_class"][name]["threshold"] == row["threshold"]
        assert again["per_class"][name]["ap"]["value"] == pytest.approx(row["ap"])
    assert again["headline"] == "auroc" and "validation images" in again["thresholds"]
    page = Path("m/report/index.html").read_text()
    assert "Average precision" in page and "Threshold" in page and 'id="confusion"' not in page

    images, labels = several(60, 3)
    with Path("outside.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "ward", *map(str, range(3))])
        for number, (pixels, row) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(pixels).save(f"{number}.png")
            table.writerow([f"{number}.png", f"w{number % 2}", *row])
    found = osfl("evaluate runs/a --data outside.csv --by ward --resamples 50 --out n")
    assert found.code == 0 and "All images were used" in found.out and "ward w1" in found.out
    assert json.loads(Path("n/evaluation.json").read_text())["groups"]["w0"]["images"] == 30
    refused = osfl("evaluate runs/a --data digits")
    assert refused.code == 1


def test_a_site_chooses_thresholds_and_signs_a_summary(osfl: Osfl) -> None:
    Path("sites").mkdir()
    for seed, name in enumerate(("north", "south")):
        several_npz(Path("sites") / f"{name}.npz", 120, 60) if seed else several_npz(Path("sites") / f"{name}.npz", 100, 80)
    several_npz(Path("chest.npz"))
    assert osfl("new --method fedavg --dataset chest.npz --clients north,south --smoke --sites dealt --out plan.toml").code == 0
    osfl("keys server north south --out keys")
    osfl("enroll plan.toml --keys keys --out round")
    for name in ("north", "south"):
        made = osfl(
            f"client plan.toml --client {name} --data sites/{name}.npz --key keys/{name}.key --out usb/{name}.safetensors"
        )
        assert made.code == 0, made.err
    assert osfl("receive round usb").code == 0 and osfl("server round --key keys/server.key").code == 0
    take = "personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub"
    found = osfl(f"{take} --data sites/north.npz --out model --format json").json["evaluation"]
    kept = json.loads(Path("model/thresholds.json").read_text())
    assert found["data"]["part"] == "test" and set(kept) == set(found["per_class"]) and len(kept) == len(CLASSES)
    assert {name: row["threshold"] for name, row in found["per_class"].items()} == kept
    card = Path("model/model_card.md").read_text()
    assert "a probability of each of 3 classes" in card and "Average precision, micro" in card and "validation images" in card

    measured = osfl("evaluate model --data sites/north.npz --client north --key keys/north.key --out measured --resamples 50")
    assert measured.code == 0 and "ap_micro" in measured.out
    table = osfl("results round measured")
    assert table.code == 0 and "AUROC" in table.out and "Average precision" in table.out
    signed = json.loads(Path("measured/summary.json").read_text())["summary"]
    assert (
        signed["metrics"]["ap"]["value"] == json.loads(Path("measured/evaluation.json").read_text())["metrics"]["ap"]["value"]
    )


def test_missing_thresholds_are_reported(osfl: Osfl) -> None:
    several_npz(Path("chest.npz"))
    osfl(f"{RUN} --out runs/a")
    Path("runs/a/results.json").unlink()
    found = osfl("evaluate runs/a --data chest.npz --resamples 0 --out m --format json").json
    assert "No thresholds are known" in found["thresholds"]
    assert {row["threshold"] for row in found["per_class"].values()} == {0.5}


def test_a_comparison_without_methods_takes_those_that_learn_such_labels(osfl: Osfl) -> None:
    several_npz(Path("chest.npz"), 60, 30)
    found = osfl("compare --dataset chest.npz --clients 2 --partition iid --smoke --out cmp --format json")
    assert found.code == 0, found.err
    assert "ensemble@ensemble=class_count" in found.out and "odds" not in found.out and "onesum" in found.out
