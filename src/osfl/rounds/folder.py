"""The round folder: what is on disk is the state. To resume, run the same command again.

plan.json  contract.json  enrolled.json   agreed when the round opened
inbox/  rejected.jsonl                    uploads that passed the gate; refusals and why
repair_request.json  repairs/             of a secure sum: who is missing, and the others' repairs
journal.jsonl                             what each finished phase cost
release.safetensors  personal/            what the server gave back, signed
total.safetensors                         where a release follows from a sum: the sum of the uploads (osfl.rounds.total)
models/                                   what clients made of it (in a simulation)
figures/                                  pictures that the method wants in the report
scratch/                                  checkpoints of unfinished phases
forgotten/  forgetting.json               certificates of what was forgotten; an unfinished forgetting
sbom.cdx.json                             what the release was made with: packages and versions (CycloneDX)
judgment.json                            whom the judgment before the server phase suspects, and why
head.json                                 what the folder held when the server last signed something
results.json  report/  model_card.md
encounters/1  encounters/2  ...           where clients exchange several times: the rounds before this last one
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch

from osfl.core.errors import Rejected, RoundError
from osfl.core.method import Method
from osfl.core.result import Result, read_result
from osfl.core.types import (
    ClientId,
    Contract,
    Facts,
    Json,
    Payload,
    Plan,
    Release,
    Upload,
    canonical,
    settings_as_json,
)
from osfl.rounds.head import read_head, sign_head
from osfl.rounds.lock import folder_lock
from osfl.rounds.provenance import EXCLUDED
from osfl.rounds.secure_sum import masked_contract, total_of
from osfl.rounds.state import LEFT_OUT, check_key, check_whole, existing_request, read_json, read_policy
from osfl.rounds.storage import load_model_of, payload_of, save_model
from osfl.runtime.atomic import append_line, make_folder, replace_atomically
from osfl.runtime.meter import book
from osfl.runtime.payloads import load_payload, save_payload, to_raw
from osfl.runtime.sbom import NAME as SBOM
from osfl.runtime.sbom import bill_of_materials
from osfl.wire.bundle import Bundle, pack
from osfl.wire.gate import AcceptancePolicy, verify_release
from osfl.wire.inbox import Inbox
from osfl.wire.refusals import HEAD
from osfl.wire.repair import REPAIRS, stored_seeds
from osfl.wire.signing import SigningKey

TOTAL = "total.safetensors"
MILESTONES = 20  # intermediate models of the server that are kept for a curve


@dataclass(frozen=True)
class Round:
    """One opened round folder."""

    folder: Path
    plan: Plan
    policy: AcceptancePolicy
    server: str  # public key that signs releases
    server_key: SigningKey | None = None  # needed to publish one

    @property
    def inbox(self) -> Inbox:
        return Inbox(self.folder / "inbox", self.policy)

    @property
    def present(self) -> list[ClientId]:
        """The plan's clients without those who were forgotten."""
        return [client for client in self.plan.clients if client not in self.policy.gone]

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    # --- uploads ---

    def delivered(self) -> dict[ClientId, int]:
        """Clients whose upload is safe in the inbox, with its size in bytes; sorted."""
        return self.inbox.delivered()

    def uploads(self, among: Collection[ClientId] | None = None) -> tuple[Sequence[Upload], dict[ClientId, str]]:
        """Every upload (`among` these clients), sorted by client, and the digests that the release will name as its origin."""
        inbox = self.inbox
        origin = {client: inbox.digest(client) for client in self.delivered() if among is None or client in among}
        return Stored(inbox, origin), origin

    def secure_total(self, method: Method, uploads: Sequence[Upload]) -> Upload:
        """The secure sum of these uploads, with the masks of missing clients taken out by the others' repairs."""
        request = existing_request(self.folder, self.policy)
        return total_of(uploads, method, self.plan, request.missing if request else (), self._repair)

    def _repair(self, client: ClientId) -> Mapping[ClientId, bytes]:
        return stored_seeds(self.folder / REPAIRS, self.inbox, existing_request(self.folder, self.policy), client)

    # --- release ---

    def excluded(self, among: Collection[ClientId]) -> dict[ClientId, str]:
        """Whom the coordinator left out of a release that is made of `among`, with the digests of their uploads."""
        noted = {client for phase, client in self.journal() if phase == LEFT_OUT}
        return {client: self.inbox.digest(client) for client in self.delivered() if client in noted and client not in among}

    def publish(
        self, release: Release, made_from: Mapping[ClientId, str], excluded: Mapping[ClientId, str] | None = None
    ) -> None:
        """Sign and write the release; its shared part comes last and lists all others, so that it stands for the whole.
        It names the uploads that it was made of, and those that the coordinator left out."""
        (self.folder / "personal").mkdir(exist_ok=True)
        origin = {f"upload/{client}": digest for client, digest in made_from.items()}
        origin |= {f"{EXCLUDED}{client}": digest for client, digest in (excluded or {}).items()}
        for client in sorted(release.personal):
            data = self._signed("personal", client, release.personal[client], {})
            replace_atomically(self.folder / "personal" / f"{client}.safetensors", data)
            origin[f"personal/{client}"] = self._verified(data).digest
        data = self._signed("release", "", release.shared, origin)
        digest = self._verified(data).digest
        self._check_only_release(digest)
        assert self.server_key is not None
        # before the release: after a crash in between, the same command makes the release that the head names
        sign_head(self.folder, self.plan.digest, digest, self.server_key)
        replace_atomically(self.folder / SBOM, bill_of_materials())
        replace_atomically(self.folder / "release.safetensors", data)

    def _check_only_release(self, digest: str) -> None:
        """With noise that sites share there is one release, also where its file was deleted: beside another one it would show
        the sums of who is only in one of them with a share of the noise alone."""
        if self.plan.privacy is None or self.plan.privacy.noise != "share" or not (self.folder / HEAD).exists():
            return
        before = read_head(self.folder / HEAD, self.server)["release"]
        if before not in ("", digest):
            raise RoundError(
                "this round has signed another release, and with noise that sites share it gets no second one",
                field="privacy.noise",
                expected=before,
                got=digest,
                fix="Put the first release back from a copy; to go on with other sites, open a new round.",
            )

    def supersede(self, before: str, after: str, joined: Sequence[ClientId]) -> None:
        """Note which release took the place of which (digests), and that not everybody has it yet."""
        (self.folder / "everyone-has-it").unlink(missing_ok=True)
        self.note("superseded", {"before": before, "after": after, "joined": list(joined)})

    def _signed(self, kind: Any, client: str, payload: Payload, made_from: Mapping[str, str]) -> bytes:
        assert self.server_key is not None, "a round that is only read cannot publish"
        return pack(
            kind, client, self.plan.digest, to_raw(payload.tensors), dict(payload.facts), self.server_key, made_from=made_from
        )

    def _verified(self, data: bytes | Path) -> Bundle:
        return verify_release(data, self.server, self.plan.digest, withdrawn=self.policy.withdrawn)

    def release(self) -> tuple[Release, str] | None:
        """The published release and its digest, or None before the server phase has finished."""
        path = self.folder / "release.safetensors"
        if not path.exists():
            return None
        try:
            shared = self._verified(path)
        except Rejected as no:
            problem = no.reason if no.field == "certificate" else f"it is damaged: {no.reason}"
            raise RoundError(
                f"release.safetensors cannot be used: {problem}",
                field="release",
                fix="Delete it and run the same command again.",
            ) from None
        personal = {}
        for name, digest in shared.made_from.items():
            kind, _, client = name.partition("/")
            if kind == "personal":
                own = self._verified(self.folder / "personal" / f"{client}.safetensors")
                if own.digest != digest:
                    raise RoundError(
                        f"personal/{client}.safetensors is not the one that the release names",
                        client=client,
                        expected=digest,
                        got=own.digest,
                        fix="Delete release.safetensors and run the same command again.",
                    )
                personal[client] = payload_of(own)
        return Release(payload_of(shared), personal), shared.digest

    def release_content(self) -> str:
        """The digest of what the release's shared part says: tensors and facts, without the plan and the uploads behind it."""
        return self._verified(self.folder / "release.safetensors").content

    def release_bytes(self) -> dict[ClientId, int]:
        """What each client downloads; an empty release costs nothing."""
        shared = self.folder / "release.safetensors"
        own = {path.stem: path.stat().st_size for path in (self.folder / "personal").glob("*.safetensors")}
        has_shared = bool(own or self._verified(shared).tensors)
        return {client: (shared.stat().st_size if has_shared else 0) + own.get(client, 0) for client in self.present}

    # --- models that clients made of the release ---

    def model(self, client: ClientId, release: str) -> Payload | None:
        """What the client made of the release with this digest, if it has finished."""
        kept = load_model_of(self.folder / "models" / f"{client}.safetensors")
        return kept[0] if kept is not None and kept[1] == release else None

    def keep_model(self, client: ClientId, payload: Payload, release: str) -> None:
        save_model(self.folder / "models" / f"{client}.safetensors", payload, release)

    def milestone(self, done: int, total: int, model: Callable[[], Payload]) -> None:
        """Keep intermediate models of the server until they are scored; of many, enough for a curve."""
        if done < total and done * MILESTONES // total == (done - 1) * MILESTONES // total:
            return
        start, path = time.perf_counter(), self.scratch / "milestones" / f"{done:08d}.safetensors"
        if not path.exists():
            save_payload(path, model())
        book(start - time.perf_counter())  # watching is not the server's work

    def milestones(self) -> dict[int, Payload]:
        kept = {int(path.stem): load_payload(path) for path in sorted((self.scratch / "milestones").glob("*.safetensors"))}
        return {done: model for done, model in kept.items() if model is not None}

    # --- journal and results ---

    def note(self, phase: str, facts: Mapping[str, Json], client: ClientId = "") -> None:
        append_line(self.folder / "journal.jsonl", canonical({"phase": phase, "client": client, **facts}))

    def journal(self) -> dict[tuple[str, ClientId], dict[str, Json]]:
        """The last note of each phase and client; a line torn by a crash is passed over."""
        notes: dict[tuple[str, ClientId], dict[str, object]] = {}
        path = self.folder / "journal.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                note = json.loads(line)
                notes[note["phase"], note["client"]] = note
        return notes

    def show(self, title: str, figure: Json) -> None:
        """Keep a picture for the report; the same title again replaces it."""
        (self.folder / "figures").mkdir(exist_ok=True)
        name = hashlib.sha256(title.encode()).hexdigest()[:16]
        replace_atomically(self.folder / "figures" / f"{name}.json", canonical({"title": title, "figure": figure}))

    def figures(self) -> dict[str, Json]:
        kept = [json.loads(path.read_bytes()) for path in (self.folder / "figures").glob("*.json")]
        return {entry["title"]: entry["figure"] for entry in sorted(kept, key=lambda entry: str(entry["title"]))}

    def finished(self) -> Result | None:
        """The result, if this very release was evaluated already."""
        if not (self.folder / "results.json").exists():
            return None
        result, release = read_result(self.folder), self.release()
        return result if release is not None and release[1] == result["release_digest"] else None

    def tidy(self) -> None:
        """A finished round needs no checkpoints."""
        shutil.rmtree(self.scratch, ignore_errors=True)


