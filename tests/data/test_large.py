"""Many images: the same pixels as few, but in mapped files; with gray among color, deep files, damaged ones and no cache."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from osfl.cli.main import answer
from osfl.core.errors import DataError
from osfl.core.types import Dataset
from osfl.data import make_shard, open_dataset
from osfl.data.kept import _marks
from osfl.data.mapped import Picked, is_large, picked
from osfl.data.source import Part, Source, content_digest
from osfl.runtime.cache import cache_folder, contents, trim


def _folder(root: Path, deep: bool = False) -> Path:
    """Thirty images of two classes, one of them gray, one damaged; `deep`: two of 16 bits."""
    rng = np.random.default_rng(0)
    for i in range(30):
        path = root / ("cat" if i % 2 else "dog") / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if deep and i in (3, 4):
            Image.fromarray(rng.integers(0, 4096, (8, 8), dtype=np.uint16)).save(path)
        else:
            Image.fromarray(rng.integers(0, 256, (8, 8) if i == 5 else (8, 8, 3), dtype=np.uint8)).save(path)
    (root / "cat" / "broken.png").write_bytes(b"\x89PNG no")
    return root


def _pixels() -> list[Path]:
    """Kept files of pixels."""
    return sorted((cache_folder() / "decoded").glob("*.pixels"))


def _mapped(part: Part) -> bool:
    """Whether its pixels lie in a file that is mapped into memory."""
    address = part.dataset.images.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, last = (int(side, 16) for side in span.split("-"))
        if first <= address < last:
            return inode != "0"
    return False


def _same(one: Source, other: Source) -> bool:
    return one.digest == other.digest and one.problems == other.problems and one.native == other.native


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.data.mapped.LARGE", 1)
    monkeypatch.setattr("osfl.data.decoded_files.BATCH", 7)
    monkeypatch.setattr("osfl.data.mapped.AT_ONCE", 4)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("channels", [None, 1, 3])
def test_many_images_are_the_same_as_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: bool, channels: int | None, request: pytest.FixtureRequest
) -> None:
    folder = str(_folder(tmp_path / "pets", deep))
    few = open_dataset(folder, size=8, channels=channels)
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "other"))
    request.getfixturevalue("all_large")
    cold = open_dataset(folder, size=8, channels=channels)
    assert _same(few, cold) and _mapped(cold.train) and _mapped(cold.test) and not _mapped(few.train)
    warm = open_dataset(folder, size=8, channels=channels)
    assert _same(few, warm) and _mapped(warm.train)
    shards = [make_shard(source.train, "north", seed=0) for source in (few, warm)]
    assert shards[0].digest == shards[1].digest and content_digest(shards[0].val) == content_digest(shards[1].val)


def test_the_second_start_decodes_nothing_and_the_first_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_large: None
) -> None:
    folder, seen = str(_folder(tmp_path / "pets")), list[tuple[str, int, int]]()
    first = open_dataset(folder, size=8, progress=lambda *step: seen.append(step))
    assert [done for what, done, total in seen if what == "decode images"] == list(range(1, 32)) and seen[-1][2] == 31
    seen.clear()
    monkeypatch.setattr("osfl.data.decoded_files.decode", lambda *given: pytest.fail("decoded again"))
    again = open_dataset(folder, size=8, progress=lambda *step: seen.append(step))
    assert _same(first, again) and not seen
    assert len(_pixels()) == 1 and contents()["decoded"][1] > 30 * 8 * 8 * 3


@pytest.mark.parametrize("damage", ["cut", "gone", "longer"])
def test_damaged_pixels_are_decoded_again(tmp_path: Path, own_cache: Path, all_large: None, damage: str) -> None:
    folder = str(_folder(tmp_path / "pets"))
    first = open_dataset(folder, size=8)
    (pixels,) = (own_cache / "decoded").glob("*.pixels")
    if damage == "gone":
        pixels.unlink()
    else:
        blob = pixels.read_bytes()
        pixels.write_bytes(blob[:-1] if damage == "cut" else blob + b"x")
    assert _same(first, open_dataset(folder, size=8))


def test_without_a_cache_no_file_stays(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, all_large: None
) -> None:
    monkeypatch.setenv("OSFL_CACHE_LIMIT", "0")
    source = open_dataset(str(_folder(tmp_path / "pets")), size=8)
    assert _mapped(source.train) and not [path for path in own_cache.rglob("*") if path.is_file()]
    assert len(np.unique(source.train.dataset.images.numpy())) > 100  # pixels are there all the same


def test_nothing_usable_is_an_error_as_ever(tmp_path: Path, all_large: None) -> None:
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "cat" / "a.png").write_bytes(b"\x89PNG no")
    with pytest.raises(DataError, match="holds no usable image"):
        open_dataset(str(tmp_path / "pets"), size=8)


def test_what_lies_together_is_not_copied(tmp_path: Path, all_large: None) -> None:
    part = open_dataset(str(_folder(tmp_path / "pets")), size=8).train
    images = part.dataset.images
    together = picked(images, np.arange(3, 9))
    assert together.data_ptr() == images[3:].data_ptr()
    apart = picked(images, np.array([1, 5, 2]))
    assert apart.data_ptr() != images.data_ptr() and bool((apart == images[[1, 5, 2]]).all())


def test_a_quarter_of_a_gigabyte_is_many() -> None:
    assert not is_large(1000, (3, 224, 224)) and is_large(2000, (3, 224, 224))


def test_a_second_start_copies_no_split(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, all_large: None
) -> None:
    """Splits are places in the mapped file; what somebody asks for at once is copied once, kept, and mapped again."""
    folder = str(_folder(tmp_path / "pets"))

    def start() -> tuple[list[str], Dataset]:
        shard = make_shard(open_dataset(folder, size=8).train, "north", seed=0)
        return [shard.digest, content_digest(shard.val)], shard.train

    first, train = start()
    assert len(_pixels()) == 1  # digests needed no copy
    pixels = train.images.clone()
    assert len(_pixels()) == 2
    monkeypatch.setattr("osfl.data.mapped.keep", lambda *given: pytest.fail("copied again"))
    again, same = start()
    assert again == first and bool((same.images == pixels).all())
    assert isinstance(train, Picked)
    kind, given = train.__reduce__()  # what another process gets
    assert kind is Dataset and bool((kind(*given).images == pixels).all())
    monkeypatch.setattr("osfl.data.mapped.LARGE", 1 << 20)
    some = train.subset(torch.tensor([5, 0]))  # few images are read, not copied into a file
    assert bool((some.images == pixels[[5, 0]]).all()) and bool((some.labels == train.labels[[5, 0]]).all())


def test_a_split_that_was_cut_short_is_copied_again(tmp_path: Path, own_cache: Path, all_large: None) -> None:
    part = open_dataset(str(_folder(tmp_path / "pets")), size=8).train
    before = {path: path.stat().st_size for path in (own_cache / "decoded").glob("*.pixels")}
    pixels = part.dataset.images.clone()
    (kept,) = set((own_cache / "decoded").glob("*.pixels")) - set(before)
    kept.write_bytes(kept.read_bytes()[:-1])
    again = open_dataset(str(tmp_path / "pets"), size=8).train
    assert bool((again.dataset.images == pixels).all()) and kept.stat().st_size == pixels.numel()


# --- a second start reads no pixels, and what differs is noticed ------------------------------------------------------------


def _start(folder: str, seen: list[str] | None = None) -> list[str]:
    """The digests of a source, its shard and their images; `seen`: the steps of its progress."""
    source = open_dataset(folder, size=8, progress=lambda what, done, total: seen.append(what) if seen is not None else None)
    shard = make_shard(source.train, "north", seed=0)
    pixels = [hashlib.sha256(images.numpy().tobytes()).hexdigest() for images in (shard.train.images, shard.val.images)]
    return [source.digest, shard.digest, content_digest(source.test.dataset), *pixels]


def _change(path: Path) -> None:
    """Another byte; size and time of change as before."""
    before, blob = path.stat(), bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_second_start_reads_no_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_large: None) -> None:
    folder = str(_folder(tmp_path / "pets"))
    first = _start(folder)
    for place in ("source._digest_of_pixels", "kept._content", "mapped.keep", "decoded_files.decode"):
        monkeypatch.setattr(f"osfl.data.{place}", lambda *given: pytest.fail("pixels were read"))
    source = open_dataset(folder, size=8)
    shard = make_shard(source.train, "north", seed=0)
    assert [source.digest, shard.digest, content_digest(source.test.dataset)] == first[:3]
    with pytest.raises(pytest.fail.Exception):
        content_digest(source.test.dataset, read=True)


def test_a_changed_image_is_noticed_though_its_size_and_time_are_as_before(tmp_path: Path, all_large: None) -> None:
    root = _folder(tmp_path / "pets")
    first, changed = _start(str(root)), root / "cat" / "01.png"
    before = changed.stat()
    shade = np.array(Image.open(changed))
    Image.fromarray(255 - shade).save(changed)
    blob = changed.read_bytes()[: before.st_size]
    changed.write_bytes(blob + bytes(before.st_size - len(blob)))
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    seen: list[str] = []
    assert _start(str(root), seen)[0] != first[0] and "decode images" in seen


@pytest.mark.parametrize("which", ["all", "copy"])
def test_changed_kept_pixels_are_noticed_and_made_again(tmp_path: Path, all_large: None, which: str) -> None:
    folder, seen = str(_folder(tmp_path / "pets")), list[str]()
    open_dataset(folder, size=8)
    (whole,) = _pixels()
    first = _start(folder)
    copy = next(path for path in _pixels() if path != whole)
    _change(whole if which == "all" else copy)
    assert _start(folder, seen) == first
    assert ("decode images" in seen) == ("check kept images" in seen) == (which == "all")
    seen.clear()
    assert _start(folder, seen) == first and not seen


def test_marks_alone_make_nothing_again(tmp_path: Path, all_large: None) -> None:
    folder, seen = str(_folder(tmp_path / "pets")), list[str]()
    first = _start(folder)
    for path in _pixels():
        path.touch()
    assert _start(folder, seen) == first and set(seen) == {"check kept images"}
    seen.clear()
    assert _start(folder, seen) == first and not seen


def test_notes_that_others_could_have_written_are_not_believed(tmp_path: Path, all_large: None) -> None:
    """Whoever can write into the folder changes pixels and the notes to fit: the digest is then that of the pixels."""
    folder = str(_folder(tmp_path / "pets"))
    first = open_dataset(folder, size=8)
    (pixels,) = _pixels()
    _change(pixels)
    note = pixels.with_suffix(".written")
    note.write_text(json.dumps({"sha256": hashlib.sha256(pixels.read_bytes()).hexdigest(), "marks": _marks(pixels.stat())}))
    for path in (pixels, note):
        path.chmod(0o666)
    forged = open_dataset(folder, size=8)
    assert forged.digest != first.digest


def test_the_full_check_names_and_deletes_what_differs(
    tmp_path: Path, all_large: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(_folder(tmp_path / "pets"))
    first = _start(folder)
    assert answer(["cache", "--verify", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] == {"files": len(_pixels()), "changed": []}
    pixels = _pixels()[0]
    _change(pixels)
    note = json.loads(pixels.with_suffix(".written").read_text())
    pixels.with_suffix(".written").write_text(json.dumps({**note, "marks": _marks(pixels.stat())}))  # a start would not notice
    assert answer(["cache", "--verify"]) == 1 and pixels.name in "".join(capsys.readouterr().out.split())
    assert not pixels.exists() and _start(folder) == first


def test_files_that_are_used_together_are_deleted_together(tmp_path: Path, all_large: None) -> None:
    """Pixels are not marked as used, because that changes the times they are known by; the notes beside them are."""
    folder = str(_folder(tmp_path / "pets"))
    open_dataset(folder, size=8)
    (pixels,) = _pixels()
    other = pixels.with_name("other.npz")
    other.write_bytes(bytes(1000))
    for path in (pixels, pixels.with_suffix(".npz"), pixels.with_suffix(".written"), *pixels.parent.glob("*.digest")):
        os.utime(path, (1, 1))
    os.utime(other, (1000, 1000))
    open_dataset(folder, size=8)
    trim(contents()["decoded"][1] - 1)
    assert pixels.exists() and not other.exists()
