"""The site's role: make one signed upload from its own images, take one release. This module sends nothing.

Besides the upload a coordinator may ask for a repair of a secure sum (`roles/repair.py`) and a summary of results
(`roles/summaries.py`).

work/<round>/<client>/upload.safetensors   its upload, kept: it is sent again, never computed again
work/<round>/<client>/model.safetensors    what it made of the release, with plan.json beside it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from osfl.core.errors import DataError, Rejected, RoundError, UsageError
from osfl.core.method import Context, Method, quiet
from osfl.core.registry import one_shot
from osfl.core.result import finding_line
from osfl.core.topology import is_last, next_encounter
from osfl.core.types import ClientId, Payload, Plan, Progress, Release, Shard, digest_of
from osfl.data.findings import grouped
from osfl.data.layout import PARTS
from osfl.data.reading import reading_of
from osfl.data.site import open_site, site_problems
from osfl.data.views import make_shard
from osfl.models.input_facts import describe_inputs
from osfl.roles.repair import all_keys, check_not_missing
from osfl.rounds.folder import contracts_of
from osfl.rounds.lock import folder_lock
from osfl.rounds.phases import check_sealed_size, computing, run_client_phase, run_personalization, with_secret
from osfl.rounds.storage import load_model_of, payload_of, save_model
from osfl.runtime.atomic import append_line, replace_atomically
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import payload_digest
from osfl.wire.bundle import Bundle
from osfl.wire.gate import AcceptancePolicy, accept, verify_release
from osfl.wire.masks import keys_digest
from osfl.wire.signing import SigningKey
from osfl.wire.withdrawn import NOTHING, Withdrawn

Notice: TypeAlias = Callable[[str], None]
_ELSEWHERE = "Wait for it, or choose another --work."


def work_folder(plan: Plan, client: ClientId, work: Path) -> Path:
    """Where a site keeps what belongs to this round."""
    return work / plan.digest[:16] / client


def open_shard(
    plan: Plan, client: ClientId, data: Path, progress: Progress = quiet, notice: Notice = lambda line: None
) -> Shard:
    """The site's images as the round's method gets them, split into training and validation as in a simulation.

    `notice` gets a line for each thing to know about them: how they are resized, which pixels networks get, what is wrong.
    """
    check_own_folder(plan, client, data)
    found = open_site(data, plan.task, progress, reading_of(plan.data))
    inputs = describe_inputs(plan.settings, plan.task.image[1], found.native)
    findings = grouped(site_problems(found, client, plan.task))
    for line in [*inputs["lines"], *inputs["cautions"], *map(finding_line, findings)]:
        notice(line)
    return make_shard(found.train, client, seed=plan.seed)


def check_own_folder(plan: Plan, client: ClientId, data: Path) -> None:
    """Refuse the folder above all sites' folders: their images would count as scanners or wards of this one site."""
    own = (client, *plan.task.classes, *PARTS)
    others = [other for other in plan.clients if other not in own and (data / other).is_dir()]
    if others:
        raise DataError(
            f"{data} holds folders of other sites: {', '.join(others)}",
            client=client,
            field="data",
            expected="this site's own images",
            fix=f"Name the site's own folder, such as {data / client}.",
        )


