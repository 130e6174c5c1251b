"""Read, check and write plan.toml. Every mistake is reported at once, each with the nearest valid name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from osfl.core.errors import UsageError, nearest
from osfl.core.method import Method
from osfl.core.names import architecture_rule, is_client_id, is_digest
from osfl.core.registry import load, names
from osfl.core.settings import comments_of, resolve_settings
from osfl.core.sums import secure_sum_problems
from osfl.core.topology import KINDS, is_contact, topology_from, topology_problems
from osfl.core.types import ClientId, Contact, Json, Judging, Limits, Plan, Privacy, Task, Topology

VERSION = 1
COMBINE = ("mean", "median", "trimmed", "geometric")


# --- plan.toml ---------------------------------------------------------------------------------------------------------


def read_plan(path: Path) -> Plan:
    """A plan.toml as a Plan, with every mistake in one message."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no plan at {path}", fix="Write one with `osfl new`.") from None
    except OSError as error:  # a folder, or not ours to read
        raise UsageError(
            f"the plan {path} cannot be read: {error.strerror}", field="plan", fix="Name the file itself, such as plan.toml."
        ) from None
    except (ValueError, RecursionError) as error:  # no TOML, or TOML made to break its reader: depth, endless numbers
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    return plan_from(table, str(path))


def plan_from(table: Mapping[str, Json], where: str) -> Plan:
    """A parsed plan.toml or plan.json as a Plan."""
    problems, fixes = _misshapen(table), ["`osfl new` writes a plan with every key explained."]
    with contextlib.suppress(KeyError, TypeError):  # of another shape, which is reported already
        problems += _quorum_problems(table["round"]["quorum"], table["clients"])
    settings = None
    if isinstance(table.get("method"), str) and isinstance(table.get("settings", {}), Mapping):
        try:
            settings = resolve_settings(load(table["method"]), "paper", table.get("settings", {}))
        except UsageError as error:
            problems += error.problems
            fixes = [error.fix] if error.fix else fixes
    if problems:
        raise UsageError([f"{where}: {problem}" for problem in problems], field="plan", fix=fixes[0])
    task = table["task"]
    channels, height, width = task["image"]
    plan = Plan(
        Task(task.get("name", "task"), tuple(task["classes"]), (channels, height, width), task.get("kind", "multiclass")),
        table["method"],
        settings,
        tuple(sorted(table["clients"])),
        Limits(**table.get("limits", {})),
        table.get("seed", 0),
        dict(table.get("data", {})),
        **table.get("round", {}),
        topology=topology_from(table["topology"]) if "topology" in table else None,
        privacy=_privacy(table["privacy"]) if "privacy" in table else None,
        judging=Judging(**table.get("judging", {})),
    )
    check_plan(plan)
    return plan


