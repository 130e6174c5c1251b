"""Settings of a method: from text and presets to values, and where they depart from the paper. All mistakes at once."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any

from osfl.core.errors import UsageError, nearest
from osfl.core.types import Json

if TYPE_CHECKING:
    from osfl.core.method import Method

_LARGEST = 1e30  # single precision ends soon after, and torch stops there with an error that names no setting


def resolve_settings(method: type[Method], preset: str, changes: Mapping[str, Json] | None = None) -> Any:
    """The method's Settings: paper defaults, then the preset, then the user's changes (text or values).

    Settings with a method `resolved` choose there what follows from other settings, so that the plan names it.
    """
    if preset not in method.PRESETS:
        raise UsageError(
            f"there is no preset {preset!r}.{nearest(preset, list(method.PRESETS))}",
            field="preset",
            fix=f"Presets: {', '.join(method.PRESETS)}.",
        )
    kinds = typing.get_type_hints(method.Settings)
    known = {f.name: kinds[f.name] for f in dataclasses.fields(method.Settings)}
    problems: list[str] = []
    values: dict[str, Json] = {}
    for name, value in {**method.PRESETS[preset], **(changes or {})}.items():
        if name not in known:
            problems.append(f"{method.__name__} has no setting {name!r}.{nearest(name, list(known))}")
            continue
        try:
            values[name] = _convert(value, known[name])
        except (TypeError, ValueError) as error:
            problems.append(f"setting {name!r}: expected {_spell(known[name])}, got {value!r}{_because(error)}")
    if problems:
        raise UsageError(problems, field="settings", fix=f"Settings: {', '.join(known)}.")
    settings = method.Settings(**values)
    return settings.resolved() if hasattr(settings, "resolved") else settings


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """`--set epochs=2 --set method.lr=0.1` as a mapping; the prefix `method.` may be left out."""
    changes, problems = {}, []
    for change in texts:
        name, equals, value = change.partition("=")
        if not equals or not name.strip():
            problems.append(f"--set {change!r}: expected key=value, for example --set epochs=2")
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
    if kind is float and not math.isfinite(float(value)):
        raise ValueError("not a finite number")
    if kind is float and abs(float(value)) > _LARGEST:
        raise ValueError(f"at most {_LARGEST:g}")
    return kind(value)


def _one_of(value: object, options: Sequence[object]) -> object:
    if value not in options:
        raise ValueError(f"one of {', '.join(map(str, options))}")
    return value


def _spell(kind: object) -> str:
    return "a choice" if typing.get_origin(kind) is typing.Literal else getattr(kind, "__name__", str(kind))


def _because(error: TypeError | ValueError) -> str:
    text = str(error)
    return "" if isinstance(error, TypeError) or "could not convert" in text or "invalid literal" in text else f" ({text})"


def deviations(method: Method | type[Method], settings: Any, without: Collection[str] = ()) -> list[str]:
    """Where this run departs from the paper: what the method always does, each setting that is not the paper's (`without`
    those that had no part in it), and what these settings leave without effect: `Method.departures`, of an instance only."""
    paper = method.Settings()
    changed = [
        f"{f.name} = {getattr(settings, f.name)!r}, paper: {getattr(paper, f.name)!r}"
        for f in dataclasses.fields(settings)
        if getattr(settings, f.name) != getattr(paper, f.name) and f.name not in without
    ]
    return [*method.DEVIATIONS, *changed, *([] if isinstance(method, type) else method.departures())]


def comments_of(settings: type[Any]) -> dict[str, str]:
    """The sentence beside each setting in its source, and what it may be, so that a plan explains itself."""
    found: dict[str, str] = {}
    for owner in reversed(settings.__mro__[:-1]):
        for name, comment in re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(owner), flags=re.M):
            found[name] = comment
    choices = {
        name: typing.get_args(kind)
        for name, kind in typing.get_type_hints(settings).items()
        if typing.get_origin(kind) is typing.Literal
    }
    return found | {name: f"{' | '.join(map(str, options))}: {found.get(name, '')}" for name, options in choices.items()}
