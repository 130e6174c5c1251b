"""Findings: grouped by reason with counts, the same in `check`, `run`, `client`, results.json, report and model card."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.cli.main import answer
from osfl.core.errors import DataError
from osfl.core.result import finding_line
from osfl.data import Problem, class_problems, grouped, open_dataset
from osfl.data.layout import names_several, read_table


def _image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)).save(path)


def test_six_hundred_files_are_one_line() -> None:
    found = grouped([Problem(f"{i}.png", "damaged", "left out", f"byte {i}") for i in range(600)])
    assert found == [
        {"what": "damaged", "done": "left out", "count": 600, "examples": [f"{i}.png (byte {i})" for i in range(3)]}
    ]
    assert finding_line(found[0]) == "damaged: 600 × left out (0.png (byte 0), 1.png (byte 1), 2.png (byte 2), …)"
    assert len(grouped([Problem(str(i), "damaged", "left out") for i in range(9)], examples=None)[0]["examples"]) == 9


def test_names_cannot_steer_a_terminal() -> None:
    (found,) = grouped([Problem("a\x1b[2J\n.png", "unknown class '\x07'", "left out")])
    assert finding_line(found) == "unknown class '?': 1 × left out (a?[2J?.png)"


def test_classes_with_too_few_images() -> None:
    counts = {"north": [5, 1, 0, 0, 1], "south": [5, 4, 7, 0, 0]}
    found = [(p.path, p.what) for p in class_problems("abcde", counts, [2, 2, 0, 1, 1])]
    assert found == [
        ("d", "no training image of a class"),
        ("e", "one training image of a class"),
        ("north/b", "a client with one image of a class"),
        ("north/c", "a client without images of a class"),
        ("c", "no test image of a class"),
    ]
    assert not class_problems("ab", {"north": [2, 2]}, [1, 1]) and not class_problems("a", {"north": [2]})


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_as_a_spreadsheet_writes_them(tmp_path: Path, separator: str, encoding: str) -> None:
    rows = [["path", "label", "patient"], *([f"{i}.png", f"Größe {i % 2}", f"p{i // 2}"] for i in range(20))]
    for i in range(20):
        _image(tmp_path / f"{i}.png", i)
    (tmp_path / "t.csv").write_bytes("\r\n".join(separator.join(row) for row in rows).encode(encoding))
    source = open_dataset(str(tmp_path / "t.csv"), size=8)
    assert source.classes == ("Größe 0", "Größe 1") and len(source.train) + len(source.test) == 20
    assert source.train.groups is not None and source.test.groups is not None
    assert not set(source.train.groups.tolist()) & set(source.test.groups.tolist())
    assert any("columns are separated by" in p.what for p in source.problems)


def test_the_separator_is_found_in_the_header() -> None:
    assert [i.label for i in read_table('"label";"path"\r\n"x;y";"a.png"\r\n', "t.csv").items] == ["x;y"]
    table = read_table("sep=;\r\npath;label\r\na.png;x\r\n;y\r\n", "t.csv")
    assert [i.name for i in table.items] == ["a.png"] and [p.path for p in table.problems if p.what == "no path"] == ["t.csv:4"]
    assert not read_table("path,label\na;b.png,x\n", "t.csv").problems
    with pytest.raises(DataError, match="lacks the columns"):
        read_table("path:label\na.png:x\n", "t.csv")


def test_what_may_be_several_labels_is_named() -> None:
    table = read_table("path,label\na.png,glioma\nb.png,glioma+edema\nc.png,edema\n", "t.csv")
    assert {i.label for i in table.items} == {"glioma", "edema", "glioma+edema"} and not table.several
    assert [(p.path, p.detail) for p in table.problems] == [("b.png", "glioma+edema")]
    assert "multi-label" in table.problems[0].what
    alone = {"glioma", "edema"}
    assert all(names_several(f"glioma{joint}edema", alone) for joint in (";", ",", "+", " & ", "/"))
    assert not any(names_several(label, alone) for label in ("t-shirt/top", "glioma", "|", "glioma|"))


def _odd_folder(root: Path) -> None:
    """Two classes of twelve; one of a single image; five broken files; a class whose name holds an escape sequence."""
    for label, count in (("cat", 12), ("dog\x1b[31m", 12), ("yak", 1)):
        for i in range(count):
            _image(root / label / f"{i}.png", 100 * len(label) + i)
    for i in range(5):
        (root / "cat" / f"broken{i}.png").write_bytes(b"\x89PNG no")


def test_check_run_results_report_and_card_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _odd_folder(tmp_path / "odd")
    what = ["--dataset", "odd", "--clients", "2", "--partition", "iid", "--image-size", "8"]
    assert answer(["check", *what]) == 0
    checked = capsys.readouterr().out
    assert "\x1b" not in checked and "dog?" in checked
    lines = [
        "not an image: 5 × left out (cat/broken0.png, cat/broken1.png, cat/broken2.png, …)",
        "one training image of a class: 1 × used; nothing of the class can be held out (yak)",
        "no test image of a class: 1 × kept as a class; no score says anything (yak)",
    ]
    assert all(line in checked for line in lines) and "With --format json every file is named." in checked
    assert answer(["check", *what, "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["findings"][0]["examples"]) == 5
    assert answer(["run", "--method", "local_only", *what, "--smoke", "--out", "out"]) == 0
    output = capsys.readouterr().out
    kept = [finding_line(finding) for finding in json.loads(Path("out/results.json").read_text())["data"]["findings"]]
    card, page = Path("out/model_card.md").read_text(), Path("out/report/index.html").read_text()
    for line in lines:
        assert line in kept and line in output and line.split(":")[0] in card and line.split(" (")[0] in page


def test_a_site_is_reported_before_and_while_it_takes_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for label, count in (("cat", 12), ("dog", 1)):
        for i in range(count):
            _image(Path("images") / label / f"{i}.png", 100 * len(label) + i)
    new = ["new", "--method", "fedavg", "--classes", "cat,dog,yak", "--image-size", "8", "--channels", "1", "--smoke"]
    assert answer([*new, "--clients", "north,south", "--set", "epochs=1"]) == 0
    assert answer(["keys", "north", "--out", "keys"]) == 0
    site = ["plan.toml", "--client", "north", "--data", "images"]
    assert answer(["check", *site]) == 0
    checked = capsys.readouterr().out
    assert answer(["client", *site, "--key", "keys/north.key"]) == 0
    noticed = capsys.readouterr().out
    for text in (checked, noticed):
        assert "a client with one image of a class: 1 × used to train, not held out for validation (north/dog)" in text
        assert "a client without images of a class: 1 × left as it is: the other clients may have some (north/yak)" in text
