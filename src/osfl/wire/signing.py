"""Ed25519 keys, their files, and signatures as lower-case hex."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from osfl.core.errors import UsageError
from osfl.core.names import shown
from osfl.runtime.atomic import create_once
from osfl.wire.points import weakness

SIGNATURE_DIGITS = 128
_KEY = re.compile(r"[0-9a-f]{64}")
_OTHER_KEY = "`osfl keys` never makes such a key: ask its owner for another one, and by which program it was made."
_SIGNATURE = re.compile(r"[0-9a-f]{128}")  # one spelling only: upper-case digits would be a second one


class VerifyKey:
    """The public half, known to everyone who must recognize the signer.

    Keys for which a signature can be made without a private key are refused here, and so everywhere (see osfl.wire.points).
    """

    def __init__(self, public_hex: str) -> None:
        if not isinstance(public_hex, str) or not _KEY.fullmatch(public_hex):
            raise UsageError(
                f"{shown(public_hex)} is not a public key",
                field="key",
                fix="A public key is 64 lower-case hex digits, as printed by `osfl keys`.",
            )
        if problem := weakness(bytes.fromhex(public_hex)):
            raise UsageError(f"the public key {public_hex} is refused: {problem}", field="key", fix=_OTHER_KEY)
        self.hex = public_hex
        self._key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_hex))

    def verify(self, data: bytes, signature_hex: str) -> bool:
        if not _SIGNATURE.fullmatch(signature_hex):
            return False
        try:
            self._key.verify(bytes.fromhex(signature_hex), data)
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """The private half; it never leaves its owner."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> SigningKey:
        """The key that these 32 bytes are; simulations derive them so that a run repeats byte for byte."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def public_hex(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    @property
    def seed(self) -> bytes:
        """The 32 bytes that the key is: for osfl.wire.sealing, and for nobody to write down."""
        return self._key.private_bytes_raw()

    def sign(self, data: bytes) -> str:
        return self._key.sign(data).hex()

    def save(self, path: Path) -> None:
        """Write a PEM file that only its owner can read, whole or not at all; never over an existing one."""
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        if not _created(path, pem):
            raise _key_error(path, "exists already", "Keep it (a new key is a new identity) or name another.")

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        try:
            mode, pem = path.stat().st_mode, path.read_bytes()
        except OSError as error:
            raise _key_error(path, f"cannot be read: {error.strerror}", "Make one with `osfl keys`.") from None
        if b"PRIVATE KEY" not in pem:  # first: nobody should lock away a public half
            raise _key_error(path, "holds no private key", "Give the .key file that `osfl keys` wrote, not the .pub file.")
        if os.name == "posix" and mode & 0o077:
            raise _key_error(path, f"can be read by others (mode {mode & 0o777:o})", f"Run: chmod 600 {path}")
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise _key_error(path, "is not an unencrypted PEM key", "Make one with `osfl keys`.") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise _key_error(path, "is not an Ed25519 key", "Make one with `osfl keys`.")
        return cls(key)


def save_public(path: Path, public_hex: str) -> None:
    """The public half as one line of text, which may be mailed, printed or read out; never over another one."""
    if _created(path, f"{public_hex}\n".encode("ascii")):
        path.chmod(0o644)
    elif read_public(path) != public_hex:
        raise _key_error(path, "holds another key", "Move it away if it is no longer in use.")


def _created(path: Path, content: bytes) -> bool:
    """Whether this call made the file, durably; a disk that is full leaves nothing, where half a key would be in the way."""
    try:
        return create_once(path, content)
    except OSError as error:
        raise _key_error(path, f"cannot be written: {error.strerror}", "Name a folder you can write to.") from None


def read_public(path: Path) -> str:
    """The public key that a `.pub` file holds, or the public half of a `.key` file."""
    try:
        with path.open("rb") as file:
            text = file.read(4096)  # keys are short; whatever else was named by mistake may not be
    except OSError as error:
        raise _key_error(path, f"cannot be read: {error.strerror}", "Name a .pub file that `osfl keys` wrote.") from None
    if b"PRIVATE KEY" in text:
        return SigningKey.load(path).public_hex
    digits = text.strip().decode("ascii", "replace")
    if not _KEY.fullmatch(digits):
        raise _key_error(
            path,
            f"holds no public key: expected 64 lower-case hex digits, got {shown(digits, 40)}",
            "Ask its owner for the .pub file that `osfl keys` wrote.",
        )
    if problem := weakness(bytes.fromhex(digits)):
        raise _key_error(path, f"holds a public key that is refused: {problem}", _OTHER_KEY)
    return VerifyKey(digits).hex


def _key_error(path: Path, problem: str, fix: str) -> UsageError:
    return UsageError(f"the key file {path} {problem}", field="key", fix=fix)
