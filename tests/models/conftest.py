"""One compute thread: on a busy machine, threads that wait for each other are most of the time of tiny models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from osfl.runtime.workers import compute_threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield
