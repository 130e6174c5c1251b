"""The gate beyond the corpus: order of checks, what is read when, releases, roles, files that are not files."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osfl.core.errors import Rejected, UsageError
from osfl.core.names import check_client_id, shown
from osfl.core.tensors import RawTensor
from osfl.core.types import Field, Limits, canonical
from osfl.wire.bundle import Bundle, Kind, pack
from osfl.wire.gate import AcceptancePolicy, ReleaseRejected, accept, verify_release
from osfl.wire.signing import SigningKey
from osfl.wire.source import BytesLike
from tests.wire.forge import (
    CLIENT,
    CONTRACTS,
    KEY,
    OTHER,
    OTHER_KEY,
    OTHER_PLAN,
    PLAN,
    POLICY,
    SERVER,
    UNKNOWN,
    draft,
    facts,
    upload,
)
from tests.wire.fuzz import campaign

Source = BytesLike | Path


def refused(data: Source, policy: AcceptancePolicy = POLICY) -> Rejected:
    with pytest.raises(Rejected) as caught:
        accept(data, policy)
    return caught.value


def taken(data: Source, policy: AcceptancePolicy = POLICY) -> Bundle | None:
    """`refused` without the cost of pytest's."""
    try:
        return accept(data, policy)
    except Rejected:
        return None


def test_every_single_bit_flip_is_refused() -> None:
    data = upload()
    assert taken(data)
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert not taken(changed), f"bit {bit}"


def test_every_truncation_is_refused() -> None:
    data = upload()
    assert not any(taken(data[:length]) for length in range(len(data)))


def test_ten_thousand_fuzzed_bundles() -> None:
    found = campaign(10_000)
    assert found["signed"] == 5_000 and found["accepted"] > 100, "the fuzzer has to come close to good bundles"
    assert (found["unhandled"], found["wrong_accepts"], found["wrong_refusals"]) == (0, 0, 0)
    assert found["different_fields"] > 30
    assert found["slowest_ms"] < 1000, "100 ms on a quiet machine; see the benchmark"


def test_the_message_says_who_what_expected_got_and_what_to_do() -> None:
    no = refused(upload(model__w=RawTensor("F32", (2, 4), bytes(32))))
    assert str(no) == (
        "Upload rejected from 'st-mary': tensor 'model/w' has the wrong shape (expected [2, 3], got [2, 4]).\n"
        "The plan defines what an upload holds; retrain with `osfl client plan.toml` or agree on another plan."
    )


def test_checks_stop_at_the_first_no_in_the_agreed_order() -> None:
    """A file with every fault names the first; repaired one by one, the next comes up."""
    made = draft(upload("mallory", UNKNOWN, plan=OTHER_PLAN, drop="model/w", facts_changed={"samples": 0}))
    made.body += b"\0"
    manifest = made.manifest
    assert refused(made.build(metadata={"manifest": 1}) + bytes(64 << 10)).field == "size"
    assert refused(made.build(metadata={"manifest": 1}, length=1 << 40)).field == "header length"
    assert refused(made.build(header=b"{")).field == "header"
    assert refused(made.build(metadata={"manifest": 1})).field == "metadata"
    assert refused(made.build(UNKNOWN)).field == "client"
    manifest["client"] = CLIENT
    assert refused(made.build(UNKNOWN)).field == "signature"
    manifest["format"] = 2
    assert refused(made.build()).field == "format"
    manifest["format"] = 1
    assert refused(made.build()).field == "plan"
    manifest["plan"] = PLAN
    assert refused(made.build()).field == "model/w"
    made = draft(
        upload(model__w=RawTensor("F32", (2, 3), struct.pack("<6f", *[float("nan")] * 6)), facts_changed={"samples": 0})
    )
    good_hash = made.manifest["tensors"]["model/w"]["sha256"]
    made.manifest["tensors"]["model/w"]["sha256"] = "0" * 64
    assert refused(made.build() + b"\0").field == "size"
    assert refused(made.build()).field == "model/w.sha256"
    made.manifest["tensors"]["model/w"]["sha256"] = good_hash
    assert refused(made.build()).field == "model/w.values"


def test_limits_are_inclusive() -> None:
    data = upload()
    header, size = struct.unpack("<Q", data[:8])[0], len(data)
    facts_size = len(canonical(facts()))

    def field(**limits: int) -> str | None:
        policy = dataclasses.replace(POLICY, limits=dataclasses.replace(POLICY.limits, **limits))
        return None if taken(data, policy) else refused(data, policy).field

    assert field(upload_bytes=size, header_bytes=header, facts_bytes=facts_size) is None
    assert field(upload_bytes=size - 1) == "size"
    assert field(header_bytes=header - 1) == "header length"
    assert field(facts_bytes=facts_size - 1) == "facts"


