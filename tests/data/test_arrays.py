"""MedMNIST files, the embedded digits, and the usual benchmark files, made small."""

from __future__ import annotations

import gzip
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from osfl.core.errors import DataError, UsageError
from osfl.data import class_counts, open_dataset

RNG = np.random.default_rng(0)


def _npz(path: Path, **arrays: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return str(path)


def _arrays(n: int = 40, shape: tuple[int, ...] = (6, 6), parts: tuple[str, ...] = ("train", "val", "test")) -> dict[str, Any]:
    labels = np.arange(n, dtype=np.uint8)[:, None] % 4
    images = {f"{part}_images": RNG.integers(0, 256, (n, *shape), dtype=np.uint8) for part in parts}
    return images | {f"{part}_labels": labels for part in parts}


def test_a_file_that_memory_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _npz(tmp_path / "large.npz", **_arrays())
    assert len(open_dataset(path).train) == 40
    monkeypatch.setattr("osfl.data.arrays.available_memory", lambda: 3000)
    with pytest.raises(DataError, match=r"at most 3,000, which this machine has memory for"):
        open_dataset(path)


def test_digits_have_the_size_that_is_asked_for() -> None:
    source = open_dataset("digits")
    assert source.image == (1, 16, 16) and len(source.classes) == 10 and source.val is None
    assert (len(source.train), len(source.test)) == (1346, 451)
    assert int(source.train.dataset.images.max()) > 200 and source.train.dataset.images.dtype.itemsize == 1
    other = open_dataset("digits", size=28, channels=3)
    assert other.image == (3, 28, 28) and other.digest != source.digest
    assert np.array_equal(other.test.labels, source.test.labels)
    assert open_dataset("digits").digest == source.digest


def test_digits_are_these_very_pixels() -> None:
    """Pinned: a change moves every number that was ever measured on the digits."""
    assert open_dataset("digits", size=8).digest == "ddf98f7be4b78d2cecefed64c7541c0c1662e5f0aa54a2ddbc5452610b596c06"


@pytest.mark.parametrize("size, channels", [(2, None), (5000, None), (None, 2), (None, 4)])
def test_impossible_geometry(size: int | None, channels: int | None) -> None:
    with pytest.raises(UsageError):
        open_dataset("digits", size=size, channels=channels)


@pytest.mark.parametrize("shape, image", [((6, 6), (1, 6, 6)), ((6, 6, 3), (3, 6, 6)), ((6, 6, 1), (1, 6, 6))])
def test_npz(tmp_path: Path, shape: tuple[int, ...], image: tuple[int, int, int]) -> None:
    arrays = _arrays(shape=shape)
    source = open_dataset(_npz(tmp_path / "mine.npz", **arrays))
    assert (source.name, source.image, source.classes) == ("mine", image, ("0", "1", "2", "3"))
    assert source.val is not None and len(source.val) == 40 and source.problems == ()
    plane = arrays["train_images"].reshape(40, 6, 6, -1)[..., 0]
    assert np.array_equal(source.train.dataset.images.numpy()[:, 0], plane)


def test_npz_is_resized_and_recolored(tmp_path: Path) -> None:
    path = _npz(tmp_path / "mine.npz", **_arrays(shape=(6, 6, 3)))
    assert open_dataset(path, size=12, channels=1).image == (1, 12, 12)
    oblong = open_dataset(_npz(tmp_path / "oblong.npz", **_arrays(shape=(6, 9))))
    assert oblong.image == (1, 9, 9) and "not square" in oblong.problems[0].what


def test_npz_without_a_test_part_gets_a_fixed_one(tmp_path: Path) -> None:
    path = _npz(tmp_path / "mine.npz", **_arrays(n=100, parts=("train",)))
    source = open_dataset(path)
    assert (len(source.train), len(source.test)) == (80, 20)
    assert class_counts(source.test.labels, 4).tolist() == [5, 5, 5, 5]
    assert source.digest == open_dataset(path).digest and "no test part" in source.problems[0].what


def test_npz_by_name_under_osfl_data(tmp_path: Path) -> None:
    _npz(tmp_path / "data" / "mine.npz", **_arrays())
    assert open_dataset("mine").name == "mine"


BAD: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "float images": ({"train_images": np.zeros((4, 6, 6))}, "float64, expected uint8"),
    "flat images": ({"train_images": np.zeros((4, 36), np.uint8)}, r"shape \[4, 36\]"),
    "two channels": ({"train_images": np.zeros((4, 6, 6, 2), np.uint8)}, r"shape \[4, 6, 6, 2\]"),
    "no images": ({"train_images": np.zeros((0, 6, 6), np.uint8), "train_labels": np.zeros(0, np.uint8)}, "is empty"),
    "multi-label": ({"train_labels": np.full((4, 14), 7, np.uint8)}, r"14 columns \(multi-label\), expected 0 and 1"),
    "float labels": ({"train_labels": np.zeros(4)}, "expected integers"),
    "fewer labels": ({"train_labels": np.zeros(3, np.uint8)}, "4 'train_images' but 3 'train_labels'"),
    "negative label": ({"train_labels": np.array([0, 1, -1, 2])}, r"in -1\.\.2"),
    "enormous label": ({"train_labels": np.array([0, 1, 10**6, 2])}, "expected 0..9999"),
    "other size": ({"test_images": np.zeros((4, 7, 7), np.uint8), "test_labels": np.zeros(4, np.uint8)}, "differ"),
    "lonely images": ({"test_images": np.zeros((4, 6, 6), np.uint8)}, "must come together"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_npz_names_the_mistake(tmp_path: Path, name: str) -> None:
    changes, message = BAD[name]
    good = {"train_images": np.zeros((4, 6, 6), np.uint8), "train_labels": np.zeros(4, np.uint8)}
    with pytest.raises(DataError, match=message):
        open_dataset(_npz(tmp_path / "bad.npz", **{**good, **changes}))


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"float64.*multi-label"):
        open_dataset(_npz(tmp_path / "x.npz", train_images=np.zeros((4, 6, 6)), train_labels=np.full((4, 3), 2, np.uint8)))
    with pytest.raises(DataError, match="no 'train_images'"):
        open_dataset(_npz(tmp_path / "y.npz", something=np.zeros(3)))


def test_pickles_and_damaged_files_are_refused(tmp_path: Path) -> None:
    objects = np.array([{"a": 1}] * 4, dtype=object)
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset(_npz(tmp_path / "pickle.npz", train_images=np.zeros((4, 6, 6), np.uint8), train_labels=objects))
    whole = Path(_npz(tmp_path / "whole.npz", **_arrays())).read_bytes()
    for name, blob in {
        "cut": whole[:-200],
        "empty": b"",
        "text": b"hello",
        "flipped": whole[:300] + b"x" + whole[301:],
    }.items():
        (tmp_path / f"{name}.npz").write_bytes(blob)
        with pytest.raises(DataError, match="cannot be read"):
            open_dataset(str(tmp_path / f"{name}.npz"))


def _idx(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_from_idx_files(tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    images, labels = RNG.integers(0, 256, (30, 28, 28)), np.arange(30) % 10
    for part in ("train", "t10k"):
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            blob = _idx(array)
            (folder / f"{name}.gz" if packed else folder / name).write_bytes(gzip.compress(blob) if packed else blob)
    source = open_dataset("fashion-mnist")
    assert source.image == (1, 28, 28) and source.classes[9] == "ankle boot" and len(source.test) == 30
    assert np.array_equal(source.train.dataset.images[:, 0].numpy(), images)
    assert bool(source.problems) == packed  # small files are not the published ones


@pytest.mark.parametrize("blob", [b"", b"\0\0\x08", b"\0\0\x0d\x01\0\0\0\x01\0", _idx(np.zeros((3, 2, 2)))[:-1], b"x" * 99])
def test_damaged_idx(tmp_path: Path, blob: bytes) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "data" / f"{name}-ubyte").write_bytes(blob)
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset("fashion-mnist")


def _cifar(n: int, label_bytes: int) -> tuple[bytes, np.ndarray[Any, Any]]:
    images = RNG.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    labels = np.stack([np.full(n, 7), np.arange(n) % 10], axis=1)[:, -label_bytes:].astype(np.uint8)
    return np.concatenate([labels, images.reshape(n, -1)], axis=1).tobytes(), images


@pytest.mark.parametrize("name, label_bytes", [("cifar10", 1), ("cifar100", 2)])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar_from_binary_records(tmp_path: Path, name: str, label_bytes: int, packed: bool) -> None:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    names = names if name == "cifar10" else ["train.bin", "test.bin"]
    folder = "cifar-10-batches-bin" if name == "cifar10" else "cifar-100-binary"
    files = {file: _cifar(20, label_bytes) for file in names}
    target = tmp_path / "data" / folder
    target.mkdir(parents=True)
    if packed:
        with tarfile.open(tmp_path / "data" / f"{name[:5]}-{name[5:]}-binary.tar.gz", "w:gz") as archive:
            for file, (blob, _) in files.items():
                member = tarfile.TarInfo(f"{folder}/{file}")
                member.size = len(blob)
                archive.addfile(member, BytesIO(blob))
    else:
        for file, (blob, _) in files.items():
            (target / file).write_bytes(blob)
    source = open_dataset(name)
    assert np.array_equal(source.test.dataset.images.numpy(), files[names[-1]][1])
    assert source.test.labels.tolist() == [i % 10 for i in range(20)]
    assert len(source.classes) == int(name[5:]) and len(source.train) == 20 * (len(names) - 1)


def test_damaged_cifar(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").write_bytes(b"\1" * 3074)
    (tmp_path / "data" / "test.bin").write_bytes(b"\1" * 3000)
    with pytest.raises(DataError, match="whole number of records"):
        open_dataset("cifar100")
    (tmp_path / "data" / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(b"no tar"))
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset("cifar10")


def test_svhn_calls_zero_zero(tmp_path: Path) -> None:
    (tmp_path / "data" / "svhn").mkdir(parents=True)
    images = RNG.integers(0, 256, (32, 32, 3, 20), dtype=np.uint8)
    labels = (np.arange(20) % 10 + 1).astype(np.uint8)[:, None]  # 1..10
    for part in ("train", "test"):
        savemat(tmp_path / "data" / "svhn" / f"{part}_32x32.mat", {"X": images, "y": labels})
    source = open_dataset("svhn")
    assert source.image == (3, 32, 32) and source.train.labels.tolist() == [(i % 10 + 1) % 10 for i in range(20)]
    assert np.array_equal(source.train.dataset.images[3].numpy(), images[..., 3].transpose(2, 0, 1))
    (tmp_path / "data" / "svhn" / "test_32x32.mat").write_bytes(b"MATLAB 5.0 but no")
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset("svhn")