def _privacy(table: Mapping[str, Json]) -> Privacy:
    """8 and 8.0 are one plan."""
    return Privacy(float(table["epsilon"]), float(table["delta"]), table.get("noise", "site"), table.get("colluders", 0))


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a key of a plan may hold, as text and as a test."""

    texts: str
    fits: Callable[[Json], bool]


def _whole(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(value: Json) -> bool:
    return _whole(value) and value > 0


def _number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _moment(value: Json) -> bool:
    """A time that means the same everywhere, or nothing."""
    try:
        return value == "" or datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _texts(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_TABLE = _Kind("a table of keys and values", lambda value: isinstance(value, Mapping))
_TEXT = _Kind("text", lambda value: isinstance(value, str))
_POSITIVE = _Kind("a positive whole number", _positive)
_SHARE = _Kind(
    "a share above 0, at most 1", lambda value: (_whole(value) and value == 1) or (isinstance(value, float) and 0 < value <= 1)
)
_KEYS = {
    "version": _Kind(f"{VERSION}; other versions are not supported", lambda value: _whole(value) and value == VERSION),
    "task": _TABLE,
    "method": _TEXT,
    "settings": _TABLE,
    "clients": _Kind('a list of names such as ["north", "south"]', _texts),
    "limits": _TABLE,
    "seed": _Kind("a whole number", _whole),
    "data": _TABLE,
    "round": _TABLE,
    "topology": _TABLE,
    "judging": _TABLE,
    "privacy": _TABLE,
}
_PARTS: Mapping[str, Mapping[str, _Kind]] = {
    "task": {
        "name": _TEXT,
        "classes": _Kind('a list of names such as ["cat", "dog"]', _texts),
        "image": _Kind(
            "three positive whole numbers, [channels, height, width]",
            lambda value: isinstance(value, list) and len(value) == 3 and all(map(_positive, value)),
        ),
        "kind": _Kind(
            "'multiclass' (one class an image) or 'multilabel' (several, or none)",
            lambda value: value in ("multiclass", "multilabel"),
        ),
    },
    "limits": {**{field.name: _POSITIVE for field in dataclasses.fields(Limits)}, "share": _SHARE},
    "data": {
        "dataset": _TEXT,
        "digest": _TEXT,
        "partition": _TEXT,
        "evaluated_on": _Kind("'test' or 'val'", lambda value: value in ("test", "val")),
        "samples": _Kind("a positive whole number", lambda value: value is None or _positive(value)),
        "test_samples": _Kind("a positive whole number", lambda value: value is None or _positive(value)),
        "group": _TEXT,
        "slices": _TEXT,
        "window": _TEXT,
        "groups": _Kind("'whole': a person's images are at one site", lambda value: value in (None, "whole")),
    },
    "round": {
        "quorum": _Kind("a whole number, 0 for all clients", lambda value: _whole(value) and value >= 0),
        "deadline": _Kind('a time with its zone such as "2026-12-24T18:00:00Z", or ""', _moment),
        "late": _Kind("true or false", lambda value: isinstance(value, bool)),
        "secure_sum": _Kind("true or false", lambda value: isinstance(value, bool)),
        "private_randomness": _Kind("true or false", lambda value: isinstance(value, bool)),
    },
    "privacy": {
        "epsilon": _Kind("a number above 0", lambda value: _number(value) and value > 0),
        "delta": _Kind("a number above 0 and below 1", lambda value: _number(value) and 0 < value < 1),
        "noise": _Kind("'site' or 'share'", lambda value: value in ("site", "share")),
        "colluders": _Kind("a whole number of at least 0", lambda value: _whole(value) and value >= 0),
    },
    "judging": {
        "suspects": _Kind("'ask', 'note' or 'off'", lambda value: value in ("ask", "note", "off")),
        "combine": _Kind(" or ".join(map(repr, COMBINE)), lambda value: value in COMBINE),
    },
    "topology": {
        "kind": _Kind(" or ".join(map(repr, KINDS)), lambda value: value in KINDS),
        "peers": _Kind("a whole number, 0 unless the kind is 'random'", lambda value: _whole(value) and value >= 0),
        "encounters": _POSITIVE,
        "encounter": _POSITIVE,
        "after": _Kind('the digest of a plan, or ""', lambda value: value == "" or is_digest(value)),
        "contacts": _Kind(
            "a list of tables with a, b, start, seconds, bytes_per_second and, if need be, encounter",
            lambda value: isinstance(value, list) and all(map(is_contact, value)),
        ),
    },
}
_NEEDED = ("task", "method", "clients", "task.classes", "task.image", "privacy.epsilon", "privacy.delta")


def _misshapen(table: Mapping[str, Json]) -> list[str]:
    """Every key that is missing, unknown or of the wrong kind; `settings` are the method's own affair."""
    known, found = dict(_KEYS), dict(table)
    for part, kinds in _PARTS.items():
        if isinstance(table.get(part), Mapping):
            known |= {f"{part}.{key}": kind for key, kind in kinds.items()}
            extra = part == "data"  # may say more: it describes, and the digest of the images decides
            found |= {f"{part}.{key}": value for key, value in table[part].items() if not extra or key in kinds}
    problems = [f"unknown key {key!r}.{nearest(key, list(known))}" for key in found if key not in known]
    problems += [f"{key!r} is missing" for key in _NEEDED if key in known and key not in found]
    return problems + [
        f"{key!r}: expected {known[key].texts}, got {value!r}"
        for key, value in found.items()
        if key in known and not known[key].fits(value)
    ]


def _quorum_problems(quorum: int, clients: Sequence[ClientId]) -> list[str]:
    wrong = quorum > len(clients)
    return [f"round.quorum: expected at most {len(clients)}, the number of clients, got {quorum}"] * wrong


def _architecture_problems(plan: Plan) -> list[str]:
    """In `north:cnn,*:resnet18` a client that is none would silently get what all others get."""
    pairs = [part for part in str(getattr(plan.settings, "architecture", "")).split(",") if ":" in part]
    named = [architecture_rule(part)[0] for part in pairs]
    return [
        f"setting 'architecture': {name!r} is no client of this plan; clients: {', '.join(plan.clients)}"
        for name in named
        if name and name != "*" and name not in plan.clients
    ]


