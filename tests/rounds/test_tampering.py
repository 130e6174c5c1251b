"""A finished round folder that somebody tampered with: `osfl verify` notices it, or it says what it said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from osfl.cli.main import answer
from tests.rounds.tampering import WAYS, campaign, finished


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], Path]:
    return finished(tmp_path_factory.mktemp("finished"))


def test_random_tampering_is_noticed_or_harmless(
    whole: tuple[Path, list[Path], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The record benchmarks/records/tampering.json has 550 of them."""
    folder, older, head = whole
    found = campaign(folder, older, head, times=3 * len(WAYS), seed=0, work=tmp_path)
    assert found["missed"] == []
    assert sum(kind.get("noticed", 0) for kind in found["by_kind"].values()) > len(WAYS)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("inbox/north.safetensors", "the folder lacks that file"),
        ("head.json", "is missing"),
        ("forgotten/0001.json", "deleted or put back"),
    ],
)
def test_a_deleted_file_is_named(
    whole: tuple[Path, list[Path], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    copy = Path(shutil.copytree(whole[0], tmp_path / "copy"))
    assert answer(["verify", "--round", str(copy)]) == 0
    (copy / name).unlink()
    capfd.readouterr()
    assert answer(["verify", "--round", str(copy)]) == 1
    assert says in " ".join("".join(capfd.readouterr()).split())


def test_the_sum_of_an_earlier_state_is_noticed(
    whole: tuple[Path, list[Path], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It still holds what was forgotten since."""
    copy = Path(shutil.copytree(whole[0], tmp_path / "copy"))
    shutil.copyfile(whole[1][-1] / "total.safetensors", copy / "total.safetensors")
    assert answer(["verify", "--round", str(copy)]) == 1
    assert "the sum of other uploads" in " ".join("".join(capfd.readouterr()).split())
