"""`Simulation`: the options of a simulated run, and its preparation: options → plan, dataset → shards and a test set."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from osfl.core.errors import DataError, UsageError, nearest
from osfl.core.plan import check_plan
from osfl.core.registry import given_as, load
from osfl.core.settings import resolve_settings
from osfl.core.topology import parse_topology, topology_options, topology_summary
from osfl.core.types import ClientId, Dataset, Json, Limits, Plan, Privacy, Shard, Task, Topology
from osfl.data import (
    Problem,
    Source,
    assign,
    class_counts,
    class_problems,
    domain_clients,
    evaluation_part,
    make_shard,
    make_shards,
    open_dataset,
    parse_partition,
    take_stratified,
)
from osfl.data.leakage import name_problems
from osfl.data.partition import NATURAL, Partition
from osfl.data.reading import Reading, reading_of
from osfl.data.site import open_site
from osfl.data.source import Part, finish, together
from osfl.data.views import with_train
from osfl.models.input_facts import encoder_side


@dataclass(frozen=True)
class Simulation:
    """One simulated federation. The same options on the command line give the same digests."""

    method: str
    dataset: str = "digits"
    clients: int | None = None  # None: 5, or as many as the partition dictates (silos, domains)
    partition: str = "dirichlet:0.1"
    preset: str = "cpu"
    seed: int = 0
    changes: Mapping[str, Json] = field(default_factory=dict)  # --set key=value
    samples: int | None = None  # use so many training images, stratified
    image_size: int | None = None
    channels: int | None = None
    evaluate_on: Literal["test", "val"] = "test"  # val: for choosing settings without touching the test set
    limits: Limits = field(default_factory=Limits)  # no option for these: only a plan sets others
    plan: str = ""  # the file that this was read from
    topology: Topology | None = None  # which clients exchange with which
    contacts: str = ""  # the file that its schedule was read from
    reading: Reading = field(default_factory=Reading)  # columns, slices and gray values
    secure_sum: bool = False  # masked uploads; then nobody's share can be capped, and limits.share is 1
    private_randomness: bool = False  # drawn anew in every run
    test_samples: int | None = None  # judge by so many images, stratified; many clients' ensembles take long to judge
    privacy: Privacy | None = None  # differential privacy, for methods that send sums
    source: Source | None = None  # images that were given in Python, instead of `dataset`
    quorum: int = 0  # no option: only a plan says that fewer than all sites are enough

    def command(self, out: str) -> str:
        """The command that repeats this run."""
        if self.source is not None:
            return f"osfl.run({self.method!r}, dataset=(...), out={out!r})  # on images that were given in Python"
        usual = replace(Limits(), share=1.0) if self.secure_sum else Limits()
        if self.plan and (self.quorum or self.limits not in (usual, Limits()) or (self.topology and self.topology.contacts)):
            return shlex.join(["osfl", "run", "--plan", self.plan, "--dataset", self.dataset, "--out", out])
        parts = ["osfl", "run", "--method", given_as(self.method), "--dataset", self.dataset]
        parts += ["--clients", str(self.clients)] if self.clients is not None else []
        parts += ["--partition", self.partition, "--preset", self.preset, "--seed", str(self.seed)]
        for name, value in (("--samples", self.samples), ("--image-size", self.image_size), ("--channels", self.channels)):
            parts += [name, str(value)] if value is not None else []
        parts += [text for key, value in self.reading.as_facts().items() for text in (f"--{key}", value)]
        parts += ["--evaluate-on", "val"] if self.evaluate_on == "val" else []
        parts += ["--test-samples", str(self.test_samples)] if self.test_samples is not None else []
        parts += ["--secure-sum"] if self.secure_sum else []
        parts += ["--private-randomness"] if self.private_randomness else []
        parts += ["--contacts", self.contacts] if self.contacts else topology_options(self.topology) if self.topology else []
        if self.privacy:
            parts += ["--epsilon", str(self.privacy.epsilon), "--delta", str(self.privacy.delta)]
            parts += ["--noise", self.privacy.noise]
            parts += ["--colluders", str(self.privacy.colluders)] if self.privacy.colluders else []
        for key, value in self.changes.items():
            parts += ["--set", f"{key}={value}"]
        return shlex.join([*parts, "--out", out])


@dataclass(frozen=True)
class Federation:
    """A simulation made concrete: the plan, every client's shard, and the images to judge by."""

    plan: Plan
    shards: Sequence[Shard]
    test: Dataset
    counts: Mapping[ClientId, Sequence[int]]  # class counts of each client, training and validation together
    domains: Mapping[ClientId, NDArray[np.bool_]] | None  # which test images are of a client's domain
    source: Source
    data_facts: Mapping[str, Json] = field(default_factory=dict)  # about the data, beyond what the plan holds
    doubts: Sequence[Problem] = ()  # about the partition
    rehearsed: bool = False  # a real plan with the images of its sites: uploads are compared with each other, as in the round

    @property
    def problems(self) -> list[Problem]:
        """What is wrong with the files, and the classes with too few images."""
        classes = self.plan.task.classes
        test = class_counts(self.test.labels, len(classes)).tolist()
        named = name_problems(self.source.train, self.source.test)
        return [*self.source.problems, *named, *self.doubts, *class_problems(classes, self.counts, test)]


