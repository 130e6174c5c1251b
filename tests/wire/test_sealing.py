"""Sealed files: the addressee reads them, nobody else does, and not one bit can be changed."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from osfl.core.errors import Rejected
from osfl.wire import sealing
from osfl.wire.sealing import PIECE, is_sealed, seal, sealed_size, unseal
from osfl.wire.signing import SigningKey

SERVER, OTHER = SigningKey.from_seed(bytes(range(32))), SigningKey.from_seed(bytes(32))
LIMIT = 1 << 20
HEAD = 80


def make(folder: Path, data: bytes) -> Path:
    (folder / "plain").write_bytes(data)
    seal(folder / "plain", folder / "sealed", SERVER.public_hex)
    return folder / "sealed"


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_the_addressee_reads_what_was_sealed(tmp_path: Path, size: int) -> None:
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    path = make(tmp_path, data)
    assert is_sealed(path) and not is_sealed(tmp_path / "plain")
    assert path.stat().st_size == sealed_size(size)
    assert bytes(unseal(path, SERVER, LIMIT)) == data
    assert b"0123456789abcdef" not in path.read_bytes()


def test_two_copies_have_no_bytes_in_common_but_the_addressee(tmp_path: Path) -> None:
    first = make(tmp_path, b"the same words").read_bytes()
    second = make(tmp_path, b"the same words").read_bytes()
    assert first[:48] == second[:48] and first[48:80] != second[48:80] and first[80:] != second[80:]


def test_both_halves_of_a_key_agree_on_the_other_curve() -> None:
    for key in (SERVER, OTHER):
        public = sealing._own(key).public_key().public_bytes_raw()
        assert public == sealing._for_exchange(key.public_hex)
        X25519PublicKey.from_public_bytes(public)


def test_another_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="another key") as no:
        unseal(make(tmp_path, b"words"), OTHER, LIMIT)
    assert no.value.expected == OTHER.public_hex and no.value.got == SERVER.public_hex


def test_no_bit_can_be_changed(tmp_path: Path) -> None:
    path = make(tmp_path, b"few words")
    good = path.read_bytes()
    for place in range(len(sealing.MAGIC), len(good)):
        for bit in range(8):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
            with pytest.raises(Rejected):
                unseal(path, SERVER, LIMIT)


def test_pieces_cannot_be_moved_left_out_or_added(tmp_path: Path) -> None:
    path = make(tmp_path, bytes(PIECE) + bytes([1]) * PIECE + bytes([2]) * 10)
    data, step = path.read_bytes(), PIECE + 16
    head, one, two, three = data[:HEAD], data[HEAD : HEAD + step], data[HEAD + step : HEAD + 2 * step], data[HEAD + 2 * step :]
    for harmed in (
        head + two + one + three,
        head + one + two,
        head + one + three,
        head + one + two + three + three,
        head + one + one + three,
        head,
        data[:-1],
        data + b"\0",
        data[: HEAD + 8],
        b"",
    ):
        path.write_bytes(harmed)
        with pytest.raises(Rejected):
            unseal(path, SERVER, LIMIT)


def test_a_public_key_that_gives_no_secret_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path, b"words")
    data = path.read_bytes()
    path.write_bytes(data[:48] + bytes(32) + data[80:])
    with pytest.raises(Rejected, match="incomplete or was changed"):
        unseal(path, SERVER, LIMIT)


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="too large"):
        unseal(make(tmp_path, bytes(100)), SERVER, 99)
