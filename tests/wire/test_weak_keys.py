"""Public keys of low order: the library verifies signatures under them that no private key made; osfl refuses them everywhere.

The points are computed here from the curve equation, not taken from osfl.wire.points.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from osfl.cli.main import answer
from osfl.core.errors import UsageError
from osfl.core.plan import write_plan
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.tensors import RawTensor
from osfl.core.types import Plan, Task
from osfl.roles import coordinator
from osfl.rounds.state import read_policy
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy, accept, verify_release
from osfl.wire.sealing import seal
from osfl.wire.signing import SigningKey, VerifyKey, read_public

P = 2**255 - 19
D = -121665 * pow(121666, P - 2, P) % P


def roots(square: int) -> list[int]:
    """Both square roots modulo P, by trying the four candidates of an exponent that works for P = 5 (mod 8)."""
    candidate = pow(square % P, (P + 3) // 8, P)
    found = {candidate * pow(2, (P - 1) // 4 * turn, P) % P for turn in range(4)}
    return sorted(x for x in found if (x * x - square) % P == 0)


def torsion() -> set[tuple[int, int]]:
    """All points with 8 A = 0. Twice an order-8 point has y = 0, so x^2 = -y^2 there: D y^4 + 2 y^2 - 1 = 0."""
    points = {(0, 1), (0, P - 1), *((x, 0) for x in roots(P - 1))}
    for root in roots(1 + D):
        for y in roots((root - 1) * pow(D, P - 2, P)):
            points |= {(x, y) for x in roots(-y * y)}
    assert all((-x * x + y * y - 1 - D * x * x * y * y) % P == 0 for x, y in points)
    return points


def encodings(x: int, y: int) -> Iterator[bytes]:
    """Canonical and not: y or y + P, and for x = 0 both signs."""
    for height, sign in product((y, y + P), {x % 2, 1} if x == 0 else {x % 2}):
        if height < 2**255:
            yield (height | sign << 255).to_bytes(32, "little")


WEAK = sorted({text for point in torsion() for text in encodings(*point)})
NEUTRAL = (1).to_bytes(32, "little")
FORGED = NEUTRAL + bytes(32)  # R = [0]B, s = 0


class NoPrivateKey(SigningKey):
    """Signs for the neutral point without knowing any secret."""

    def __init__(self) -> None:
        pass

    def sign(self, data: bytes) -> str:
        return FORGED.hex()


def by_library(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def test_there_are_eight_points_and_fourteen_encodings() -> None:
    assert len(torsion()) == 8 and len(WEAK) == 14


def test_the_library_verifies_what_nobody_signed() -> None:
    """For each of the eight points some message among a few verifies with s = 0 and a torsion point as R."""
    canonical = [next(encodings(*point)) for point in torsion()]
    for public in canonical:
        assert any(by_library(public, r + bytes(32), b"message %d" % n) for r in canonical for n in range(64)), public.hex()
    assert all(by_library(NEUTRAL, FORGED, message) for message in (b"", b"any", b"other"))


@pytest.mark.parametrize("public", WEAK, ids=lambda public: public.hex()[:8])
def test_each_encoding_is_refused_as_text_and_as_file(public: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"low order|not canonical"):
        VerifyKey(public.hex())
    (tmp_path / "north.pub").write_text(public.hex() + "\n")
    with pytest.raises(UsageError, match=r"north\.pub holds a public key that is refused: .*(low order|not canonical)") as no:
        read_public(tmp_path / "north.pub")
    assert no.value.fix and no.value.field == "key"


def test_heights_above_the_prime_and_heights_without_a_point() -> None:
    beyond = next(y for y in range(P, 2**255) if y - P > 1)  # y = 2 in its second spelling
    with pytest.raises(UsageError, match="not canonical"):
        VerifyKey(beyond.to_bytes(32, "little").hex())
    nowhere = next(y for y in range(2, 99) if not roots((y * y - 1) * pow(D * y * y + 1, P - 2, P)))
    with pytest.raises(UsageError, match="no point of the curve"):
        VerifyKey(nowhere.to_bytes(32, "little").hex())


def test_keys_that_osfl_makes_are_accepted() -> None:
    for number in range(100):
        assert VerifyKey(SigningKey.from_seed(number.to_bytes(32, "big")).public_hex).hex


# --- the attack at each place where a key comes in ---------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan, and keys of which `north` is the neutral point."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(write_plan(_plan()))
    assert answer(["keys", "server", "south", "--out", "keys"]) == 0
    (tmp_path / "keys" / "north.pub").write_text(NEUTRAL.hex() + "\n")
    return tmp_path


def _plan() -> Plan:
    settings = resolve_settings(load("fedavg"), "smoke")
    return Plan(Task("t", ("a", "b"), (1, 8, 8)), "fedavg", settings, ("north", "south"))


def _forged(kind: str = "upload") -> bytes:
    tensors = {"x": RawTensor("F32", (1,), bytes(4))}
    return pack(kind, "north" if kind == "upload" else "", _plan().digest, tensors, {}, NoPrivateKey())  # type: ignore[arg-type]


def _run(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capfd.readouterr()
    code = answer(command.split())
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err
    return code, " ".join((captured.out + captured.err).split())


def test_keys_and_enrol_refuse_the_file(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, output = _run("enroll plan.toml --keys keys --out round", capfd)
    assert code == 2 and "north.pub" in output and "low order" in output and not (place / "round" / "enrolled.json").exists()
    code, output = _run("keys north --out keys", capfd)
    assert code == 2 and "north.pub" in output and "low order" in output
    south, server = read_public(place / "keys" / "south.pub"), read_public(place / "keys" / "server.pub")
    for north, signs in ((NEUTRAL.hex(), server), (server, NEUTRAL.hex())):
        with pytest.raises(UsageError, match="low order"):
            coordinator.open_new(place / "round", _plan(), {"north": north, "south": south}, signs)
    assert not (place / "round").exists()


def test_the_gate_refuses_a_key_that_was_enrolled_before(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A round folder of an older version, or an edited one, with the neutral point in enrolled.json."""
    (place / "keys" / "north.pub").unlink()
    assert answer(["keys", "north", "--out", "keys"]) == 0
    assert answer(["enroll", "plan.toml", "--keys", "keys", "--out", "round"]) == 0
    enrolled = json.loads((place / "round" / "enrolled.json").read_text())
    enrolled["clients"]["north"] = NEUTRAL.hex()
    (place / "round" / "enrolled.json").write_text(json.dumps(enrolled))
    (place / "forged.safetensors").write_bytes(_forged())
    for command in ("receive round forged.safetensors", "verify forged.safetensors --round round"):
        code, output = _run(command, capfd)
        assert code != 0 and "low order" in output, command
    with pytest.raises(UsageError, match="low order"):
        read_policy(place / "round")
    with pytest.raises(UsageError, match="low order"):
        accept(_forged(), AcceptancePolicy(_plan().digest, {"north": NEUTRAL.hex()}, {}, 2))


def test_verify_personalize_and_seal_refuse_it_as_the_servers(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "server.pub").write_text(NEUTRAL.hex() + "\n")
    (place / "release.safetensors").write_bytes(_forged("release"))
    for command in (
        "verify release.safetensors --plan plan.toml --server server.pub",
        "verify release.safetensors --plan plan.toml --keys keys",
        "personalize plan.toml --client north --release release.safetensors --server server.pub",
        "client plan.toml --client south --data . --key keys/south.key --seal server.pub --out u.safetensors",
    ):
        code, output = _run(command, capfd)
        assert code == 2 and "low order" in output, command
    with pytest.raises(UsageError, match="low order"):
        verify_release(_forged("release"), NEUTRAL.hex(), _plan().digest)
    for public in WEAK:  # the shared secret with any of them would be zero
        with pytest.raises(UsageError):
            seal(place / "release.safetensors", place / "sealed", public.hex())
