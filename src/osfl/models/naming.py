"""Modules as named tensors and back: the contents of an upload, and the contract for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from osfl.core.errors import OsflError
from osfl.core.types import Contract, Field
from osfl.runtime.payloads import DTYPES

if TYPE_CHECKING:
    from osfl.core.types import Tensors


class ModelError(OsflError):
    """Tensors that do not fit the model they are meant for."""

    title = "Model"


def named(model: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers on the CPU, in plain memory order, as `prefix/<state dict key>`."""
    state = model.state_dict()
    return {
        f"{prefix}/{key}": value.detach().to("cpu", copy=True).contiguous(memory_format=torch.contiguous_format)
        for key, value in state.items()
    }


def load_named(model: nn.Module, tensors: Tensors, prefix: str) -> None:
    """Copy the tensors under `prefix/` into the model; names, shapes and dtypes must match exactly."""
    start = f"{prefix}/"
    given = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    state = model.state_dict()
    _check_names(state, given, prefix)
    for key, target in state.items():  # all are checked before the first is written
        _check_tensor(f"{prefix}/{key}", target, given[key])
    with torch.no_grad():
        for key, target in state.items():
            target.copy_(given[key])  # into place, so that channels_last and the device stay


def contract_of(model: nn.Module, prefix: str) -> Contract:
    """Exactly the tensors that `named(model, prefix)` gives."""
    state = model.state_dict()
    return {f"{prefix}/{key}": Field(DTYPES[value.dtype], tuple(value.shape)) for key, value in state.items()}


def halved(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The same tensors with 16 bits a number, for links where bytes count; whole numbers stay."""
    return {name: value.half() if value.is_floating_point() else value for name, value in tensors.items()}


def widened(tensors: Tensors) -> dict[str, torch.Tensor]:
    """With 32 bits a number, which models compute with."""
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def halved_contract(contract: Contract) -> Contract:
    """What `halved` makes of tensors of this contract."""
    return {name: replace(field, dtype="F16") if field.dtype == "F32" else field for name, field in contract.items()}


def _check_names(state: Tensors, given: Tensors, prefix: str) -> None:
    missing, extra = sorted(state.keys() - given.keys()), sorted(given.keys() - state.keys())
    if not missing and not extra:
        return
    what = [f"lacks {_some(missing, prefix)}"] if missing else []
    what += [f"has {_some(extra, prefix)}, which the model does not"] if extra else []
    raise ModelError(
        f"the given set of tensors {' and '.join(what)}",
        field=f"{prefix}/{(missing or extra)[0]}",
        expected=f"{len(state)} tensors under '{prefix}/'",
        got=len(given),
        fix="Build the model with the architecture that the tensors were trained with.",
    )


def _some(keys: list[str], prefix: str) -> str:
    shown = ", ".join(f"'{prefix}/{key}'" for key in keys[:3])
    return shown + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _check_tensor(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    if target.shape != value.shape or target.dtype != value.dtype:
        raise ModelError(
            f"tensor '{name}' does not fit",
            field=name,
            expected=f"{DTYPES[target.dtype]} {list(target.shape)}",
            got=f"{DTYPES.get(value.dtype, str(value.dtype))} {list(value.shape)}",
            fix="Build the model with the architecture, image size and classes that the tensors were trained with.",
        )