def check_plan(plan: Plan) -> None:
    """What no round can start with, all at once."""
    problems = []
    if len(plan.task.classes) < 2:
        problems.append(f"task.classes: expected at least 2 classes, got {len(plan.task.classes)}")
    if len(set(plan.task.classes)) != len(plan.task.classes):
        problems.append("task.classes: a class is named twice")
    if min(plan.task.image) < 1 or plan.task.image[0] not in (1, 3):
        problems.append(f"task.image: expected (1 or 3, height, width), got {plan.task.image}")
    if not plan.clients or len(set(plan.clients)) != len(plan.clients):
        problems.append(f"clients: expected one or more different names, got {list(plan.clients)}")
    problems += [
        f"clients: {name!r} is not a client name; use lower-case letters, digits, '.', '_' and '-' (64 at most), not 'server'"
        for name in plan.clients
        if not is_client_id(name)
    ]
    problems += _quorum_problems(plan.quorum, plan.clients) + _architecture_problems(plan)
    method, fix = load(plan.method)(plan.task, plan.settings), None
    if plan.task.kind not in method.TASKS:
        able = [name for name in names() if plan.task.kind in load(name).TASKS]
        fix = f"Choose a method that can: {', '.join(able)}."
        problems.append(f"task.kind: {plan.method} learns one class an image, and here an image may have several (multi-label)")
    if plan.topology is not None:
        wrong = topology_problems(plan.topology, plan.clients)
        fix = f"Correct the topology; clients: {', '.join(plan.clients)}." if wrong else fix
        problems += wrong
        if not method.provides("relay"):
            fix = "Leave the topology out, or choose a method without a server, such as fol."
            problems.append(
                f"topology: in {plan.method} every client reaches a server or all other clients; a topology "
                "matters only to methods in which neighbors exchange directly, such as fol"
            )
    if plan.late and not method.additive():
        fix = "Leave round.late out, or choose a method that only adds, such as onesum."
        problems.append(
            f"round.late: the release of {plan.method} is no function of a sum, to which a later upload can be added"
        )
    if plan.judging.combine not in ("mean", *method.robust()):
        known = ", ".join(method.robust()) or "none"
        fix = "Leave judging.combine out, or choose a method that has it, such as fedavg."
        problems.append(f"judging.combine: {plan.method} has no {plan.judging.combine!r}; it has: {known}")
    if plan.secure_sum and plan.judging.combine != "mean":
        problems.append("judging.combine: in a secure sum the server sees no single upload; leave it out")
    if plan.topology is not None and plan.judging.combine != "mean":
        problems.append("judging.combine: with a topology no server combines what sites sent; leave it out")
    if plan.privacy is not None:
        wrong = _privacy_problems(plan, method)
        fix = (
            "Correct [privacy], or leave it out; onesum, fedcgs, fedpft, falcon, federated_factory with factory=mixture, and "
            "methods that upload models have differential privacy."
            if wrong
            else fix
        )
        problems += wrong
    try:
        problems += method.problems(len(plan.clients))
        problems += secure_sum_problems(plan, method) if plan.secure_sum else []
    except UsageError as error:  # a method that works with what it should have refused
        problems, fix = [*problems, *error.problems], error.fix
    if problems:
        raise UsageError(problems, field="plan", fix=fix)


def _privacy_problems(plan: Plan, method: Method) -> list[str]:
    """What would make the plan's epsilon untrue."""
    privacy = plan.privacy
    assert privacy is not None
    problems = [
        f"privacy.{key}: expected {_PARTS['privacy'][key].texts}, got {value!r}"
        for key, value in dataclasses.asdict(privacy).items()
        if not _PARTS["privacy"][key].fits(value)
    ]
    if plan.topology is not None:
        problems.append("privacy: with a topology sites would draw noise anew for each encounter, which averages it out")
    problems += _colluder_problems(privacy, plan.quorum or len(plan.clients))
    if plan.late and privacy.noise == "share":
        problems.append(
            "round.late: two releases that differ by one site show its sums with a share of the noise; set noise = 'site'"
        )
    return problems or [*method.privacy_problems(plan)]


def _colluder_problems(privacy: Privacy, quorum: int) -> list[str]:
    """Noise of the other sites of the smallest sum must be there."""
    if not privacy.colluders:
        return []
    if privacy.noise != "share":
        return ["privacy.colluders: each site adds all of the noise, so no other site can weaken it; leave it out"]
    if privacy.colluders >= quorum:
        return [f"privacy.colluders: expected fewer than the {quorum} sites of the smallest sum, got {privacy.colluders}"]
    return []


_LIMITS = comments_of(Limits)


