"""Command-line options to a `Simulation`; all mistakes are reported in one message."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from osfl.cli import options
from osfl.core.errors import UsageError
from osfl.data.reading import Reading, check_reading, reading_of

if TYPE_CHECKING:
    from osfl.core.types import Plan, Privacy, Topology
    from osfl.runtime.machine import Machine
    from osfl.simulate.simulation import Simulation

PRESETS = ("cpu", "paper", "smoke")
DEFAULT_METHOD = "onesum"  # of run, new and estimate, where no --method is given
# Of `osfl compare` without --methods: ours; what models that are sent once reach without further training, and where they are
# averaged; the same with ten messages instead of one; and both ends, no exchange and no privacy. Affordable: their models are
# trained once for three of them. None fails where images are few, as generators do.
SENSIBLE = ("onesum", "ensemble@ensemble=odds", "fedavg", "fedavg_rounds", "local_only", "centralized")
_SEVERAL = {"ensemble@ensemble=odds": "ensemble@ensemble=class_count"}  # for images that may have several classes


@dataclass(frozen=True)
class RunOptions:
    """What the options of run, compare, check, estimate and new say; nothing of it is checked yet."""

    methods: Sequence[str]  # `run` has one; `name@key=value` is a variant
    dataset: str = "digits"
    clients: int | None = None
    partition: str = "dirichlet:0.1"
    preset: str = "cpu"
    seed: int = 0
    changes: Sequence[str] = ()  # --set
    samples: int | None = None
    image_size: int | None = None
    channels: int | None = None
    evaluate_on: Literal["test", "val"] = "test"
    device: str = "cpu"
    topology: str | None = None  # mesh, ring, random:K
    encounters: int = 1
    contacts: Path | None = None  # a schedule, as a CSV file
    test_samples: int | None = None
    reading: Reading = field(default_factory=Reading)  # --group, --slices, --window
    secure_sum: bool = False
    private_randomness: bool = False
    epsilon: float | None = None  # differential privacy: both or neither
    delta: float | None = None
    noise: Literal["site", "share"] | None = None
    colluders: int = 0  # of a noise that is shared


@dataclass
class Mistakes:
    """Collects what `UsageError`s say, and raises them as one."""

    problems: list[str] = field(default_factory=list)
    fixes: list[str] = field(default_factory=list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            self.problems += [problem for problem in error.problems if problem not in self.problems]
            if error.fix and error.fix not in self.fixes:
                self.fixes.append(error.fix)

    def check(self) -> None:
        if self.problems:
            raise UsageError(self.problems, fix="\n".join(self.fixes) or None)


def machine_for(
    device: str, precision: str, memory: str, *, workers: int | None = None, threads: int = 1, engine: str = "local"
) -> Machine:
    """The machine that these options describe; what it does not have is refused before anything starts."""
    from osfl.runtime.machine import Machine, parse_memory

    if (device, precision) != ("cpu", "fp32"):  # which need no torch to be right
        from osfl.runtime.environment import device_named
        from osfl.runtime.precision import check_precision

        check_precision(precision, device_named(device))
    return Machine(workers, device, threads, engine, precision, parse_memory(memory) if memory else 0)  # type: ignore[arg-type]


def parse_options(args: RunOptions) -> Simulation:
    """The simulation that these options describe (of the first method), or an error with all that is wrong with them."""
    from osfl.core.settings import parse_changes
    from osfl.data.geometry import check_geometry
    from osfl.data.partition import parse_partition
    from osfl.runtime.environment import device_named
    from osfl.simulate.simulation import Simulation, open_source

    mistakes, changes, topology = Mistakes(), {}, None
    with mistakes.noted():
        changes = parse_changes(args.changes)
    with mistakes.noted():
        topology = _topology(args)
    simulation = Simulation(
        args.methods[0] if args.methods else "",
        args.dataset,
        args.clients,
        args.partition,
        args.preset,
        args.seed,
        changes,
        args.samples,
        args.image_size,
        args.channels,
        args.evaluate_on,
        topology=topology,
        contacts=str(args.contacts or ""),
        test_samples=args.test_samples,
        reading=args.reading,
        secure_sum=args.secure_sum,
        private_randomness=args.private_randomness,
    )
    with mistakes.noted():
        simulation = replace(simulation, privacy=_privacy(args))
    _methods(simulation, args, mistakes)
    with mistakes.noted():
        parse_partition(args.partition)
    with mistakes.noted():
        check_reading(args.reading)
    with mistakes.noted():
        device_named(args.device)
    with mistakes.noted():
        check_geometry(args.image_size, args.channels)
    if mistakes.problems and _unknown(args.dataset):  # else `prepare` opens it, which may take a while
        with mistakes.noted():
            open_source(args.dataset, None, None)
    mistakes.check()
    return simulation


def _topology(args: RunOptions) -> Topology | None:
    from osfl.core.topology import parse_topology, read_contacts

    if args.contacts is not None and (args.topology or args.encounters > 1):
        raise UsageError(
            "a contact schedule already defines the topology and the encounters",
            field="contacts",
            fix="Leave --topology and --encounters out; the column encounter numbers the exchanges.",
        )
    if args.contacts is not None:
        return read_contacts(args.contacts)
    if args.topology is None and args.encounters == 1:
        return None
    return parse_topology("mesh" if args.topology is None else args.topology, args.encounters)


def _privacy(args: RunOptions) -> Privacy | None:
    from osfl.core.types import Privacy

    if args.epsilon is None and args.delta is None and args.noise is None and not args.colluders:
        return None
    if args.epsilon is None or args.delta is None:
        raise UsageError(
            "differential privacy needs --epsilon and --delta",
            field="epsilon" if args.epsilon is None else "delta",
            fix="For example --epsilon 8 --delta 1e-5.",
        )
    return Privacy(args.epsilon, args.delta, args.noise or "site", args.colluders)


def _methods(simulation: Simulation, args: RunOptions, mistakes: Mistakes) -> None:
    """Names, preset and settings of all methods; without a known method only the preset's name can be checked."""
    from osfl.core.registry import load
    from osfl.core.settings import resolve_settings
    from osfl.simulate.simulation import for_methods

    if not args.methods:
        with mistakes.noted():
            raise UsageError("--method is missing", field="method", fix="`osfl ls methods` lists them: --method ensemble.")
    known = 0
    for label in args.methods:
        with mistakes.noted():
            load(label.partition("@")[0])
            known += 1
    with mistakes.noted():
        if known < len(args.methods) or not args.methods:
            _preset(args.preset)
        elif len(args.methods) == 1 and "@" not in args.methods[0]:
            resolve_settings(load(args.methods[0]), args.preset, simulation.changes)
        else:
            for_methods(simulation, args.methods)


