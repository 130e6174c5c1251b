"""The phases of a round, one function each, for every transport.

`osfl.run` takes them all in one process; a site takes `run_client_phase` and `run_personalization` (osfl.roles.site), a
coordinator takes `run_server_phase`
(osfl.roles.coordinator). A method's file does not know which of these it is part of.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from osfl.core.errors import RoundError, UploadBlocked
from osfl.core.method import Context, Method, ignore_figure, ignore_milestone
from osfl.core.types import ClientId, Contract, Json, Payload, Plan, Progress, Release, Shard
from osfl.models.architectures import architecture_for
from osfl.rounds.contacts import check_windows, least_bytes, windows
from osfl.rounds.egress import check_exposure, check_numbers, check_open_sums, check_payload
from osfl.rounds.exposure import accepted, compared, spanned, would_stop
from osfl.rounds.folder import Round, contracts_of
from osfl.rounds.secure_sum import masked
from osfl.rounds.state import no_more_releases
from osfl.rounds.total import keep_total, total_of
from osfl.runtime.atomic import create_once
from osfl.runtime.devices import on_device
from osfl.runtime.environment import devices_named
from osfl.runtime.machine import Machine
from osfl.runtime.memory import budget, sharing
from osfl.runtime.meter import Meter, measure, remark, reset_peak_memory, start_up
from osfl.runtime.payloads import PayloadCache, to_raw
from osfl.runtime.precision import check_precision, computing_in, with_fallback
from osfl.runtime.workers import Workers, compute_threads
from osfl.wire.bundle import pack
from osfl.wire.sealing import sealed_size
from osfl.wire.signing import SigningKey


@contextmanager
def computing(
    plan: Plan,
    machine: Machine,
    progress: Progress,
    scratch: Path,
    *,
    cache: Path | None = None,
    show: Callable[[str, Json], None] = ignore_figure,
    milestone: Callable[[int, int, Callable[[], Payload]], None] = ignore_milestone,
) -> Iterator[Context]:
    """What methods compute with; `scratch` keeps finished stages, so that a killed phase goes on where it was."""
    device, *others = devices_named(machine.device)
    check_precision(machine.precision, device)
    workers = Workers(machine.workers)
    with (
        compute_threads(machine.threads),
        computing_in(machine.precision),
        budget(machine.memory),
        sharing(min(workers.count, len(plan.clients)), 1 + len(others)),
        on_device(machine.device),
    ):
        yield Context(
            plan,
            device,
            progress,
            scratch,
            workers.map,
            PayloadCache(cache or scratch / "cache").get_or_compute,
            show,
            milestone,
            devices=(device, *others),
        )


def with_secret(ctx: Context, client: ClientId, folder: Path | None = None) -> Context:
    """Where the plan asks for private randomness, the context of one client with a secret of its own. Kept in `folder`: with it
    the client, and nobody else, can repeat its upload. Work that was kept without it, or with another one, is not used."""
    if not ctx.plan.private_randomness:
        return ctx
    secret = os.urandom(32)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        create_once(folder / f"{client}.secret", secret)
        secret = (folder / f"{client}.secret").read_bytes()
    name = hashlib.sha256(secret).hexdigest()

    def get_or_compute(key: Json, make: Callable[[], Payload]) -> Payload:
        return ctx.get_or_compute({"secret": name, "key": key}, make)

    return replace(ctx, secret=secret, get_or_compute=get_or_compute)


def contract_for(plan: Plan, contracts: Mapping[str, Contract], client: ClientId) -> tuple[str, Contract]:
    """The architecture that the plan gives this client, and what its upload must hold; "" where there is but one contract."""
    name = "" if "" in contracts else architecture_for(plan.settings.architecture, client)
    return name, contracts[name]


def run_client_phase(
    method: Method,
    shard: Shard,
    plan: Plan,
    contracts: Mapping[str, Contract],
    key: SigningKey,
    ctx: Context,
    keys: Mapping[ClientId, str] = MappingProxyType({}),
    notice: Callable[[str], None] = lambda line: None,
    *,
    real: bool = True,
) -> tuple[bytes, Meter]:
    """Run the client phase: the upload, checked by the egress check and signed, and what it cost.

    `keys`: the public keys of all clients, which a secure sum needs. The checks see what is then masked. `notice` gets the
    figures of the egress check, a line each. `real`: of a real site, whose upload leaves it; in a simulation nothing leaves,
    and what would stop a real site alone is a remark in the results.
    """
    ctx = ctx if ctx.secret else with_secret(ctx, shard.client)
    check_claim(plan, shard)  # both before it trains in vain
    check_promised_size(plan, shard.client, contracts)
    start_up()
    with measure() as meter:
        payload = with_fallback(lambda: method.client_phase(shard, ctx), _broken, remark)
    open_contracts = contracts_of(method) if plan.secure_sum else contracts
    contract = open_contracts[payload.facts.get("architecture", "") if "" not in open_contracts else ""]
    check_payload(payload, contract, shard, plan.task, plan.limits, private=plan.privacy is not None)
    with measure():  # what the checks compute is no cost of the method
        check_numbers(method, payload, shard, ctx)
        ratios = check_exposure(method, payload, shard, plan.task, ctx, real=real)
    if real and not plan.secure_sum:
        check_open_sums(method, payload, shard.client, plan)
    elif not real and ((ratios and would_stop(ratios)) or (method.too_few(payload, plan) and not plan.secure_sum)):
        meter.remarks.append("a real site would not send this: the features of single images can be read out of its sums")
    if ratios:
        classes = plan.task.classes
        lines = [compared(ratios, classes), accepted(ratios, classes), *([] if plan.secure_sum else [spanned(ratios)])]
        for line in filter(None, lines):
            notice(line)
    if plan.secure_sum:
        payload = masked(method, payload, shard.client, plan, keys, key)
    bundle = pack("upload", shard.client, plan.digest, to_raw(payload.tensors), dict(payload.facts), key)
    if plan.topology is not None:
        check_windows(plan, shard.client, len(bundle), contract)
    return bundle, meter


def check_claim(plan: Plan, shard: Shard) -> None:
    """Refuse more images than the plan lets a site claim, in all or of a class: the gate would refuse the upload."""
    most_of_a_class = int(shard.train.class_counts(len(plan.task.classes)).max())
    for limit, images, what in (("samples", len(shard.train), ""), ("class_samples", most_of_a_class, " of one class")):
        if images > (most := getattr(plan.limits, limit)):
            raise UploadBlocked(
                f"it has more images{what} than the plan allows a site",
                client=shard.client,
                field=f"limits.{limit}",
                expected=f"at most {most}",
                got=images,
                fix=f"Agree on a plan with limits.{limit} = {images} or more, or learn from fewer.",
            )


def check_promised_size(plan: Plan, client: ClientId, contracts: Mapping[str, Contract]) -> None:
    """Refuse a contract whose uploads cannot fit into a contact window, if the plan has any."""
    if plan.topology is not None and windows(plan, client):
        check_windows(plan, client, _promised(plan, client, contracts), contract_for(plan, contracts, client)[1], least=True)


def _promised(plan: Plan, client: ClientId, contracts: Mapping[str, Contract]) -> int:
    return least_bytes(plan, client, *contract_for(plan, contracts, client))


def check_schedule(plan: Plan, clients: Iterable[ClientId], contracts: Mapping[str, Contract]) -> None:
    """Compare every client's smallest possible upload with its contact windows, before anybody trains; one refusal names all
    clients, with advice for the bundle that fits worst."""
    refused: list[tuple[float, UploadBlocked]] = []
    for client in clients:
        try:
            check_promised_size(plan, client, contracts)
        except UploadBlocked as no:
            refused.append((min(windows(plan, client).values()) / _promised(plan, client, contracts), no))
    if refused:
        worst = min(refused, key=lambda pair: pair[0])[1]
        others = ", ".join(str(no.client) for _, no in refused if no is not worst)
        worst.fix = f"{worst.fix} Nor does what {others} would send fit." if others else worst.fix
        raise worst


def check_sealed_size(plan: Plan, client: ClientId, size: int, contracts: Mapping[str, Contract]) -> None:
    """A sealed copy is longer than the bundle, whose own size `run_client_phase` has checked: refused if a window would cut
    it."""
    _, contract = contract_for(plan, contracts, client)
    check_windows(plan, client, sealed_size(size), contract)


def run_server_phase(method: Method, fl_round: Round, ctx: Context, among: Collection[ClientId] | None = None) -> None:
    """From the inbox to a signed release. The server sees uploads, never shards; `among`: only those of these clients.

    With a secure sum the method gets one upload, the sum of all.
    """
    privacy = fl_round.plan.privacy
    why = no_more_releases(fl_round.folder, fl_round.policy.server, privacy.noise) if privacy else ""
    if why:
        raise RoundError(why, field="privacy.noise", expected="one release", got="a second one", fix="Open a new round.")
    uploads, made_from = fl_round.uploads(among)
    reset_peak_memory()
    ctx.progress("server", 0, 1)
    with measure() as meter:
        kept = None
        # additive methods check as they add, and the server of a secure sum checks the total
        if privacy is not None and not method.additive() and not fl_round.plan.secure_sum:
            for upload in uploads:
                method.check_upload(upload, ctx)
        if fl_round.plan.secure_sum:
            total = [fl_round.secure_total(method, uploads)]
            release = with_fallback(lambda: method.server_phase(total, ctx), _broken_release, remark)
        elif method.additive() and ctx.plan.topology is None:
            kept = total_of(method, fl_round, uploads, made_from, ctx)
            release = method.release_of(kept.total, uploads, ctx)
        else:
            release = with_fallback(lambda: method.server_phase(uploads, ctx), _broken_release, remark)
    if kept is not None:
        keep_total(fl_round, kept)
    fl_round.note("server", meter.as_json())
    fl_round.publish(release, made_from, fl_round.excluded(made_from))
    ctx.progress("server", 1, 1)


def _broken(payload: Payload) -> str:
    """Name a tensor that is not finite, or nothing."""
    return next((name for name, value in payload.tensors.items() if not bool(value.isfinite().all())), "")


def _broken_release(release: Release) -> str:
    parts = (release.shared, *release.personal.values())
    return next((name for part in parts if (name := _broken(part))), "")


def run_personalization(method: Method, release: Release, shard: Shard, ctx: Context) -> tuple[Payload, Meter]:
    """What a client makes of the release, and what it cost."""
    with measure() as meter:
        payload: Payload = with_fallback(lambda: method.personalize(release, shard, ctx), _broken, remark)
    return payload, meter
