"""A pretend accelerator for machines without one: the device `pretend`, whose tensors keep their numbers on the CPU.

It stops where a GPU stops: an operation on tensors of two devices, a CPU generator for a tensor of the device, `.numpy()` of
a tensor of the device, and, if asked, float64 (Apple's MPS has none) or an allocation beyond its memory. It counts what a GPU
waits for: FLOPs by the device that does them, and transfers between the two devices, each with the phase and the line of code.

    with pretend() as log:
        x = torch.zeros(3, device="pretend")
        x + torch.zeros(3)  # raises MixedDevices

Torch leaves the dispatch key PrivateUse1 to devices of others; here its kernels are Python functions. A tensor of the device
is a wrapper (`DeviceTensor`) that reports the device and holds a CPU tensor; an operation unwraps its arguments, runs on the
CPU, and wraps the result. So results are those of the CPU, bit for bit, unless code takes another way on another device.

`pretend:1` and `pretend:2` are two devices beside each other; operations on tensors of both are refused. Torch lets such a
backend have one device only, and takes both for `pretend:0`. So a tensor of `pretend` may stand beside either: use it alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry

import osfl

NAME = "pretend"
_SOURCE = str(Path(osfl.__file__).parent) + "/"
aten = torch.ops.aten


class _Backend(_DummyBackendModule):
    """What torch asks of a device's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device_count(self) -> int:
        return 3


_setup_privateuseone_for_python_backend(NAME, _Backend())  # once a process; without tensors of the device it changes nothing
DEVICE = torch.device(NAME, 0)
_CpuGenerator = torch.Generator


class MixedDevices(RuntimeError):
    """What a GPU would refuse, with torch's message where it has one."""


@dataclass
class Log:
    """What was counted, by (phase, what, "file:line" of osfl's code)."""

    phase: str = ""
    flops: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # what: "pretend", "pretend:1" or "cpu"
    transfers: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # what: "to device", "to host"
    float64: bool = True  # False: the device has none
    memory: int = 0  # largest allocation in bytes that succeeds; 0: any

    def transferred(self) -> int:
        return sum(self.transfers.values())

    def move(self, what: str) -> None:
        self.transfers[self.phase, what, _line()] += 1

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


_log: Log | None = None  # of the block that is open


@contextlib.contextmanager
def pretend(*, float64: bool = True, memory: int = 0) -> Iterator[Log]:
    """Everything inside may use the device; what it does there, and what the CPU does beside it, is counted.

    One thread only: run rounds with `Machine(workers=1, device="pretend")`.
    """
    global _log  # the kernels of a device are global, too
    assert _log is None, "there is but one device"
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to() cannot write one kind of tensor into another
    torch.Generator = Generator  # type: ignore[misc]
    _log = Log(float64=float64, memory=memory)
    try:
        with _CountFlops(_log):
            yield _log
    finally:
        _log = None
        torch.Generator = _CpuGenerator  # type: ignore[misc]
        torch.__future__.set_swap_module_params_on_conversion(swap)


def _line() -> str:
    """The innermost line of osfl's code. A backward pass may run in a thread of its own, for which the main one waits."""
    frame: Any = sys._getframe()
    if threading.current_thread() is not threading.main_thread():
        frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        if frame.f_code.co_filename.startswith(_SOURCE):
            return f"{frame.f_code.co_filename.removeprefix(_SOURCE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


# --- tensors and generators of the device --------------------------------------------------------------------------------


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on the device. Its numbers are `raw`, a tensor on the CPU."""

    raw: torch.Tensor
    number: int  # of the device; 0: of the one that the tensors beside it are on

    @staticmethod
    def __new__(cls, raw: torch.Tensor, number: int = 0) -> DeviceTensor:
        if _log is not None and not _log.float64 and raw.dtype == torch.float64:
            raise TypeError(f"Cannot convert a tensor to float64 as the {NAME} framework doesn't support float64")
        if _log is not None and 0 < _log.memory < raw.nbytes:
            raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {raw.nbytes} bytes.")
        with torch.inference_mode(False):  # so that autograd treats it as it treats `raw`
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.size(),
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                layout=raw.layout,
                device=DEVICE,
            )
        made.raw, made.number = raw, number
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME, self.number)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.raw!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            twin = DeviceTensor(self.raw.detach().clone(memory_format=torch.preserve_format), self.number)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = (
                torch.nn.Parameter(twin, self.requires_grad) if is_parameter else twin.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() to copy it to host memory first."
        )

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, place: Any) -> Any:
        parts = place if isinstance(place, tuple) else (place,)
        return super().__getitem__(tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


_device_generators: dict[int, torch.Generator] = {}  # kept, so that no other gets their address


def _address(generator: Any) -> int:
    return int(generator._cdata)


class _AnyGenerator(type(_CpuGenerator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _CpuGenerator)


class Generator(_CpuGenerator, metaclass=_AnyGenerator):
    """`torch.Generator`, which may also be one of the device."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        if not _is_ours(device):
            return _CpuGenerator(device)
        made = _CpuGenerator()
        _device_generators[_address(made)] = made
        return made


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


