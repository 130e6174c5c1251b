"""The cache of decoded images and features: a limit, oldest use out first, shown and cleared, or not written at all."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from osfl.cli.main import answer
from osfl.core.errors import UsageError
from osfl.data import open_dataset
from osfl.ingredients.tokens.store import store_of
from osfl.runtime.cache import LIMIT, cache_folder, cache_limit, clear, contents, trim, used, without_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(LIMIT, "1")
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        path = tmp_path / "images" / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    return tmp_path / "cache"


def _file(path: Path, size: int, age: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_what_was_used_longest_ago_goes_first(folder: Path) -> None:
    oldest, middle, newest = (
        _file(folder / "decoded" / name, 100, age) for name, age in (("a", 9000), ("b", 8000), ("c", 7000))
    )
    download = _file(folder / "datasets" / "d.npz", 1000, 99999)
    assert trim(300) == 0 and trim(299) == 100
    assert not oldest.exists() and middle.exists() and download.exists()
    used(middle)
    assert trim(100) == 100 and middle.exists() and not newest.exists() and download.exists()


def test_features_in_use_stay(folder: Path) -> None:
    young, old = _file(folder / "features" / "x" / "young", 100, 10), _file(folder / "features" / "x" / "old", 100, 9000)
    assert trim(0) == 100 and young.exists() and not old.exists()


def test_opening_again_counts_as_use_and_the_limit_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_dataset("images", size=8)
    (kept,) = (folder / "decoded").iterdir()
    os.utime(kept, (1, 1))
    assert open_dataset("images", size=8).digest == first.digest and kept.stat().st_mtime > 1e9
    size = kept.stat().st_size
    monkeypatch.setenv(LIMIT, str(1.5 * size / 1e9))
    open_dataset("images", size=9)
    assert not kept.exists() and len(list((folder / "decoded").iterdir())) == 1


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(LIMIT, text)
    with pytest.raises(UsageError, match="expected gigabytes"):
        cache_limit()


def test_the_verb_shows_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_dataset("images", size=8)
    _file(folder / "datasets" / "d.npz", 1000, 0)
    assert answer(["cache", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["limit_bytes"] == 10**9 and shown["contents"]["decoded"]["files"] == 1 and shown["folder"] == str(folder)
    assert answer(["cache", "--clear"]) == 0 and "Deleted" in capsys.readouterr().out
    assert [files for files, _ in contents().values()] == [0, 0, 1]
    assert answer(["cache", "--downloads"]) == 2 and answer(["cache", "--clear", "--downloads"]) == 0
    assert [files for files, _ in contents().values()] == [0, 0, 0]
    clear()  # nothing is there any more


def test_without_a_cache_nothing_of_the_images_is_written(folder: Path) -> None:
    assert (
        answer(["check", "--dataset", "images", "--partition", "iid", "--clients", "2", "--image-size", "8", "--no-cache"]) == 0
    )
    assert os.environ[LIMIT] == "0" and not list(folder.rglob("*"))
    store = store_of("0" * 64)
    store.put([b"x" * 32], torch.ones(1, 2, 3))
    assert store.missing([b"x" * 32]) == [] and store.get([b"x" * 32]).shape == (1, 2, 3)
    assert not list(folder.rglob("*"))
    without_cache()
    assert cache_limit() == 0


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number that no file of users has."""
    monkeypatch.delenv("OSFL_CACHE")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    with pytest.raises(UsageError, match="Set OSFL_CACHE"):
        cache_folder()
