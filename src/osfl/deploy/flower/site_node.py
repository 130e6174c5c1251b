"""A site on the network: it answers the coordinator's requests about one round, from its own disk.

The upload is made once and kept; asked again, the same bytes are sent. Nothing here looks inside a bundle or a plan:
making the upload and taking the release are handed in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from osfl.core.errors import OsflError, UsageError
from osfl.core.names import is_digest
from osfl.core.types import ClientId
from osfl.deploy.flower import messages
from osfl.deploy.flower.chunks import FileInfo, Partial, announce, read_chunk
from osfl.deploy.flower.messages import MessageBody
from osfl.runtime.atomic import locked, replace_atomically
from osfl.wire.sealing import seal
from osfl.wire.signing import SigningKey

LARGEST = 256 << 20  # bytes that one answer may hold, whatever is asked
PARTS = ("release", "personal")


@dataclass(frozen=True)
class SiteNode:
    """One site. `make` gives the file to send, made once, and refuses what may not leave; `take` is given the release's files
    and makes the model.

    With the server's public key as `seal`, what is sent is encrypted to it: whoever runs the network cannot read it.
    """

    client: ClientId
    key: SigningKey
    work: Path  # <round>/<client>/ below it belongs to a round
    make: Callable[[str], Path]
    take: Callable[[str, Path, Path | None], Path]
    seal: str = ""
    repair: Callable[[str, bytes], Path] | None = None  # answers a request for repairs of a secure sum, or refuses

    def handle(self, kind: str, body: MessageBody) -> MessageBody:
        """The answer to one request; a refusal holds no details, because these belong to the site."""
        try:
            return self._answer(kind, body)
        except OsflError as no:
            print(f"[osfl] {no}", flush=True)
            return {"client": self.client, "refused": f"{type(no).__name__}{f' ({no.field})' if no.field else ''}"}

    def _answer(self, kind: str, body: MessageBody) -> MessageBody:
        fl_round = messages.text(body, "round")
        if not is_digest(fl_round):
            raise UsageError("the message names no round", field="round")
        if kind == messages.ANNOUNCE:
            return self._make_upload(fl_round, body)
        if messages.text(body, "client") != self.client:
            raise UsageError("the message is for another client", field="client")
        answers = {
            messages.CHUNK: self._chunk,
            messages.RECEIPT: self._receipt,
            messages.PUT: self._put,
            messages.TAKE: self._take,
            messages.REPAIR: self._repair,
        }
        return answers[kind](fl_round, body)

    def folder(self, fl_round: str) -> Path:
        return self.work / fl_round[:16] / self.client

    # --- the upload ---

    def _make_upload(self, fl_round: str, body: MessageBody) -> MessageBody:
        """Who this is, and its upload: size, hash, and the first chunk, which often is all."""
        proof = self.key.sign(messages.statement(fl_round, self.client, messages.text(body, "nonce")))
        about: dict[str, str | int | bytes] = {"client": self.client, "proof": proof}
        if not messages.number(body, "wanted"):
            return about
        path = self._upload(fl_round, messages.text(body, "plan"))
        info = announce(path)
        first = read_chunk(path, 0, _length(body))
        return {**about, "bytes": info.bytes, "whole": info.sha256, **messages.chunk_body(first)}

    def _upload(self, fl_round: str, plan: str) -> Path:
        kept, sent = self.folder(fl_round) / "upload.safetensors", self._sent(fl_round)
        if not _follows(sent, kept):
            kept = self.make(plan)  # what is finished is given again, or refused if its sealed copy may not leave
        with locked(sent.with_name(".sealed.lock")):  # two copies never have the same bytes: there must be one
            if self.seal and not _follows(sent, kept):
                seal(kept, sent, self.seal)
        return sent

    def _sent(self, fl_round: str) -> Path:
        """Sealed once for its addressee and kept: every piece that is asked for belongs to the same file."""
        return self.folder(fl_round) / (f"upload.{self.seal[:16]}.sealed" if self.seal else "upload.safetensors")

    def _chunk(self, fl_round: str, body: MessageBody) -> MessageBody:
        kept = self._sent(fl_round)
        if not kept.exists():
            raise UsageError("there is no upload yet", field="upload")
        return messages.chunk_body(read_chunk(kept, max(0, messages.number(body, "offset")), _length(body)))

    def _receipt(self, fl_round: str, body: MessageBody) -> MessageBody:
        """Noted beside the upload, for the people at the site."""
        known = {key: body[key] for key in ("digest", "bytes", "refused") if key in body}
        refused = messages.text(body, "refused")
        print(
            f"[osfl] the coordinator refused the upload: {refused}"
            if refused
            else f"[osfl] the coordinator has the upload {messages.text(body, 'digest')}",
            flush=True,
        )
        replace_atomically(self.folder(fl_round) / "receipt.json", json.dumps(known, indent=1, sort_keys=True).encode())
        return {}

    def _repair(self, fl_round: str, body: MessageBody) -> MessageBody:
        """What this site shares with missing ones, for the server alone: it is never sent unsealed."""
        request = body.get("request")
        if self.repair is None or not self.seal or not isinstance(request, bytes):
            raise UsageError("the message holds no request for repairs that this site can answer", field="request")
        bundle = self.repair(messages.text(body, "plan"), request)
        sealed = bundle.with_suffix(".sealed")
        with locked(sealed.with_name(".sealed.lock")):
            seal(bundle, sealed, self.seal)
            return {"data": sealed.read_bytes()}

    # --- the release ---

    def _put(self, fl_round: str, body: MessageBody) -> MessageBody:
        """Keep a chunk of the release; returns how much of this part is here now."""
        part, chunk = messages.text(body, "part"), messages.chunk_in(body)
        info = FileInfo.announced(body.get("bytes"), body.get("whole"))
        if part not in PARTS or info is None or chunk is None:
            raise UsageError("the message holds no piece of a release", field="part")
        self._check_disk_space(fl_round, info)
        there = self.folder(fl_round) / f"{part}.safetensors"
        partial = Partial(self.folder(fl_round), part, info, max(1, messages.number(body, "chunk")))
        with partial.turn():  # a program that Flower believes dead may still be answering the same question
            if there.exists() and announce(there) == info:
                return {"part": part, "have": info.bytes}
            partial.add(chunk)
            have = partial.size
            if partial.finished:
                partial.complete().replace(there)
        return {"part": part, "have": have}

    def _check_disk_space(self, fl_round: str, info: FileInfo) -> None:
        """Whoever operates the network may not fill this disk: a release follows an upload, and has to fit."""
        folder = self.folder(fl_round)
        if not (folder / "upload.safetensors").exists():
            raise UsageError(f"a release of round {fl_round[:16]}, in which this site has no upload", field="round")
        free = shutil.disk_usage(folder).free
        if info.bytes > free:
            raise UsageError(
                f"the release does not fit on this disk: it has {info.bytes:,} bytes, {free:,} are free",
                field="bytes",
                fix="Make room, or move the site's work folder.",
            )

    def _take(self, fl_round: str, body: MessageBody) -> MessageBody:
        release, personal = (self.folder(fl_round) / f"{part}.safetensors" for part in PARTS)
        if not release.exists():
            raise UsageError("the release is not here yet", field="release")
        model = self.take(messages.text(body, "plan"), release, personal if personal.exists() else None)
        print(f"[osfl] the release is verified; the model is {model}", flush=True)
        return {"taken": 1}


def _follows(sent: Path, kept: Path) -> bool:
    """Whether what is sent was made of what is kept."""
    return kept.exists() and sent.exists() and sent.stat().st_mtime_ns >= kept.stat().st_mtime_ns


def _length(body: MessageBody) -> int:
    return min(LARGEST, max(1, messages.number(body, "length")))