def prepare(simulation: Simulation) -> Federation:
    """Plan, shards and test set of a simulation. Settings are checked first, before any image is decoded."""
    return prepare_all([simulation])[0]


def prepare_all(variants: Sequence[Simulation]) -> list[Federation]:
    """The same for simulations that differ in method, settings and topology only (`for_methods`).

    Shards are made once for all that work at the same image size, and all that is wrong with any plan is one error.
    """
    found: list[Federation] = []
    parts: dict[tuple[int, ...], _DataParts] = {}
    mistakes: list[UsageError] = []
    for simulation in variants:
        try:
            _check_kinds(simulation)
            settings = _settings(simulation)
            partition = parse_partition(simulation.partition)
            reading = replace(simulation.reading, by=partition.column)
            source = _opened(simulation, settings, reading)
            if source.image not in parts:
                parts[source.image] = _split(simulation, source, partition, reading)
            found.append(_federation(simulation, settings, parts[source.image]))
        except UsageError as error:
            mistakes.append(error)
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else _as_one(mistakes)
    return found


def _check_kinds(simulation: Simulation) -> None:
    """Options given in Python may be anything; the command line has checked its own."""
    counts = {name: getattr(simulation, name) for name in ("clients", "samples", "test_samples", "image_size", "channels")}
    found = [
        f"{name}: expected a whole number of at least 1, got {value!r}"
        for name, value in counts.items()
        if value is not None and not (type(value) is int and value >= 1)
    ]
    if type(simulation.seed) is not int:
        found.append(f"seed: expected a whole number, got {simulation.seed!r}")
    if simulation.evaluate_on not in ("test", "val"):
        found.append(f"evaluate_on: expected 'test' or 'val', got {simulation.evaluate_on!r}")
    if not isinstance(simulation.partition, str):
        found.append(f"partition: expected text such as 'dirichlet:0.1', got {simulation.partition!r}")
    if found:
        raise UsageError(found, field="simulation")


def default_folder(simulation: Simulation) -> Path:
    """Where a run goes without --out: runs/ensemble-digits-dirichlet-0.1-seed0"""
    parts = [simulation.method, Path(simulation.dataset).stem, simulation.partition.replace(":", "-")]
    if simulation.topology:
        parts.append(f"{simulation.topology.kind}-{simulation.topology.encounters}")
    return Path("runs") / f"{'-'.join(parts)}-seed{simulation.seed}"


