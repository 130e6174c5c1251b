"""Which 32 bytes are an Ed25519 public key that only the owner of a private key can sign for (RFC 8032, section 5.1.3).

A key A of low order (8 A = 0) needs no private key: R = [s]B and any s verify whenever [k]A = 0, under the neutral point for
every message. OpenSSL accepts such keys, so they are refused here, and with them every second encoding of a point: keys are
compared as text, and one key in two encodings would be two clients.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

PRIME = 2**255 - 19
D = -121665 * pow(121666, -1, PRIME) % PRIME  # -x^2 + y^2 = 1 + D x^2 y^2
_ROOT_OF_MINUS_ONE = pow(2, (PRIME - 1) // 4, PRIME)

Point: TypeAlias = tuple[int, int]  # affine x, y


@lru_cache(maxsize=4096)
def weakness(public: bytes) -> str:
    """Why these 32 bytes are not accepted as a public key; empty if they are. Kept, for a round asks again at each upload."""
    number = int.from_bytes(public, "little")
    y, sign = number & (2**255 - 1), number >> 255
    if y >= PRIME:
        return "its encoding is not canonical (y is not below 2^255 - 19)"
    x = _x_of(y)
    if x is None:
        return "it is no point of the curve"
    if x == 0 and sign:
        return "its encoding is not canonical (x is 0 and has a sign)"
    if _low_order((x, y)):
        return "it has low order, so signatures under it need no private key"
    return ""


def _x_of(y: int) -> int | None:
    """One of the two x with this y; None where there is none."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, PRIME) % PRIME  # D is no square: the divisor is never 0
    x = pow(square, (PRIME + 3) // 8, PRIME)
    if (x * x - square) % PRIME:
        x = x * _ROOT_OF_MINUS_ONE % PRIME
    return x if (x * x - square) % PRIME == 0 else None


def _low_order(point: Point) -> bool:
    """Whether eight times the point is the neutral one."""
    for _ in range(3):
        point = _doubled(point)
    return point == (0, 1)


def _doubled(point: Point) -> Point:
    """RFC 8032, section 5.1.4; the formula is complete, so the divisors are never 0."""
    x, y = point
    product = D * x * x * y * y % PRIME
    return (
        2 * x * y * pow(1 + product, -1, PRIME) % PRIME,
        (y * y + x * x) * pow(1 - product, -1, PRIME) % PRIME,
    )
