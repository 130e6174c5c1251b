"""Mutants by hand: what is changed, what is left alone, and the interval of a share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import osfl
from benchmarks import mutation
from benchmarks.mutation import EACH, asked, everything, results, sampled, shuffled, summary, wilson
from benchmarks.mutation_sites import TARGETS, Mutant, mutants_of, mutated

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
    monkeypatch.setattr(mutation, "test_files", lambda folder: {})
    monkeypatch.setattr(mutation, "judged", lambda *_: {"killed": next(killed), "by": "", "tests": 1})
    for tests, now in (("old", False), ("new", True)):
        monkeypatch.setattr(mutation, "digest_of", lambda folder, tests=tests: tests)
        (found,) = results([mutant], lambda line: None).values()
        assert found["killed"] is now and found["at_first"] is False


def mutant_of(file: str) -> Mutant:
    return Mutant(file, "f", 1, "1 -> 2", 0, 0)


def test_a_mutant_is_shown_to_tests_that_import_its_file_its_own_first() -> None:
    texts = {
        "tests/methods/test_b.py": "from osfl.methods.b import B",
        "tests/methods/test_other.py": "from osfl.ingredients.a import x\nfrom osfl.methods.b import B",
        "tests/ingredients/test_a.py": "from osfl.ingredients.a import x",
        "tests/ingredients/test_more.py": "import osfl.ingredients.a",
        "tests/ingredients/test_rounds.py": 'load("c")',
        "tests/ingredients/test_ab.py": "from osfl.ingredients.ab import x",
    }
    own = ["tests/ingredients/test_a.py", "tests/ingredients/test_more.py", "tests/methods/test_other.py"]
    assert asked(mutant_of("ingredients/a.py"), texts) == own
    assert asked(mutant_of("methods/b/__init__.py"), texts)[0] == "tests/methods/test_b.py"
    assert asked(mutant_of("methods/c.py"), texts) == ["tests/ingredients/test_rounds.py"]  # nobody imports it
    assert asked(mutant_of("methods/nobody.py"), texts) == []
    apart = {
        "tests/methods/d/test_whole.py": "from osfl.methods.d import D",
        "tests/methods/d/test_part.py": "osfl.methods.d.part",
    }
    assert asked(mutant_of("methods/d/part.py"), apart) == ["tests/methods/d/test_part.py", "tests/methods/d/test_whole.py"]


def test_every_target_has_tests_to_be_shown_to() -> None:
    texts = mutation.test_files(Path(osfl.__file__).parents[2])
    assert not [file for file in TARGETS if not asked(mutant_of(file), texts)]


FOUND = {
    "killed": (1, "a"),
    "alive": (0, ""),
    "too slow": (-1, mutation.OUT_OF_TIME),
    "only data": (mutation.NONE_COLLECTED, ""),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_is_killed_is_what_a_test_tells_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    path = tmp_path / "src" / "osfl" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE, encoding="utf-8")
    mutant, runs = mutants_of(SOURCE, "a.py", "other")[0], list[tuple[bool, list[str]]]()

    def child(folder: Path, options: list[str], seconds: float) -> dict[str, object]:
        changed = path.read_text(encoding="utf-8") != SOURCE
        runs.append((changed, list(options)))
        code, failed = FOUND[what] if changed else (0, "")
        return {"code": code, "failed": failed}

    monkeypatch.setattr(mutation, "in_child", child)
    passed: set[str] = set()
    for _ in range(2):
        found = mutation.judged(mutant, {"tests/test_a.py": "from osfl.a import other"}, tmp_path, passed)
        assert found["killed"] == (what == "killed") and path.read_text(encoding="utf-8") == SOURCE
    checked = [options for changed, options in runs if not changed]
    assert checked == ([["a"]] if what == "killed" else [])  # once


def test_a_test_that_fails_anyway_kills_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutation, "in_child", lambda *_: {"code": 1, "failed": "a"})
    with pytest.raises(SystemExit, match="the tests must pass before anything is changed: a"):
        mutation.check_passes("a", tmp_path)


def test_a_beginning_of_the_sample_is_reported_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def some(mutants: list[Mutant], say: object, seconds: float) -> dict[str, dict[str, object]]:
        limits.append(seconds)
        return {mutant.name: {"killed": True, "at_first": True, "by": "a"} for mutant in mutants[:3]}

    monkeypatch.setattr(mutation, "results", some)
    found = mutation.run(2)
    assert limits == [120.0] and found["sample"] == 3 < found["whole_sample"] == len(sampled(everything()))
    mutation.run()
    assert limits[1] == float("inf")
