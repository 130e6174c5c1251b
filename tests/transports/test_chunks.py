"""A file in pieces is whole or not there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from osfl.transports.chunks import Chunk, Damaged, Partial, Whole, announce, read_chunk

CONTENT = bytes(range(256)) * 10  # 2560 bytes
WHOLE = Whole(len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def partial(tmp_path: Path, chunk: int = 1000) -> Partial:
    return Partial(tmp_path / "pieces", "north", WHOLE, chunk)


def test_pieces_make_the_file(tmp_path: Path, file: Path) -> None:
    assert announce(file) == WHOLE
    growing = partial(tmp_path)
    for offset in (0, 1000, 2000):
        assert not growing.finished
        assert growing.add(read_chunk(file, offset, 1000))
    assert growing.finished and growing.complete().read_bytes() == CONTENT


def test_only_the_next_whole_piece_is_taken(tmp_path: Path, file: Path) -> None:
    growing, first = partial(tmp_path), read_chunk(file, 0, 1000)
    assert not growing.add(read_chunk(file, 1000, 1000))  # too early
    assert not growing.add(Chunk(0, first.data[:500], first.sha256))  # cut on the way
    assert not growing.add(Chunk(0, b"x" + first.data[1:], first.sha256))  # damaged
    assert not growing.add(Chunk(0, b"", hashlib.sha256(b"").hexdigest()))  # nothing
    assert growing.add(first) and not growing.add(first)  # and not twice
    assert growing.size == 1000


def test_more_than_was_announced_is_not_taken(tmp_path: Path) -> None:
    data = CONTENT + b"more"
    assert not partial(tmp_path, 5000).add(Chunk(0, data, hashlib.sha256(data).hexdigest()))


@pytest.mark.parametrize("torn", [1, 999, 1001, 1999])
def test_goes_on_from_the_last_whole_piece(tmp_path: Path, file: Path, torn: int) -> None:
    growing = partial(tmp_path)
    growing.path.write_bytes(CONTENT[:torn])
    again = partial(tmp_path)
    assert again.size == torn // 1000 * 1000
    while not again.finished:
        assert again.add(read_chunk(file, again.size, 1000))
    assert again.complete().read_bytes() == CONTENT


def test_wrong_bytes_are_found_at_the_end_and_removed(tmp_path: Path) -> None:
    growing = partial(tmp_path)
    growing.path.write_bytes(bytes(len(CONTENT)))  # as a power cut may leave it
    assert partial(tmp_path).finished
    with pytest.raises(Damaged, match="do not make the file"):
        growing.complete()
    assert growing.size == 0


def test_another_announcement_is_another_file(tmp_path: Path) -> None:
    other = Partial(tmp_path / "pieces", "north", Whole(10, "0" * 64), 5)
    assert other.path != partial(tmp_path).path


@pytest.mark.parametrize("said", [(0, "0" * 64), (-1, "0" * 64), (True, "0" * 64), ("9", "0" * 64), (9, "xyz"), (9, None)])
def test_an_announcement_of_the_wrong_form_is_none(said: tuple[object, object]) -> None:
    assert Whole.heard(*said) is None
    assert Whole.heard(9, "0" * 64) == Whole(9, "0" * 64)