def _preset(name: str) -> None:
    from osfl.core.errors import nearest

    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}.{nearest(name, PRESETS)}", fix=f"Presets: {', '.join(PRESETS)}.")


def _unknown(dataset: str) -> bool:
    from osfl.data.catalog import sheets
    from osfl.data.places import data_folder

    folder = data_folder()
    files = folder.glob(f"{dataset}.*") if folder and "/" not in dataset else ()
    return dataset not in sheets() and not Path(dataset).exists() and not any(files)


def sensible(simulation: Simulation) -> list[str]:
    """What `osfl compare` runs without --methods: all of them learn the kind of labels that these data have."""
    from osfl.simulate.simulation import open_source

    source = open_source(simulation.dataset, simulation.image_size, simulation.channels, simulation.reading)
    return [_SEVERAL.get(label, label) if source.kind == "multilabel" else label for label in SENSIBLE]


def numbers(text: str, option: str) -> list[int]:
    """`0,1,2` as numbers, each once."""
    try:
        found = [int(item) for item in text.split(",") if item.strip()]
    except ValueError:
        found = []
    if not found or len(set(found)) != len(found):
        raise UsageError(f"{option} {text!r}: expected different whole numbers, such as {option} 0,1,2", field="seeds")
    return found


def names(text: str, option: str, what: str = "method") -> list[str]:
    """`a,b,c` as names, each once."""
    found = [item.strip() for item in text.split(",") if item.strip()]
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise UsageError(f"{option}: {', '.join(twice)} is named twice", field=f"{what}s", fix=f"Name each {what} once.")
    return found


