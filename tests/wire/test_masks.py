"""Masks cancel in the sum and look like noise to everybody else; seeds belong to one pair in one round."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from osfl.core.types import canonical
from osfl.wire.masks import add_mask, commitment, is_added, keys_digest, pair_seed
from osfl.wire.signing import SigningKey

PLAN = "ab" * 32
SITES = ("east", "north", "south", "west")
KEYS = {name: SigningKey.from_seed(name.encode().ljust(32)) for name in SITES}
Array = NDArray[np.uint64]


def seed(one: str, other: str, plan: str = PLAN) -> bytes:
    return pair_seed(KEYS[one], one, other, KEYS[other].public_hex, plan)


def mask_all(term: Array, client: str, others: tuple[str, ...], plan: str) -> None:
    for other in others:
        add_mask([term], seed(client, other, plan), subtract=not is_added(client, other))


def test_a_seed_by_hand() -> None:
    """X25519 of both Ed25519 keys, HKDF-SHA256 with the plan as salt and the pair as info."""
    key, other = KEYS["north"], KEYS["west"]
    scalar = X25519PrivateKey.from_private_bytes(hashlib.sha512(other.seed).digest()[:32])
    y = int.from_bytes(bytes.fromhex(key.public_hex), "little") & (2**255 - 1)
    u = ((1 + y) * pow(1 - y, -1, 2**255 - 19) % (2**255 - 19)).to_bytes(32, "little")
    secret = scalar.exchange(X25519PublicKey.from_public_bytes(u))
    info = b"osfl secure sum 1" + canonical([["north", key.public_hex], ["west", other.public_hex]])
    assert seed("north", "west") == HKDF(SHA256(), 32, bytes.fromhex(PLAN), info).derive(secret)


def test_both_ends_of_a_pair_have_its_seed_and_nobody_has_another_pairs() -> None:
    """Another pair, another round, another name or another key: another seed."""
    seeds = [seed(a, b) for a in SITES for b in SITES if a < b]
    assert len(set(seeds)) == 6 and all(seed(a, b) == seed(b, a) for a in SITES for b in SITES if a != b)
    assert seed("north", "west", "cd" * 32) != seed("north", "west")
    assert pair_seed(KEYS["north"], "north", "vest", KEYS["west"].public_hex, PLAN) != seed("north", "west")
    assert len({commitment(one) for one in seeds}) == 6 and not {commitment(one) for one in seeds} & set(seeds)


def test_keys_have_one_digest_in_any_order() -> None:
    public = {name: key.public_hex for name, key in KEYS.items()}
    assert keys_digest(public) == keys_digest(dict(reversed(public.items())))
    assert keys_digest({**public, "west": public["east"]}) != keys_digest(public)


def test_a_mask_by_hand() -> None:
    """ChaCha20 over the arrays one after the other, eight bytes a number; added or subtracted modulo 2^64."""
    key = seed("north", "west")
    stream = np.frombuffer(Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(bytes(8 * 70_003)), "<u8")
    first, second = np.full(70_000, 2**64 - 1, np.uint64), np.array([1, 2, 3], np.uint64)
    add_mask([first, second], key, subtract=False)
    assert (first == stream[:70_000] - np.uint64(1)).all()
    assert (second == stream[70_000:] + np.array([1, 2, 3], np.uint64)).all()
    add_mask([first, second], key, subtract=True)
    assert (first == 2**64 - 1).all() and list(second) == [1, 2, 3]


def test_a_thousand_random_rounds_sum_exactly() -> None:
    rng = np.random.default_rng(0)
    for number in range(1000):
        sites = SITES[: 2 + number % 3]
        plan = hashlib.sha256(str(number).encode()).hexdigest()
        terms = rng.integers(0, 2**64, (len(sites), 5), dtype=np.uint64)
        sent = terms.copy()
        for row, client in zip(sent, sites, strict=True):
            mask_all(row, client, tuple(name for name in sites if name != client), plan)
        assert (sent.sum(0) == terms.sum(0)).all() and (sent != terms).all()


def chi_square(values: Array, bits: int) -> float:
    """Of 256 buckets of so many bits, from bit `bits` on; in units of its deviation from the mean for uniform values."""
    found = np.bincount((values >> np.uint64(bits) & np.uint64(255)).astype(np.int64), minlength=256)
    expected = len(values) / 256
    return (float(((found - expected) ** 2 / expected).sum()) - 255) / math.sqrt(2 * 255)


@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_what_others_know_of_a_term_is_uniform(colluders: int) -> None:
    """The server and all but one of the others take out every mask that they share: 10^6 values of what is left."""
    rng = np.random.default_rng(1)
    term = rng.binomial(1000, 0.3, 10**6).astype(np.uint64)
    seen, others = term.copy(), tuple(name for name in SITES if name != "north")
    mask_all(seen, "north", others, PLAN)
    for other in others[:colluders]:
        add_mask([seen], seed(other, "north"), subtract=is_added("north", other))
    for bits in range(0, 64, 8):
        assert abs(chi_square(seen, bits)) < 5
        assert chi_square(term, bits) > 1000  # the test can fail: without a mask it does
    assert abs(np.corrcoef(seen.astype(float), term.astype(float))[0, 1]) < 0.005
    assert abs(np.corrcoef(seen[1:].astype(float), seen[:-1].astype(float))[0, 1]) < 0.005
    for other in others[colluders:]:  # with the last of them nothing is left to hide
        add_mask([seen], seed(other, "north"), subtract=is_added("north", other))
    assert (seen == term).all()
