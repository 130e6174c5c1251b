"""Check that an upload holds exactly the tensors of its contract: names, dtypes, shapes."""

from __future__ import annotations

from collections.abc import Mapping

from osfl.core.errors import Rejected
from osfl.core.names import is_digest, is_tensor_name, shown
from osfl.core.tensors import WIDTH
from osfl.core.types import Contract, Field, Json
from osfl.wire.bundle import TensorEntry

RETRAIN = "The plan defines what an upload holds; retrain with `osfl client plan.toml` or agree on another plan."
REPACK = "Another program made this file, or it was changed in transit: copy it again from where it was made."
MOST_DIMENSIONS = 16


def read_entries(value: Json) -> dict[str, TensorEntry]:
    """The manifest's list of tensors, every entry well formed."""
    if not isinstance(value, dict):
        raise _malformed("tensors", "the manifest's list of tensors is not an object", "an object", value)
    return {name: _read_line(name, entry) for name, entry in value.items()}


def _read_line(name: str, value: Json) -> TensorEntry:
    if not is_tensor_name(name):
        raise _malformed("tensors", "a tensor has an unusable name", "1 to 200 printable ASCII characters", name)
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "sha256"}:
        raise _malformed(name, f"the manifest's entry of tensor '{name}' is malformed", "dtype, shape, sha256", value)
    dtype, shape, sha256 = value["dtype"], value["shape"], value["sha256"]
    if not isinstance(dtype, str) or dtype not in WIDTH:
        raise _malformed(f"{name}.dtype", f"tensor '{name}' has an unknown dtype", ", ".join(WIDTH), dtype)
    if not _is_shape(shape):
        expected = f"at most {MOST_DIMENSIONS} sizes"
        raise _malformed(f"{name}.shape", f"tensor '{name}' has no valid shape", expected, shape)
    if not is_digest(sha256):
        raise _malformed(f"{name}.sha256", f"tensor '{name}' has no valid hash", "64 lower-case hex digits", sha256)
    return TensorEntry(dtype, tuple(shape), sha256)


def _is_shape(value: Json) -> bool:
    sizes = isinstance(value, list) and len(value) <= MOST_DIMENSIONS
    return sizes and all(type(size) is int and size >= 0 for size in value)


def check_contract(entries: Mapping[str, TensorEntry], contract: Contract) -> None:
    """Exactly the contract's names; optional ones may be missing, and so may say nothing about a free dimension."""
    for name, promised in sorted(contract.items()):
        if promised.required and name not in entries:
            raise _broken(name, f"tensor '{name}' is missing", _described(promised), "nothing")
    for name in sorted(entries):
        if name not in contract:
            raise _broken(name, f"tensor '{name}' is not part of the contract", f"only {_names(contract)}", name)
    _check_together(entries, contract)
    free: dict[str, tuple[int, str]] = {}
    for name, entry in sorted(entries.items()):
        _check_line(name, entry, contract[name], free)


def _check_together(entries: Mapping[str, TensorEntry], contract: Contract) -> None:
    """Groups are whole, and of each choice something is there."""
    groups = {contract[name].group: name for name in sorted(entries, reverse=True) if contract[name].group}
    for name, promised in sorted(contract.items()):
        if promised.group in groups and name not in entries:
            reason = f"tensor '{name}' is missing, which comes together with tensor '{groups[promised.group]}'"
            raise _broken(name, reason, _described(promised), "nothing")
    made = {contract[name].choice for name in entries}
    for name, promised in sorted(contract.items()):
        if promised.choice and promised.choice not in made:
            offered = {other: entry for other, entry in contract.items() if entry.choice == promised.choice}
            raise _broken(name, f"nothing of '{promised.choice}' is there", f"one of {_names(offered)}", "nothing")


def _check_line(name: str, entry: TensorEntry, promised: Field, free: dict[str, tuple[int, str]]) -> None:
    if entry.dtype != promised.dtype:
        raise _broken(f"{name}.dtype", f"tensor '{name}' has the wrong dtype", promised.dtype, entry.dtype)
    fits = len(entry.shape) == len(promised.shape) and all(
        isinstance(want, str) or want == size for want, size in zip(promised.shape, entry.shape, strict=True)
    )
    if not fits:
        expected = f"[{', '.join(map(str, promised.shape))}]"
        raise _broken(f"{name}.shape", f"tensor '{name}' has the wrong shape", expected, shown(list(entry.shape)))
    for want, size in zip(promised.shape, entry.shape, strict=True):
        if isinstance(want, str):
            _check_free(name, want, size, free)


def _check_free(name: str, dimension: str, size: int, free: dict[str, tuple[int, str]]) -> None:
    expected, other = free.setdefault(dimension, (size, name))
    if size != expected:
        reason = f"tensor '{name}' disagrees with tensor '{other}' about the dimension '{dimension}'"
        raise _broken(f"{name}.shape", reason, expected, size)


def _described(promised: Field) -> str:
    return f"{promised.dtype} [{', '.join(map(str, promised.shape))}]"


def _names(contract: Contract) -> str:
    first = ", ".join(sorted(contract)[:4]) or "no tensors"
    return first if len(contract) <= 4 else f"{first} and {len(contract) - 4} more"


def _broken(field: str, reason: str, expected: object, got: object) -> Rejected:
    return Rejected(reason, field=field, expected=expected, got=got, fix=RETRAIN)


def _malformed(field: str, reason: str, expected: str, got: object) -> Rejected:
    return Rejected(reason, field=field, expected=expected, got=shown(got), fix=REPACK)
