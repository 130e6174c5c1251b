"""The coordinator's table of what sites measured: signed summaries, verified, kept in the round folder, tabulated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from osfl.core.errors import UsageError
from osfl.core.types import Json
from osfl.rounds.state import read_policy
from osfl.runtime.atomic import make_folder, replace_atomically
from osfl.wire.summary import SummaryRejected, digest_of_summary, read_summary

FOLDER = "summaries"  # of a round folder


@dataclass(frozen=True)
class Refused:
    file: str
    why: SummaryRejected


def receive_summaries(folder: Path, given: Sequence[Path]) -> tuple[list[dict[str, Json]], list[Refused]]:
    """Verify what is given, keep what is good, and return all that the round has; and what was refused, with the reason."""
    policy = read_policy(folder)
    enrolled = {client: key for client, key in policy.enrolled.items() if client not in policy.gone}
    refused = []
    for path in _files(given):
        try:
            summary = read_summary(path, enrolled, policy.plan)
        except SummaryRejected as no:
            refused.append(Refused(str(path), no))
            continue
        make_folder(folder / FOLDER)
        name = f"{summary['client']}-{digest_of_summary(summary)[:16]}.json"
        replace_atomically(folder / FOLDER / name, path.read_bytes())
    kept = [
        read_summary(path, enrolled, policy.plan) for path in sorted((folder / FOLDER).glob("*.json")) if _of(path, enrolled)
    ]
    return kept, refused


def _of(path: Path, enrolled: dict[str, str]) -> bool:
    """Summaries of a site that was forgotten are no longer shown."""
    return json.loads(path.read_bytes())["summary"]["client"] in enrolled


def _files(given: Sequence[Path]) -> Iterator[Path]:
    for path in given:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("summary*.json") if file.is_file())
        elif path.is_file():
            yield path
        else:
            raise UsageError(
                f"there is no file {path}", field="summary", fix="Name summary.json files, or folders that hold them."
            )