def write_plan(plan: Plan) -> str:
    """A commented plan.toml; `read_plan` of it gives the same digest."""
    data = plan.as_json()
    explained = comments_of(type(plan.settings))
    lines = [
        f"# A one-shot round of {plan.method}. Everybody who takes part needs this same file: its digest names the round.",
        f"version = {VERSION}",
        f"method = {_toml(plan.method)}",
        f"seed = {plan.seed}                       # all randomness is derived from it",
        f"clients = {_toml(data['clients'])}       # each of them uploads exactly once",
        "",
        "[task]",
        f"name = {_toml(plan.task.name)}",
        f"classes = {_toml(data['task']['classes'])}",
        f"image = {_toml(data['task']['image'])}   # channels, height, width",
        *(['kind = "multilabel"             # an image may have several of the classes, or none'] * ("kind" in data["task"])),
        "",
        "[settings]",
        *(
            f"{key} = {_toml(value)}{_comment(explained.get(key))}"
            for key, value in data["settings"].items()
            if value is not None
        ),
        "",
        "[limits]                         # what is accepted at most, and how far claimed counts are relied on",
        *(f"{key} = {_toml(value)}{_comment(_LIMITS[key])}" for key, value in dataclasses.asdict(plan.limits).items()),
        "",
        "[round]                          # when the server phase may begin",
        f"quorum = {plan.quorum}                       # so many uploads are needed; 0: one of each client",
        f'deadline = {_toml(plan.deadline)}                    # wait for the others until then, "2026-12-24T18:00:00Z"',
    ]
    method = load(plan.method)(plan.task, plan.settings)
    if method.additive():
        lines.append(
            f"late = {_toml(plan.late)}                     # true: an upload that comes after the release makes the next one"
        )
    if method.provides("summands"):
        lines += _sum_lines(plan)
    lines.append(f"private_randomness = {_toml(plan.private_randomness)}       # true: only a site can repeat its training")
    lines += _judging_lines(plan, method)
    lines += _privacy_lines(plan.privacy) if plan.privacy else []
    lines += _topology_lines(plan.topology) if plan.topology else []
    if plan.data:
        lines += ["", "[data]                           # where simulated shards come from, and how files are read"]
        lines += [f"{key} = {_toml(value)}" for key, value in data["data"].items() if value is not None]
    return "\n".join(lines) + "\n"


def _sum_lines(plan: Plan) -> list[str]:
    line = (
        f"secure_sum = {_toml(plan.secure_sum)}               # true: the server learns the sum of all uploads only; needs "
        "limits.share = 1, and each site the others' keys"
    )
    why = [
        "# Why: whoever reads open sums may read single images out of them, and sites stop where that succeeds. What it costs:",
        "# forgetting a site ends the round, nobody joins after the release, the server can check the sum only, and for a site",
        "# that stays away each other one sends a small file (`osfl repair`).",
    ]
    return [line, *(why if plan.secure_sum and getattr(plan.settings, "readable", "") == "stop" else [])]


def _judging_lines(plan: Plan, method: Method) -> list[str]:
    found = [
        "",
        "[judging]                        # sites whose uploads contradict the others, before the server phase",
        f"suspects = {_toml(plan.judging.suspects)}                 # ask: wait for the coordinator; note: go on, noted; off",
    ]
    if method.robust():
        rules = ", ".join(method.robust())
        found.append(
            f"combine = {_toml(plan.judging.combine)}                 # or a robust average, for malicious sites: {rules}"
        )
    return found


def _privacy_lines(privacy: Privacy) -> list[str]:
    return [
        "",
        "[privacy]                        # differential privacy of single images; every round spends it anew",
        f"epsilon = {_toml(privacy.epsilon)}                    # smaller is more private, and less accurate",
        f"delta = {_toml(privacy.delta)}                    # how often that may fail; far below one over the images",
        f"noise = {_toml(privacy.noise)}                   # site: against the server, too; share: with secure_sum, too",
        f"colluders = {privacy.colluders}                    # share: so many sites may tell others their noise",
    ]


def _topology_lines(topology: Topology) -> list[str]:
    return [
        "",
        "[topology]                       # which clients exchange with which",
        f"kind = {_toml(topology.kind)}",
        f"peers = {topology.peers}                        # random: number of neighbors of each client",
        f"encounters = {topology.encounters}                   # so many exchanges follow each other, each with its own plan",
        f"encounter = {topology.encounter}                    # this plan is that one of them",
        f"after = {_toml(topology.after)}                       # digest of the plan before",
        "contacts = [",
        *(f"    {_inline(contact)}," for contact in topology.contacts),
        "]",
    ]


def _inline(contact: Contact) -> str:
    return "{ " + ", ".join(f"{key} = {_toml(value)}" for key, value in dataclasses.asdict(contact).items()) + " }"


def _comment(text: str | None) -> str:
    return f"  # {text}" if text else ""


def _toml(value: Json) -> str:
    """TOML spells strings, numbers, booleans and lists as JSON does."""
    return json.dumps(value, ensure_ascii=False)
