"""Nobody is in training and test, in training and validation, or at two sites: 100 seeds, and columns of any spelling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.cli.arguments import same_plan
from osfl.cli.main import answer
from osfl.core.errors import DataError, UsageError
from osfl.core.plan import plan_from
from osfl.core.types import Plan, Task
from osfl.data import assign, make_shard, open_dataset
from osfl.data.layout import arrange, names_patient, person_key
from osfl.data.site import open_site
from osfl.data.source import Part, Source, part_of
from osfl.data.split import hold_out_mask
from osfl.data.views import hold_out
from osfl.simulate.simulation import Simulation, open_source, prepare

Table = Callable[..., Path]
PEOPLE, EACH = 30, 4


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A CSV of 30 people with four images each, three of one class and one of the other. Brightness is the image's number."""
    for i in range(PEOPLE * EACH):
        path = tmp_path / "images" / f"{i:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(path)

    def write(columns: str = "patient_id", rows: Callable[[int], str] = lambda i: f"p{i // EACH}", more: str = "") -> Path:
        lines = [f"images/{i:03}.png,{(i // EACH + (i % EACH == 0)) % 2},{rows(i)}" for i in range(PEOPLE * EACH)]
        (tmp_path / "table.csv").write_text(f"path,label,{columns}\n" + "\n".join(lines) + "\n")
        return tmp_path / "table.csv"

    return write


def whom(part: Part) -> set[str]:
    assert part.groups is not None
    return set(part.groups.tolist())