def _as_one(mistakes: Sequence[UsageError]) -> UsageError:
    problems = dict.fromkeys(problem for error in mistakes for problem in error.problems)
    fixes = dict.fromkeys(error.fix for error in mistakes if error.fix)
    return UsageError(list(problems), fix="\n".join(fixes) or None)


def _settings(simulation: Simulation) -> Any:
    method = load(simulation.method)
    private = method.PRIVATE if simulation.privacy else {}
    return resolve_settings(method, simulation.preset, {**private, **simulation.changes})


@dataclass(frozen=True)
class _DataParts:
    """What all methods of a comparison share: everything of a `Federation` but its plan."""

    source: Source
    shards: Sequence[Shard]
    test: Dataset
    counts: Mapping[ClientId, Sequence[int]]
    domains: Mapping[ClientId, NDArray[np.bool_]] | None
    doubts: Sequence[Problem]
    facts: Mapping[str, Json]  # [data] of the plan


def _split(simulation: Simulation, source: Source, partition: Partition, reading: Reading) -> _DataParts:
    """Shards by the partition, and the images to judge by."""
    train, judged = evaluation_part(source, simulation.evaluate_on)
    if simulation.samples is not None:
        train = take_stratified(train, simulation.samples)
    if simulation.test_samples is not None:
        judged = _judges(judged, simulation.test_samples)
    used = with_train(source, train)
    clients = simulation.clients
    if clients is None and partition.kind not in ("silos", *NATURAL):
        clients = 5
    assignment = assign(partition, train.strata, clients, simulation.seed, train.domains, groups=train.groups)
    counts = {c: class_counts(train.labels[index], len(source.classes)).tolist() for c, index in assignment.items()}
    domains, doubts = _domains(partition, train, judged)
    return _DataParts(
        source,
        make_shards(used, assignment, seed=simulation.seed),
        judged.dataset,
        counts,
        domains,
        doubts,
        _data_facts(simulation, used, train, reading),
    )


def _data_facts(simulation: Simulation, used: Source, train: Part, reading: Reading) -> dict[str, Json]:
    """The table [data] of a plan."""
    facts: dict[str, Json] = {
        "dataset": used.name,
        "digest": used.digest,
        "partition": simulation.partition,
        "evaluated_on": simulation.evaluate_on,
        **reading.as_facts(),
    }
    if simulation.samples is not None:  # TOML knows no null: what is not asked for is not named
        facts["samples"] = simulation.samples
    if simulation.test_samples is not None:
        facts["test_samples"] = simulation.test_samples
    if train.groups is not None and len(set(train.groups.tolist())) < len(train):  # plans of other draws have other digests
        facts["groups"] = "whole"
    return facts


def _federation(simulation: Simulation, settings: Any, parts: _DataParts) -> Federation:
    source = parts.source
    plan = Plan(
        Task(source.name, source.classes, source.image, source.kind),
        simulation.method,
        settings,
        tuple(sorted(parts.counts)),
        replace(simulation.limits, share=1.0) if simulation.secure_sum else simulation.limits,
        simulation.seed,
        parts.facts,
        simulation.quorum,
        topology=simulation.topology,
        secure_sum=simulation.secure_sum,
        privacy=simulation.privacy,
        private_randomness=simulation.private_randomness,
    )
    check_plan(plan)
    return Federation(plan, parts.shards, parts.test, parts.counts, parts.domains, source, doubts=parts.doubts)


def _domains(
    partition: Partition, train: Part, judged: Part
) -> tuple[dict[ClientId, NDArray[np.bool_]] | None, Sequence[Problem]]:
    """Which test images are of each site's own domain, where sites are domains of the data; and what is doubtful there."""
    if partition.kind not in NATURAL:
        return None, []
    doubts = _at_two_sites(train)
    if judged.domains is None or train.domains is None:
        return None, doubts
    client_of = domain_clients(sorted(set(train.domains.tolist())))
    domains = {client: judged.domains == name for name, client in client_of.items()}
    without = [client for client, mask in domains.items() if not mask.any()]
    if not without:
        return domains, doubts
    if partition.kind == "by":  # a small ward is no mistake
        what = "a site without test images"
        done = "all sites' own scores are by their class shares, not on their own test images"
        return None, [*doubts, *(Problem(client, what, done) for client in without)]
    raise DataError(
        f"no test images of the domain(s) {', '.join(without)}",
        field="partition",
        fix="Add some, or leave the split to osfl: domain/class/* without train and test.",
    )


