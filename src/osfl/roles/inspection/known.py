"""What is known about the round that a bundle claims to belong to; every part of it may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from osfl.core.errors import Rejected, UsageError
from osfl.core.types import Contract, Json, Limits, Plan, digest_of
from osfl.rounds.state import read_json, read_policy
from osfl.wire.bundle import Bundle
from osfl.wire.gate import verify_release
from osfl.wire.signing import read_public
from osfl.wire.window import Seen
from osfl.wire.withdrawn import NOTHING, Withdrawal, Withdrawn


@dataclass(frozen=True)
class Known:
    """A plan as plan.json has it, what its uploads may hold, and whose keys are known."""

    plan: Mapping[str, Json] | None = None
    contracts: Mapping[str, Contract] = field(default_factory=dict)
    clients: Mapping[str, str] = field(default_factory=dict)  # client -> public key
    server: str = ""  # public key
    given: str = ""  # a public key that the reader named; it then is the one that must have signed
    where: str = ""  # where this comes from: a path, or nothing where that is plain
    withdrawn: Withdrawn = NOTHING  # what the round's certificates of forgetting took back
    current: Mapping[str, str] = field(default_factory=dict)  # what the round's own release names
    enrolled: Mapping[str, str] = field(default_factory=dict)  # client -> the key it signed with before a class was forgotten

    @property
    def round(self) -> str:
        return "" if self.plan is None else digest_of(dict(self.plan))

    @property
    def place(self) -> str:
        return f"in {self.where}" if self.where else "here"

    @property
    def classes(self) -> tuple[str, ...]:
        return () if self.plan is None else tuple(self.plan["task"]["classes"])

    @property
    def several(self) -> bool:
        """Whether an image may be of several classes."""
        return self.plan is not None and self.plan["task"].get("kind") == "multilabel"

    @property
    def image(self) -> tuple[int, ...]:
        return () if self.plan is None else tuple(self.plan["task"]["image"])

    @property
    def limits(self) -> Limits | None:
        return None if self.plan is None else Limits(**self.plan["limits"])

    def key_for(self, bundle: Bundle) -> tuple[str, str]:
        """The public key that must have signed this bundle, and whose it is, as text; empty if not known."""
        if self.given:
            return self.given, "the key that you named"
        if bundle.kind == "upload":
            keys = self.enrolled if bundle.digest in self.withdrawn.digests else self.clients
            return keys.get(bundle.client, ""), f"the key of {bundle.client!r} that is enrolled {self.place}"
        return self.server, f"the server's key that is enrolled {self.place}"

    def withdrawal_of(self, seen: Seen) -> Withdrawal | None:
        """Why this bundle must not be used any more, where certificates of forgetting say so."""
        bundle = seen.bundle
        if bundle.kind == "personal":
            return None if bundle.digest in self.current.values() else self.withdrawn.personal.get(bundle.digest)
        return self.withdrawn.of(seen.envelope.manifest)

    def whole_plan(self) -> Plan | None:
        """The plan with its method's settings; this is where torch comes in."""
        from osfl.core.plan import plan_from

        return None if self.plan is None else plan_from(dict(self.plan), self.where)


def from_round(folder: Path) -> Known:
    """Everything that is known from a round folder; no torch."""
    policy = read_policy(folder)
    current: Mapping[str, str] = {}
    if policy.withdrawn.personal:
        with suppress(Rejected):
            release = folder / "release.safetensors"
            current = verify_release(release, policy.server, policy.plan, withdrawn=policy.withdrawn).made_from
    # What is left of an upload after a class was forgotten is signed by the server.
    keys = {client: policy.server if policy.forgotten.get(client) else key for client, key in policy.enrolled.items()}
    return Known(
        read_json(folder / "plan.json"),
        policy.contracts,
        keys,
        policy.server,
        where=str(folder),
        withdrawn=policy.withdrawn,
        current=current,
        enrolled=policy.enrolled,
    )


def from_plan(path: Path) -> Known:
    """Everything that is known from a plan.toml: it holds no keys."""
    from osfl.core.plan import read_plan
    from osfl.core.registry import is_reference, load
    from osfl.rounds.folder import contracts_of

    plan = read_plan(path)
    method = load(plan.method)(plan.task, plan.settings)
    return Known(plan.as_json(), {} if is_reference(method) else contracts_of(method, plan), where=str(path))


def gather(bundle: Path, plan: Path | None = None, fl_round: Path | None = None, key: Path | None = None) -> Known:
    """From what the reader names; a bundle that lies in a round folder is judged by that round unless they name something."""
    if plan is not None and fl_round is not None:
        raise UsageError("a round folder has its plan already", field="plan", fix="Give --plan or --round, not both.")
    if plan is not None:
        known = from_plan(plan)
    elif fl_round is not None:
        known = from_round(fl_round)
    else:
        around = _round_around(bundle)
        known = from_round(around) if around else Known()
    return replace(known, given=read_public(key)) if key else known


def _round_around(bundle: Path) -> Path | None:
    """The round folder that this file is part of: ROUND/release.safetensors, ROUND/inbox/x, ROUND/personal/x."""
    needed = ("plan.json", "contract.json", "enrolled.json")
    places = (bundle.parent, bundle.parent.parent) if bundle.parent.name in ("inbox", "personal") else (bundle.parent,)
    return next((place for place in places if all((place / name).is_file() for name in needed)), None)
