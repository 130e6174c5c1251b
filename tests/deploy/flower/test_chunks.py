"""A file in pieces is whole or not there."""

from __future__ import annotations

import hashlib
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import Thread

import pytest

from osfl.deploy.flower.chunks import Chunk, Damaged, FileInfo, Partial, announce, read_chunk
from tests.faults.kills import CONTEXT

CONTENT = bytes(range(256)) * 10  # 2560 bytes
WHOLE = FileInfo(len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


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


def bring(tmp_path: Path, file: Path, barrier: Barrier, sender: Connection) -> None:
    """One of several programs that receive the same file; which pieces it added itself."""
    added = []
    for offset in range(0, len(CONTENT), 10):
        barrier.wait()
        if partial(tmp_path, 10).add(read_chunk(file, offset, 10)):
            added.append(offset)
    sender.send(added)


def test_of_several_writers_one_adds_a_piece(tmp_path: Path, file: Path) -> None:
    barrier, pipes = CONTEXT.Barrier(4), [CONTEXT.Pipe(duplex=False) for _ in range(4)]
    writers = [CONTEXT.Process(target=bring, args=(tmp_path, file, barrier, sender)) for _, sender in pipes]
    for writer in writers:
        writer.start()
    added = [offset for receiver, _ in pipes for offset in receiver.recv()]
    for writer in writers:
        writer.join()
    assert sorted(added) == list(range(0, len(CONTENT), 10))
    assert partial(tmp_path, 10).complete().read_bytes() == CONTENT


def test_nobody_cuts_what_another_is_writing(tmp_path: Path, file: Path) -> None:
    """A second program opens the file while a piece is half written: it waits for its turn, and then the piece is there."""
    growing, other = partial(tmp_path), partial(tmp_path)
    growing.add(read_chunk(file, 0, 1000))
    outcome: list[bool] = []
    with growing.turn(), growing.path.open("ab") as half:
        half.write(CONTENT[1000:1700])
        half.flush()
        assert partial(tmp_path).size == 1000 and growing.path.stat().st_size == 1700
        late = Thread(target=lambda: outcome.append(other.add(read_chunk(file, 1000, 1000))))
        late.start()
        late.join(0.2)
        assert late.is_alive() and growing.path.stat().st_size == 1700
        half.write(CONTENT[1700:2000])
    late.join()
    assert outcome == [False] and growing.add(read_chunk(file, 2000, 1000))
    assert growing.complete().read_bytes() == CONTENT


def test_another_announcement_is_another_file(tmp_path: Path) -> None:
    other = Partial(tmp_path / "pieces", "north", FileInfo(10, "0" * 64), 5)
    assert other.path != partial(tmp_path).path


@pytest.mark.parametrize("output", [(0, "0" * 64), (-1, "0" * 64), (True, "0" * 64), ("9", "0" * 64), (9, "xyz"), (9, None)])
def test_an_announcement_of_the_wrong_form_is_none(output: tuple[object, object]) -> None:
    assert FileInfo.announced(*output) is None
    assert FileInfo.announced(9, "0" * 64) == FileInfo(9, "0" * 64)