# --- one operation -------------------------------------------------------------------------------------------------------

_COPIES = ("_to_copy", "copy_", "_copy_from")  # between devices, on purpose
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")  # take indices from the CPU, too
_SCALARS = ("where", "masked_fill", "masked_fill_", "fill_", "index_fill_", "lerp", "clamp")  # take a CPU tensor of one number
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")  # for a value


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the device: at least one argument is there, or the result shall be."""
    name, to = func.overloadpacket.__name__, kwargs.get("device")
    if name in ("is_pinned", "_pin_memory"):
        return args[0] if name == "_pin_memory" else False
    if name not in _COPIES:
        _check(func, name, args, kwargs)
    _count_transfers(name, args, to)
    on_host = name == "_local_scalar_dense" or (to is not None and not _is_ours(to))
    options = {key: _raw(value) for key, value in kwargs.items()}
    options |= {"device": torch.device("cpu")} if _is_ours(to) else {}
    options |= {"pin_memory": False} if options.get("pin_memory") else {}
    result = func(*map(_raw, args), **options)
    if on_host:
        return result
    number = _number(to) if _is_ours(to) else max((one.number for one in _ours(args, kwargs)), default=0)
    return _wrapped(result, _written(func, args, kwargs) if func._schema.is_mutable else {}, number)


def _number(device: Any) -> int:
    return torch.device(device).index or 0


def _ours(args: Any, kwargs: Any) -> list[DeviceTensor]:
    return [one for one in _tensors(*args, *kwargs.values()) if isinstance(one, DeviceTensor)]


def _tensors(*values: Any) -> list[torch.Tensor]:
    """All tensors among an operation's arguments, which are tensors, or lists of them, or others."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


def _raw(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_raw(one) for one in value]
    return value.raw if isinstance(value, DeviceTensor) else value


