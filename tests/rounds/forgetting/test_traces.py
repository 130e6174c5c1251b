"""Fingerprints find bytes wherever they are, and nothing else."""

import base64
import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from osfl.rounds.forgetting import traces

RNG = np.random.default_rng(5)


def test_a_fingerprint_is_the_polynomial_of_its_window() -> None:
    data = RNG.bytes(40)
    base, modulus = traces._BASE, 1 << 64
    for start, found in enumerate(traces.fingerprints(data)):
        window = data[start : start + traces.WINDOW]
        assert int(found) == sum((byte + 1) * pow(base, 31 - i, modulus) for i, byte in enumerate(window)) % modulus
    assert len(traces.fingerprints(data)) == 9
    assert not len(traces.fingerprints(data[:31]))


def test_bytes_are_found_at_any_offset_and_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_CHUNK", 100)
    secret = RNG.bytes(500)
    wanted = traces.sample([secret])
    for offset in (0, 1, 63, 99):
        (tmp_path / "a").write_bytes(RNG.bytes(offset) + secret + RNG.bytes(50))
        assert traces.search(tmp_path, wanted) == {tmp_path / "a": set(wanted)}
    (tmp_path / "a").write_bytes(RNG.bytes(2000))
    assert traces.search(tmp_path, wanted) == {}


def test_half_a_file_is_found_too(tmp_path: Path) -> None:
    secret = RNG.bytes(4000)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / ".half.tmp").write_bytes(secret[:2000])
    assert list(traces.search(tmp_path, traces.sample([secret]))) == [tmp_path / "deep" / ".half.tmp"]


def test_what_everybody_has_is_nobodys() -> None:
    assert traces.sample([bytes(4000), b"\1\0\0\0" * 100, np.arange(9, dtype=np.int64).tobytes(), b"short"]) == []


def test_fingerprints_stay_few_however_large_a_model_is() -> None:
    assert 900 < len(traces.sample([RNG.bytes(3000) for _ in range(100)])) <= 1024


def _zipped(path: Path, data: bytes) -> None:
    np.savez_compressed(path.with_suffix(".npz"), a=np.frombuffer(data, dtype="<f4").astype("<f8"))


FORMS: dict[str, Callable[[Path, bytes], object]] = {
    "gzip": lambda path, data: path.write_bytes(gzip.compress(data)),
    "base64": lambda path, data: path.write_bytes(base64.encodebytes(data)),
    "base64 of URLs": lambda path, data: path.write_bytes(base64.urlsafe_b64encode(data)),
    "bzip2": lambda path, data: path.write_bytes(bz2.compress(data)),
    "xz": lambda path, data: path.write_bytes(lzma.compress(data)),
    "base64 inside of JSON": lambda path, data: path.write_text(json.dumps({"weights": base64.b64encode(data).decode()})),
    "base64 inside of a page": lambda path, data: path.write_bytes(
        b"<p>text</p>" * 300 + b'<img src="data:image/png;base64,' + base64.b64encode(data) + b'">'
    ),
    "hexadecimal": lambda path, data: path.write_text("weights: " + data.hex()),
    "float64": lambda path, data: path.write_bytes(np.frombuffer(data, dtype="<f4").astype("<f8").tobytes()),
    "float64 in an archive": _zipped,
}


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_found_in_other_forms(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_CHUNK", 1001)  # no multiple of anything
    secret = RNG.normal(size=700).astype("<f4").tobytes()
    FORMS[form](tmp_path / "copy", secret)
    assert len(traces.search(tmp_path, traces.sample([secret]))) == 1
    FORMS[form](tmp_path / "copy", RNG.normal(size=700).astype("<f4").tobytes())
    assert traces.search(tmp_path, traces.sample([secret])) == {}


def test_bytes_are_found_behind_links_and_a_loop_of_links_ends(tmp_path: Path) -> None:
    secret, folder = RNG.bytes(4000), tmp_path / "round"
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    (tmp_path / "elsewhere" / "copy").write_bytes(secret)
    (folder / "file").symlink_to(tmp_path / "elsewhere" / "copy")
    (folder / "all").symlink_to(tmp_path / "elsewhere")
    (folder / "again").symlink_to(folder)
    (folder / "nowhere").symlink_to(tmp_path / "gone")
    assert set(traces.search(folder, traces.sample([secret]))) == {folder / "file", folder / "all" / "copy"}


def test_a_file_that_only_begins_like_an_archive_is_searched_as_it_is(tmp_path: Path) -> None:
    secret = RNG.bytes(500)
    for start in (b"\x1f\x8b", b"PK\x03\x04"):
        (tmp_path / "a").write_bytes(start + secret)
        assert list(traces.search(tmp_path, traces.sample([secret]))) == [tmp_path / "a"]
