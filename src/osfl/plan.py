"""plan.toml ↔ Plan, and words ↔ settings. Reports every mistake at once, each with the nearest valid name."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from osfl.errors import UsageError
from osfl.protocol import Json, Limits, Plan, Task
from osfl.registry import load, nearest

VERSION = 1


def resolve_settings(
    method: type[Any], preset: str, changes: Mapping[str, Any] | None = None, *, ignore_unknown: bool = False
) -> Any:
    """The method's Settings: paper defaults, then the preset, then the user's changes (text or values)."""
    if preset not in method.PRESETS:
        raise UsageError(f"there is no preset {preset!r}.{nearest(preset, list(method.PRESETS))}", field="preset",
                         fix=f"Presets: {', '.join(method.PRESETS)}.")  # fmt: skip
    kinds = typing.get_type_hints(method.Settings)
    known = {f.name: kinds[f.name] for f in dataclasses.fields(method.Settings)}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, value in {**method.PRESETS[preset], **(changes or {})}.items():
        if name not in known:
            if not ignore_unknown:
                problems.append(f"{method.__name__} has no setting {name!r}.{nearest(name, list(known))}")
            continue
        try:
            values[name] = _convert(value, known[name])
        except ValueError as error:
            problems.append(f"setting {name!r}: expected {_spell(known[name])}, got {value!r}{_because(error)}")
    if problems:
        raise UsageError(problems, field="settings", fix=f"Settings: {', '.join(known)}.")
    return method.Settings(**values)


def parse_changes(words: Sequence[str]) -> dict[str, str]:
    """`--set epochs=2 --set method.lr=0.1` as a mapping; the prefix `method.` may be left out."""
    changes, problems = {}, []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            problems.append(f"--set {word!r}: expected key=value, for example --set epochs=2")
        changes[name.strip().removeprefix("method.")] = value.strip()
    if problems:
        raise UsageError(problems, field="set")
    return changes


def _convert(value: Any, kind: Any) -> Any:
    """A value, or its text, as the type that a setting is declared with."""
    if typing.get_origin(kind) in (typing.Union, UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value in (None, "none", "None") else _convert(value, options[0])
    if typing.get_origin(kind) is tuple:
        parts = value.split("+") if isinstance(value, str) else value
        return tuple(_convert(part, typing.get_args(kind)[0]) for part in parts)
    if typing.get_origin(kind) is typing.Literal:
        return _one_of(value, typing.get_args(kind))
    if kind is bool:
        return _one_of(str(value).lower(), ("true", "false", "1", "0", "yes", "no")) in ("true", "1", "yes")
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError("not a whole number")
    if kind is float and isinstance(value, bool):
        raise ValueError("not a number")
    return kind(value)


def _one_of(value: Any, options: Sequence[Any]) -> Any:
    if value not in options:
        raise ValueError(f"one of {', '.join(map(str, options))}")
    return value


def _spell(kind: Any) -> str:
    return "a choice" if typing.get_origin(kind) is typing.Literal else getattr(kind, "__name__", str(kind))


def _because(error: ValueError) -> str:
    text = str(error)
    return "" if "could not convert" in text or "invalid literal" in text else f" ({text})"


def deviations(method: type[Any], settings: Any) -> list[str]:
    """Where this run departs from the paper: what the method always does, and each setting that is not the paper's."""
    paper = method.Settings()
    changed = [
        f"{f.name} = {getattr(settings, f.name)!r}, paper: {getattr(paper, f.name)!r}"
        for f in dataclasses.fields(settings)
        if getattr(settings, f.name) != getattr(paper, f.name)
    ]
    return [*method.DEVIATIONS, *changed]


# --- plan.toml ---------------------------------------------------------------------------------------------------------


def read_plan(path: Path) -> Plan:
    """A plan.toml as a Plan, with every mistake in one message."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no plan at {path}", fix="Write one with `osfl new --method fedavg`.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    return plan_from(table, str(path))


def plan_from(table: Mapping[str, Any], where: str) -> Plan:
    """A parsed plan.toml or plan.json as a Plan."""
    problems = [f"{where}: unknown key {key!r}.{nearest(key, list(_KEYS))}" for key in table if key not in _KEYS]
    problems += [f"{where}: {key!r} is missing" for key in ("task", "method", "clients") if key not in table]
    if table.get("version", VERSION) != VERSION:
        problems.append(f"{where}: version {table['version']!r} is not supported, expected {VERSION}")
    if problems:
        raise UsageError(problems, field="plan", fix="`osfl new` writes a plan with every key explained.")
    try:
        task = table["task"]
        classes = tuple(str(name) for name in task["classes"])
        channels, height, width = (int(side) for side in task["image"])
        limits = Limits(**table.get("limits", {}))
        clients = tuple(sorted(str(client) for client in table["clients"]))
        seed = int(table.get("seed", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where}: [task] or [limits] cannot be read: {error}", field="plan") from None
    method = load(str(table["method"]))
    settings = resolve_settings(method, "paper", table.get("settings", {}))
    plan = Plan(Task(str(task.get("name", "task")), classes, (channels, height, width)), str(table["method"]),
                settings, clients, limits, seed, dict(table.get("data", {})))  # fmt: skip
    check_plan(plan)
    return plan


_KEYS = ("version", "task", "method", "settings", "clients", "limits", "seed", "data")
_SAFE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


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
        f"clients: {name!r} is not a client name; use lower-case letters, digits, '.', '_' and '-' (64 at most)"
        for name in plan.clients
        if not _SAFE.fullmatch(name)
    ]
    method = load(plan.method)(plan.task, plan.settings)
    problems += method.problems(len(plan.clients))
    if problems:
        raise UsageError(problems, field="plan")


def comments_of(settings: type[Any]) -> dict[str, str]:
    """The sentence beside each setting in its source, so that a plan explains itself."""
    found: dict[str, str] = {}
    for owner in reversed(settings.__mro__[:-1]):
        for name, comment in re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(owner), flags=re.M):
            found[name] = comment
    return found


def write_plan(plan: Plan) -> str:
    """A commented plan.toml; `read_plan` of it gives the same digest."""
    data = plan.as_json()
    explained = comments_of(type(plan.settings))
    lines = [
        f"# A one-shot round of {plan.method}. Everybody who takes part needs this same file: its digest names the round.",
        f"version = {VERSION}",
        f"method = {_toml(plan.method)}",
        f"seed = {plan.seed}                       # all randomness is derived from it",
        f"clients = {_toml(data['clients'])}       # each of them speaks exactly once",
        "",
        "[task]",
        f"name = {_toml(plan.task.name)}",
        f"classes = {_toml(data['task']['classes'])}",
        f"image = {_toml(data['task']['image'])}   # channels, height, width",
        "",
        "[settings]",
        *(f"{key} = {_toml(value)}{_comment(explained.get(key))}" for key, value in data["settings"].items()
          if value is not None),
        "",
        "[limits]                         # what the receiving desk accepts at most",
        *(f"{key} = {value}" for key, value in data["limits"].items()),
    ]  # fmt: skip
    if plan.data:
        lines += ["", "[data]                           # simulation only: where the shards come from"]
        lines += [f"{key} = {_toml(value)}" for key, value in data["data"].items() if value is not None]
    return "\n".join(lines) + "\n"


def _comment(text: str | None) -> str:
    return f"  # {text}" if text else ""


def _toml(value: Json) -> str:
    """TOML spells strings, numbers, booleans and lists as JSON does."""
    return json.dumps(value, ensure_ascii=False)
