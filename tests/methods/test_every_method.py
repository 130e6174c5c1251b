"""Shared checks over the registry: a new method file is tested here without a line being added."""

from pathlib import Path

import pytest

from osfl.checks import CHECKS
from osfl.registry import names


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", names())
def test_every_method(method: str, check: str, tmp_path: Path) -> None:
    CHECKS[check](method, tmp_path)
