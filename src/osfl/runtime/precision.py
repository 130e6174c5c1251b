"""The floats that networks compute with: fp32, tf32, bf16 or fp16. It changes how, not what, so it is part of no plan.

With bf16 and fp16 a network's own layers compute in 16 bits (torch's autocast) and its answers are 32-bit floats again;
weights, losses, optimizers, statistics and closed forms stay in 32 or 64 bits. `mixed` marks where networks are entered;
`descend` and `gradients` are how a loop goes backward that may compute in 16 bits: in fp16, which has few exponents, losses are
scaled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import ParamSpec, TypeVar, cast, get_args

import torch

from osfl.core.errors import TrainingError, UsageError
from osfl.runtime.machine import Precision

P = ParamSpec("P")
Out = TypeVar("Out")
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SCALE = 2.0**10  # of losses whose gradients no GradScaler adapts
_current: ContextVar[str] = ContextVar("osfl_precision", default="fp32")


def current_precision() -> str:
    return _current.get()


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse what is no precision, and what this device cannot compute."""
    known = get_args(Precision)
    if precision not in known:
        raise UsageError(f"there is no precision {precision!r}", field="precision", fix=f"Choose one of {', '.join(known)}.")
    if precision == "tf32" and device.type != "cuda":
        raise UsageError(
            f"tf32 is a format of NVIDIA's tensor cores; {device.type} has none",
            field="precision",
            fix="Use --precision fp32, or --device cuda.",
        )
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UsageError("this GPU has no bf16", field="precision", fix="Use --precision fp16.")


@contextlib.contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """Networks compute in this precision here, and in workers that are started here."""
    token, before = _current.set(precision), (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    # torch's own default lets convolutions round to tf32, so that a GPU is further from a CPU than fp32 says
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
        _current.reset(token)


def half(device: torch.device) -> torch.dtype | None:
    """The 16-bit floats that networks compute with now on this device; None for 32 bits."""
    return None if device.type == "meta" else _HALF.get(_current.get())


def mixed(work: Callable[P, Out]) -> Callable[P, Out]:
    """A method of a network (self, x, ...): its layers compute in the precision that is asked for, its answers have 32 bits."""

    @functools.wraps(work)
    def entered(*args: P.args, **options: P.kwargs) -> Out:
        device = cast(torch.Tensor, args[1]).device
        dtype = half(device)
        if dtype is None:
            return work(*args, **options)
        with torch.autocast(device.type, dtype):
            found = work(*args, **options)
        return cast(Out, _wide(found))

    return entered


def _wide(found: object) -> object:
    if isinstance(found, tuple):
        return tuple(_wide(one) for one in found)
    return found.float() if isinstance(found, torch.Tensor) and found.dtype in _HALF.values() else found


# --- going backward ------------------------------------------------------------------------------------------------------


def backward(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Add the loss' gradients to those that the parameters have."""
    scaler = _scaler(optimizer, loss.device)
    (loss if scaler is None else scaler.scale(loss)).backward()


def advance(optimizer: torch.optim.Optimizer, device: torch.device, adjust: Callable[[], object] | None = None) -> None:
    """One step along the gradients; `adjust` may change them first. In fp16, gradients that overflowed make no step."""
    scaler = _scaler(optimizer, device)
    if scaler is not None:
        scaler.unscale_(optimizer)
    if adjust is not None:
        adjust()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor, adjust: Callable[[], object] | None = None) -> None:
    """One step of an optimizer down this loss."""
    optimizer.zero_grad(set_to_none=True)
    backward(optimizer, loss)
    advance(optimizer, loss.device, adjust)


def _scaler(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.amp.GradScaler | None:
    """The optimizer's own, which remembers how far this loss may be scaled; None but in fp16."""
    if half(device) != torch.float16:
        return None
    if not hasattr(optimizer, "osfl_scaler"):
        optimizer.osfl_scaler = torch.amp.GradScaler(device.type)  # type: ignore[attr-defined]
    return cast(torch.amp.GradScaler, optimizer.osfl_scaler)  # type: ignore[attr-defined]


def scaling(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """How far this optimizer's losses are scaled, to be kept beside its state; empty but in fp16."""
    return optimizer.osfl_scaler.state_dict() if hasattr(optimizer, "osfl_scaler") else {}


def restore_scaling(optimizer: torch.optim.Optimizer, device: torch.device, kept: dict[str, object]) -> None:
    scaler = _scaler(optimizer, device)
    if scaler is not None and kept:
        scaler.load_state_dict(kept)


def gradients(loss: torch.Tensor, inputs: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """`torch.autograd.grad`, whose small numbers survive fp16."""
    if half(loss.device) != torch.float16:
        return torch.autograd.grad(loss, inputs)
    return tuple(one / _SCALE for one in torch.autograd.grad(loss * _SCALE, inputs))


# --- what overflows in 16 bits is computed in 32 ---------------------------------------------------------------------------


def with_fallback(work: Callable[[], Out], broken: Callable[[Out], str], note: Callable[[str], object]) -> Out:
    """The work, and once more in fp32 where 16 bits were not enough for it; `note` gets a sentence about that.

    `broken` names what is not finite in the outcome, or "".
    """
    precision = current_precision()
    if precision not in _HALF:
        return work()
    try:
        made = work()
        why = broken(made)
        why = why and f"{why} is not finite"
    except TrainingError as error:
        why = error.reason
    if not why:
        return made
    note(f"{precision} overflowed ({why}), so this phase was computed in fp32")
    with computing_in("fp32"):
        return work()