def encounter_folder(folder: Path, number: int) -> Path:
    """Where a simulation keeps an encounter that came before the last one."""
    return folder / "encounters" / str(number)


def first_encounter(folder: Path) -> Path:
    """The round with which everything in this folder began; the folder itself where clients exchange once."""
    first = encounter_folder(folder, 1)
    return first if first.is_dir() else folder


class Stored(Sequence[Upload]):
    """Uploads that are read and checked when they are asked for: a method that takes one after the other never has them all
    in memory. One that somebody still holds is not read again. Facts stay: who asks for an upload once more, and only for them,
    reads nothing."""

    def __init__(self, inbox: Inbox, origin: Mapping[ClientId, str]) -> None:
        self._inbox, self._origin, self._clients = inbox, origin, list(origin)
        self._held: weakref.WeakValueDictionary[ClientId, Upload] = weakref.WeakValueDictionary()
        self._facts: dict[ClientId, Facts] = {}  # of what was read and checked

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, index: int) -> Upload: ...
    @overload
    def __getitem__(self, index: slice) -> list[Upload]: ...
    def __getitem__(self, index: int | slice) -> Upload | list[Upload]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        client = self._clients[index]
        held = self._held.get(client)
        if held is not None:
            return held
        if client in self._facts:
            payload = Payload(_Waiting(lambda: self._read(client).tensors), dict(self._facts[client]))
        else:
            payload = self._read(client)
            self._facts[client] = dict(payload.facts)
        upload = self._held[client] = Upload(client, self._inbox.policy.plan, payload)
        return upload

    def _read(self, client: ClientId) -> Payload:
        bundle = self._inbox.bundle(client)
        if bundle.digest != self._origin[client]:
            raise RoundError(
                "the stored upload changed while the round was computed",
                client=client,
                field="inbox",
                expected=self._origin[client],
                got=bundle.digest,
                fix="Run the same command again.",
            )
        return payload_of(bundle)


