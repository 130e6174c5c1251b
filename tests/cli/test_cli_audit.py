"""What `osfl audit` says when it is done, and where it and other commands find a run's images again."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from osfl.cli.audit import _federation, _show
from osfl.core.result import read_result
from tests.cli.conftest import Osfl

RUN = "run --method fedavg --clients 2 --partition iid --smoke --image-size 8"


def test_a_run_of_a_comparison_is_reported_how_to_stand_beside_the_others_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = {"membership": [], "canaries": [], "verdict": ["Nothing was found."], "not_shown": ["Much."]}
    result: Any = {"reconstruction": {"attackers": {}}, "audit": audit}
    _show(result, tmp_path / "falcon" / "seed0")
    shown = "".join("".join(capsys.readouterr()).split())
    assert "osflreport" not in shown and "Nothingwasfound." in shown and "Notshown:Much." in shown
    (tmp_path / "comparison.json").write_text("{}", encoding="utf-8")
    _show(result, tmp_path / "falcon" / "seed0")
    output = "".join("".join(capsys.readouterr()).split())  # lines may break anywhere
    assert f"osflreport{tmp_path}" in output


def drawn() -> list[tuple[str, str, np.ndarray[Any, Any]]]:
    """Class, person and gray picture; three classes of twelve pictures, two of each person."""
    rng = np.random.default_rng(0)
    return [
        (name, f"{name}{number // 2}", (rng.integers(0, 60, (8, 8)) + 90 * label).astype(np.uint8))
        for label, name in enumerate(("dim", "gray", "light"))
        for number in range(12)
    ]


def images_as(kind: str) -> str:
    """The pictures as users have them: the options of a run that reads them."""
    place = Path("elsewhere")
    place.mkdir()
    if kind == "npz":
        pixels, labels = np.stack([one for _, _, one in drawn()]), np.repeat(np.arange(3), 12)[:, None]
        np.savez(place / "mine.npz", train_images=pixels, train_labels=labels, test_images=pixels[::4], test_labels=labels[::4])
        return "--dataset elsewhere/mine.npz"
    rows = []
    for number, (name, person, pixels) in enumerate(drawn()):
        path = place / "mine" / name / f"{number}.{'dcm' if kind == 'dicom' else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "dicom":
            from tests.data.test_medical import _dicom

            _dicom(pixels.astype(np.uint16), path)
        else:
            Image.fromarray(pixels).save(path)
        rows.append([path.relative_to(place), name, person, f"ward {number % 2}"])
    if kind != "table":
        return "--dataset elsewhere/mine --channels 1" + (" --window 120:240" if kind == "dicom" else "")
    with (place / "mine.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "mrn", "ward"], *rows])
    return "--dataset elsewhere/mine.csv --group mrn"


@pytest.mark.parametrize("kind", ["npz", "folder", "table", "dicom"])
def test_images_that_were_given_by_a_path_are_found_again(osfl: Osfl, kind: str) -> None:
    """The plan keeps their name only."""
    if kind == "dicom":
        pytest.importorskip("pydicom")
    where = images_as(kind)
    assert osfl(f"{RUN} {where} --out runs/a").code == 0
    again = _federation(Path("runs/a"), "")
    assert again.plan.digest == read_result(Path("runs/a"))["plan_digest"]
    place = where.split()[1]
    written = osfl(f"new --method fedavg {where} --clients 2 --partition iid --smoke --image-size 8 --out mine.toml")
    assert f"osfl run --plan mine.toml --dataset {place}" in " ".join(written.out.split())
    assert osfl(f"check mine.toml --dataset {place}").code == 0
    assert osfl(f"run --plan mine.toml --dataset {place} --out runs/b").code == 0
    assert read_result(Path("runs/b"))["release_digest"] == read_result(Path("runs/a"))["release_digest"]


def test_an_audit_of_images_that_were_moved(osfl: Osfl) -> None:
    where = images_as("npz")
    osfl(f"{RUN} {where} --out runs/a")
    Path("elsewhere").rename("archive")
    audit = "audit runs/a --shadows 0 --canaries 0 --images 10"
    refused = osfl(audit)
    assert refused.code == 1 and "elsewhere/mine.npz" in refused.err and "--dataset PATH" in refused.err
    assert osfl(f"{audit} --dataset archive/mine.npz").code == 0 and "audit" in read_result(Path("runs/a"))
    refused = osfl("audit runs/a --dataset digits")
    assert refused.code == 2 and "the data here give" in refused.err


def test_beside_a_plan_only_the_place_of_its_dataset_is_taken(osfl: Osfl) -> None:
    osfl("new --method fedavg --dataset digits --clients 2 --smoke --out plan.toml")
    refused = osfl("run --plan plan.toml --dataset digits --clients 3")
    assert refused.code == 2 and "--clients would contradict it" in refused.err
