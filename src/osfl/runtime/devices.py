"""How a loop on an accelerator gets what is drawn on the CPU, and what an accelerator lacks.

Random numbers come from CPU generators, whatever the device, so that users with and without a GPU draw the same ones. A loop
that copied them at each step would make the device wait; so they are drawn some steps ahead and copied together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from osfl.core.errors import DeviceError

WITHOUT_FLOAT64 = {"mps"}  # kinds of devices
AHEAD_BYTES = 64 << 20  # of numbers that are drawn before their step comes
_LOST = ("CUDA error", "cuDNN error", "NCCL error", "HIP error", "MPS backend")  # beginnings of what drivers report


def ahead(draws: Iterable[Sequence[Any]], device: torch.device) -> Iterator[Sequence[Any]]:
    """What each step of a loop takes from the CPU (indices, random numbers), on the device: many steps in one transfer.
    What is no tensor stays what it is.

    The draws are made in their order, one step's after the other's; so a loop gets the numbers that it would draw itself, if
    nothing else uses the generator meanwhile. On a CPU nothing is drawn before its step.
    """
    if device.type == "cpu":
        yield from draws
        return
    waiting: list[Sequence[object]] = []
    size = 0
    for drawn in draws:
        waiting.append(drawn)
        size += sum(part.nbytes for part in drawn if isinstance(part, torch.Tensor))
        if size >= AHEAD_BYTES:
            yield from _moved(waiting, device)
            waiting, size = [], 0
    yield from _moved(waiting, device)


def _moved(steps: Sequence[Sequence[object]], device: torch.device) -> Iterator[Sequence[object]]:
    """Tensors of one place in all steps travel as one."""
    return zip(*(_together(parts, device) for parts in zip(*steps, strict=True)), strict=True)


def _together(parts: Sequence[Any], device: torch.device) -> Sequence[Any]:
    if not isinstance(parts[0], torch.Tensor):
        return parts
    flat = torch.cat([part.flatten() for part in parts]).to(device)
    cut = torch.split(flat, [part.numel() for part in parts])
    return [one.view(part.shape) for one, part in zip(cut, parts, strict=True)]


def failure(error: BaseException, device: torch.device | str) -> DeviceError | None:
    """What a failure of the device means for who runs this; None for any other failure."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(
            f"{device} ran out of memory",
            field="memory",
            got=text,
            fix="Let training use less of it (`--memory 8GB`), or lower the setting that says how many images a step has "
            "(batch_size, edm_batch). Then run the same command again: what was finished is kept.",
        )
    if isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and text.startswith(_LOST)):
        return DeviceError(
            f"{device} stopped answering",
            field="device",
            got=text,
            fix="Look at the driver's log, and run the same command again: what was finished is kept.",
        )
    return None


@contextlib.contextmanager
def on_device(device: torch.device | str) -> Iterator[None]:
    """A device that fails inside says what to do about it."""
    try:
        yield
    except RuntimeError as error:
        explained = failure(error, device)
        if explained is None:
            raise
        raise explained from error


def exact(device: torch.device) -> torch.device:
    """Where 64-bit floats are computed: on the device, but on the CPU where it has none."""
    return device if wide(device) == torch.float64 else torch.device("cpu")


def place_for(model: torch.nn.Module, device: torch.device) -> torch.device:
    """The device, but the CPU for a network with 64-bit floats where the device has none."""
    held = (*model.parameters(), *model.buffers())
    return exact(device) if any(one.dtype == torch.float64 for one in held) else device


def wide(device: torch.device) -> torch.dtype:
    """The widest floats of a device: 64 bits, but 32 on Apple's, which has no others."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64