class _Waiting(Mapping[str, torch.Tensor]):
    """Tensors that are read when the first of them is asked for."""

    def __init__(self, read: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._read = read

    @cached_property
    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self._read()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@contextlib.contextmanager
def open_round(
    folder: Path, plan: Plan, contracts: Mapping[str, Contract], enrolled: Mapping[ClientId, str], server_key: SigningKey
) -> Iterator[Round]:
    """Open a new round here, or continue the one that has this very plan. One process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        agree(folder, plan, contracts, enrolled, server_key.public_hex)
        yield _existing(folder, plan, server_key)


def agree(folder: Path, plan: Plan, contracts: Mapping[str, Contract], enrolled: Mapping[ClientId, str], server: str) -> None:
    """Write down what the round is about, once; a folder that holds another round is refused."""
    fixed = {
        "contract.json": {name: {t: settings_as_json(f) for t, f in contract.items()} for name, contract in contracts.items()},
        "enrolled.json": {"clients": dict(enrolled), "server": server},
        "plan.json": plan.as_json(),  # last: a folder with a plan is a round
    }
    _same_plan(folder, plan)
    make_folder(folder)
    is_round = (folder / "plan.json").exists()  # else the others are left of an opening that failed, maybe of another round
    for name, content in fixed.items():
        if not (is_round and (folder / name).exists()):
            replace_atomically(folder / name, json.dumps(content, indent=1, sort_keys=True).encode())
    (folder / "inbox").mkdir(exist_ok=True)


@contextlib.contextmanager
def existing_round(folder: Path, plan: Plan, server_key: SigningKey | None = None) -> Iterator[Round]:
    """The round that is here, as it was agreed. With the server's key the folder is locked, and a release can be published."""
    if server_key is None:
        yield _existing(folder, plan)
        return
    with folder_lock(folder):
        fl_round = _existing(folder, plan, server_key)
        check_server_key(fl_round)
        yield fl_round


def check_server_key(fl_round: Round) -> None:
    assert fl_round.server_key is not None
    check_key(fl_round.server, fl_round.server_key)


def _existing(folder: Path, plan: Plan, server_key: SigningKey | None = None) -> Round:
    check_whole(folder)
    policy = read_policy(folder)
    return Round(folder, plan, policy, policy.server, server_key)


def _same_plan(folder: Path, plan: Plan) -> None:
    """Refuse a folder that holds another round, saying what differs."""
    if not (folder / "plan.json").exists():
        return
    there, here = read_json(folder / "plan.json"), json.loads(canonical(plan.as_json()))
    different = _differences(there, here)
    if different:
        raise RoundError(
            f"{folder} holds another round; different: {', '.join(different)}",
            field="out",
            fix="Choose another --out, or repeat the command that made it (its results.json or fusion.json has it), or delete "
            "the folder.",
        )


def _differences(there: Mapping[str, Json], here: Mapping[str, Json], prefix: str = "") -> list[str]:
    found = []
    for key in sorted({*there, *here}):
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} ({a!r} there, {b!r} now)")
    return found


def simulated_key(seed: int, who: str) -> SigningKey:
    """Keys of simulated sites are derived, not secret: a simulation must repeat byte for byte. Real sites generate theirs."""
    return SigningKey.from_seed(hashlib.sha256(canonical(["osfl simulated key", seed, who])).digest())


def contracts_of(method: Method, plan: Plan | None = None) -> dict[str, Contract]:
    """What an upload may hold, for each architecture that the plan allows; worked out once, when the round opens.

    With a plan that asks for a secure sum, it is what a masked upload holds, which there is one of.
    """
    if plan is not None and plan.secure_sum:
        return {"": masked_contract(method, plan)}
    names: Sequence[str] = method.architectures()
    needs = tuple(method.needs())
    return {name: {t: replace(f, needs=needs) for t, f in method.contract(name).items()} for name in names}