def make_upload(
    plan: Plan,
    client: ClientId,
    data: Path,
    key: SigningKey,
    work: Path,
    *,
    machine: Machine = Machine(),
    progress: Progress = quiet,
    sealed: bool = False,
    notice: Notice = lambda line: None,
    keys: Mapping[ClientId, str] = MappingProxyType({}),
) -> Path:
    """The one bundle of this site. Once it is finished it stands: asked again, the same file is given.

    `sealed`: it leaves as a sealed copy, which is longer, and refused if a contact's window would cut it.
    `keys`: of a secure sum, the public keys of all sites; the bundle is masked with them.
    `notice` also gets the figures of the egress check and what a reader of the upload can find out (`Method.cautions`).
    """
    method, folder = method_for(plan, client), work_folder(plan, client, work)
    path, contracts = folder / "upload.safetensors", contracts_of(method, plan)
    enrolled = all_keys(plan, client, key, keys) if plan.secure_sum else {client: key.public_hex}
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # its upload is between the site and the coordinator
    with folder_lock(folder, fix=_ELSEWHERE):
        policy = AcceptancePolicy(
            plan.digest, enrolled, contracts, len(plan.task.classes), plan.limits, several=plan.task.several
        )
        if plan.secure_sum:
            policy = replace(policy, keys=keys_digest(enrolled))
            check_not_missing(folder, client)
        if path.exists():
            upload = _check_kept(path, policy, client, once=plan.secure_sum or plan.privacy is not None)
        else:
            shard = open_shard(plan, client, data, progress, notice)
            with computing(plan, machine, progress, folder / "scratch") as ctx:
                own = with_secret(replace(ctx, previous=previous_model(plan, client, work)), client, folder)
                bundle, meter = run_client_phase(method, shard, plan, contracts, key, own, enrolled, notice)
            upload = accept(bundle, policy)  # what the coordinator will ask of it, asked here first
            spent = {"phase": "client", "data": shard.digest, **meter.as_json()}
            append_line(folder / "journal.jsonl", json.dumps(spent).encode())
            replace_atomically(path, bundle)
        for line in () if plan.secure_sum else method.cautions(payload_of(upload), plan):
            notice(line)
    if sealed:
        check_sealed_size(plan, client, path.stat().st_size, contracts)
    return path


def _check_kept(path: Path, policy: AcceptancePolicy, client: ClientId, once: bool) -> Bundle:
    """`once`: another upload would reuse its masks, or draw other noise, and both together would show too much."""
    try:
        return accept(path, policy)
    except Rejected as no:
        raise RoundError(
            f"the upload kept in {path} is not good any more: {no.reason}",
            client=client,
            field=no.field,
            expected=no.expected,
            got=no.got,
            fix="Use the keys that it was made with, or take part in another round: a second upload would show too much."
            if once
            else "Use the key it was signed with, or delete that file to train again.",
        ) from None


def take_release(
    plan: Plan,
    client: ClientId,
    release: Path,
    personal: Path | None,
    server: str,
    work: Path,
    *,
    data: Path | None = None,
    machine: Machine = Machine(),
    progress: Progress = quiet,
    spare: bool = False,
    withdrawn: Withdrawn = NOTHING,
) -> Path:
    """The site's model of the round: the release, verified with the server's public key, and made the site's own.

    `personal` is the part that was made for this site, where the method makes one; one that the release does not name is
    refused, or ignored if it may lie there unasked (`spare`). Most methods need no data here. `withdrawn` is what the
    certificates of forgetting that are at hand took back.
    """
    whole, digest = read_release(plan, client, release, personal, server, spare, withdrawn)
    with at_work(plan, client, work, machine, progress) as ctx:
        return make_model(whole, digest, plan, client, work, data, ctx)


@contextmanager
def at_work(plan: Plan, client: ClientId, work: Path, machine: Machine, progress: Progress) -> Iterator[Context]:
    """Lock the site's folder and yield the context of its phase, with its model of the encounter before."""
    folder = work_folder(plan, client, work)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with folder_lock(folder, fix=_ELSEWHERE), computing(plan, machine, progress, folder / "scratch") as ctx:
        yield with_secret(replace(ctx, previous=previous_model(plan, client, work)), client, folder)


def make_model(
    release: Release, digest: str, plan: Plan, client: ClientId, work: Path, data: Path | None, ctx: Context
) -> Path:
    """What the site makes of a release with this digest, and of what it made one encounter earlier; made once."""
    method, folder = method_for(plan, client), work_folder(plan, client, work)
    if ctx.previous is not None:
        digest = digest_of({"release": digest, "previous": payload_digest(ctx.previous)})
    path = folder / "model.safetensors"
    kept = load_model_of(path)
    if kept is not None and kept[1] == digest:
        return path
    if kept is not None:
        _check_not_uploaded(plan, client, work)
    shard = _shard_for(method, plan, client, data, ctx.progress)
    _check_same_images(folder / "journal.jsonl", shard)
    payload, meter = run_personalization(method, release, shard, ctx)
    append_line(folder / "journal.jsonl", json.dumps({"phase": "personalize", **meter.as_json()}).encode())
    replace_atomically(folder / "plan.json", json.dumps(plan.as_json(), indent=1, sort_keys=True).encode())
    save_model(path, payload, digest)
    return path


