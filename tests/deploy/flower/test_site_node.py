"""What a site at the network keeps, and what it does not."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from osfl.deploy.flower import messages
from osfl.deploy.flower.chunks import Chunk
from osfl.deploy.flower.messages import MessageBody
from osfl.deploy.flower.site_node import SiteNode
from osfl.wire.sealing import unseal
from osfl.wire.signing import SigningKey

ROUND = "a" * 64


@pytest.fixture
def site(tmp_path: Path) -> SiteNode:
    def made(_: str) -> Path:
        finished = found.folder(ROUND) / "upload.safetensors"
        assert finished.exists(), "not asked for"
        return finished

    def never(*_: object) -> Path:
        raise AssertionError("not asked for")

    found = SiteNode("north", SigningKey.from_seed(bytes(32)), tmp_path, made, never)
    return found


def piece(data: bytes, size: int, whole: str) -> MessageBody:
    chunk = Chunk(0, data, hashlib.sha256(data).hexdigest())
    return {
        "round": ROUND,
        "client": "north",
        "part": "release",
        "bytes": size,
        "whole": whole,
        "chunk": 4,
        **messages.chunk_body(chunk),
    }


def sent(site: SiteNode) -> None:
    folder = site.folder(ROUND)
    folder.mkdir(parents=True)
    (folder / "upload.safetensors").write_bytes(b"said")


def test_a_release_follows_an_upload(site: SiteNode) -> None:
    body = piece(b"once", 4, hashlib.sha256(b"once").hexdigest())
    assert site.handle(messages.PUT, body)["refused"] == "UsageError (round)"
    assert not list(site.work.rglob("*.*"))
    sent(site)
    assert site.handle(messages.PUT, body) == {"part": "release", "have": 4}
    assert (site.folder(ROUND) / "release.safetensors").read_bytes() == b"once"


def test_a_release_larger_than_the_disk_is_refused_at_once(site: SiteNode, capsys: pytest.CaptureFixture[str]) -> None:
    sent(site)
    assert site.handle(messages.PUT, piece(b"much", 1 << 60, "b" * 64))["refused"] == "UsageError (bytes)"
    assert "does not fit" in capsys.readouterr().out
    assert [path.name for path in site.folder(ROUND).iterdir()] == ["upload.safetensors"]


def test_what_travels_is_sealed_once(site: SiteNode, tmp_path: Path) -> None:
    server = SigningKey.from_seed(bytes([7]) * 32)
    sent(site)
    sealing = replace(site, seal=server.public_hex)
    asked: MessageBody = {"round": ROUND, "nonce": "0", "wanted": 1, "plan": "{}", "length": 1 << 20}
    output, again = sealing.handle(messages.ANNOUNCE, asked), sealing.handle(messages.ANNOUNCE, asked)
    assert output["data"] == again["data"] and b"said" not in bytes(output["data"])  # type: ignore[arg-type]
    (tmp_path / "came").write_bytes(output["data"])  # type: ignore[arg-type]
    assert bytes(unseal(tmp_path / "came", server, 100)) == b"said"
    piece = sealing.handle(messages.CHUNK, {"round": ROUND, "client": "north", "offset": 3, "length": 5})
    assert piece["data"] == output["data"][3:8]  # type: ignore[index]


def test_another_addressee_or_upload_is_sealed_anew(site: SiteNode, tmp_path: Path) -> None:
    old, new = (SigningKey.from_seed(bytes([number]) * 32) for number in (7, 8))
    sent(site)
    asked: MessageBody = {"round": ROUND, "nonce": "0", "wanted": 1, "plan": "{}", "length": 1 << 20}
    received, upload = tmp_path / "came", site.folder(ROUND) / "upload.safetensors"
    for key, output in ((old, b"said"), (new, b"said"), (new, b"said again")):
        if upload.read_bytes() != output:
            later = upload.stat().st_mtime_ns + 10**9
            upload.write_bytes(output)
            os.utime(upload, ns=(later, later))
        received.write_bytes(replace(site, seal=key.public_hex).handle(messages.ANNOUNCE, asked)["data"])  # type: ignore[arg-type]
        assert bytes(unseal(received, key, 100)) == output


def test_two_programs_of_one_site_answer_at_once(site: SiteNode, tmp_path: Path) -> None:
    """Flower may believe that a program is dead while it still answers: the release is whole, and the upload sealed once."""
    sent(site)
    release = bytes(range(256)) * 64
    whole = hashlib.sha256(release).hexdigest()
    body: MessageBody = {
        "round": ROUND,
        "client": "north",
        "part": "release",
        "bytes": len(release),
        "whole": whole,
        "chunk": 1024,
    }
    sealing = replace(site, seal=SigningKey.from_seed(bytes([7]) * 32).public_hex)
    asked: MessageBody = {"round": ROUND, "nonce": "0", "wanted": 1, "plan": "{}", "length": 1 << 20}

    def both() -> tuple[object, list[object]]:
        output = sealing.handle(messages.ANNOUNCE, asked)["whole"]
        pieces = [
            Chunk(at, release[at : at + 1024], hashlib.sha256(release[at : at + 1024]).hexdigest())
            for at in range(0, len(release), 1024)
        ]
        return output, [site.handle(messages.PUT, {**body, **messages.chunk_body(piece)}).get("refused") for piece in pieces]

    with ThreadPoolExecutor(4) as pool:
        answers = [found.result() for found in [pool.submit(both) for _ in range(4)]]
    assert len({output for output, _ in answers}) == 1 and not any(no for _, refused in answers for no in refused)
    assert site.handle(messages.PUT, {**body, **messages.chunk_body(Chunk(0, b"", whole))})["have"] == len(release)
    assert (site.folder(ROUND) / "release.safetensors").read_bytes() == release
    assert not list(site.folder(ROUND).glob("*.part"))
