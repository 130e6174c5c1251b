"""The inbox on a good day, and its answers on a bad one."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from osfl.core.errors import Rejected, RoundError, UsageError
from osfl.wire import refusals
from osfl.wire.inbox import Inbox
from osfl.wire.refusals import JOURNAL
from tests.faults.traps import fail, trapped
from tests.wire.forge import CLIENT, OTHER, OTHER_KEY, POLICY, upload


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path / "round" / "inbox", POLICY)


def journal(inbox: Inbox) -> list[dict[str, Any]]:
    path = inbox.folder.parent / JOURNAL
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_received_once_whatever_the_way(inbox: Inbox, tmp_path: Path) -> None:
    data = upload()
    (path := tmp_path / "upload.safetensors").write_bytes(data)
    first = inbox.receive(path)
    assert (first.client, first.bytes, first.path.read_bytes()) == (CLIENT, len(data), data)
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    for again in (data, bytearray(data), memoryview(data), path, first.path):
        assert inbox.receive(again) == first
    assert Inbox(inbox.folder, POLICY).uploads() == [first]
    assert [entry.name for entry in inbox.folder.iterdir()] == [f"{CLIENT}.safetensors"]
    assert journal(inbox) == []


def test_uploads_are_sorted_by_client(inbox: Inbox) -> None:
    inbox.receive(upload())
    inbox.receive(upload(OTHER, OTHER_KEY))
    assert [receipt.client for receipt in inbox.uploads()] == [OTHER, CLIENT]
    assert inbox.bundle(CLIENT).facts["samples"] == 12


def test_the_first_upload_stands(inbox: Inbox) -> None:
    first = inbox.receive(upload())
    with pytest.raises(Rejected) as caught:
        inbox.receive(upload(facts_changed={"samples": 13}))
    assert caught.value.field == "upload" and caught.value.expected == first.digest and caught.value.fix
    assert inbox.uploads() == [first]
    assert [entry["field"] for entry in journal(inbox)] == ["upload"]


def test_refusals_are_remembered(inbox: Inbox) -> None:
    for data in (b"", upload(facts_changed={"samples": 0})):
        with pytest.raises(Rejected):
            inbox.receive(data)
    first, second = journal(inbox)
    assert (first["client"], first["field"], second["client"], second["field"]) == (
        "unknown sender",
        "size",
        CLIENT,
        "facts.samples",
    )
    assert second["fix"] and second["time"] > 0


def test_a_torn_line_spoils_no_other(inbox: Inbox) -> None:
    path = inbox.folder.parent / JOURNAL
    path.write_bytes(b'{"torn')
    with pytest.raises(Rejected):
        inbox.receive(b"")
    torn, whole = path.read_text().splitlines()
    assert torn == '{"torn' and json.loads(whole)["field"] == "size"


def test_the_log_cannot_be_filled_and_forged_names_hide_nobody(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many refusals of one kind are counted; those of others, and of forged signatures, stay."""
    monkeypatch.setattr(refusals, "MOST_BYTES", 20_000)
    with pytest.raises(Rejected):  # by an enrolled client, signed well
        inbox.receive(upload(facts_changed={"samples": 0}))
    forged = bytearray(upload())
    place = forged.index(b'"signature":"') + len(b'"signature":"')
    forged[place : place + 4] = b"0000"
    with pytest.raises(Rejected, match="signature"):
        inbox.receive(bytes(forged))
    for _ in range(500):
        with pytest.raises(Rejected):
            inbox.receive(b"")
    kept = journal(inbox)
    assert sum(map(refusals.times, kept)) == 502 and len(kept) < 200
    assert (inbox.folder.parent / JOURNAL).stat().st_size < 20_000
    assert [entry["field"] for entry in kept if entry["client"] == CLIENT] == ["facts.samples", "signature"]


def test_lines_that_count_others_are_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MOST_BYTES", 1)
    for number in range(refusals.KEPT + 30):
        refusals.note(tmp_path / JOURNAL, Rejected(f"reason {number}", client=CLIENT, field="size"), {CLIENT})
    counting, *single = refusals.entries(tmp_path / JOURNAL)
    assert counting["count"] == 30 and counting["client"] == CLIENT
    assert [entry["reason"] for entry in single] == [f"reason {number}" for number in range(30, 30 + refusals.KEPT)]


def test_a_journal_that_fails_does_not_hide_the_refusal(inbox: Inbox) -> None:
    (inbox.folder.parent / JOURNAL).mkdir()
    with pytest.raises(Rejected):
        inbox.receive(b"")


def test_a_stored_file_that_was_damaged_is_stated_so(inbox: Inbox) -> None:
    receipt = inbox.receive(upload())
    receipt.path.write_bytes(receipt.path.read_bytes()[:-1])
    for action in (inbox.uploads, lambda: inbox.bundle(CLIENT), lambda: inbox.receive(upload())):
        with pytest.raises(RoundError, match="stored upload is damaged") as caught:
            action()
        assert caught.value.client == CLIENT and "Move st-mary.safetensors" in str(caught.value)


def test_a_stored_file_of_someone_else(inbox: Inbox) -> None:
    inbox.receive(upload()).path.rename(inbox.path(OTHER))
    with pytest.raises(RoundError, match="it is an upload of 'st-mary'"):
        inbox.uploads()


def test_nothing_received_yet(inbox: Inbox) -> None:
    assert inbox.uploads() == []
    with pytest.raises(RoundError, match="nothing has been received"):
        inbox.bundle(CLIENT)
    with pytest.raises(UsageError):
        inbox.bundle("../../etc/passwd")


def test_a_full_disk_is_not_an_acknowledgement(inbox: Inbox) -> None:
    with trapped(1, fail(28), stays=True), pytest.raises(RoundError) as caught:
        inbox.receive(upload())
    assert "Nothing was acknowledged" in str(caught.value) and caught.value.got == "No space left on device"
    with trapped(1, fail(5), stays=True):
        for action in (inbox.uploads, lambda: inbox.bundle(CLIENT)):
            with pytest.raises(RoundError):
                action()
    assert inbox.receive(upload()).client == CLIENT


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RoundError, match="the disk failed at inbox"):
        Inbox(tmp_path / "file" / "inbox", POLICY)
