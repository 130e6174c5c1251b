"""Where results go: nothing that is there already is lost, and odd names, terminals and disks are messages."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from osfl.cli.main import answer
from osfl.cli.terminal import complain, put_json
from osfl.core.errors import TrainingError, UsageError
from tests.cli.conftest import Osfl, round_with_bundles

CLIENT = "client plan.toml --client {0} --data sites/{0} --key keys/{0}.key --out {1}"
RUN = "run --method fedavg --clients 2 --partition iid --samples 60 --smoke --out runs/one"


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("round")
    round_with_bundles(folder, ["north", "south"])
    return folder


def test_an_upload_is_never_written_over_another_file(osfl: Osfl, delivered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(delivered)
    Path("notes.txt").write_text("what a physician noted about the images of last week")
    for target in ("plan.toml", "keys/north.key", "notes.txt", "usb/south.safetensors"):
        before = Path(target).read_bytes()
        result = osfl(CLIENT.format("north", target))
        assert result.code == 1 and "is there already" in result.err and "Choose another --out" in result.err, target
        assert Path(target).read_bytes() == before
    assert "a bundle of 'south'" in osfl(CLIENT.format("north", "usb/south.safetensors")).err


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_an_earlier_copy_of_an_upload_is_replaced(
    osfl: Osfl, delivered: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """Also one that was cut off, such as by unplugging the medium."""
    monkeypatch.chdir(delivered)
    usb = Path("usb/north.safetensors")
    whole = usb.read_bytes()
    usb.write_bytes(whole[:keep])
    assert osfl(CLIENT.format("north", usb)).code == 0 and usb.read_bytes() == whole
    for _ in range(2):  # a sealed copy is another file each time
        assert osfl(CLIENT.format("north", "usb/sealed") + " --seal keys/server.pub").code == 0


def test_runs_comparisons_and_evaluations_have_folders_of_their_own(osfl: Osfl) -> None:
    assert osfl(RUN).code == 0
    compared = RUN.replace("run --method", "compare --methods")
    for command in (compared, "evaluate runs/one --data digits --out runs/one"):
        result = osfl(command)
        assert result.code == 1 and "runs/one holds a round" in result.err, result.err
    assert "OSFL comparison" not in Path("runs/one/report/index.html").read_text()
    assert osfl(compared.replace("runs/one", "runs/both")).code == 0
    result = osfl(RUN.replace("runs/one", "runs/both"))
    assert result.code == 1 and "runs/both holds a comparison" in result.err


def test_a_table_of_predictions(osfl: Osfl) -> None:
    from PIL import Image

    assert osfl(RUN).code == 0
    Image.new("L", (8, 8)).save("dot.png")
    assert osfl("predict --run runs/one dot.png --out new/folder/table.csv").code == 0
    assert Path("new/folder/table.csv").read_text().startswith("path,class,probability")
    picture = Path("dot.png").read_bytes()
    result = osfl("predict --run runs/one dot.png --out dot.png")
    assert result.code == 2 and "one of the images" in result.err and Path("dot.png").read_bytes() == picture
    Path("dot.png").rename(Path("data", b"d\xfc".decode("utf-8", "surrogateescape") + ".png"))  # no text
    Path("data/._dot.png").write_bytes(b"what macOS adds on a memory stick")
    assert osfl("predict --run runs/one data --out table.csv").code == 0
    assert b"d\xfc.png," in Path("table.csv").read_bytes()


def test_a_name_that_is_no_text_is_refused_before_anything_starts(capfd: pytest.CaptureFixture[str]) -> None:
    name = b"runs/d\xfc".decode("utf-8", "surrogateescape")
    assert answer(["run", "--smoke", "--out", name, "--format", "json"]) == 2
    assert "no UTF-8" in json.loads(capfd.readouterr().out)["reason"] and not Path("runs").exists()


def test_the_key_of_a_summary_is_looked_at_before_anything_is_measured(osfl: Osfl) -> None:
    assert osfl(RUN).code == 0
    result = osfl("evaluate runs/one --data digits --client client-01 --key no.key --out measured")
    assert result.code == 2 and "no.key" in result.err and not Path("measured").exists()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_old_terminal(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    assert answer(["ls", "presets"]) == 0
    put_json({"name": "Köln \N{EM DASH}"})
    sys.stdout.flush()
    text, brace, rest = out.getvalue().decode(encoding).partition("{")
    assert "smoke" in text and json.loads(brace + rest) == {"name": "Köln \N{EM DASH}"}


def test_a_full_disk_behind_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        complain("Files: no space.", {"error": "FilesError"}, as_json=True)
        monkeypatch.undo()
        assert "no space" in capsys.readouterr().err
        with pytest.raises(OSError):  # so that it does not happen at the exit of the process
            full.close()


def test_facts_of_an_error_are_json() -> None:
    assert TrainingError("it fails", got=float("nan"), expected=1.5).as_json() == {
        "error": "TrainingError",
        "reason": "it fails",
        "got": "nan",
        "expected": 1.5,
    }
    assert UsageError(["one", "two"]).as_json()["reason"] == "one; two"
