"""What fits into a window, when it is there, and what is refused before the contact: by hand."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from osfl.core.errors import UploadBlocked
from osfl.core.tensors import RawTensor
from osfl.core.types import Contact, Field, Limits, Plan, Task, Topology
from osfl.deploy.flower.chunks import Chunk, Damaged, Partial, announce, read_chunk
from osfl.rounds.contacts import (
    Size,
    capacity,
    check_windows,
    done_times,
    halving,
    least_bytes,
    schedule,
    what_would_fit,
    windows,
)
from osfl.rounds.folder import simulated_key
from osfl.wire.bundle import pack


def contact(a: str, b: str, clock: str, seconds: float, rate: float, encounter: int = 1) -> Contact:
    return Contact(a, b, f"2026-12-24T{clock}:00Z", seconds, rate, encounter)


# The pair a-b meets twice in the first encounter, a-c once in the second.
SCHEDULE = Topology(
    "contacts",
    encounters=2,
    contacts=(
        contact("a", "b", "18:00", 10, 50),
        contact("a", "b", "19:00", 20, 50),
        contact("a", "c", "21:00", 5.5, 100, 2),
    ),
)
SIZES = {"a": Size(600, 300, 600), "b": Size(500), "c": Size(551)}


def make_plan(topology: Topology | None) -> Plan:
    settings = SimpleNamespace(wire="float32")
    return Plan(Task("t", ("x", "y"), (1, 8, 8)), "m", settings, ("a", "b", "c"), Limits(), topology=topology)


def test_windows_of_a_pair_in_one_encounter_add_up() -> None:
    assert capacity(SCHEDULE.contacts[2]) == 550
    assert windows(make_plan(SCHEDULE), "a") == {"b": 1500} == {"b": sum(map(capacity, SCHEDULE.contacts[:2]))}
    assert windows(make_plan(SCHEDULE), "c") == {} == windows(make_plan(None), "a") == windows(make_plan(Topology("ring")), "a")


def test_a_transfer_goes_on_in_the_next_window() -> None:
    first, again, later = schedule(SCHEDULE, SIZES)[0], schedule(SCHEDULE, SIZES)[2], schedule(SCHEDULE, SIZES)[-1]
    assert (first.sender, first.receiver, first.window_bytes, first.fits) == ("a", "b", 500, False)
    assert (again.carried_before, again.arrives) == (500, "2026-12-24T19:00:02+00:00")
    assert (later.sender, later.bundle_bytes, later.window_bytes, later.fits) == ("c", 551, 550, False)
    ways = [(way.sender, way.receiver, way.start[11:16]) for way in schedule(SCHEDULE, SIZES)]
    assert ("b", "a", "19:00") not in ways  # all 500 bytes were there after the first window


def test_when_each_site_is_done() -> None:
    found = {
        (d.client, d.encounter): (d.received, d.expected, d.at[11:19]) for d in done_times(SCHEDULE, ("a", "b", "c"), SIZES)
    }
    assert found["a", 1] == (1, 1, "18:00:10") and found["b", 1] == (1, 1, "19:00:02") and found["c", 1] == (0, 0, "")
    assert found["a", 2] == (0, 1, "") and found["c", 2] == (0, 1, "") and found["b", 2] == (0, 0, "")


def test_what_does_not_fit_is_refused_with_its_size_and_what_would() -> None:
    plan = make_plan(SCHEDULE)
    contract = {"w": Field("F32", (300,)), "n": Field("I64", (10,))}  # 1,200 bytes of floats
    check_windows(plan, "a", 1500, contract)
    with pytest.raises(UploadBlocked) as caught:
        check_windows(plan, "a", 2000, contract)
    assert (caught.value.expected, caught.value.got) == ("at most 1,500 bytes", "2,000 bytes")
    assert "With --set wire=float16 it would have about 1,400 bytes, which fits." in str(caught.value)
    assert "at most 58% of its weights" in str(caught.value) and "without the contact(s) with b" in str(caught.value)
    assert "does not fit either" in what_would_fit(Size(4000, 1000, 2000), 1500)
    assert "float16" not in what_would_fit(Size(4000, 0, 4000), 1500)  # the method has no such setting, or has it set
    assert "at most 37% of" in what_would_fit(Size(4000, 0, 4000), 1500)
    assert "at most 99% of" in what_would_fit(Size(1000, 500, 1000), 999)
    assert "names and hashes by themselves take 2,000 bytes" in what_would_fit(Size(4000, 1000, 2000), 1500)
    assert "names and hashes by themselves take 2,000 bytes" in what_would_fit(
        Size(3000, 0, 1000), 1500
    )  # float16 is on already
    assert "at most 50% of" in what_would_fit(Size(3000, 0, 1000), 2500)


def test_the_contract_tells_the_least_size_before_training() -> None:
    small = {"w": Field("F32", (2, 3)), "n": Field("I64", ("n",)), "maybe": Field("F32", (100,), required=False)}
    plan, key = replace(make_plan(SCHEDULE), settings={"wire": "float32"}), simulated_key(0, "a")
    tensors = {"w": RawTensor("F32", (2, 3), bytes(24)), "n": RawTensor("I64", (0,), b"")}
    bundle = pack("upload", "a", plan.digest, tensors, {"architecture": "cnn", "samples": 7}, key)
    assert least_bytes(plan, "a", "cnn", small) == len(bundle)  # names, hashes and signature, too


def test_who_has_one_window_too_few_is_received_by_nobody() -> None:
    """It refuses to send, so that the wide window beside the tight one carries nothing either."""
    both = Topology("contacts", contacts=(contact("a", "b", "18:00", 10, 100), contact("a", "c", "19:00", 10, 10)))
    found = {d.client: (d.received, d.expected, d.at) for d in done_times(both, ("a", "b", "c"), {**SIZES, "c": Size(90)})}
    assert found["b"] == (0, 1, "") == found["c"]
    assert found["a"][:2] == (2, 2)
    with pytest.raises(UploadBlocked):
        check_windows(make_plan(both), "a", SIZES["a"][0], {})


def test_a_cut_contact_resumes_and_a_damaged_one_is_refused_whole(tmp_path: Path) -> None:
    """Two windows of a pair: the second goes on where the first was cut, in the middle of a piece."""
    bundle = tmp_path / "a.safetensors"
    bundle.write_bytes(bytes(range(256)) * 3)
    whole = announce(bundle)
    first = Partial(tmp_path / "partial", "a", whole, 100)
    for offset in (0, 100, 200):
        assert first.add(read_chunk(bundle, offset, 100))
    with first.path.open("ab") as file:
        file.write(b"torn")
    second = Partial(tmp_path / "partial", "a", whole, 100)
    assert second.size == 300 and not second.add(read_chunk(bundle, 200, 100))  # what came twice is dropped
    while not second.finished:
        assert second.add(read_chunk(bundle, second.size, 100))
    assert second.complete().read_bytes() == bundle.read_bytes()
    other = Partial(tmp_path / "other", "a", whole, 1000)
    wrong = bytes(768)
    assert other.add(Chunk(0, wrong, hashlib.sha256(wrong).hexdigest()))
    with pytest.raises(Damaged):
        other.complete()
    assert other.size == 0


def test_both_of_a_pair_have_its_window() -> None:
    assert windows(make_plan(SCHEDULE), "b") == {"a": 1500}
    with pytest.raises(UploadBlocked, match="the window with a"):
        check_windows(make_plan(SCHEDULE), "b", 1501, {})


def test_advice_is_for_the_tightest_window() -> None:
    both = Topology("contacts", contacts=(contact("a", "b", "18:00", 10, 80), contact("a", "c", "19:00", 10, 50)))
    with pytest.raises(UploadBlocked) as caught:
        check_windows(make_plan(both), "a", 1000, {"w": Field("F32", (200,))})
    assert caught.value.expected == "at most 500 bytes" and "window with b, c" in str(caught.value)
    assert "about 600 bytes, which does not fit either" in str(caught.value) and "at most 37% of" in str(caught.value)


def test_what_is_halved_already_is_not_halved_again() -> None:
    plan, contract = make_plan(SCHEDULE), {"w": Field("F16", (700,)), "n": Field("F32", (10,))}
    assert halving(plan, contract) == 20
    assert halving(replace(plan, settings=SimpleNamespace(wire="float16")), contract) == 0
    assert halving(replace(plan, settings=SimpleNamespace()), contract) == 0


def test_a_bundle_is_there_with_its_last_byte_and_a_site_is_done_with_its_last_bundle() -> None:
    both = Topology("contacts", contacts=(contact("a", "b", "18:00", 10, 50), contact("a", "c", "19:00", 10, 50)))
    sizes = {"a": Size(10), "b": Size(401), "c": Size(500)}
    found = {way.sender: way.arrives[11:19] for way in schedule(both, sizes) if way.receiver == "a"}
    assert found == {"b": "18:00:09", "c": "19:00:10"}
    assert next(done.at[11:19] for done in done_times(both, ("a",), sizes)) == "19:00:10"


def test_windows_are_used_in_the_order_of_time_whatever_their_zone() -> None:
    east = Contact("a", "b", "2026-12-24T19:30:00+02:00", 10, 50)  # 17:30 in UTC
    both = Topology("contacts", contacts=(contact("a", "b", "18:00", 10, 50), east))
    assert [way.start[11:16] for way in schedule(both, SIZES) if way.sender == "b"] == ["19:30"]
