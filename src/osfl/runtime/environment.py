"""What a result depends on besides the plan: versions, processor, device."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy
import torch

from osfl.core.errors import UsageError
from osfl.core.version import __version__
from osfl.runtime.machine import Machine


def device_named(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, `mps` or `auto`, checked before any work starts; of several devices the first."""
    return devices_named(name)[0]


def devices_named(names: str) -> tuple[torch.device, ...]:
    """One device, or several of a kind: `cuda:0,cuda:1`, or all with `cuda:all`."""
    kind, colon, number = names.partition(":")
    if colon and number == "all":
        kind = _one(kind).type
        return tuple(torch.device(kind, place) for place in range(_count(kind)))
    found = tuple(_one(name.strip()) for name in names.split(","))
    if len({device.type for device in found}) > 1 or len({device.index or 0 for device in found}) < len(found):
        raise UsageError(
            f"--device {names!r}: expected different devices of one kind",
            field="device",
            fix="For example --device cuda:0,cuda:1, or cuda:all. Results of different kinds differ in their last bits.",
        )
    return found


def _one(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in _kinds():
        raise UsageError(f"there is no device {name!r}", field="device", fix="Use cpu, cuda, cuda:1, cuda:all, mps or auto.")
    count = _count(device.type)
    if count == 0:
        raise UsageError(f"this machine has no usable {device.type} device", field="device", fix="Use --device cpu.")
    if (device.index or 0) >= count:
        raise UsageError(
            f"this machine has no device {name!r}: it has {count} of kind {device.type}",
            field="device",
            fix=f"Use --device {device.type}:{count - 1} or a lower number; numbers begin with 0.",
        )
    return device


def _kinds() -> set[str]:
    """Kinds of devices that networks can compute on here; another maker may have registered one of its own with torch."""
    registered = torch._C._get_privateuse1_backend_name()
    return {"cpu", "cuda", "mps"} | ({registered} if hasattr(torch, registered) else set())


def _count(kind: str) -> int:
    """How many devices of this kind the machine has."""
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return 1 if kind == "cpu" else int(getattr(torch, kind).device_count())


def numerics() -> dict[str, str]:
    """What the last bits of a computation on the CPU depend on: equal here, equal bytes."""
    return {
        "osfl": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def describe_environment(machine: Machine, workers: int) -> dict[str, object]:
    return {
        "osfl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        **machine.bits(),
        "threads": torch.get_num_threads(),
        "workers": workers,
    }


def _processor() -> str:
    """The processor's name as Linux knows it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
