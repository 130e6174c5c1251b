"""The inbox of a round: one upload a client, exactly once, safe on disk before it is acknowledged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from osfl.core.errors import Rejected, RoundError
from osfl.core.names import check_client_id
from osfl.core.types import ClientId, digest_of
from osfl.runtime import atomic
from osfl.wire import refusals
from osfl.wire.bundle import Bundle
from osfl.wire.envelope import read_envelope
from osfl.wire.gate import AcceptancePolicy, open_stored, open_upload
from osfl.wire.sealing import is_sealed, unseal
from osfl.wire.signing import SigningKey
from osfl.wire.source import BytesLike, opened


@dataclass(frozen=True)
class Receipt:
    """The acknowledgement: this upload is on disk and stays."""

    client: ClientId
    digest: str
    bytes: int
    path: Path


class Inbox:
    """A folder with `<client>.safetensors` files; the folder is the state, so a new process just continues."""

    def __init__(self, folder: Path, policy: AcceptancePolicy) -> None:
        self.folder, self.policy = folder, policy
        with _using(folder):
            atomic.make_folder(folder)
            atomic.sweep(folder)

    def receive(self, source: BytesLike | Path) -> Receipt:
        """Check, store durably, then acknowledge. The same upload again gets the same receipt."""
        try:
            bundle, data = open_upload(source, self.policy)
            self._refuse_forgotten(bundle.client)
            self._refuse_missing(bundle.client)
            receipt = Receipt(bundle.client, bundle.digest, data.nbytes, self.path(bundle.client))
            if self._store(receipt.path, data):
                return receipt
            del bundle, data  # before the stored one is read: never two in memory
            return self._repeated(receipt)
        except Rejected as no:
            self.note(no)
            raise

    def unsealed(self, source: BytesLike | Path, key: SigningKey | None, owner: str = "server") -> BytesLike | Path:
        """What a sealed file holds, to be received; any other source as it is."""
        try:
            if not isinstance(source, Path) or not is_sealed(source):
                return source
            if key is not None:
                return unseal(source, key, self.policy.limits.upload_bytes)
        except Rejected as no:
            self.note(no)
            raise
        # not noted: that nobody gave a key is no fault of the bundle
        raise Rejected(
            f"it is sealed, and only the {owner}'s private key opens it",
            field="key",
            fix=f"Give that key with --key {owner}.key.",
        )

    def uploads(self) -> list[Receipt]:
        """Everything acknowledged so far, by client, checked again; other files in the folder are nobody's upload."""
        with _using(self.folder):
            present = [client for client in self._expected() if self.path(client).exists()]
        return [self._stored(client)[1] for client in present]

    def delivered(self) -> dict[ClientId, int]:
        """Clients whose upload is here, by name, with its size in bytes; it was checked on receipt."""
        with _using(self.folder):
            paths = {client: self.path(client) for client in self._expected()}
            return {client: path.stat().st_size for client, path in paths.items() if path.exists()}

    def digest(self, client: ClientId) -> str:
        """The identity of a client's upload, from its header only; it was checked on receipt."""
        try:
            with opened(self.path(client)) as file:
                manifest = read_envelope(file, self.policy.limits).manifest
        except Rejected as no:
            raise _damaged(client, self.path(client), no.reason) from None
        return digest_of(manifest)

    def bundle(self, client: ClientId) -> Bundle:
        """The bundle of a client, checked again."""
        with _using(self.folder):
            present = self.path(client).exists()
        if not present:
            raise RoundError(
                "nothing has been received from this client",
                client=client,
                field="inbox",
                fix="Receive its upload first with `osfl receive`.",
            )
        return self._stored(client)[0]

    def path(self, client: ClientId) -> Path:
        return self.folder / f"{check_client_id(client)}.safetensors"

    def _stored(self, client: ClientId) -> tuple[Bundle, Receipt]:
        path = self.path(client)
        try:
            bundle, data = open_stored(path, self.policy, client)
        except Rejected as no:
            raise _damaged(client, path, no.reason) from None
        if bundle.client != client:
            raise _damaged(client, path, f"it is an upload of '{bundle.client}'")
        return bundle, Receipt(client, bundle.digest, data.nbytes, path)

    def _store(self, path: Path, data: memoryview) -> bool:
        """True if this call made the file; on disk with its name, whoever made it."""
        with _using(path):
            if path.exists():
                atomic.sync_folder(self.folder)  # the process that stored it may not have come that far
                return False
            return atomic.create_once(path, data)

    def _expected(self) -> list[ClientId]:
        """Whose uploads count: a file of a forgotten client is nobody's."""
        return [client for client in sorted(self.policy.enrolled) if self.policy.forgotten.get(client) != ""]

    def _refuse_forgotten(self, client: ClientId) -> None:
        if client in self.policy.forgotten:
            gone = "a class of its upload" if self.policy.forgotten[client] else "this client"
            raise Rejected(
                f"{gone} was forgotten in this round",
                client=client,
                field="client",
                expected="another client",
                got=client,
                fix="Forgetting is final in a round. To take part again, open a new round (another seed will do).",
            )

    def _refuse_missing(self, client: ClientId) -> None:
        if client in self.policy.missing:
            raise Rejected(
                "the others were asked to take this site's masks out of the sum, because it had not delivered",
                client=client,
                field="client",
                expected="another client",
                got=client,
                fix="Its upload must not be used, nor kept: with those repairs it can be read. Delete it, and take part in "
                "another round.",
            )

    def _repeated(self, receipt: Receipt) -> Receipt:
        """The receipt once more, if it is for the upload that is stored."""
        stored = self._stored(receipt.client)[1]
        if stored.digest == receipt.digest:
            return stored
        raise Rejected(
            "this client has already sent a different upload, and the first one stands",
            client=receipt.client,
            field="upload",
            expected=stored.digest,
            got=receipt.digest,
            fix="A client uploads once a round. To replace its upload, open a new round.",
        )

    def note(self, no: Rejected) -> None:
        """Remember a refusal beside the inbox; trouble here must not hide the refusal itself."""
        with contextlib.suppress(OSError):
            refusals.note(self.folder.parent / refusals.JOURNAL, no, self.policy.enrolled)


@contextlib.contextmanager
def _using(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RoundError(
            f"the disk failed at {path.name}",
            field="inbox",
            expected="a working disk",
            got=error.strerror,
            fix="Nothing was acknowledged. Free some disk space or repair the disk, then receive it again.",
        ) from error


def _damaged(client: ClientId, path: Path, why: str) -> RoundError:
    return RoundError(
        f"the stored upload is damaged: {why}",
        client=client,
        field="inbox",
        fix=f"Move {path.name} out of the inbox and receive the client's file again.",
    )