def _check_not_uploaded(plan: Plan, client: ClientId, work: Path) -> None:
    """Keep a model that the upload of the next encounter was made from: else nobody knew what that upload was made of."""
    if is_last(plan) or not (work_folder(next_encounter(plan), client, work) / "upload.safetensors").exists():
        return
    raise RoundError(
        "this site has uploaded in the next encounter, from the model that it made here",
        client=client,
        field="work",
        expected="what that model was made of",
        got="something else",
        fix="What came late cannot be used any more. Go on with the plan of the next encounter.",
    )


def previous_model(plan: Plan, client: ClientId, work: Path) -> Payload | None:
    """What this site made one encounter earlier; None in the first."""
    after = plan.topology.after if plan.topology else ""
    if not after:
        return None
    path = work / after[:16] / client / "model.safetensors"
    kept = load_model_of(path)
    if kept is None:
        raise RoundError(
            "the model of the encounter before is not here",
            client=client,
            field="work",
            expected=path,
            got="nothing",
            fix="Finish that one first, with `osfl exchange` or `osfl personalize`, and this --work.",
        )
    return kept[0]


def read_release(
    plan: Plan,
    client: ClientId,
    release: Path,
    personal: Path | None,
    server: str,
    spare: bool = False,
    withdrawn: Withdrawn = NOTHING,
) -> tuple[Release, str]:
    """What the server gave back to this site, and the release's digest; refused unless the server signed both parts."""
    shared = verify_release(release, server, plan.digest, withdrawn=withdrawn)
    if shared.kind != "release":
        raise UsageError(
            f"{release} is a personal part, not the release itself",
            field="release",
            fix="Give release.safetensors first, and this file as --personal.",
        )
    if f"personal/{client}" not in shared.made_from and personal is not None and not spare:
        others = any(name.startswith("personal/") for name in shared.made_from)
        what = f"no personal part for {client!r}" if others else "no personal parts"
        raise UsageError(
            f"the release has {what}, so there is nothing to give", field="personal", fix=f"Leave --personal {personal} out."
        )
    own = _personal(plan, client, shared, personal, server)
    parts = {client: payload_of(own)} if own else {}
    return Release(payload_of(shared), parts), shared.digest


def _personal(plan: Plan, client: ClientId, shared: Bundle, personal: Path | None, server: str) -> Bundle | None:
    """The site's own part, which must be the one that the release names."""
    named = shared.made_from.get(f"personal/{client}")
    if named is None:
        return None
    if personal is None:
        raise UsageError(
            f"this release has a part for {client!r}, which is missing here",
            field="personal",
            fix=f"Fetch personal/{client}.safetensors from the coordinator; give it as --personal.",
        )
    own = verify_release(personal, server, plan.digest, client)
    if own.digest != named:
        raise RoundError(
            "the personal part is not the one that the release names",
            client=client,
            field="personal",
            expected=named,
            got=own.digest,
            fix="Fetch both files again; they belong together.",
        )
    return own


def _shard_for(method: Method, plan: Plan, client: ClientId, data: Path | None, progress: Progress) -> Shard:
    """The images, if this method learns from them after the round; else a shard that only has a name."""
    if data is not None:
        return open_shard(plan, client, data, progress)
    if method.needs_images_after_round():
        raise UsageError(
            f"{plan.method} learns from the site's images once more",
            field="data",
            fix="Give them with --data, the same as before.",
        )
    import torch

    from osfl.core.types import Dataset

    none = Dataset(torch.empty(0, *plan.task.image, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    return Shard(client, none, none)


def _check_same_images(journal: Path, shard: Shard) -> None:
    """Check that a site trains on the same images as for its upload. A line torn by a crash is skipped."""
    uploaded = ""
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() and len(shard.train) else []:
        with suppress(json.JSONDecodeError, KeyError, TypeError):
            note = json.loads(line)
            uploaded = note["data"] if note["phase"] == "client" else uploaded
    if uploaded and shard.digest != uploaded:
        raise RoundError(
            "these are not the images that the upload was made from",
            client=shard.client,
            field="data",
            expected=uploaded,
            got=shard.digest,
            fix="Give the folder that `osfl client --data` was given, as it was then.",
        )


def method_for(plan: Plan, client: ClientId) -> Method:
    """The plan's method, if this client can take part in a real round of it."""
    if client not in plan.clients:
        raise UsageError(f"{client!r} is no client of this plan", field="client", fix=f"Clients: {', '.join(plan.clients)}.")
    return one_shot(plan)
