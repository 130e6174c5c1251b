"""Several labels of one image: tables with a column a class or `a|b`, arrays as ChestMNIST has them, splits and partitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.core.errors import DataError
from osfl.core.types import Task
from osfl.data import assign, make_shards, open_dataset, sheets, take_stratified
from osfl.data.layout import read_table
from osfl.data.multilabel import label_matrix, labels_in, rarest
from osfl.data.site import open_site
from tests.several import CLASSES, several, several_npz

TASK = Task("chest", ("edema", "mass"), (1, 8, 8), "multilabel")


def _images(folder: Path, count: int) -> None:
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")


def _table(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    (folder / "t.csv").write_bytes(text.encode(encoding))
    return folder / "t.csv"


@pytest.mark.parametrize("encoding, separator", [("utf-8", ","), ("utf-8-sig", ";"), ("utf-16", "\t")])
def test_a_column_for_each_class(tmp_path: Path, encoding: str, separator: str) -> None:
    _images(tmp_path, 12)
    rows = [["path", "Edema", "Mass", "patient", "age"]]
    rows += [[f"{i}.png", str(int(i % 2 == 0)), "1.0" if i < 4 else "0", f"p{i}", "61"] for i in range(12)]
    path = _table(tmp_path, "\r\n".join(separator.join(row) for row in rows), encoding)
    source = open_dataset(str(path), size=8)
    assert source.kind == "multilabel" and source.classes == ("Edema", "Mass")
    names = np.concatenate([part.names for part in (source.train, source.test) if part.names is not None])
    labels = np.concatenate([source.train.labels, source.test.labels])
    expected = {f"{i}.png": [int(i % 2 == 0), int(i < 4)] for i in range(12)}
    assert {str(name): row for name, row in zip(names, labels.tolist(), strict=True)} == expected
    problems = [p.what for p in source.problems]
    assert "columns of 0 and 1: Edema, Mass" in problems and "unknown column 'age'" in problems
    assert any("'patient' names the patient" in what for what in problems)


@pytest.mark.parametrize("column", ["label", "labels"])
def test_several_labels_in_a_cell(tmp_path: Path, column: str) -> None:
    _images(tmp_path, 8)
    cells = ["edema", "mass | edema", "No Finding", "mass"] * 2
    lines = [f"path,{column}", *(f"{i}.png,{cell}" for i, cell in enumerate(cells))]
    source = open_dataset(str(_table(tmp_path, "\n".join(lines))), size=8)
    assert source.kind == "multilabel" and source.classes == ("edema", "mass")
    rows = np.concatenate([source.train.labels, source.test.labels]).tolist()
    assert sorted(rows) == sorted([[1, 0], [1, 1], [0, 0], [0, 1]] * 2)
    problems = [p.what for p in source.problems if "several labels" in p.what]
    assert problems == (["2 of 8 rows with several labels, joined by '|'"] if column == "label" else [])


def test_one_label_an_image_stays_one() -> None:
    table = read_table("path,label,smoker,female\na.png,x,0,1\nb.png,y,1,1\n", "t.csv")
    assert not table.several and [item.label for item in table.items] == ["x", "y"]
    assert [p.what for p in table.problems] == ["unknown column 'smoker'", "unknown column 'female'"]
    with pytest.raises(DataError, match="lacks the columns"):  # one column of 0 and 1 may be anything
        read_table("path,female\na.png,0\nb.png,1\n", "t.csv")


def test_a_cell_that_is_neither_0_nor_1_leaves_its_row_out() -> None:
    rows = "\n".join(f"{i}.png,{i % 2},1" for i in range(20))
    table = read_table(f"path,edema,mass\n{rows}\nbad.png,?,1\n", "t.csv")
    assert [p.what for p in table.problems if p.path == "t.csv:22"] == ["a cell of a class that is neither 0 nor 1"]
    assert len(table.items) == 20 and table.classes == ("edema", "mass")


def test_a_site_needs_a_column_for_each_class_of_the_plan(tmp_path: Path) -> None:
    _images(tmp_path, 4)
    lines = ["path,EDEMA,Mass,hernia", "0.png,0,0,1", "1.png,1,1,0", "2.png,0,1,0", "3.png,0,0,0"]
    found = open_site(_table(tmp_path, "\n".join(lines)), TASK)
    assert found.train.labels.tolist() == [[0, 0], [1, 1], [0, 1], [0, 0]]  # its columns in the plan's order; no hernia
    with pytest.raises(DataError, match="no column 'mass', which is a class of the plan"):
        open_site(_table(tmp_path, "path,edema,hernia\n0.png,0,1\n1.png,1,0\n"), TASK)
    one = open_site(_table(tmp_path, "path,label\n0.png,mass\n1.png,edema\n2.png,-\n"), TASK)  # by chance none has two
    assert one.train.labels.tolist() == [[0, 1], [1, 0], [0, 0]]
    with pytest.raises(DataError, match="classes that the plan does not know"):
        open_site(_table(tmp_path, "path,label\n0.png,mass|hernai\n1.png,edema\n"), TASK)


def test_the_kinds_of_plan_and_data_have_to_agree(tmp_path: Path) -> None:
    _images(tmp_path, 3)
    one_label = Task("chest", ("edema", "mass"), (1, 8, 8))
    with pytest.raises(DataError, match="several labels an image"):
        open_site(_table(tmp_path, "path,label\n0.png,mass|edema\n1.png,mass\n2.png,edema\n"), one_label)
    with pytest.raises(DataError, match="one label an image"):
        np.savez(tmp_path / "one.npz", train_images=np.zeros((4, 8, 8), np.uint8), train_labels=np.array([0, 1, 0, 1]))
        open_site(tmp_path / "one.npz", TASK)


def test_chestmnist_is_opened_from_its_file(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = np.random.default_rng(1).integers(0, 2, (30, 14), dtype=np.uint8)
    (tmp_path / "data").mkdir()
    given = {"images": images, "labels": labels}
    arrays = {f"{part}_{what}": value for part in ("train", "val", "test") for what, value in given.items()}
    np.savez(tmp_path / "data" / "chestmnist.npz", **arrays)  # type: ignore[arg-type]
    source = open_dataset("chestmnist")
    assert source.kind == "multilabel" and len(source.classes) == 14 and source.classes[-1] == "hernia"
    assert np.array_equal(source.train.labels, labels) and sheets()["chestmnist"].classes == source.classes


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train_labels": np.full((4, 3), 2)}, "expected 0 and 1"),
        ({"train_labels": np.zeros((3, 3), np.uint8)}, "4 'train_images' but 3 rows"),
        ({"test_labels": np.zeros((4, 2), np.uint8)}, "differ in how many columns"),
        ({"test_labels": np.zeros((4, 1), np.uint8)}, "differ in how many columns"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    images, labels = np.zeros((4, 8, 8), np.uint8), np.zeros((4, 3), np.uint8)
    good = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(tmp_path / "x.npz", **(good | change))
    with pytest.raises(DataError, match=message):
        open_dataset(str(tmp_path / "x.npz"))


def test_an_image_counts_as_its_rarest_class() -> None:
    matrix = label_matrix(["a|b", "a", "-", "a|c", "b|a", "c|b"], "abc")
    assert matrix.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1], [1, 1, 0], [0, 1, 1]]
    assert rarest(matrix).tolist() == [1, 0, 3, 2, 1, 2]  # c is rarer than b, b than a; 3: none
    assert labels_in(" none ") == () and labels_in("b|a|b") == ("a", "b")


def test_parts_have_all_classes(tmp_path: Path) -> None:
    """Every class is in training, validation and test as often as it is in all; a rare one, too."""
    images, labels = several(400, 3)
    np.savez(tmp_path / "x.npz", train_images=images, train_labels=labels)
    source = open_dataset(str(tmp_path / "x.npz"))
    shares = labels.mean(0)
    for part in (source.train, source.test, take_stratified(source.train, 100)):
        assert np.allclose(part.labels.mean(0), shares, atol=0.06), part.labels.mean(0)
    (shard,) = make_shards(source, assign("iid", source.train.strata, 1, 0), seed=0, val_fraction=0.2)
    assert np.allclose(shard.val.labels.double().mean(0).numpy(), shares, atol=0.08)


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.3", "dirichlet-client:0.3", "classes:2", "silos"])
def test_every_partition_gives_each_image_to_one_client(tmp_path: Path, spec: str) -> None:
    source = open_dataset(str(several_npz(tmp_path / "x.npz")))
    drawn = assign(spec, source.train.strata, None if spec == "silos" else 3, 0)
    assert sorted(np.concatenate(list(drawn.values())).tolist()) == list(range(len(source.train)))
    if spec == "silos":  # one client a class as the rarest, and one whose images have none
        alone = [client for client, index in drawn.items() if not source.train.labels[index].any()]
        assert len(drawn) == len(CLASSES) + 1 and len(alone) == 1
