"""Sealed bundles: a signed bundle, encrypted so that only the holder of the receiver's private key can read it.

    magic (16)  addressee's public key (32)  ephemeral public key (32)  pieces: 65,536 bytes and a tag of 16 each

X25519 between a key made for this file and the addressee's, HKDF-SHA256, ChaCha20-Poly1305. The nonce of a piece is its number
and whether it is the last one, so pieces cannot be moved, left out or added. The addressee's Ed25519 key serves here as well:
both curves are one curve in two spellings (RFC 7748, section 4.1), and nobody has to look after a second key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from osfl.core.errors import Rejected
from osfl.runtime.atomic import replace_in_pieces
from osfl.wire.points import PRIME
from osfl.wire.signing import SigningKey, VerifyKey
from osfl.wire.source import Source, opened

MAGIC = b"osfl sealed 001\n"
PIECE = 1 << 16
_TAG, _KEY = 16, 32
_HEAD = len(MAGIC) + 2 * _KEY


def is_sealed(path: Path) -> bool:
    with opened(path) as file:
        return file.head(len(MAGIC)) == MAGIC


def sealed_size(plain: int) -> int:
    """How long a sealed file of so many bytes is."""
    return _HEAD + plain + _TAG * max(1, -(-plain // PIECE))


def seal(source: Path, target: Path, to: str) -> None:
    """Write a copy of a file that only the owner of the public key `to` can read. Two copies never have the same bytes."""
    replace_in_pieces(target, _pieces(source, VerifyKey(to).hex))


def _pieces(source: Path, to: str) -> Iterator[bytes]:
    ephemeral = X25519PrivateKey.generate()
    public, addressee = ephemeral.public_key().public_bytes_raw(), _for_exchange(to)
    cipher = _cipher(ephemeral.exchange(X25519PublicKey.from_public_bytes(addressee)), public, addressee)
    yield MAGIC + bytes.fromhex(to) + public
    with source.open("rb") as file:
        number, piece = 0, file.read(PIECE)
        while True:
            ahead = file.read(PIECE)
            yield cipher.encrypt(_nonce(number, not ahead), piece, None)
            if not ahead:
                return
            number, piece = number + 1, ahead


def unseal(path: Path, key: SigningKey, limit: int) -> memoryview:
    """What a sealed file holds, in memory and nowhere else; refused when one bit of it is not what was sealed."""
    with opened(path) as file:
        if file.size > sealed_size(limit):
            raise _no(
                "size",
                "the file is too large",
                f"at most {sealed_size(limit)} bytes",
                file.size,
                "The plan sets the limit; give the file that the client made.",
            )
        body, last = divmod(max(0, file.size - _HEAD), PIECE + _TAG)
        if file.size < _HEAD + _TAG or 0 < last < _TAG:
            raise _damaged("a shorter file")
        return _plain(file, key, body * PIECE + max(0, last - _TAG), body + (last > 0))


def _plain(file: Source, key: SigningKey, size: int, count: int) -> memoryview:
    head = file.head(_HEAD)
    to, public = head[len(MAGIC) : -_KEY].hex(), head[-_KEY:]
    if to != key.public_hex:
        raise _no("seal", "it is sealed to another key", key.public_hex, to, "Seal it to the receiver's public key.")
    try:
        cipher = _cipher(_own(key).exchange(X25519PublicKey.from_public_bytes(public)), public, _for_exchange(to))
        plain = bytearray(size)
        for number in range(count):
            piece = file.part(_HEAD + number * (PIECE + _TAG), PIECE + _TAG)
            piece_bytes = cipher.decrypt(_nonce(number, number == count - 1), piece, None)
            plain[number * PIECE : number * PIECE + len(piece_bytes)] = piece_bytes
    except (InvalidTag, ValueError):  # ValueError: a public key of low order, which gives no secret
        raise _damaged("other bytes") from None
    return memoryview(plain).toreadonly()


def shared_secret(key: SigningKey, public_hex: str) -> bytes:
    """What X25519 gives the owners of these two keys, and nobody else; for osfl.wire.masks."""
    return _own(key).exchange(X25519PublicKey.from_public_bytes(_for_exchange(VerifyKey(public_hex).hex)))


def _cipher(secret: bytes, ephemeral: bytes, addressee: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(HKDF(SHA256(), 32, salt=ephemeral + addressee, info=MAGIC).derive(secret))


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _for_exchange(public_hex: str) -> bytes:
    """The Ed25519 point with height y as the X25519 one: u = (1 + y) / (1 - y). Keys of low order, which would give no secret
    (y = 1 not even a u), are refused by `VerifyKey`."""
    y = int.from_bytes(bytes.fromhex(public_hex), "little") & (2**255 - 1)
    return ((1 + y) * pow(1 - y, -1, PRIME) % PRIME).to_bytes(_KEY, "little")


def _own(key: SigningKey) -> X25519PrivateKey:
    """The same scalar that signs: the first half of the seed's SHA-512 (RFC 8032, section 5.1.5)."""
    return X25519PrivateKey.from_private_bytes(hashlib.sha512(key.seed).digest()[:_KEY])


def _damaged(got: str) -> Rejected:
    return _no(
        "seal",
        "the sealed file is incomplete or was changed",
        "what was sealed",
        got,
        "Copy it again from where it was made, and wait until that has finished.",
    )


def _no(field: str, reason: str, expected: object, got: object, fix: str) -> Rejected:
    return Rejected(reason, field=field, expected=expected, got=got, fix=fix)