def shown(images: object) -> set[int]:
    """The people whom these images show, from their pixels."""
    return {int(value) // EACH for value in np.asarray(images)[:, 0, 0, 0]}


COLUMNS = [
    "patient",
    "patient_id",
    "Patient ID",
    "PATIENTID",
    "patient-id",
    "subject",
    "Subject_ID",
    "subjectid",
    "case",
    "Case",
    "case_id",
    "case no",
    "group",
    "Group",
    "person_id",
]


@pytest.mark.parametrize("column", COLUMNS)
def test_any_spelling_keeps_people_together(table: Table, column: str) -> None:
    source = open_dataset(str(table(column)), size=8)
    assert not whom(source.train) & whom(source.test) and len(whom(source.train) | whom(source.test)) == PEOPLE
    assert shown(source.train.dataset.images) & shown(source.test.dataset.images) == set()
    assert [(p.path, p.what) for p in source.problems] == [
        ("table.csv", f"the column '{column.lower()}' names the patient of an image: 30 in 120 rows")
    ]


@pytest.mark.parametrize("column", ["age", "cases_total", "patientage", "subjective", "showcase", "image_group_size"])
def test_other_columns_are_named(table: Table, column: str) -> None:
    assert not names_patient(column)
    source = open_dataset(str(table(column)), size=8)
    assert source.train.groups is None
    (problem,) = source.problems
    assert problem.what == f"unknown column '{column}'" and "patient, subject, case" in problem.done


@pytest.fixture
def source(table: Table) -> Source:
    return open_dataset(str(table()), size=8)


PARTITIONS = [
    "iid",
    "dirichlet:0.1",
    "dirichlet:5",
    "dirichlet-client:0.3",
    "dirichlet-client:0.3:0.5",
    "classes:1",
    "classes:2",
    "silos",
]


WRITINGS: list[tuple[Callable[[int], str], str]] = [
    (lambda i: f"{'Pp'[i % 2]}{i // EACH}", "'P0' = 'p0'"),
    (lambda i: f"{i // EACH + 1:0{1 + 2 * (i % 2)}}", "'001' = '1'"),
    (lambda i: f"{i // EACH + 1}{'.0' * (i % 2)}", "'1' = '1.0'"),
    (lambda i: f"case{' ' * (i % 3)}{i // EACH}", "'case  0' = 'case 0' = 'case0'"),
]


@pytest.mark.parametrize(("rows", "example"), WRITINGS)
def test_one_person_written_in_several_ways_is_one_over_100_seeds(
    table: Table, rows: Callable[[int], str], example: str
) -> None:
    """Half of each person's rows have another writing of the name: no part and no site shares a person with another."""
    source = open_dataset(str(table(rows=rows)), size=8)
    assert not shown(source.train.dataset.images) & shown(source.test.dataset.images)
    assert len(whom(source.train) | whom(source.test)) == PEOPLE
    (found,) = [problem for problem in source.problems if "differ only in" in problem.what]
    assert found.what.startswith(f"{PEOPLE} people have names") and example in found.what and "different people" in found.done
    assert any("30 in 120 rows" in problem.what for problem in source.problems)
    for seed in range(100):
        sites = assign("dirichlet:0.3", source.train.labels, 3, seed, groups=source.train.groups)
        people = [shown(source.train.dataset.images[index]) for index in sites.values()]
        assert sum(map(len, people)) == len(set().union(*people)), seed


def test_names_that_differ_in_more_are_different_people(table: Table) -> None:
    for one, other in (("1.05", "1.5"), ("1.2.0", "1.2"), ("10", "1"), ("0", "00a"), ("p-1", "p1"), ("1.0.1", "1.1")):
        assert person_key(one) != person_key(other)
    assert person_key("０07.0") == person_key(" 7") and person_key("000") == person_key("0")
    assert not [p for p in open_dataset(str(table()), size=8).problems if "differ only in" in p.what]


def test_folders_of_one_person_written_in_two_ways_are_one() -> None:
    items, problems = arrange(["a/P1/0.png", "a/p2/0.png", "b/p1/0.png", "b/q7/0.png", "b/q07/1.png", "b/r/1.png"])
    assert [item.group for item in items] == ["P1", "p2", "P1", "q07", "q07", "r"]
    assert any("2 people" in p.what and "'P1' = 'p1'" in p.what and "'q07' = 'q7'" in p.what for p in problems)


def test_nobody_is_at_two_sites_nor_in_two_parts_over_100_seeds(source: Source) -> None:
    """Sites, training and validation at each site, held-out parts for tuning, and test parts."""
    judged = shown(source.test.dataset.images)
    for seed in range(100):
        spec = PARTITIONS[seed % len(PARTITIONS)]
        clients = 2 if spec == "silos" else 3
        sites = assign(spec, source.train.labels, clients, seed, groups=source.train.groups)
        assert sorted(np.concatenate(list(sites.values())).tolist()) == list(range(len(source.train)))
        seen: Counter[int] = Counter()
        for client, index in sites.items():
            shard = make_shard(source.train.subset(index), client, seed=seed)
            train, val = shown(shard.train.images), shown(shard.val.images)
            assert not train & val and not (train | val) & judged, (spec, seed, client)
            seen.update(train | val)
        assert max(seen.values()) == 1 and len(seen) == len(whom(source.train)), (spec, seed)
        held = hold_out_mask(source.train.labels, 0.2, seed, "test", groups=source.train.groups)
        assert source.train.groups is not None
        assert not set(source.train.groups[held].tolist()) & set(source.train.groups[~held].tolist())
    kept, tuning = hold_out(source.train, 0.2)
    assert not whom(kept) & whom(tuning)


def test_a_simulation_does_it_too(table: Table) -> None:
    """From the command's options to shards, for each seed; without the column people are everywhere."""
    path = str(table("Patient"))
    for seed in range(100):
        for evaluate_on in ("test", "val"):
            federation = prepare(
                Simulation("local_only", path, 4, "dirichlet:0.3", "smoke", seed, image_size=8, evaluate_on=evaluate_on)
            )
            sides = [shown(images) for s in federation.shards for images in (s.train.images, s.val.images) if len(images)]
            sides.append(shown(federation.test.images))
            assert max(Counter(person for side in sides for person in side).values()) == 1, (seed, evaluate_on)


def test_plans_name_that_people_are_drawn_whole(table: Table) -> None:
    """Sites were drawn otherwise before: a plan of that time must not pass for this one."""

    def plan(rows: Callable[[int], str]) -> Plan:
        open_source.cache_clear()  # the file is written anew
        return prepare(Simulation("local_only", str(table("patient", rows)), 3, "iid", "smoke", image_size=8)).plan

    people = plan(lambda i: f"p{i // EACH}")
    assert people.data["groups"] == "whole" and plan_from(people.as_json(), "plan.json").digest == people.digest
    assert "groups" not in plan(lambda i: f"p{i}").data  # one image each: the same draw as ever
    by_hand = replace(people, data={key: value for key, value in people.data.items() if key not in ("digest", "groups")})
    same_plan(by_hand, people, Path("plan.toml"))  # names no data of its own
    before = replace(people, data={key: value for key, value in people.data.items() if key != "groups"})
    with pytest.raises(UsageError, match="the data here give"):
        same_plan(before, people, Path("plan.toml"))
    with pytest.raises(UsageError, match="groups"):
        plan_from({**people.as_json(), "data": {**people.data, "groups": "split"}}, "plan.json")


def test_where_everybody_has_one_image_nothing_changes(source: Source) -> None:
    names = np.array([f"p{i % 97:02}-{i}" for i in range(len(source.train))])
    for spec in ("iid", "dirichlet:0.1", "dirichlet-client:0.3", "classes:1", "silos"):
        clients = None if spec == "silos" else 2
        plain = assign(spec, source.train.labels, clients, 7)
        grouped = assign(spec, source.train.labels, clients, 7, groups=names)
        assert {c: i.tolist() for c, i in plain.items()} == {c: i.tolist() for c, i in grouped.items()}


def test_domains_and_silos_follow_what_a_person_shows_most() -> None:
    pixels = np.zeros((6, 1, 8, 8), np.uint8)
    part = part_of(pixels, [0, 0, 1, 1, 1, 0], np.array(list("xxyyyy")), np.array(list("aaabbb")))
    for spec in ("domains", "silos"):
        sites = assign(spec, part.labels, None, 0, part.domains, groups=part.groups)
        assert [index.tolist() for index in sites.values()] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(DataError, match="class number 1 shows another one more often"):
        assign("silos", np.array([0, 0, 1, 0]), None, 0, groups=np.array(["a", "a", "a", "b"]))
    with pytest.raises(DataError, match=r"2 people .* cannot be shared by 3 clients"):
        assign("iid", part.labels, 3, 0, groups=part.groups)


def test_two_columns_that_disagree_are_for_the_user(table: Table) -> None:
    with pytest.raises(DataError, match=r"two columns that name the patient .*'patient_id' and 'group'") as no:
        open_dataset(str(table("patient_id,group", lambda i: f"p{i // EACH},{i % 3}")), size=8)
    assert no.value.fix and "Rename" in no.value.fix
    same = open_dataset(str(table("patient_id,case", lambda i: f"p{i // EACH},{i // EACH + 100}")), size=8)
    assert not whom(same.train) & whom(same.test)
    with pytest.raises(DataError, match="the column 'patient' more than once"):
        open_dataset(str(table("patient,Patient", lambda i: f"{i},{i}")), size=8)


def test_doubtful_columns_are_named(table: Table) -> None:
    few = open_dataset(str(table("case", lambda i: "yes" if i % 2 else "no")), size=8).problems[0].what
    assert "2 in 120 rows, which is few: is it a person?" in few
    holes = open_dataset(str(table("subject", lambda i: "" if i < 4 else f"p{i // EACH}")), size=8)
    assert ("4 rows with nothing in 'subject'", "each taken as somebody else") in [(p.what, p.done) for p in holes.problems]
    split = open_dataset(str(table("split,patient", lambda i: f"{'test' if i % EACH == 0 else 'train'},p{i // EACH}")), size=8)
    assert any("30 people (patients, groups) have the same name in train and in test: p0" in p.what for p in split.problems)


def test_a_patient_with_folders_in_two_classes_is_one_person(tmp_path: Path) -> None:
    names = [f"{c}/{p}" for c, people in (("sick", "abcdef"), ("well", "aghijk")) for p in people]
    for number, name in enumerate(names):
        for i in range(3):
            path = tmp_path / "folder" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 10 * number + i, np.uint8)).save(path)
    source = open_dataset(str(tmp_path / "folder"), size=8)
    assert source.classes == ("sick", "well") and whom(source.train) | whom(source.test) == set("abcdefghijk")
    assert not whom(source.train) & whom(source.test)


