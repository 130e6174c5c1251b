"""Config files beside a checkpoint: attention heads, activation, order of classes, and the scale of pixels.

transformers writes `config.json` and `preprocessor_config.json`, timm a `config.json` with `pretrained_cfg`. All are optional;
what they state is used, and what they state in an unknown form is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osfl.models.architectures import parse
from osfl.models.naming import ModelError

Pixels = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of RGB in [0, 1]
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
_LARGEST = 4 << 20  # bytes; a config with a thousand class names has less than a hundredth of it
_GELU = ("gelu", "gelu_python")


@dataclass(frozen=True)
class Companions:
    """What was found beside a file; empty where there is nothing."""

    file: str
    config: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, object] = field(default_factory=dict)


def read_companions(path: Path, file: str) -> Companions:
    return Companions(file, _read(path.with_name(CONFIG), file), _read(path.with_name(PROCESSOR), file))


def check_config(beside: Companions, architecture: str, classes: Sequence[str]) -> None:
    """`ModelError` where the checkpoint's own config describes another network, or its classes in another order."""
    heads = parse(architecture)[1].get("h")
    activation, its = beside.config.get("hidden_act"), beside.config.get("num_attention_heads")
    if heads and isinstance(activation, str) and activation not in _GELU:
        raise _misfit(beside, "hidden_act", "gelu", activation, "Transformers here compute GELU: offer a model that does.")
    if heads and type(its) is int and its > 0 and its != heads:
        raise _misfit(beside, "num_attention_heads", str(heads), str(its), "Say --architecture with its heads, such as vit-h4.")
    for name in ("id2label", "label_names", "labels"):
        listed = _rows(beside.config.get(name))
        if listed != list(classes) and sorted(listed) == sorted(classes):
            first = next(i for i, (given, ours) in enumerate(zip(listed, classes, strict=True)) if given != ours)
            raise _misfit(
                beside,
                name,
                f"{classes[first]!r} in row {first}",
                repr(listed[first]),
                "List classes in the order of the heads' rows, the same for all offers.",
            )


def declared_pixels(beside: Companions) -> Pixels | None:
    """How the checkpoint's own files scale RGB in [0, 1], or None where they do not give it.

    transformers computes (255 u f - mean) / deviation, with f = 1/255 unless set, and 1 where nothing is rescaled.
    """
    processor, card = beside.processor, beside.config.get("pretrained_cfg", beside.config)
    times = 255 * _number(beside, "rescale_factor", processor.get("rescale_factor", 1 / 255))
    times = times if processor.get("do_rescale", True) else 255.0
    if times < 1e-3:
        raise _unclear(beside, "rescale_factor", "a number such as 1/255", str(processor.get("rescale_factor")))
    if processor.get("do_normalize") is False:
        return _scaled(beside, "do_normalize", (0.0,) * 3, (1.0,) * 3, times)
    if "image_mean" in processor and "image_std" in processor:
        mean, deviation = (_rgb(beside, name, processor[name]) for name in ("image_mean", "image_std"))
        return _scaled(beside, "image_mean", mean, deviation, times)
    if isinstance(card, Mapping) and "mean" in card and "std" in card:
        return _scaled(beside, "mean", _rgb(beside, "mean", card["mean"]), _rgb(beside, "std", card["std"]), 1.0)
    return None


def _scaled(beside: Companions, name: str, mean: Sequence[float], deviation: Sequence[float], times: float) -> Pixels:
    found = tuple(value / times for value in mean), tuple(value / times for value in deviation)
    if not all(0 <= value <= 1 for value in found[0]) or not all(1e-3 <= value <= 10 for value in found[1]):
        raise _unclear(beside, name, "a mean of RGB between 0 and 1, and its deviation", str(found))
    return found


def _rgb(beside: Companions, name: str, given: object) -> tuple[float, ...]:
    """One number for each color; a single one is for all of them."""
    values = given if isinstance(given, list) else [given]
    if len(values) not in (1, 3):
        raise _unclear(beside, name, "three numbers, or one for all colors", str(given))
    return tuple(_number(beside, name, value) for value in (values if len(values) == 3 else 3 * values))


def _number(beside: Companions, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1e4:  # NaN is not, either
        raise _unclear(beside, name, "a number from 0 to 10,000", str(value))
    return float(value)


def _rows(names: object) -> list[str]:
    """Class names in the order of the head's rows, listed or by row; none where they are not given."""
    if isinstance(names, Mapping) and all(str(key).isdecimal() and len(str(key)) < 10 for key in names):
        names = [names[key] for key in sorted(names, key=int)]
    return [str(name) for name in names] if isinstance(names, list) else []


def _misfit(beside: Companions, name: str, expected: str, got: str, fix: str) -> ModelError:
    return ModelError(
        f"the config.json beside {beside.file} describes another model",
        field=name,
        expected=f"{name} {expected}",
        got=got[:60],
        fix=fix,
    )


def _unclear(beside: Companions, name: str, expected: str, got: str) -> ModelError:
    return ModelError(
        f"'{name}' in the files beside {beside.file} cannot be understood",
        field=name,
        expected=expected,
        got=got[:60],
        fix="Repair it, or offer the safetensors file from a folder without it.",
    )


def _read(path: Path, file: str) -> Mapping[str, Any]:
    """A JSON object; nothing where there is none. One that cannot be read is no reason to trust the file beside it."""
    if not path.is_file():
        return {}
    got = "more than that"
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig")) if path.stat().st_size <= _LARGEST else None
    except (OSError, ValueError, RecursionError) as error:
        found, got = None, str(error)[:60]
    if not isinstance(found, Mapping):
        raise ModelError(
            f"the {path.name} beside {file} cannot be read",
            field=path.name,
            expected=f"a JSON object of at most {_LARGEST:,} bytes",
            got=got if found is None else "no object",
            fix="Repair it, or offer the safetensors file from a folder without it.",
        )
    return found
