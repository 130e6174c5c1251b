"""Mutants by hand: what is changed, what is left alone, and the interval of a share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import osfl
from benchmarks.mutation import everything, shuffled, summary, wilson
from benchmarks.mutation_sites import TARGETS, mutants_of, mutated

SOURCE = '''
def loss(x, y, momentum=0.9):
    """1 + 1 stays as it is."""
    spend(2 * x)
    if x < 3:
        raise ValueError(x + 1)
    total = -x.clamp(0.5).square() + kl(x, y, reduction="sum")
    total.backward()
    return total / 1e-12


def other(x):
    return x * 2
'''


def changes(functions: str = "loss") -> list[str]:
    return [mutant.what for mutant in mutants_of(SOURCE, "file.py", functions)]


def test_each_place_is_changed_once_in_each_way() -> None:
    assert changes() == [
        "if x < 3 -> if not",
        "x < 3 -> x <= 3",
        "3 -> 4",
        "-x.clamp(0.5).square() + kl(x, y, reduction='sum') -> -x.clamp(0.5).square() - kl(x, y, reduction='sum')",
        "-x.clamp(0.5).square() -> x.clamp(0.5).square()",
        "x.clamp(0.5).square() -> x.clamp(0.5)",
        "x.clamp(0.5) -> x",
        "0.5 -> 1.0",
        "kl(x, y, reduction='sum') -> kl(y, x, reduction='sum')",
        "kl(x, y, reduction='sum') -> kl(x, y)",
        "total.backward() -> pass",
        "total / 1e-12 -> total * 1e-12",
    ]
    assert changes("other") == ["x * 2 -> x / 2", "2 -> 3"] and len(changes("*")) == 14


def test_a_mutant_is_the_file_with_that_change_alone() -> None:
    found = mutants_of(SOURCE, "file.py", "*")
    texts = [mutated(SOURCE, mutant) for mutant in found]
    assert len(set(texts)) == len(found)
    assert "return x / 2" in texts[-2] and "total.backward()" in texts[-2]
    assert "pass" in texts[10] and "total.backward()" not in texts[10]


def test_equal_changes_of_one_function_have_names_of_their_own() -> None:
    found = mutants_of("def f(x):\n    return x + 1 + (x + 1)\n", "file.py")
    assert len({mutant.name for mutant in found}) == len(found) == 5


def test_every_target_exists_and_the_order_is_fixed() -> None:
    root = Path(osfl.__file__).parent
    for file, names in TARGETS.items():
        found = {mutant.function for mutant in mutants_of((root / file).read_text(encoding="utf-8"), file, names)}
        for name in names.split() if names != "*" else []:
            assert any(function == name or function.startswith(f"{name}.") for function in found), (file, name)
    mutants = everything()
    assert shuffled(mutants) == shuffled(mutants) != mutants and set(shuffled(mutants)) == set(mutants)
    assert len({mutant.name for mutant in mutants}) == len(mutants)


def test_the_interval_of_a_share_and_what_is_counted() -> None:
    assert wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    mutants = [replace(mutants_of(SOURCE, "file.py", "other")[0], what=str(i)) for i in range(4)]
    found = {mutant.name: {"killed": i != 2} for i, mutant in enumerate(mutants)}
    reported = summary(mutants, found, 40)
    assert (reported["mutants"], reported["sample"], reported["killed"], reported["killed_share"]) == (40, 4, 3, 0.75)
    assert list(reported["survivors"]) == [mutants[2].name]
