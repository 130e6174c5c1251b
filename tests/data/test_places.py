"""Where files come from: names, OSFL_DATA, downloads that are checked, and the cache of decoded images."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.cli.ls import _available
from osfl.core.errors import DataError, UsageError
from osfl.data import open_dataset, sheets
from osfl.data.catalog import File
from osfl.data.places import bases, download, hashes
from osfl.models.weights_table import weights_folder


def _quiet(what: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize(
    "typo, meant",
    [
        ("digit", "digits"),
        ("bloodcell-28", "bloodcells-28"),
        ("pacs-sub", "pacs-subset"),
        ("cifar-10", "cifar10"),
        ("BloodMNIST", "bloodmnist"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_dataset(typo)
    assert meant in str(caught.value) and "give a path" in str(caught.value)


def test_paths_that_are_not_there_or_not_data(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file or folder"):
        open_dataset("./nowhere/images")
    with pytest.raises(UsageError, match="no dataset ''"):
        open_dataset("")
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(UsageError, match="no kind of dataset"):
        open_dataset(str(tmp_path / "x.pt"))


def test_a_sheet_without_its_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset("pacs-subset")
    assert "OSFL_DATA" in str(caught.value) and str(tmp_path / "data") in str(caught.value)


def test_sheets_are_complete() -> None:
    assert len([name for name in sheets() if "mnist" in name]) == 12 * 4 + 1
    for name, sheet in sheets().items():
        assert sheet.name == name and sheet.title and sheet.source and sheet.license and sheet.counts, name
        assert len(set(sheet.classes)) == len(sheet.classes) and (len(sheet.classes) > 1 or sheet.layout == "folder"), name
        assert all(file.md5 or file.sha256 for file in sheet.files), name
        assert sheet.layout == "embedded" or sheet.files or (sheet.folders and "not known to us" in sheet.notes), name


@pytest.mark.parametrize("name", [name for name, sheet in sheets().items() if sheet.layout == "folder"])
def test_a_folder_of_a_known_name_is_opened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its notes say; the last of its usual names, with two images of each of three classes."""
    sheet = sheets()[name]
    monkeypatch.setenv("OSFL_DATA", str(tmp_path / "data"))
    with pytest.raises(DataError, match=f"(?s)images of dataset '{name}' are not on this machine.*Expected: {name}/"):
        open_dataset(name)
    classes, root = sheet.classes[:3] or ("n01", "n02", "n03"), tmp_path / "data" / sheet.folders[-1]
    outer = sheet.domains or (
        {"train", "test"} if "test" in sheet.counts else ("one", "two") if name == "tuberculosis" else ("",)
    )
    for folder in (root / place / label for place in outer for label in classes):
        folder.mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (9, 9), (number * 40, len(folder.name), 7)).save(folder / f"{number}.png")
    source = open_dataset(name, size=8)
    assert source.classes == (sheet.classes or classes) and source.sheet is sheet
    assert len(source.train.labels) + len(source.test.labels) == 6 * len(classes) * len(outer)
    assert any("no checksum is known" in problem.what for problem in source.problems)
    if sheet.domains:
        assert source.train.domains is not None and set(source.train.domains) == set(sheet.domains)
    assert _available(sheet) == "yes"


@pytest.mark.parametrize(
    "code, heavy",
    [
        ("from osfl.data import sheets; sheets()", "numpy"),
        ("from osfl.data import parse_partition; from osfl.data.places import find_file", "torch"),
        ("from osfl.data.geometry import check_geometry", "torch"),
    ],
)
def test_listing_and_checking_options_is_quick(code: str, heavy: str) -> None:
    test = f"import sys; {code}; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", test], check=False).returncode == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "x.bin").write_bytes(b"content")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, output_format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "www"))) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def test_a_download_is_checked_before_it_gets_its_name(tmp_path: Path, server: str) -> None:
    target = tmp_path / "cache" / "x.bin"
    md5 = hashlib.md5(b"content", usedforsecurity=False).hexdigest()
    with pytest.raises(DataError, match="damaged or was changed"):
        download(File("x.bin", f"{server}/x.bin", md5="0" * 32), target, _quiet)
    assert list(target.parent.iterdir()) == []
    steps: list[int] = []
    download(File("x.bin", f"{server}/x.bin", md5=md5), target, lambda what, done, total: steps.append(done))
    assert target.read_bytes() == b"content" and steps == [7] and len(list(target.parent.iterdir())) == 1


