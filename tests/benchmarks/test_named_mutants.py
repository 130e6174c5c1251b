"""Mistakes by name: each can still be made, in one place, and leaves a file that Python reads."""

import ast
from pathlib import Path

import pytest

from benchmarks.named_mutants import NAMED, Named, written

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("one", NAMED, ids=lambda one: one.name)
def test_each_named_mistake_can_be_made_in_exactly_one_place(one: Named) -> None:
    before = (ROOT / "src" / "osfl" / one.file).read_text(encoding="utf-8")
    after = written(one, before)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)) and (ROOT / one.tests).exists()


@pytest.mark.parametrize(("text", "times"), [("b", 0), ("aa", 2)])
def test_a_text_that_is_not_there_once_is_named(text: str, times: int) -> None:
    with pytest.raises(SystemExit, match=rf"swapped: x\.py has 'a' {times} times, expected once"):
        written(Named("swapped", "x.py", "a", "b", "tests/x.py"), text)
    assert written(Named("swapped", "x.py", "a", "b", "tests/x.py"), "ca") == "cb"
