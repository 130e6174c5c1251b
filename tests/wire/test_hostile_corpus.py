"""Every named bad file is refused, with the right field and everything that the reader needs to act."""

from __future__ import annotations

from pathlib import Path

import pytest

from osfl.core.errors import Rejected
from osfl.wire.gate import accept
from tests.wire.corpus import CORPUS
from tests.wire.forge import POLICY
from tests.wire.oracle import acceptable


@pytest.mark.parametrize("name", CORPUS)
def test_refused_with_the_right_field(name: str, tmp_path: Path) -> None:
    field, maker = CORPUS[name]
    data = maker()
    path = tmp_path / "upload.safetensors"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(Rejected) as caught:
            accept(source, POLICY)
        no = caught.value
        assert no.field == field
        assert None not in (no.client, no.expected, no.got, no.fix) and no.reason
        assert str(no).isprintable() is False and str(no).count("\n") == 1, "two lines, the remedy on the second"
        assert len(str(no)) < 1000 and "\x1b" not in str(no)


def test_the_second_opinion_agrees() -> None:
    assert [name for name, (_, maker) in CORPUS.items() if acceptable(maker(), POLICY)] == []


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 60