def _wrapped(value: Any, written: Mapping[int, torch.Tensor], number: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_wrapped(one, written, number) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    return written[id(value)] if id(value) in written else DeviceTensor(value, number)


def _written(func: Any, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
    """The tensors that the operation writes to, by what they hold: they are results as they are."""
    given = [*zip(func._schema.arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in func._schema.arguments)]
    tensors = _tensors(*(value for one, value in given if one.alias_info is not None and one.alias_info.is_write))
    for tensor in tensors:
        if tensor.shape != _raw(tensor).shape or tensor.stride() != _raw(tensor).stride():
            _follow(tensor)
    return {id(_raw(tensor)): tensor for tensor in tensors}


def _follow(tensor: Any) -> None:
    """Give a wrapper the shape that an operation gave its numbers in place."""
    raw = tensor.raw
    with no_dispatch():
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            aten.as_strided_.default(tensor, raw.shape, raw.stride(), raw.storage_offset())
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def _check(func: Any, name: str, args: Any, kwargs: Any) -> None:
    for generator in (*args, kwargs.get("generator")):
        if isinstance(generator, _CpuGenerator) and _address(generator) not in _device_generators:
            raise MixedDevices(f"{func}: Expected a '{NAME}' device type for generator but found 'cpu'")
    numbers = {one.number for one in _ours(args, kwargs)} - {0}
    if len(numbers) > 1:
        raise MixedDevices(f"{func}: Expected all tensors to be on the same device, but found {NAME}:1 and {NAME}:2, not cpu!")
    tensors = _tensors(*args, *kwargs.values())
    if name in _INDEXING:
        if not isinstance(args[0], DeviceTensor):
            raise MixedDevices(f"{func}: indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        tensors = _tensors(*args[2:])
    wrong = [t for t in tensors if not isinstance(t, DeviceTensor)]
    if wrong and (name in (*_SCALARS, *_INDEXING) or torch.Tag.pointwise in func.tags):
        wrong = [t for t in wrong if t.dim() > 0]
    if tensors and func._schema.is_mutable and not isinstance(tensors[0], DeviceTensor):
        wrong.append(tensors[0])  # one number on the CPU can be read, not written
    if wrong:
        raise MixedDevices(
            f"{func}: Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and cpu!"
            f" (on cpu: {[tuple(t.shape) for t in wrong]})"
        )


def _count_transfers(name: str, args: Any, to: Any) -> None:
    if _log is None:
        return
    if name == "_to_copy":
        before, after = isinstance(args[0], DeviceTensor), isinstance(args[0], DeviceTensor) if to is None else _is_ours(to)
    elif name in ("copy_", "_copy_from"):
        after, before = isinstance(args[0], DeviceTensor), isinstance(args[1], DeviceTensor)
    else:
        before, after = name in _WAITS, False
    if before != after:
        _log.move("to device" if after else "to host")
    elif before and name in _COPIES:
        there = {_number(to)} if name == "_to_copy" and to is not None else {args[0].number}
        came = {args[0 if name == "_to_copy" else 1].number}
        if len((there | came) - {0}) > 1:
            _log.move("to another device")
    if name in _INDEXING:
        for index in args[1]:
            if isinstance(index, torch.Tensor) and not isinstance(index, DeviceTensor):
                _log.move("to device")
            elif isinstance(index, torch.Tensor) and index.dtype == torch.bool and name == "index":
                _log.move("to host")  # how many are true decides how large the result is


# --- kernels: what makes tensors of none -----------------------------------------------------------------------------------


def _factory(make: Any) -> Callable[..., torch.Tensor]:
    def kernel(*args: Any, **options: Any) -> torch.Tensor:
        raw = make(*args, **{**options, "device": torch.device("cpu"), "pin_memory": False})
        return DeviceTensor(raw, _number(options.get("device") or NAME))

    return kernel


_kernels = torch.library.Library("aten", "IMPL")
_MAKERS = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace")
for _name in (*_MAKERS, "full", "eye", "eye.m", "zeros", "ones", "scalar_tensor"):
    _packet, _, _overload = _name.partition(".")
    _kernels.impl(_name, _factory(getattr(getattr(aten, _packet), _overload or "default")), "PrivateUse1")
_kernels.impl("_to_copy", lambda *args, **kwargs: _run(aten._to_copy.default, args, kwargs), "PrivateUse1")  # torch.tensor()
_others = torch.library.Library("_", "IMPL")
_others.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")


# --- 16 bits: the operations that autocast computes in them ----------------------------------------------------------------

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def _lowered(operation: Any) -> Callable[..., torch.Tensor]:
    def kernel(*args: Any, **options: Any) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            narrow = (a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a for a in args)
            made: torch.Tensor = operation(*narrow, **options)
            return made

    return kernel


for _name in ("conv2d", "convolution", "linear", "matmul", "mm", "bmm", "addmm"):
    _kernels.impl(_name, _lowered(getattr(aten, _name).default), "AutocastPrivateUse1")
_others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


# --- FLOPs -----------------------------------------------------------------------------------------------------------------


class _CountFlops(TorchDispatchMode):
    """FLOPs by phase and device, with torch's own formulas."""

    def __init__(self, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        if packet not in flop_registry:
            if _is_composite(func):  # inference mode shows operations before they are taken apart
                with self:
                    return func.decompose(*args, **kwargs)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        tensors = _tensors(*args)
        if not any(t.is_meta for t in tensors):
            numbers = [t.number for t in tensors if isinstance(t, DeviceTensor)]
            place = "cpu" if not numbers else f"{NAME}:{max(numbers)}" if any(numbers) else NAME
            count = _backward_flops if packet is aten.convolution_backward else flop_registry[packet]
            self.log.flops[self.log.phase, place, _line()] += count(*args, **kwargs, out_val=out)
        return out


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _backward_flops(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any) -> int:
    """Each gradient of a convolution costs as much as the forward pass; torch's formula overlooks groups."""
    transposed, wanted = rest[4], rest[7]
    return int(2 * (x if transposed else grad).numel() * weight[0].numel() * (int(wanted[0]) + int(wanted[1])))
