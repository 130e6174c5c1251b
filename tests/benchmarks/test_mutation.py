"""Mutants by hand: what is changed, what is left alone, and the interval of a share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import osfl
from benchmarks import mutation
from benchmarks.mutation import EACH, everything, results, sampled, shuffled, summary, wilson
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


def test_the_interval_of_a_share() -> None:
    assert wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)


def test_the_share_is_of_what_was_killed_at_first_and_changes_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = mutants_of(SOURCE, "file.py", "other")[0]
    mutants = [replace(one, what=str(i), file="large" if i < 3 else "small") for i in range(5)]
    monkeypatch.setattr(mutation, "HARMLESS", {mutants[2].name: "the same"})
    found = {mutant.name: {"killed": i != 2, "at_first": i not in (2, 4), "by": "a test"} for i, mutant in enumerate(mutants)}
    others = [replace(one, what=f"more {i}", file="large") for i in range(5)]
    reported = summary(mutants, found, [*mutants, *others])
    assert (reported["mutants"], reported["sample"], reported["harmless"]) == (10, 5, 1)
    first = reported["killed_at_first"]
    assert (first["killed"], first["of"], first["share"]) == (3, 4, 0.75)
    assert first["in_all_lines"] == 0.9  # 8 of 10 are in a file with both killed, 2 in one with half
    assert reported["killed_now"] == {"killed": 4, "of": 4, "share": 1.0}
    assert reported["survivors_at_first"] == {mutants[4].name: "killed now by a test"}
    assert reported["harmless_ones"] == {mutants[2].name: "the same"}


def test_a_change_elsewhere_leaves_the_order_of_the_others() -> None:
    before = mutants_of(SOURCE, "file.py", "loss")
    after = [*mutants_of(SOURCE, "file.py", "other"), *before]
    assert [mutant for mutant in shuffled(after) if mutant in before] == shuffled(before)


def test_the_sample_has_mutants_of_every_file() -> None:
    picked = sampled(shuffled(everything()))
    counts = Counter(mutant.file for mutant in picked)
    assert set(counts) == set(TARGETS) and max(counts.values()) == EACH


def test_what_a_mutant_was_at_first_is_kept_when_it_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (mutant,) = sampled(everything()[:1])
    killed = iter([False, True])
    monkeypatch.setattr(mutation, "STATE", tmp_path)
    monkeypatch.setattr(mutation, "prepare", lambda: None)
    monkeypatch.setattr(mutation, "copied", lambda: Path(osfl.__file__).parents[2])
    monkeypatch.setattr(mutation, "suite", lambda folder: None)
    monkeypatch.setattr(mutation, "judged", lambda *_: {"killed": next(killed), "by": "", "tests": 1})
    for tests, now in (("old", False), ("new", True)):
        monkeypatch.setattr(mutation, "digest_of", lambda folder, tests=tests: tests)
        (found,) = results([mutant], lambda line: None).values()
        assert found["killed"] is now and found["at_first"] is False


def test_a_test_file_is_measured_again_when_it_or_a_source_that_it_ran_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("src/osfl/one.py", "src/osfl/two.py", "tests/methods/test_one.py", "tests/methods/test_two.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    asked: list[str] = []

    def measure(folder: Path, name: str) -> dict[str, object]:
        asked.append(Path(name).stem)
        word = Path(name).stem.removeprefix("test_")
        lines = {f"{word}.py": {"1": [f"{name}::it"]}}
        return {"seconds": {f"{name}::it": 1.0}, "lines": lines, "ran": [f"src/osfl/{word}.py"]}

    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    monkeypatch.setattr(mutation, "STATE", tmp_path)
    monkeypatch.setattr(mutation, "_measured", measure)
    mutation.suite(tmp_path)
    assert asked == ["test_one", "test_two"]
    (tmp_path / "src/osfl/two.py").write_text("x = 2\n", encoding="utf-8")
    suite = mutation.suite(tmp_path)
    assert asked == ["test_one", "test_two", "test_two"]
    assert suite.lines == {f"{word}.py": {"1": [f"tests/methods/test_{word}.py::it"]} for word in ("one", "two")}
    (tmp_path / "tests/methods/test_one.py").write_text("x = 2\n", encoding="utf-8")
    mutation.suite(tmp_path)
    assert asked == ["test_one", "test_two", "test_two", "test_one"]
