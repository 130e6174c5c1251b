"""Looking at a bundle without believing it refuses what cannot be shown, and notes what the gate would refuse."""

import pytest

from osfl.core.errors import Rejected
from osfl.core.tensors import RawTensor
from osfl.core.types import Limits
from osfl.wire.bundle import pack
from osfl.wire.signing import SigningKey
from osfl.wire.window import look_at

KEY = SigningKey.from_seed(b"k" * 32)
TENSORS = {"w": RawTensor("F32", (2,), bytes(8))}


def bundle(client: str = "north", kind: str = "upload", plan: str = "0" * 64) -> bytes:
    return pack(kind, client, plan, TENSORS, {"samples": 3}, KEY)  # type: ignore[arg-type]


def test_everything_that_it_says_is_there() -> None:
    seen = look_at(bundle())
    assert seen.bundle.client == "north" and seen.bundle.facts == {"samples": 3} and seen.doubts == ()
    assert seen.size == len(bundle()) and seen.signed_by(KEY.public_hex)
    assert not seen.signed_by(SigningKey.generate().public_hex)


def test_damage_is_noted() -> None:
    data = bytearray(bundle())
    data[-1] ^= 1
    assert [no.field for no in look_at(bytes(data)).doubts] == ["w.sha256"]
    spaced = bundle().replace(b'"signature":', b'"signature" :', 1)
    length = int.from_bytes(spaced[:8], "little") + 1
    assert [no.field for no in look_at(length.to_bytes(8, "little") + spaced[8:]).doubts] == ["header"]


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (bundle(plan="round"), "plan"),
        (bundle(client="../x"), "client"),
        (bundle(client=""), "client"),
        (bundle(kind="letter"), "kind"),
        (bundle(client="north", kind="release"), "client"),
        (bundle() + b"x", "size"),
        (bundle()[:-1], "size"),
    ],
)
def test_what_cannot_be_shown_is_refused(data: bytes, field: str) -> None:
    with pytest.raises(Rejected) as no:
        look_at(data)
    assert no.value.field == field


def test_releases_and_personal_parts() -> None:
    assert look_at(bundle(client="", kind="release")).bundle.kind == "release"
    assert look_at(bundle(kind="personal")).bundle.client == "north"


@pytest.mark.parametrize("start", [b"# A one-shot", b"\x89PNG\r\n\x1a\n" + bytes(9), b'{"version": 1}', b"PK\x03\x04" * 9])
def test_another_kind_of_file_is_called_no_bundle(start: bytes) -> None:
    """Its first letters are not taken for a length, and nobody is blamed."""
    with pytest.raises(Rejected) as no:
        look_at(start)
    assert str(no.value).startswith("File rejected: this is not a bundle (expected") and no.value.field == "header length"
    assert str(int.from_bytes(start[:8], "little")) not in str(no.value) and "osfl client" in str(no.value.fix)


def test_limits_hold_here_too() -> None:
    with pytest.raises(Rejected, match="the header is too long"):
        look_at(bundle(), Limits(header_bytes=64))
    with pytest.raises(Rejected, match="too large"):
        look_at(bundle(), Limits(upload_bytes=64))