# --- plans as options -------------------------------------------------------------------------------------------------


def from_plan(path: Path, dataset: str = "") -> tuple[Simulation, Plan]:
    """A simulation of a plan.toml that names the source of its shards. `dataset`: where that is, if its name is not enough."""
    from osfl.core.plan import read_plan

    plan = read_plan(path)
    if not plan.data.get("dataset"):
        raise UsageError(
            f"{path} has no [data] table, so its shards cannot be simulated",
            field="data",
            fix="Give --sites with the folders of its sites, or write it with `osfl new --dataset NAME`.",
        )
    return simulated(plan, path, dataset), plan


def needs_path(dataset: str) -> bool:
    """Whether a plan, which keeps the name of a dataset and not its place, does not lead to it again."""
    from osfl.data.opening import SUFFIXES

    return "/" in dataset or dataset.endswith(SUFFIXES)


def dataset_in(command: str) -> str:
    """What a run's command says of its images; nothing where they were given in Python."""
    try:
        arguments = shlex.split(command)
    except ValueError:
        return ""
    return next((value for word, value in pairwise(arguments) if word == "--dataset"), "")


def simulated(plan: Plan, path: Path, dataset: str = "") -> Simulation:
    """The simulation options of a plan that names the source of its shards; `dataset`: where it is."""
    from osfl.core.registry import load
    from osfl.simulate.simulation import Simulation

    paper, data = load(plan.method).Settings(), plan.data
    settings = plan.as_json()["settings"]
    changes: dict[str, object] = {k: v for k, v in settings.items() if getattr(plan.settings, k) != getattr(paper, k)}
    fixed = str(data.get("partition", "")).startswith(("silos", "domains", "by:"))  # these name the clients themselves
    return Simulation(
        plan.method,
        dataset or str(data["dataset"]),
        None if fixed else len(plan.clients),
        str(data.get("partition", "iid")),
        "paper",
        plan.seed,
        changes,
        data.get("samples"),
        plan.task.image[1],
        plan.task.image[0],
        data.get("evaluated_on", "test"),
        plan.limits,
        str(path),
        plan.topology,
        test_samples=data.get("test_samples"),
        reading=reading_of(data),
        secure_sum=plan.secure_sum,
        private_randomness=plan.private_randomness,
        privacy=plan.privacy,
        quorum=plan.quorum,
    )


def same_plan(plan: Plan, found: Plan, path: Path) -> None:
    """The shards here must be those that the plan was written for; one written by hand, without a digest, takes any."""
    there, here = ({**p.as_json(), "data": _given(p.data)} for p in (plan, found))
    if "digest" not in there["data"]:
        here["data"] = {key: value for key, value in here["data"].items() if key not in ("digest", "groups")}
        there["data"] = {key: value for key, value in there["data"].items() if key != "groups"}
    different = [key for key in ("task", "clients", "data") if there[key] != here[key]]
    if different:
        raise UsageError(
            [f"{path}: [{key}] is {there[key]!r}, but the data here give {here[key]!r}" for key in different],
            field="plan",
            fix="The dataset or the plan changed since `osfl new` wrote it: write it again with --force.",
        )


def _given(data: Mapping[str, object]) -> dict[str, object]:
    """None for an empty value: TOML has no null."""
    return {key: value for key, value in data.items() if value is not None}


def with_smoke(preset: str, smoke: bool) -> str:
    """The preset that was asked for; `--smoke` beside another one contradicts it."""
    if smoke and preset != "smoke" and any(one.name == "preset" for one in options.given_options()):
        raise UsageError(
            f"--smoke is --preset smoke, which contradicts --preset {preset}", field="preset", fix="Leave one of them out."
        )
    return "smoke" if smoke else preset
