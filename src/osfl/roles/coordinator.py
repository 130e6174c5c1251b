"""The coordinator: opens the round, receives bundles through the gate, runs the server phase when it may begin.

Receiving and looking need no torch and no private key, and any number of processes may do it at once. What is on disk is
the state (see osfl.rounds.folder).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.core.errors import UNUSABLE, OsflError, Rejected, RoundError, UsageError, go_on_without
from osfl.core.method import Method
from osfl.core.types import ClientId, Json, Plan, Progress, Upload
from osfl.rounds.judgment import UNDECIDED, ask, judged, refuse_unusable, rules, suspicions
from osfl.rounds.state import (
    KEPT,
    LEFT_OUT,
    check_key,
    existing_request,
    no_more_releases,
    pending_removal,
    read_json,
    read_policy,
)
from osfl.runtime.atomic import locked, replace_atomically
from osfl.wire.gate import read_manifest
from osfl.wire.inbox import Inbox, Receipt
from osfl.wire.refusals import JOURNAL, entries, times
from osfl.wire.repair import REPAIRS, REQUEST, RepairRequest, receive_repair, sign_request
from osfl.wire.sealing import MAGIC
from osfl.wire.source import BytesLike

if TYPE_CHECKING:
    from osfl.rounds.folder import Round
    from osfl.runtime.machine import Machine
    from osfl.wire.bundle import Bundle
    from osfl.wire.signing import SigningKey

_SECURE_LOCK = ".secure-sum.lock"
FAILED, SUPERSEDED = "server failed", "superseded"  # notes in journal.jsonl


def open_new(folder: Path, plan: Plan, enrolled: Mapping[ClientId, str], server: str) -> None:
    """Open a round here: the plan, what an upload may hold, and whose keys are known. The same call again does nothing."""
    from osfl.core.registry import one_shot
    from osfl.rounds.folder import agree, contracts_of
    from osfl.wire.gate import AcceptancePolicy
    from osfl.wire.signing import VerifyKey

    method = one_shot(plan)
    _check_enrolled(plan, enrolled, server)
    keys = {"clients": dict(enrolled), "server": server}
    if (folder / "enrolled.json").exists() and read_json(folder / "enrolled.json") != keys:
        raise RoundError(
            f"{folder} holds this round with other keys",
            field="enrolled",
            fix="Keys are agreed when a round opens. Choose another folder for other keys.",
        )
    contracts = contracts_of(method, plan)
    AcceptancePolicy(
        plan.digest, enrolled, contracts, len(plan.task.classes), plan.limits
    )  # refuses keys that are none, or shared
    VerifyKey(server)
    agree(folder, plan, contracts, enrolled, server)


def _check_enrolled(plan: Plan, enrolled: Mapping[ClientId, str], server: str) -> None:
    missing, strange = sorted(set(plan.clients) - set(enrolled)), sorted(set(enrolled) - set(plan.clients))
    problems = [f"no key for {client!r}" for client in missing]
    problems += [f"{client!r} is no client of this plan" for client in strange]
    problems += [f"{client!r} has the server's key" for client, key in enrolled.items() if key == server]
    if problems:
        raise UsageError(problems, field="enrolled", fix="Each client sends its public key (`osfl keys NAME` prints it).")


def receive(folder: Path, source: BytesLike | Path, key: SigningKey | None = None) -> Receipt:
    """Let a bundle through the gate and keep it; returns when it is safe on disk, raises `Rejected` with the reason.

    `key`: the server's private one, which only sealed bundles need.
    """
    inbox = Inbox(folder / "inbox", read_policy(folder))
    if key is not None:
        check_key(inbox.policy.server, key)  # else a sealed bundle would get the blame
    source = inbox.unsealed(source, key)
    if inbox.policy.keys:
        return _receive_masked(folder, source)
    for client in inbox.policy.gone:
        inbox.path(client).unlink(missing_ok=True)  # of a process that died at the next lines
    receipt = inbox.receive(source)
    if receipt.client in read_policy(folder).gone:  # forgotten meanwhile: what was stored must not stay
        receipt.path.unlink(missing_ok=True)
        return Inbox(folder / "inbox", read_policy(folder)).receive(source)  # refused, with the reason
    return receipt


def check_start(folder: Path, start: bytes, size: int) -> None:
    """Refuse a bundle of `size` bytes by its header alone, before the rest is fetched; a sealed one has to be here whole."""
    from osfl.wire.gate import check_head

    if start == MAGIC[:8]:
        return
    inbox = Inbox(folder / "inbox", read_policy(folder))
    try:
        check_head(start, size, inbox.policy)
    except Rejected as no:
        inbox.note(no)
        raise


def _receive_masked(folder: Path, source: BytesLike | Path) -> Receipt:
    """An upload or a repair of a secure sum. In turn with the request for repairs, in which nobody is missing who is here."""
    with locked(folder / _SECURE_LOCK):
        policy = read_policy(folder)
        inbox = Inbox(folder / "inbox", policy)
        if _kind(source) == "repair":
            return receive_repair(folder / REPAIRS, source, inbox, existing_request(folder, policy))
        return inbox.receive(source)


def _kind(source: BytesLike | Path) -> str:
    """What a bundle says it is; the gate checks that, and reports what cannot be read."""
    with suppress(Rejected):
        manifest = read_manifest(source)
        return str(manifest.get("kind")) if isinstance(manifest, dict) else ""
    return ""


def request_repairs(folder: Path, server_key: SigningKey, now: datetime | None = None) -> RepairRequest:
    """Close a secure sum without those who have not delivered: a signed request, final, that the others answer with repairs."""
    check_key(read_policy(folder).server, server_key)  # a folder that is no round is refused before anything is written there
    with locked(folder / _SECURE_LOCK):
        policy = read_policy(folder)
        request = existing_request(folder, policy)
        if request is not None:
            return request
        found = status(folder, now)
        if not found.asks:
            why = found.waits_for or "nobody is missing"
            raise RoundError(f"there is nothing to repair: {why}", field="round", fix="`osfl show` says what comes next.")
        request = RepairRequest(policy.plan, dict(found.digests), tuple(found.missing))
        replace_atomically(folder / REQUEST, sign_request(request, server_key))
        return request


@dataclass(frozen=True)
class Status:
    """Who has delivered, who is missing, what was refused, and what comes next."""

    plan: str  # digest: the round's name
    method: str
    delivered: Mapping[ClientId, int]  # bytes of each upload in the inbox
    missing: Sequence[ClientId]
    refused: Sequence[Mapping[str, Json]]  # as rejected.jsonl has them: time, client, field, reason, fix; some count others
    quorum: int
    deadline: datetime | None
    ready: bool  # the server phase may begin
    waits_for: str  # why not, as text
    released: bool
    late: Sequence[ClientId] = ()  # delivered, but not in the release
    digests: Mapping[ClientId, str] = field(default_factory=dict)  # of each upload in the inbox
    release: str = ""  # its digest, once it is there
    personal: Sequence[ClientId] = ()  # for whom the release has a part of its own
    forgotten: Sequence[ClientId] = ()  # nobody waits for them
    left_out: Sequence[ClientId] = ()  # delivered, but the coordinator made the release without them
    failed: Mapping[str, Json] | None = None  # the last server phase, if it failed: time, client, reason, fix
    joining: Sequence[ClientId] = ()  # of those who are late, whom the next release will have: the plan allows it
    supersedes: str = ""  # digest of the release that this one took the place of
    asks: bool = False  # a secure sum that may begin and first needs repairs, which nobody has asked for yet
    repairs_due: Sequence[ClientId] = ()  # who was asked for a repair and has sent none
    repaired: Sequence[ClientId] = ()  # who has sent one
    suspicions: Sequence[Mapping[str, Json]] = ()  # of the judgment before the server phase: client, rule, text, value, bound
    kept: Sequence[ClientId] = ()  # suspected, and kept by the coordinator
    content: str = ""  # digest of the release's tensors and facts alone: the same in a secure and an open sum of the same terms

    @property
    def refusals(self) -> int:
        """How many bundles were refused; a line of the log may count several."""
        return sum(map(times, self.refused))


def status(folder: Path, now: datetime | None = None, without: Collection[ClientId] = ()) -> Status:
    """The state of the round, read from its folder; `without`: as if these clients were no part of it."""
    policy, plan = read_policy(folder), read_json(folder / "plan.json")
    inbox = Inbox(folder / "inbox", policy)
    delivered = inbox.delivered()
    waiting = plan.get("round", {})
    present = [client for client in plan["clients"] if client not in policy.gone]
    quorum = waiting.get("quorum", 0) or max(1, len(set(present).difference(without)))
    deadline = datetime.fromisoformat(waiting["deadline"]) if waiting.get("deadline") else None
    here, all_of_them = (len(set(clients).difference(without)) for clients in (delivered, present))
    why = _waits_for(here, all_of_them, quorum, deadline, now or datetime.now(UTC))
    request = existing_request(folder, policy) if policy.keys else None
    repaired = [c for c in request.delivered if (folder / REPAIRS / f"{c}.safetensors").exists()] if request else []
    repairs_due = [client for client in request.delivered if client not in repaired] if request else []
    if request is not None:
        why = f"{len(repaired)} of the {len(request.delivered)} repairs that are needed have arrived" if repairs_due else ""
    if policy.keys and policy.gone:
        why = f"{', '.join(policy.gone)} was forgotten, and its masks stay in the sum: open a new round"
    why = no_more_releases(folder, policy.server, (plan.get("privacy") or {}).get("noise", "")) or why
    half = pending_removal(folder) is not None
    why = "a forgetting has begun and not ended: repeat that command" if half else why
    release = None if half else _release(folder)
    made_from = release.made_from if release else {}
    missed, notes = _without(release, delivered), list(entries(folder / "journal.jsonl"))
    left_out = [client for client in missed if any(n.get("phase") == LEFT_OUT and n.get("client") == client for n in notes)]
    late = [client for client in missed if client not in left_out]
    served = [note for note in notes if note.get("phase") in (FAILED, "server")]
    failed = [note for note in served[-1:] if note.get("phase") == FAILED]
    digests = {client: inbox.digest(client) for client in delivered}
    placed = [note for note in notes if note.get("phase") == SUPERSEDED and release and note.get("after") == release.digest]
    return Status(
        policy.plan,
        plan["method"],
        delivered,
        [client for client in present if client not in delivered],
        list(refusals(folder)),
        quorum,
        deadline,
        not why,
        why,
        release is not None,
        late,
        digests,
        release.digest if release else "",
        [name.removeprefix("personal/") for name in made_from if name.startswith("personal/")],
        [client for client in plan["clients"] if client not in present],
        left_out,
        failed[-1] if failed and (release is None or late) else None,
        [client for client in late if client not in without] if waiting.get("late") else [],
        str(placed[-1].get("before", "")) if placed else "",
        bool(policy.keys) and request is None and not why and here < all_of_them and release is None,
        repairs_due,
        repaired,
        suspicions(folder, digests),
        [client for client in delivered if any(n.get("phase") == KEPT and n.get("client") == client for n in notes)],
        release.content if release else "",
    )


def too_late(folder: Path, clients: Sequence[ClientId]) -> list[ClientId]:
    """Those whose uploads came after the release was made, which has no part of them."""
    return _without(_release(folder), clients) if clients and pending_removal(folder) is None else []


def _without(release: Bundle | None, clients: Iterable[ClientId]) -> list[ClientId]:
    return [client for client in clients if release and f"upload/{client}" not in release.made_from]


def _waits_for(delivered: int, clients: int, quorum: int, deadline: datetime | None, now: datetime) -> str:
    """Empty if the server phase may begin: everybody has uploaded, or enough have and nobody need be waited for."""
    if delivered < quorum:
        return f"{delivered} of the {quorum} uploads that are needed have arrived"
    if delivered < clients and deadline is not None and now < deadline:
        return f"{clients - delivered} more may deliver until {deadline.isoformat()}"
    return ""


def refusals(folder: Path) -> Iterator[Mapping[str, Json]]:
    """What was refused and why, oldest first; a line torn by a crash is passed over."""
    return entries(folder / JOURNAL)


def _release(folder: Path) -> Bundle | None:
    """The release in the folder, verified; None before there is one."""
    from osfl.wire.gate import verify_release

    path = folder / "release.safetensors"
    if not path.exists():
        return None
    policy = read_policy(folder)
    return verify_release(path, policy.server, policy.plan, withdrawn=policy.withdrawn)


def release_files(folder: Path, client: ClientId) -> dict[str, Path] | None:
    """The files of the release that a client fetches; None before there is one, and while something is being forgotten."""
    shared, own = folder / "release.safetensors", folder / "personal" / f"{client}.safetensors"
    if not shared.exists() or pending_removal(folder) is not None:
        return None
    if read_policy(folder).withdrawn.of(read_manifest(shared)) is not None:
        return None  # somebody put an old release back; the server phase reports it
    return {"release": shared, **({"personal": own} if client and own.exists() else {})}


def make_release(
    folder: Path,
    server_key: SigningKey,
    *,
    machine: Machine | None = None,
    progress: Progress | None = None,
    now: datetime | None = None,
    without: Collection[ClientId] = (),
    keep: Collection[ClientId] = (),
) -> str:
    """Run the server phase, if it may begin, and publish the release; its digest. A release that is there stands, unless
    the plan lets sites join late and some have: then the next release takes its place.

    Before it, uploads are compared with each other (osfl.rounds.judging), and where one is suspected the plan may ask for a
    decision.

    `without`: leave the uploads of these clients out, which stay in the inbox; the release names them as left out. `keep`: use
    these although they are suspected.
    """
    from osfl.core.method import quiet
    from osfl.core.registry import load
    from osfl.rounds.folder import existing_round
    from osfl.rounds.phases import computing, run_server_phase
    from osfl.runtime.machine import Machine

    plan = read_round_plan(folder)
    with existing_round(folder, plan, server_key) as fl_round:
        published = fl_round.release()
        found = status(folder, now, without)
        if published is not None and not found.joining:
            return published[1]
        _check_without(without, found, plan.secure_sum)
        if not found.ready and published is None:
            what = "repairs" if found.repairs_due else "uploads"
            raise RoundError(
                f"the server phase cannot begin: {found.waits_for}",
                field="round",
                expected=f"{what} from {', '.join(found.repairs_due or found.missing)}",
                got=f"{what} from {', '.join(found.repaired if found.repairs_due else found.delivered) or 'nobody'}",
                fix="Receive what is missing with `osfl receive`; `osfl show` lists it.",
            )
        if found.asks:
            raise _needs_repairs(folder, found)
        method = load(plan.method)(plan.task, plan.settings)
        among = [client for client in found.delivered if client not in (*without, *found.left_out)]
        _check_settings(method, len(among))
        with (
            _recorded(fl_round, among),
            computing(plan, machine or Machine(), progress or quiet, fl_round.scratch, show=fl_round.show) as ctx,
        ):
            if plan.judging.suspects != "off" and not plan.secure_sum:
                found_out = judged(fl_round, method, among, ctx)
                refuse_unusable(found_out)
                if plan.judging.suspects == "ask":
                    ask(found_out, [*keep, *found.kept], folder)
                for client in sorted({str(one["client"]) for one in found_out} - set(found.kept)):
                    fl_round.note(KEPT, {"rules": rules(found_out, client)}, client)
            for client in sorted(without):
                fl_round.note(LEFT_OUT, {"rules": rules(found.suspicions, client)}, client)
            run_server_phase(method, fl_round, ctx, among)
        fl_round.tidy()
        before, published = published, fl_round.release()
        if before is not None and published is not None:
            fl_round.supersede(before[1], published[1], found.joining)
    assert published is not None
    return published[1]


def _needs_repairs(folder: Path, found: Status) -> RoundError:
    who, missing = ", ".join(found.delivered), ", ".join(found.missing)
    return RoundError(
        f"the masks shared with {missing} are in the sum, and these sites have not delivered",
        field="round",
        expected=f"repairs from {who}",
        got="none, for nobody has asked",
        fix=f"Wait for {missing}, or ask the others for repairs: `osfl server {folder} --key server.key --without-missing`. "
        f"After that {missing} cannot deliver in this round.",
    )


def _check_without(without: Collection[ClientId], found: Status, secure_sum: bool) -> None:
    if without and secure_sum:
        raise UsageError(
            [f"in a secure sum {client!r} cannot be left out: nobody may uncover an upload that is here" for client in without],
            field="exclude",
            fix="Open a new round without this site.",
        )
    strange = sorted(set(without) - set(found.delivered))
    included = sorted(set(without) - set(found.late)) if found.released else []
    if included:
        raise UsageError(
            [f"the release has {client!r}" for client in included],
            field="exclude",
            fix=f"Leave out those who joined late ({', '.join(found.late)}), or take a site out with `osfl forget`.",
        )
    if strange:
        raise UsageError(
            [f"there is no upload of {client!r} to leave out" for client in strange],
            field="exclude",
            fix=f"Uploads are here from {', '.join(found.delivered) or 'nobody'}.",
        )


@contextmanager
def _recorded(fl_round: Round, among: Sequence[ClientId]) -> Iterator[None]:
    """A server phase that fails leaves a note of why, which `status` shows, and never ends in a traceback."""
    try:
        yield
    except OsflError as error:
        if error.field == UNDECIDED:  # nothing failed
            raise
        if error.client is not None and error.client in among and "--exclude" not in (error.fix or ""):
            error.fix = f"{error.fix or ''} {go_on_without(error.client)}".strip()
        _note_failure(fl_round, error)
        raise
    except UNUSABLE as error:
        last = _last_upload(error)
        known = f", last at work on the upload of {last!r}" if last else ""
        failure = RoundError(
            f"the server phase failed{known}: {type(error).__name__}: {str(error)[:300]}",
            client=last,
            field="server phase",
            expected=f"a release made of the uploads of {', '.join(among)}",
            fix=f"{go_on_without(last or 'NAME')} The whole error is in journal.jsonl; without a fault in "
            "an upload it is one of the method.",
        )
        _note_failure(fl_round, failure, "".join(traceback.format_exception(error))[-4000:])
        raise failure from error


def _note_failure(fl_round: Round, error: OsflError, trace: str = "") -> None:
    facts = {key: value for key, value in error.as_json().items() if key != "client"}
    more = {"time": float(f"{time.time():.3f}"), **({"traceback": trace} if trace else {})}
    with suppress(OSError):  # a full disk must not hide the error itself
        fl_round.note(FAILED, {**facts, **more}, error.client or "")


def _last_upload(error: BaseException) -> ClientId | None:
    """Whose upload the code held that raised this, seen from the innermost call outwards."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        held = [value.client for value in frame.f_locals.values() if isinstance(value, Upload)]
        if held:
            return held[-1]
    return None


def read_round_plan(folder: Path) -> Plan:
    """The plan of the round that is here."""
    from osfl.core.plan import plan_from

    return plan_from(read_json(folder / "plan.json"), str(folder / "plan.json"))


def _check_settings(method: Method, clients: int) -> None:
    """Settings that fit all clients may not fit those who came."""
    problems = list(method.problems(clients))
    if problems:
        raise RoundError(
            f"with {clients} uploads the method cannot run: {'; '.join(problems)}",
            field="settings",
            fix="Wait for more uploads, or open a new round with other settings.",
        )