@pytest.mark.parametrize("output", [{"samples": 1}, {"samples": 10**6}, {"class_counts": [0, 0, 10**6]}, {"note": [[[]]]}])
def test_facts_at_their_bounds(output: dict[str, Any]) -> None:
    assert accept(upload(facts_changed=output), POLICY)


class TestReading:
    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How far into the file each read goes."""
        seen: list[int] = []
        real = os.preadv

        def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            seen.append(offset + sum(len(buffer) for buffer in buffers))
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", spy)
        return seen

    def test_the_body_is_not_read_before_the_signature_is_good(self, tmp_path: Path, reads: list[int]) -> None:
        path = tmp_path / "upload"
        path.write_bytes(upload(key=UNKNOWN))
        refused(path)
        body = len(draft().body)
        assert max(reads) == path.stat().st_size - body

    def test_the_body_is_not_read_when_the_contract_is_broken(self, tmp_path: Path, reads: list[int]) -> None:
        path = tmp_path / "upload"
        path.write_bytes(upload(model__w=RawTensor("F32", (2, 4), bytes(32))))
        refused(path)
        assert max(reads) < path.stat().st_size

    def test_only_eight_bytes_of_a_file_with_a_huge_header(self, tmp_path: Path, reads: list[int]) -> None:
        path = tmp_path / "upload"
        path.write_bytes(struct.pack("<Q", 40 << 10) + bytes(50 << 10))
        refused(path)
        assert max(reads) == 8

    def test_nothing_of_a_file_that_is_too_large(self, tmp_path: Path, reads: list[int]) -> None:
        path = tmp_path / "upload"
        with path.open("wb") as file:
            file.truncate(1 << 40)
        assert refused(path).field == "size" and reads == []

    def test_short_reads_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "upload"
        path.write_bytes(upload())
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at))
        assert accept(path, POLICY) == accept(upload(), POLICY)

    def test_a_file_that_shrinks_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "upload"
        path.write_bytes(upload())
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        assert refused(path).field == "size"


def test_files_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "socket"))
    for name in ("missing", "pipe", "socket", "", "a\0b"):
        assert refused(tmp_path / name).field == "file"
    assert refused(Path("/dev/zero")).field == "file"


def test_values_are_checked_beyond_the_first_chunk() -> None:
    count = (8 << 20) // 4 + 1
    policy = AcceptancePolicy(
        PLAN, {CLIENT: KEY.public_hex}, {"": {"x": Field("F32", ("n",)), "y": Field("I8", ("n",), below=5)}}, 3
    )
    floats, labels = np.zeros(count, "<f4"), np.zeros(count, "i1")

    def send() -> bytes:
        parts = {"x": RawTensor("F32", (count,), floats.data), "y": RawTensor("I8", (count,), labels.data)}
        return pack("upload", CLIENT, PLAN, parts, {}, KEY)

    assert accept(send(), policy)
    labels[-1] = 5
    assert refused(send(), policy).field == "y.values"
    floats[-1] = np.inf
    assert refused(send(), policy).field == "x.values"


def test_optional_tensors_may_be_missing_and_other_architectures_differ() -> None:
    assert "tokens" not in accept(upload(drop="tokens"), POLICY).tensors
    small = pack("upload", OTHER, PLAN, {"model/v": RawTensor("F64", (2,), bytes(16))}, {"architecture": "mlp"}, OTHER_KEY)
    assert accept(small, POLICY).client == OTHER


def test_a_dashboard_with_one_nameless_architecture_needs_no_fact() -> None:
    policy = AcceptancePolicy(PLAN, {CLIENT: KEY.public_hex}, {"": CONTRACTS["cnn"]}, classes=3)
    assert accept(upload(facts_changed={"architecture": None}), policy)
    assert accept(upload(facts_changed={"architecture": "anything"}), policy)
    assert refused(upload(facts_changed={"architecture": 5}), policy).field == "facts.architecture"


def test_integer_fields_without_a_bound_take_any_value() -> None:
    policy = AcceptancePolicy(PLAN, {CLIENT: KEY.public_hex}, {"": {"n": Field("I32", (1,))}}, classes=3)
    assert accept(pack("upload", CLIENT, PLAN, {"n": RawTensor("I32", (1,), b"\xff" * 4)}, {}, KEY), policy)


class TestReleases:
    def release(
        self,
        kind: Kind = "release",
        client: str = "",
        key: SigningKey = SERVER,
        plan: str = PLAN,
        made_from: dict[str, str] | None = None,
        **facts_changed: Any,
    ) -> bytes:
        parts = {"model/w": RawTensor("F32", (1,), struct.pack("<f", facts_changed.pop("value", 1.0)))}
        return pack(
            kind,
            client,
            plan,
            parts,
            facts() | facts_changed,
            key,
            made_from={CLIENT: PLAN} if made_from is None else made_from,
        )

    def refused(self, data: Source, **how: Any) -> str | None:
        with pytest.raises(ReleaseRejected) as caught:
            verify_release(data, SERVER.public_hex, PLAN, **how)
        assert caught.value.client == "server" and str(caught.value).startswith("Release rejected from 'server'")
        return caught.value.field

    def test_good_ones(self, tmp_path: Path) -> None:
        path = tmp_path / "release.safetensors"
        path.write_bytes(self.release())
        assert verify_release(path, SERVER.public_hex, PLAN, client=CLIENT).made_from == {CLIENT: PLAN}
        assert verify_release(self.release("personal", CLIENT), SERVER.public_hex, PLAN, client=CLIENT).client == CLIENT
        assert verify_release(self.release("personal", OTHER), SERVER.public_hex, PLAN).client == OTHER

    def test_sixteen_dimensions_are_fine(self) -> None:
        data = pack("release", "", PLAN, {"w": RawTensor("U8", (1,) * 16, b"\0")}, {}, SERVER)
        assert verify_release(data, SERVER.public_hex, PLAN).tensors["w"].shape == (1,) * 16

    def test_bad_ones(self) -> None:
        assert self.refused(self.release(key=KEY)) == "signature"
        assert self.refused(self.release(plan=OTHER_PLAN)) == "plan"
        assert self.refused(upload(key=SERVER)) == "kind"
        assert self.refused(self.release(client=CLIENT)) == "client"
        assert self.refused(self.release("personal", "../x")) == "client"
        assert self.refused(self.release("personal", OTHER), client=CLIENT) == "client"
        assert self.refused(self.release(made_from={CLIENT: "abc"})) == "made_from"
        assert self.refused(self.release(value=float("nan"))) == "model/w.values"
        assert self.refused(self.release(note="x" * 99), limits=Limits(facts_bytes=50)) == "facts"
        assert self.refused(self.release() + b"\0") == "size"
        assert self.refused(b"") == "size"
        made = draft(self.release())
        made.manifest["facts"] = []
        assert self.refused(made.build(SERVER)) == "facts"

    def test_what_to_do_is_stated_to_the_holder_of_a_release(self, tmp_path: Path) -> None:
        """It comes from the coordinator; whoever holds it signs nothing and trains nothing."""
        damaged = self.release()[:-1] + b"\x07"
        cases: list[tuple[Source, str]] = [
            (self.release(key=KEY), "server.pub is the public key of this round's coordinator"),
            (self.release(plan=OTHER_PLAN), "Ask the coordinator for the release of this round"),
            (damaged, "copy it again from the coordinator"),
            (self.release(value=float("nan")), "ask the coordinator to make it again with `osfl server`"),
            (tmp_path / "gone.safetensors", "the coordinator, who makes it with `osfl server`"),
            (b"osfl sealed 001\n" + b"\0" * 99, "a release is never sealed"),
            (self.release()[:50], "Copy it again from where it was made"),
        ]
        for given, piece in cases:
            with pytest.raises(ReleaseRejected) as caught:
                verify_release(given, SERVER.public_hex, PLAN)
            fix = caught.value.fix or ""
            assert piece in fix and "osfl client" not in fix

    def test_every_single_bit_flip_is_refused(self) -> None:
        data = self.release()
        for bit in range(0, len(data) * 8, 3):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            self.refused(changed)


class TestGate:
    @pytest.mark.parametrize("enrolled", [{"../x": KEY.public_hex}, {"a": "abc"}, {"a": KEY.public_hex, "b": KEY.public_hex}])
    def test_enrollment_mistakes(self, enrolled: dict[str, str]) -> None:
        with pytest.raises(UsageError) as caught:
            AcceptancePolicy(PLAN, enrolled, {"": {}}, classes=2)
        assert caught.value.fix

    def test_a_contract_that_no_bundle_can_fulfill(self) -> None:
        with pytest.raises(UsageError, match="dtype of 'x'"):
            AcceptancePolicy(PLAN, {}, {"": {"x": Field("F8", (1,))}}, classes=2)


@pytest.mark.parametrize("name", ["a", "st-mary", "site_01", "0.1", "x" * 64, "console", "com", "nul-1"])
def test_good_client_ids(name: str) -> None:
    assert check_client_id(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "St-Mary",
        "x" * 65,
        ".",
        "..",
        ".x",
        "-x",
        "_x",
        "x.",
        "a/b",
        "a\\b",
        "a b",
        "a\n",
        "é",
        "con",
        "nul.txt",
        "com1",
        "lpt9.x",
        "aux",
        "a:b",
        "a*",
        "a\0",
    ],
)
def test_bad_client_ids(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_client_id(name)
    assert caught.value.field == "client" and "st-mary" in str(caught.value)


def test_strange_values_are_shown_short_and_harmless() -> None:
    assert shown("\x1b[2J\u202e") == r"'\x1b[2J\u202e'"
    assert len(shown("x" * 10_000)) == 120