def test_offline_and_unhashed_downloads_say_what_to_do(tmp_path: Path, server: str) -> None:
    for url in (f"{server}/missing.bin", "http://127.0.0.1:9/x.bin", "nonsense"):
        with pytest.raises(DataError, match="put it in the folder that OSFL_DATA names"):
            download(File("x.bin", url, md5="0" * 32), tmp_path / "x.bin", _quiet)
    with pytest.raises(DataError, match="no published hash"):
        download(File("x.bin", f"{server}/x.bin"), tmp_path / "x.bin", _quiet)
    assert not (tmp_path / "x.bin").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Set OSFL_CACHE"):
        download(File("x.bin", f"{server}/x.bin", md5="0" * 32), tmp_path / "file" / "x.bin", _quiet)


def test_a_named_file_that_differs_is_used_and_reported(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    images, labels = np.zeros((10, 28, 28), np.uint8), np.arange(10, dtype=np.uint8) % 2
    np.savez(
        tmp_path / "data" / "breastmnist.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels
    )
    source = open_dataset("breastmnist")
    assert source.sheet is sheets()["breastmnist"] and source.classes == ("malignant", "normal, benign")
    assert "hash differs" in source.problems[0].what
    labels[:] = 2
    np.savez(tmp_path / "data" / "breastmnist.npz", train_images=images, train_labels=labels)
    with pytest.raises(DataError, match=r"expected 0\.\.1"):
        open_dataset("breastmnist")


def test_decoded_images_are_reused_and_rebuilt(image_folder, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    root = image_folder(*(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    first = open_dataset(str(root), size=8)
    (stored,) = (own_cache / "decoded").iterdir()
    monkeypatch.setattr("osfl.data.decoded_files.decode", None)  # would fail if it were called
    assert open_dataset(str(root), size=8).digest == first.digest
    monkeypatch.undo()
    monkeypatch.setenv("OSFL_CACHE", str(own_cache))
    whole = stored.read_bytes()
    for damaged in (whole[:100], whole[:1000] + b"\xff" + whole[1001:], b""):
        stored.write_bytes(damaged)
        assert open_dataset(str(root), size=8).digest == first.digest
        assert stored.read_bytes() == whole


def test_a_changed_file_or_size_is_decoded_again(image_folder, own_cache: Path) -> None:  # type: ignore[no-untyped-def]
    root = image_folder(*(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    digests = {open_dataset(str(root), size=8).digest, open_dataset(str(root), size=9).digest}
    (root / "a" / "0.png").write_bytes((root / "b" / "4.png").read_bytes())
    digests.add(open_dataset(str(root), size=8).digest)
    assert len(digests) == 3 and len(list((own_cache / "decoded").iterdir())) == 3


def test_no_cache_is_no_problem(image_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "file"))
    assert len(open_dataset(str(image_folder("a/0.png", "a/1.png")), size=8).train) == 1


def test_a_damaged_download_in_the_cache_is_fetched_again(
    tmp_path: Path, server: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = np.zeros((10, 6, 6), np.uint8), np.arange(10, dtype=np.uint8) % 2
    served = tmp_path / "www" / "breastmnist.npz"
    np.savez(served, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    file = File("breastmnist.npz", f"{server}/breastmnist.npz", md5=hashes(served)["md5"])
    sheet = replace(sheets()["breastmnist"], files=(file,))
    monkeypatch.setattr("osfl.data.opening.sheets", lambda: {"breastmnist": sheet})
    first = open_dataset("breastmnist")
    kept = own_cache / "datasets" / "breastmnist.npz"
    assert first.problems == () and kept.read_bytes() == served.read_bytes()
    kept.write_bytes(b"damaged")
    assert open_dataset("breastmnist").digest == first.digest and kept.read_bytes() == served.read_bytes()


@pytest.mark.parametrize("value", ["", None, "/elsewhere"])
def test_weights_are_below_the_folder_of_the_datasets(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty OSFL_DATA is one that is not set, for both."""
    if value is None:
        monkeypatch.delenv("OSFL_DATA", raising=False)
    else:
        monkeypatch.setenv("OSFL_DATA", value)
    assert weights_folder() == bases()[0] / "weights"
    assert weights_folder() == Path(value or "../shared/data") / "weights"
