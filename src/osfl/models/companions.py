"""What lies beside a checkpoint and tells what tensors cannot: heads, activation, the order of classes, how pixels were scaled.

transformers writes `config.json` and `preprocessor_config.json`, timm a `config.json` with `pretrained_cfg`. All are optional,
and only what they say is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from osfl.models.architectures import parse
from osfl.models.naming import ModelError

Pixels = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of RGB in [0, 1]
_LARGEST = 4 << 20  # bytes; a config with a thousand class names has less than a hundredth of it


def check_config(file: Path, architecture: str, classes: Sequence[str]) -> None:
    """`ModelError` where the checkpoint's own config describes another network, or its classes in another order."""
    config, options = _read(file, "config.json"), parse(architecture)[1]
    activation, heads = config.get("hidden_act"), config.get("num_attention_heads")
    if isinstance(activation, str) and options and activation != "gelu":
        raise _other(file, "hidden_act", "gelu", activation, "The transformers here compute GELU: offer a model that does.")
    if isinstance(heads, int) and "h" in options and heads != options["h"]:
        raise _other(file, "num_attention_heads", str(options["h"]), str(heads), f"Say --architecture …-h{heads}.")
    told = _classes(config)
    if told != list(classes) and sorted(told) == sorted(classes):
        first = next(i for i, (its, ours) in enumerate(zip(told, classes, strict=True)) if its != ours)
        raise _other(file, "id2label" if "id2label" in config else "label_names", f"{classes[first]!r} in row {first}",
                     repr(told[first]), "List classes in the order of the heads' rows, the same for all offers.")  # fmt: skip


def told_pixels(file: Path) -> Pixels | None:
    """How the checkpoint's own files scale RGB in [0, 1]; None where they do not tell."""
    processor, card = _read(file, "preprocessor_config.json"), _read(file, "config.json").get("pretrained_cfg")
    pairs = [(processor.get("image_mean"), processor.get("image_std"))] if processor.get("do_normalize", True) else []
    pairs += [(card.get("mean"), card.get("std"))] if isinstance(card, Mapping) else []
    for mean, deviation in pairs:
        if _rgb(mean) and min(_rgb(deviation), default=0) > 0:
            return _rgb(mean), _rgb(deviation)
    return None


def _rgb(values: Any) -> tuple[float, ...]:
    numbers = isinstance(values, list) and len(values) == 3 and all(isinstance(value, int | float) for value in values)
    return tuple(map(float, values)) if numbers else ()


def _classes(config: Mapping[str, Any]) -> list[str]:
    """Class names in the order of the head's rows; none where they are not told."""
    names, rows = config.get("label_names"), config.get("id2label")
    if isinstance(rows, Mapping) and all(str(key).isdecimal() for key in rows):
        names = [rows[key] for key in sorted(rows, key=int)]
    return [str(name) for name in names] if isinstance(names, list) else []


def _other(file: Path, field: str, expected: str, got: str, fix: str) -> ModelError:
    return ModelError(f"the config.json beside {file} describes another model", field=field, expected=f"{field} {expected}",
                      got=got, fix=fix)  # fmt: skip


def _read(file: Path, name: str) -> Mapping[str, Any]:
    """A JSON object beside the file; nothing where there is none. One that cannot be read is no reason to trust the file."""
    path = file.with_name(name)
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= _LARGEST else None
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise ModelError(f"the {name} beside {file} cannot be read", field=name, expected="a JSON object of ordinary size",
                         fix="Repair it, or offer the safetensors file from a folder without it.")  # fmt: skip
    return found