def _at_two_sites(train: Part) -> list[Problem]:
    """People with images at more than one natural site: a person is at one site only."""
    if train.groups is None or train.domains is None:
        return []
    pairs = set(zip(train.groups.tolist(), train.domains.tolist(), strict=True))
    twice = len(pairs) - len({person for person, _ in pairs})
    done = "all images of a person are put at the site that has most of them"
    return [Problem("(all)", f"{twice} people (groups) have images at more than one site", done)] if twice else []


def _opened(simulation: Simulation, settings: Any, reading: Reading) -> Source:
    """The dataset; for a frozen encoder at the size that it works at, where the files have it and the user named none."""
    if simulation.source is not None:
        return simulation.source
    source = open_source(simulation.dataset, simulation.image_size, simulation.channels, reading)
    side = min(encoder_side(settings), source.native)
    if simulation.image_size is None and side > source.image[1]:
        return open_source(simulation.dataset, side, simulation.channels, reading)
    return source


def _judges(part: Part, count: int) -> Part:
    """So many images to judge by, of every class and domain that there is: who has only a class without any would get 0."""
    fewer = take_stratified(part, count)
    for names, left in ((part.strata, fewer.strata), (part.domains, fewer.domains)):
        if names is not None and left is not None and len(set(names.tolist())) > len(set(left.tolist())):
            raise UsageError(
                f"--test-samples {count} would leave a class or a domain without any image to judge by",
                field="test_samples",
                fix="Ask for more of them.",
            )
    return fewer


def rehearsal(plan: Plan, sites: Path) -> Federation:
    """A real plan simulated from the folders of its sites, `sites/<client>` each: the same digests as the real round.

    It is judged on the sites' own test parts, or, where one of them has none, on what each holds out for validation.
    """
    found = {client: open_site(site_folder(sites, client), plan.task, reading=reading_of(plan.data)) for client in plan.clients}
    shards = [make_shard(found[client].train, client, seed=plan.seed) for client in plan.clients]
    tests = [data.test.dataset for data in found.values() if data.test is not None]
    tested = len(tests) == len(shards)
    judged = together(tests if tested else [shard.val for shard in shards])
    counts = {c: class_counts(data.train.labels, len(plan.task.classes)).tolist() for c, data in found.items()}
    problems = [replace(problem, path=f"{c}/{problem.path}") for c, data in found.items() for problem in data.problems]
    train = together([data.train.dataset for data in found.values()])
    source = finish(
        plan.task.name,
        plan.task.classes,
        Part(train),
        None,
        Part(judged),
        None,
        problems,
        int(np.median([data.native for data in found.values()])),
    )
    facts = {
        "dataset": plan.task.name,
        "digest": source.digest,
        "partition": "sites",
        "evaluated_on": "test" if tested else "val",
    }
    return Federation(plan, shards, judged, counts, None, source, facts, rehearsed=True)


def site_folder(sites: Path, client: ClientId) -> Path:
    """`north`, `north.zip`, `north.npz` or `north.csv` in the folder of all sites."""
    options = [sites / f"{client}{suffix}" for suffix in ("", ".zip", ".npz", ".csv")]
    there = [path for path in options if path.exists()]
    if not there:
        expected = " or ".join(path.name for path in options)
        raise DataError(
            f"there is no data of {client!r} in {sites}",
            client=client,
            field="sites",
            expected=expected,
            fix="Name the folder after the client.",
        )
    return there[0]