def test_a_site_validates_on_other_people_than_it_learns_from(table: Table) -> None:
    task = Task("t", ("0", "1"), (1, 8, 8))
    found = open_site(table("Patient ID"), task)
    for seed in range(100):
        shard = make_shard(found.train, "north", seed=seed)
        assert len(shard.val) and not shown(shard.train.images) & shown(shard.val.images)


def test_arrays_that_nobody_reads_are_named(tmp_path: Path) -> None:
    images, count = np.zeros((8, 8, 8), np.uint8), np.arange(8)
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=count % 2, train_patients=count)
    assert "unknown array 'train_patients'" in [p.what for p in open_dataset(str(tmp_path / "a.npz")).problems]


def test_check_run_and_client_name_the_columns(table: Table, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = table("age")

    def output(*command: str) -> str:
        capfd.readouterr()
        assert answer([*command]) == 0
        captured = capfd.readouterr()
        return " ".join((captured.out + captured.err).split())

    checked = output("check", "--dataset", str(path), "--clients", "3", "--image-size", "8")
    assert "unknown column 'age'" in checked and "No problem found" not in checked
    out = tmp_path / "run"
    data = ("--dataset", str(path), "--clients", "3", "--image-size", "8", "--smoke", "--out", str(out))
    assert "unknown column 'age'" in output("run", "--method", "local_only", *data)
    assert "unknown column 'age'" in (out / "results.json").read_text()
    assert "unknown column" in (out / "model_card.md").read_text().replace("\\", "")
    plan, keys = str(tmp_path / "plan.toml"), str(tmp_path / "keys")
    command = "new --method fedavg --classes 0,1 --clients north --image-size 8 --channels 1 --smoke --out"
    output(*command.split(), plan)
    output("keys", "north", "--out", keys)
    site = output(
        "client", plan, "--client", "north", "--data", str(path), "--key", f"{keys}/north.key", "--work", str(tmp_path / "work")
    )
    assert "unknown column 'age'" in site
    assert "unknown column 'age'" in output("check", plan, "--data", str(path), "--client", "north")
