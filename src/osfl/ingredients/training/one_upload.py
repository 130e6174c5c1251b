"""Work on one upload at a time: whatever fails there names its client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import torch

from osfl.core.errors import UNUSABLE, OsflError, RoundError, go_on_without
from osfl.core.types import ClientId, Upload
from osfl.models.output_checks import SANE
from osfl.runtime.devices import failure


@contextmanager
def working_on(client: ClientId) -> Iterator[None]:
    """Errors inside are about this client's upload, and say so."""
    try:
        yield
    except OsflError as error:
        error.client = error.client or client
        error.fix = error.fix or go_on_without(client)
        raise
    except UNUSABLE as error:
        if failure(error, torch.device("cpu")) is not None:  # of the device, not of the upload
            raise
        raise RoundError(
            f"this upload cannot be used: {type(error).__name__}: {first_line(error)}",
            client=client,
            field="upload",
            fix=go_on_without(client),
        ) from error


def by_client(uploads: Sequence[Upload]) -> Sequence[Upload]:
    """The uploads in the order of their clients' names, each still read only when it is asked for."""
    names = [upload.client for upload in uploads]
    return _InOrder(uploads, sorted(range(len(names)), key=names.__getitem__))


def picked(uploads: Sequence[Upload], places: Sequence[int]) -> Sequence[Upload]:
    """Some of the uploads, each still read only when it is asked for."""
    return _InOrder(uploads, places)


class _InOrder(Sequence[Upload]):
    def __init__(self, uploads: Sequence[Upload], order: Sequence[int]) -> None:
        self._uploads, self._order = uploads, order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Upload: ...
    @overload
    def __getitem__(self, index: slice) -> list[Upload]: ...
    def __getitem__(self, index: int | slice) -> Upload | list[Upload]:
        if isinstance(index, slice):
            return [self._uploads[place] for place in self._order[index]]
        return self._uploads[self._order[index]]


def check_sane(values: torch.Tensor, field: str) -> None:
    """What comes out of an upload must be numbers that can be learned from."""
    if values.numel() and not bool((values.abs() < SANE).all()):
        raise RoundError(
            "what it makes is beyond all bounds", field=field, expected=f"numbers below {SANE:g}", got="larger ones, or none"
        )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
