"""Masks of a secure sum: numbers that two sites share and the server does not know, which cancel in the sum.

    pair of Ed25519 keys --X25519--> secret --HKDF-SHA256 over the plan's digest and the pair--> seed --ChaCha20--> mask

Site i sends its numbers plus the masks shared with later sites minus those shared with earlier ones, modulo 2^64, in the order
of their names. Bonawitz et al., CCS 2017, here with keys that are enrolled before the round, so that a site sends one message.
Every upload commits to its seeds: two sites without a common mask, and a wrong seed in a repair (osfl.wire.repair), are
recognized.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from osfl.core.types import ClientId, canonical, digest_of
from osfl.wire.sealing import shared_secret
from osfl.wire.signing import SigningKey

SEED = 32  # bytes
COMMITMENTS = "masks/commitments"  # of a masked upload, U8 (clients, 32) in the plan's order; the sender's own row is zero
_INFO, _COMMIT = b"osfl secure sum 1", b"osfl secure sum 1 commitment"
_TOGETHER = 1 << 16  # numbers of a mask that are in memory at once
_ZEROS = bytes(8 * _TOGETHER)


def keys_digest(enrolled: Mapping[ClientId, str]) -> str:
    """One text for all public keys of a round: sites that see another one have other keys."""
    return digest_of(dict(enrolled))


def pair_seed(key: SigningKey, client: ClientId, other: ClientId, other_public: str, plan: str) -> bytes:
    """What this client shares with another one in this round and nobody else can compute; both get the same."""
    pair = sorted([[client, key.public_hex], [other, other_public]])
    info = _INFO + canonical(pair)
    return HKDF(SHA256(), SEED, salt=bytes.fromhex(plan), info=info).derive(shared_secret(key, other_public))


def commitment(seed: bytes) -> bytes:
    """Recognizes a seed and reveals nothing of it."""
    return hashlib.sha256(_COMMIT + seed).digest()


def is_added(client: ClientId, other: ClientId) -> bool:
    """Whether this client adds the mask that it shares with the other; the other then subtracts it."""
    return client < other


def add_mask(numbers: Iterable[NDArray[np.uint64]], seed: bytes, *, subtract: bool) -> None:
    """Add the mask of this seed to flat arrays, one after the other, in place and modulo 2^64."""
    # A seed belongs to one pair in one round, so it is used with one nonce only.
    keystream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    for array in numbers:
        for start in range(0, len(array), _TOGETHER):
            part = array[start : start + _TOGETHER]
            mask = np.frombuffer(keystream.update(_ZEROS[: 8 * len(part)]), dtype="<u8")
            if subtract:
                part -= mask
            else:
                part += mask
