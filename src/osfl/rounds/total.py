"""The exact sum of a round's uploads, kept beside them: who leaves is subtracted, and who joins late is added.

`total.safetensors` is a bundle of kind "total", signed by the server, which lists the uploads in it. Nothing in it is new to
the server, and `osfl forget` takes out what it must forget before the upload itself goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from osfl.core.errors import Rejected
from osfl.core.method import Context, Method, add_up
from osfl.core.types import ClientId, Total, Upload
from osfl.rounds.folder import TOTAL, Round
from osfl.rounds.storage import payload_of
from osfl.runtime.atomic import replace_atomically, sync_folder
from osfl.runtime.payloads import to_raw
from osfl.wire.bundle import pack
from osfl.wire.gate import verify_total

_UPLOAD = "upload/"


@dataclass(frozen=True)
class KeptTotal:
    """A sum and the digests of the uploads in it, by client."""

    total: Total
    made_from: Mapping[ClientId, str]

    def without(self, term: Total) -> KeptTotal:
        (client,) = term.images
        return KeptTotal(self.total - term, {c: digest for c, digest in self.made_from.items() if c != client})

    def with_upload(self, term: Total, digest: str) -> KeptTotal:
        (client,) = term.images
        return KeptTotal(self.total + term, {**self.made_from, client: digest})


def read_total(fl_round: Round) -> KeptTotal | None:
    """What is kept; None where there is nothing, or nothing that the server signed for this round."""
    path = fl_round.folder / TOTAL
    if not path.exists():
        return None
    try:
        bundle = verify_total(path, fl_round.server, fl_round.plan.digest)
    except Rejected:
        return None
    payload = payload_of(bundle)
    made_from = {name.removeprefix(_UPLOAD): digest for name, digest in bundle.made_from.items()}
    return KeptTotal(Total(payload.tensors, dict(payload.facts["images"])), made_from)


def keep_total(fl_round: Round, kept: KeptTotal) -> None:
    """Put it on disk; an empty sum is nothing to keep."""
    path = fl_round.folder / TOTAL
    if not kept.made_from:
        drop_total(fl_round)
        return
    assert fl_round.server_key is not None, "a round that is only read keeps nothing"
    origin = {f"{_UPLOAD}{client}": digest for client, digest in kept.made_from.items()}
    facts = {"images": dict(kept.total.images)}
    data = pack("total", "", fl_round.plan.digest, to_raw(kept.total.tensors), facts, fl_round.server_key, made_from=origin)
    replace_atomically(path, data)
    path.chmod(0o600)


def drop_total(fl_round: Round) -> None:
    if (fl_round.folder / TOTAL).exists():
        (fl_round.folder / TOTAL).unlink()
        sync_folder(fl_round.folder)


def total_of(
    method: Method, fl_round: Round, uploads: Sequence[Upload], made_from: Mapping[ClientId, str], ctx: Context
) -> KeptTotal:
    """The sum of these uploads: what is kept and the terms that it lacks, or all terms where it has others."""
    kept = read_total(fl_round)
    if kept is None or not kept.made_from.items() <= made_from.items():
        kept = None
    known = kept.made_from if kept else {}
    lacking = (uploads[place] for place, client in enumerate(made_from) if client not in known)
    total = add_up(method, lacking, ctx, kept.total if kept else None)
    return KeptTotal(replace(total, images={client: total.images[client] for client in made_from}), made_from)
