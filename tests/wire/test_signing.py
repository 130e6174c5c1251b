"""Keys and their files."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from osfl.core.errors import UsageError
from osfl.wire.signing import SigningKey, VerifyKey, read_public, save_public
from tests.faults.traps import fail, trapped


def test_known_answer() -> None:
    """RFC 8032, section 7.1, test 1: the empty message."""
    key = SigningKey.from_seed(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert key.public_hex == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"") == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )


def test_only_the_right_key_options_and_spelling() -> None:
    key = SigningKey.generate()
    signature = key.sign(b"words")
    assert VerifyKey(key.public_hex).verify(b"words", signature)
    assert not VerifyKey(key.public_hex).verify(b"other words", signature)
    assert not VerifyKey(key.public_hex).verify(b"words", signature.upper())
    assert not VerifyKey(key.public_hex).verify(b"words", signature[:-2])
    assert not VerifyKey(SigningKey.generate().public_hex).verify(b"words", signature)


def test_a_saved_key_is_private_and_comes_back(tmp_path: Path) -> None:
    key, path = SigningKey.generate(), tmp_path / "client.key"
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SigningKey.load(path).public_hex == key.public_hex
    with pytest.raises(UsageError, match="exists already"):
        SigningKey.generate().save(path)
    assert SigningKey.load(path).public_hex == key.public_hex


def test_a_full_disk_leaves_no_half_of_a_key_in_the_way(tmp_path: Path) -> None:
    key, private, public = SigningKey.generate(), tmp_path / "north.key", tmp_path / "north.pub"
    for save, path in ((key.save, private), (lambda path: save_public(path, key.public_hex), public)):
        with trapped(2, fail(errno.ENOSPC), stays=True), pytest.raises(UsageError, match="cannot be written: No space left"):
            save(path)
        assert not path.exists()
        save(path)
    assert SigningKey.load(private).public_hex == read_public(public) == key.public_hex
    assert stat.S_IMODE(public.stat().st_mode) == 0o644


def test_key_files_that_cannot_be_used(tmp_path: Path) -> None:
    def problem(path: Path) -> str:
        with pytest.raises(UsageError) as caught:
            SigningKey.load(path)
        assert caught.value.field == "key" and caught.value.fix
        return str(caught.value)

    assert "cannot be read: No such file" in problem(tmp_path / "missing")
    (broken := tmp_path / "broken").write_bytes(b"\xff not a key")
    broken.chmod(0o600)
    assert "holds no private key" in problem(broken)
    broken.write_bytes(b"-----BEGIN PRIVATE KEY-----\nbroken\n")
    assert "is not an unencrypted PEM key" in problem(broken)
    other = generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    broken.write_bytes(other)
    assert "is not an Ed25519 key" in problem(broken)
    broken.chmod(0o644)
    assert "can be read by others (mode 644)" in problem(broken) and "chmod 600" in problem(broken)
    with pytest.raises(UsageError, match="cannot be written"):
        SigningKey.generate().save(tmp_path / "no folder" / "key")


@pytest.mark.parametrize("text", ["", "abc", "G" * 64, "A" * 64, "a" * 63, "a" * 64 + "\n", None, 7])
def test_public_keys_have_one_spelling(text: str) -> None:
    with pytest.raises(UsageError, match="is not a public key"):
        VerifyKey(text)