@lru_cache(maxsize=2)
def open_source(dataset: str, size: int | None, channels: int | None, reading: Reading = Reading()) -> Source:
    """Opened once for all methods and seeds of a comparison."""
    source = open_dataset(dataset, size=size, channels=channels, reading=reading)
    if len(source.classes) < 2:
        raise _one_class(Path(dataset), source.classes[0])
    return source


def _one_class(path: Path, name: str) -> DataError:
    """Most often a folder of images with a table beside it, or the folder of a single class."""
    tables = sorted(path.glob("*.csv")) if path.is_dir() else []
    fix = "Name the folder around it, with one folder a class, or a table of paths and labels."
    return DataError(
        f"'{path.name}' has images of a single class, '{name}'",
        field="dataset",
        expected="at least 2 classes",
        got="1",
        fix=f"{tables[0]} may say what each image shows: name that instead of its folder." if tables else fix,
    )


def for_methods(simulation: Simulation, methods: Sequence[str]) -> list[Simulation]:
    """The same federation for several methods; `name@key=value` is a variant. A setting goes to all that have it.

    The topology applies to methods without a server; in the others every client reaches a server, or nobody.
    """
    variants: list[Simulation] = []
    taken: set[str] = set()
    for label in methods:
        name, extra = _variant(label)
        fields = load(name).Settings.__dataclass_fields__
        contact_plan, extra = _topology_of(simulation.topology, extra) if load(name).provides("relay") else (None, extra)
        mine = {key: value for key, value in simulation.changes.items() if key in fields}
        taken |= mine.keys()
        contacts = simulation.contacts if contact_plan else ""
        variants.append(replace(simulation, method=name, changes={**mine, **extra}, topology=contact_plan, contacts=contacts))
    known = sorted({field for label in methods for field in load(label.partition("@")[0]).Settings.__dataclass_fields__})
    unknown = [key for key in simulation.changes if key not in taken]
    if unknown:
        raise UsageError([f"none of these methods has a setting {key!r}.{nearest(key, known)}" for key in unknown], field="set")
    if simulation.topology and not any(load(variant.method).provides("relay") for variant in variants):
        raise UsageError(
            "none of these methods lets neighbors exchange directly, so a topology would change nothing",
            field="topology",
            fix="Add one that does, such as fol, or leave these options out.",
        )
    for variant in variants:  # all mistakes before the first method starts
        resolve_settings(load(variant.method), variant.preset, variant.changes)
    return variants


def _topology_of(topology: Topology | None, extra: Mapping[str, str]) -> tuple[Topology | None, dict[str, str]]:
    """`fol@topology=ring@encounters=2` is a variant, too: the topology, and the settings that are left."""
    rest = {key: value for key, value in extra.items() if key not in ("topology", "encounters")}
    if len(rest) == len(extra):
        return topology, rest
    before = topology_summary(topology or Topology())
    if before["topology"] == "contacts":
        raise UsageError(
            "a contact schedule already defines the topology and the encounters",
            field="methods",
            fix="Leave topology and encounters out of the variant.",
        )
    times = extra.get("encounters", str(before["encounters"]))
    if not times.isdecimal() or int(times) < 1:
        raise UsageError(f"encounters={times}: expected a whole number from 1 on", field="methods")
    return parse_topology(extra.get("topology", before["topology"]), int(times)), rest


def _variant(label: str) -> tuple[str, dict[str, str]]:
    """`ensemble@ensemble=size` as the method and what is changed in it."""
    name, *parts = label.split("@")
    pairs = [(key.strip(), equals, value.strip()) for key, equals, value in (part.partition("=") for part in parts)]
    if not all(key and equals for key, equals, _ in pairs):
        raise UsageError(
            f"method {label!r}: after '@' a variant needs key=value", field="methods", fix="For example ensemble@ensemble=size."
        )
    return name, {key: value for key, _, value in pairs}
