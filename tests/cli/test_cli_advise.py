"""`osfl advise`: a ranking from options, folders or a plan; what contradicts itself is one clear error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Osfl

CASE = "advise --sites 5 --images 4000 --classes 8 --classes-per-site 2 --image-size 28 --channels 3 --kind medical"


def test_a_ranking_names_its_cells_and_a_command(osfl: Osfl) -> None:
    result = osfl(CASE)
    text = " ".join(result.out.split())
    assert result.code == 0 and "Your case: 5 sites, 4000 images, 8 classes" in text
    assert "blood-n5-a0.1 (0.1)" in text and "Always the most frequent class would have 19.5" in text
    assert "osfl run --method onesum" in text and "Not local_only: sends nothing" in text


def test_the_table_fits_into_80_columns_and_shows_what_it_is_ordered_by(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = osfl(CASE).out.splitlines()
    header = next(line for line in lines if line.startswith(" Method"))
    assert header.split() == ["Method", "Behind", "Accuracy", "runs", "sends", "Server", "A", "site"]
    rows = [line.split() for line in lines[lines.index(header) + 2 :] if "–" in line]
    behind = [float(row[1]) for row in rows]
    assert len(rows) > 3 and behind == sorted(behind) and all(row[-1] in ("s", "ms") for row in rows)


def test_scripts_get_all_evidence(osfl: Osfl) -> None:
    found = osfl(f"{CASE} --format json").json
    first = found["ranked"][0]
    assert found["known"] and found["case"]["share"] == 0.25 and found["constant_answer"] is None
    assert first["label"].startswith("onesum") and first["low"] <= first["accuracy"] <= first["high"]
    assert first["evidence"][0]["cell"] == "blood-n5-a0.1" and first["upload"] > 1e6
    scores = [one["score"] for one in found["ranked"]]
    assert scores == sorted(scores, reverse=True) and found["nearest"][0]["distance"] < 0.2


def test_folders_are_counted(osfl: Osfl, tmp_path: Path) -> None:
    for site, counts in {"north": {"cat": 3, "dog": 1}, "south": {"cat": 2}}.items():
        for label, number in counts.items():
            folder = tmp_path / "all" / site / "train" / label
            folder.mkdir(parents=True)
            for one in range(number):
                Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / f"{one}.png")
        (tmp_path / "all" / site / "test" / "dog").mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "all" / site / "test" / "dog" / "t.png")
    found = osfl(f"advise --folders {tmp_path / 'all'} --format json").json
    assert [found["case"][key] for key in ("sites", "images", "classes")] == [2, 6, 2]
    assert found["case"]["share"] == pytest.approx((16 / 20 + 4 / 8) / 2) and found["constant_answer"] == pytest.approx(5 / 6)
    result = osfl(f"advise --folders {tmp_path / 'all'} --sites 3")
    assert result.code == 2 and "sites: 3 was given, --folders has 2" in result.err
    (tmp_path / "all" / "west").mkdir()
    result = osfl(f"advise --folders {tmp_path / 'all'}")
    assert result.code == 1 and "no images in class folders of west" in result.err


def test_a_case_that_nothing_is_near_to_gets_no_ranking(osfl: Osfl) -> None:
    result = osfl("advise --sites 3 --images 9000000 --image-size 1024 --kind natural")
    assert result.code == 0 and "Nothing near is known" in result.out and "Try the first" not in result.out
    assert osfl("advise --sites 3 --images 9000000 --image-size 1024 --format json").json["ranked"] == []


def test_limits_exclude_with_their_reason(osfl: Osfl) -> None:
    found = osfl(f"{CASE} --no-encoder --upload-limit 500kB --format json").json
    assert "sends more: 6.8 MB a site" in found["excluded"]["onesum"]
    assert "needs published weights" in found["excluded"]["fedmitr"]
    assert all(one["upload"] <= 5e5 and not one["weights"] for one in found["ranked"])
    result = osfl(f"{CASE} --epsilon 0.1")
    assert "no committed record has it with an epsilon below 1" in result.out and "No method of the records" in result.out


def test_with_an_epsilon_records_with_differential_privacy_count(osfl: Osfl) -> None:
    found = osfl(f"{CASE} --epsilon 8 --format json").json
    (first,) = found["ranked"]
    assert first["label"].startswith("onesum@symmetry=square@epsilon=8@") and 0.8 < first["accuracy"] < 0.92
    assert (
        first["server"] is None
        and 2e5 < first["upload"] < 4e5
        and " --epsilon 8 --delta 1e-05 --noise share" in first["command"]
    )
    result = osfl(f"{CASE} --epsilon 8")
    text = " ".join(result.out.split())
    assert "noise=site, against the server, too, has 8" in text
    assert "fol: no committed record has it with differential privacy" in text and "Not local_only: sends nothing" in text
    assert osfl(f"{CASE} --epsilon 4 --format json").json["ranked"][0]["accuracy"] < first["accuracy"]


def test_a_secure_sum_says_why_others_cannot_and_stands_in_the_command(osfl: Osfl) -> None:
    found = osfl(f"{CASE} --secure-sum --format json").json
    assert [one["label"].split("@")[0] for one in found["ranked"]] == ["onesum"] and "--secure-sum" in found["ranked"][0][
        "command"
    ]
    assert "set weighting=uniform" in found["excluded"]["fedavg"] and "not only their sum" in found["excluded"]["dense"]


@pytest.mark.parametrize(
    ("command", "pieces"),
    [
        ("", ("nothing is known of the sites", "osfl advise --sites")),
        ("--sites 5 --images 3", ("--images 3", "at least one for each of 5 sites")),
        ("--sites 5 --classes 3 --classes-per-site 4", ("--classes-per-site 4", "at most the 3 classes")),
        ("--sites 5 --classes 1", ("--classes 1", "at least 2")),
        ("--sites 5 --channels 2", ("--channels 2", "1 (gray) or 3 (RGB)")),
        ("--sites 5 --secure-sum --no-server", ("--secure-sum and --no-server", "leave one of them out")),
        ("--sites 5 --epsilon 0", ("--epsilon 0", "above 0")),
        ("--sites 5 --upload-limit 3x", ("--upload-limit '3x'", "20MB")),
        ("--sites 5 --images 3 --epsilon -1 --upload-limit x", ("--images 3", "--epsilon -1", "--upload-limit 'x'")),
        ("--folders here --plan plan.toml", ("--folders and --plan", "Leave one of them out")),
        ("--plan nowhere.toml", ("no plan at nowhere.toml",)),
        ("--sites 5 --classes-per-site 2", ("--classes-per-site 2", "--classes")),
    ],
)
def test_what_contradicts_itself_is_refused(osfl: Osfl, command: str, pieces: tuple[str, ...]) -> None:
    result = osfl(f"advise {command}")
    assert result.code == 2 and all(piece in result.err for piece in pieces), result.err
