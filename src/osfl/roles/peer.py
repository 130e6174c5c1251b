"""The role of a peer: a site receives the uploads of its neighbors itself and makes its model from them.

work/<round>/<client>/inbox/            the uploads of neighbors, through the same gate as at a coordinator
work/<round>/<client>/rejected.jsonl    what was refused and why
work/<round>/<client>/model.safetensors what it made of them: the very bits of a round with a server that passes on
work/<round>/<client>/made_from.json    the uploads that it was made of, and its model of the encounter before, by digest
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from osfl.core.errors import Rejected, RoundError, UsageError
from osfl.core.method import quiet, relay_to
from osfl.core.topology import neighbors
from osfl.core.types import ClientId, Payload, Plan, Progress, Release, Upload, canonical, digest_of
from osfl.roles.site import at_work, make_model, method_for, work_folder
from osfl.rounds.folder import contracts_of
from osfl.rounds.storage import load_model_of, payload_of
from osfl.runtime.atomic import replace_atomically
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import payload_digest
from osfl.wire.envelope import read_envelope
from osfl.wire.gate import AcceptancePolicy
from osfl.wire.inbox import Inbox, Receipt
from osfl.wire.signing import SigningKey
from osfl.wire.source import BytesLike, opened


def own_inbox(plan: Plan, client: ClientId, keys: Mapping[ClientId, str], work: Path) -> Inbox:
    """The inbox of a site for this encounter; it knows the keys of its neighbors and of nobody else."""
    method = method_for(plan, client)
    if not method.provides("relay"):
        raise UsageError(
            f"{plan.method} needs a server: its model cannot be made by neighbors only",
            field="method",
            fix="Send the bundle to the coordinator and use `osfl personalize`.",
        )
    if plan.secure_sum:
        raise UsageError(
            "this round's uploads are masked: neighbors cannot read each other's, only the server's sum means something",
            field="secure_sum",
            fix="Send the bundle to the coordinator and use `osfl personalize`.",
        )
    senders = neighbors(plan, client)
    unknown = [name for name in senders if name not in keys]
    if unknown:
        raise UsageError(
            [f"no key for {name!r}, a neighbor of {client!r}" for name in unknown],
            field="keys",
            fix="Put NAME.pub of each neighbor into the folder of --keys.",
        )
    enrolled = {name: keys[name] for name in senders}
    policy = AcceptancePolicy(
        plan.digest, enrolled, contracts_of(method), len(plan.task.classes), plan.limits, several=plan.task.several
    )
    folder = work_folder(plan, client, work)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Inbox(folder / "inbox", policy)


def receive_from_neighbor(
    plan: Plan, client: ClientId, inbox: Inbox, source: BytesLike | Path, key: SigningKey | None = None
) -> Receipt:
    """Check a neighbor's bundle and store it; the same again changes nothing. `Rejected` if a check fails.

    `key`: the site's private one, which only bundles need that are sealed to it.
    """
    try:
        return inbox.receive(inbox.unsealed(source, key, "site"))
    except Rejected as no:
        if no.field != "client" or no.client not in plan.clients:
            raise
        raise Rejected(
            f"{client!r} accepts uploads of its neighbors only",
            client=no.client,
            field="client",
            expected=" or ".join(neighbors(plan, client)) or "nobody",
            got=no.client,
            fix="Give it to a neighbor of this client; [topology] in the plan defines them.",
        ) from None


def sender(path: Path, inbox: Inbox) -> ClientId:
    """The sender that a bundle names, unchecked; empty where it names none."""
    try:
        with opened(path) as file:
            manifest = read_envelope(file, inbox.policy.limits).manifest
    except Rejected:
        return ""
    return str(manifest.get("client", "")) if isinstance(manifest, Mapping) else ""


def missing_neighbors(plan: Plan, client: ClientId, inbox: Inbox) -> list[ClientId]:
    """Neighbors whose uploads have not been received yet."""
    delivered = inbox.delivered()
    return [name for name in neighbors(plan, client) if name not in delivered]


def left_out(model: Path) -> list[ClientId]:
    """Neighbors whose uploads were received but not used in this model, because theirs gives no usable numbers."""
    kept = load_model_of(model)
    notes = kept[0].facts.get("notes", {}) if kept else {}
    return list(notes.get("left_out", []))


def exchange(
    plan: Plan,
    client: ClientId,
    inbox: Inbox,
    work: Path,
    *,
    data: Path | None = None,
    without_missing: bool = False,
    machine: Machine = Machine(),
    progress: Progress = quiet,
) -> Path:
    """Make the site's model from the uploads of its neighbors; refused while one is missing, unless `without_missing`."""
    method, absent = method_for(plan, client), missing_neighbors(plan, client, inbox)
    if absent and not without_missing:
        raise RoundError(
            f"not every neighbor has uploaded: {', '.join(absent)} missing",
            client=client,
            field="neighbors",
            expected=", ".join(neighbors(plan, client)),
            got=", ".join(inbox.delivered()) or "nobody",
            fix="Give their bundles, too; what was received is kept. Or add --without-missing.",
        )
    bundles = [inbox.bundle(name) for name in inbox.delivered()]
    made_from = {f"upload/{bundle.client}": bundle.digest for bundle in bundles}
    uploads = [Upload(bundle.client, bundle.plan, payload_of(bundle)) for bundle in bundles]
    with at_work(plan, client, work, machine, progress) as ctx:
        part = relay_to(method, client, uploads, ctx)
        facts = json.loads(canonical(dict(part.facts)))  # as they would have traveled
        release = Release(Payload({}), {client: Payload(part.tensors, facts)})
        path = make_model(release, digest_of(made_from), plan, client, work, data, ctx)
        before = {"previous": payload_digest(ctx.previous)} if ctx.previous is not None else {}
        record = {"plan": plan.digest, "client": client, "made_from": {**made_from, **before}}
        replace_atomically(path.with_name("made_from.json"), json.dumps(record, indent=1, sort_keys=True).encode())
    return path
