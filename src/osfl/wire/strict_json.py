"""Strict JSON parser for untrusted input: no duplicate keys, no NaN, bounded depth; Python's own is too lenient."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from osfl.core.types import Json

_INT64 = 1 << 63


def parse(text: bytes) -> Json:
    """The value, or ValueError: no duplicate keys, NaN, infinities, integers beyond 64 bits, or broken Unicode."""
    try:
        value = json.loads(
            text.decode("utf-8"),  # bytes would let the parser guess UTF-16
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
        check(value, depth=16)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at character {error.pos})") from None
    return value


def check(value: Json, depth: int) -> None:
    """ValueError unless `value` is plain JSON with at most `depth` containers inside each other."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError("it is nested too deeply")
        _check_items(value, depth - 1)
    elif isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("it holds a number that is not finite")
    elif isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise ValueError("it holds an integer beyond 64 bits")
    elif value is not None:
        raise ValueError(f"it holds a {type(value).__name__}, which JSON does not know")


def _check_items(value: dict[object, Json] | list[Json], depth: int) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError("it has a key that is not a string")
            _check_text(key)
    for item in value.values() if isinstance(value, dict) else value:
        check(item, depth)


def _check_text(value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair") from None


def _unique(pairs: Sequence[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("it has a duplicate key")
    return value


def _integer(text: str) -> int:
    if len(text) > 20:  # longer than any 64-bit integer: do not spend quadratic time on it
        raise ValueError("it holds an integer beyond 64 bits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("it holds a number that is not finite")
    return value


def _constant(text: str) -> Json:
    raise ValueError(f"it holds {text}, which is not JSON")
