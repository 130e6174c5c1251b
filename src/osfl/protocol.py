"""The protocol on one page: what is said in a round, by whom, and what a method has to provide.

    image folder ─► Shards ─client_phase─► Payload ─► Upload ─pack─► bytes ─transport─► inbox(gate)
                                                                                           │
    report ◄─ Result ◄─evaluate─ Model ◄─build─ Payload ◄─personalize─ Release ◄─server_phase┘

Each client speaks once. What it says is an `Upload`. This file imports nothing of ours and needs no torch at run time,
so that the program which meets strangers (`osfl.wire`) stays small.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    Tensors: TypeAlias = Mapping[str, torch.Tensor]  # named: "model/head.weight"; never positional lists

ClientId: TypeAlias = str
Json: TypeAlias = Any  # None, bool, int, float, str, and lists and string-keyed dicts of them
Facts: TypeAlias = Mapping[str, Json]  # small and readable: sample counts, architecture name
Progress: TypeAlias = Callable[[str, int, int], None]  # (what, done, total)
Item = TypeVar("Item")
Out = TypeVar("Out")


def canonical(value: Json) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII, no NaN. Digests and signatures are taken of it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest_of(value: Json) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


# Marks a setting that methods got after rounds had been agreed: where it has its default it is left out, so that the
# digests of plans that never heard of it stand.
LATER: Mapping[str, bool] = {"later": True}


def said(settings: Any) -> dict[str, Json]:
    """A method's settings as a plan names them."""
    if not is_dataclass(settings):
        return dict(settings)
    values = asdict(settings)  # type: ignore[arg-type]
    return {f.name: values[f.name] for f in fields(settings) if not ("later" in f.metadata and values[f.name] == f.default)}


# --- what a round is about -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is to be learned: the classes, and images as (channels, height, width)."""

    name: str
    classes: tuple[str, ...]
    image: tuple[int, int, int]


@dataclass(frozen=True)
class Limits:
    """What a receiving desk accepts at most, and how far a round relies on what sites claim."""

    upload_bytes: int = 2 << 30  # of one upload
    header_bytes: int = 1 << 20  # of its header
    facts_bytes: int = 64 << 10  # of its facts
    samples: int = field(default=1_000_000, metadata=LATER)  # images that a site may claim; `osfl check` finds a closer bound
    class_samples: int = field(default=1_000_000, metadata=LATER)  # images of one class that a site may claim
    # No more than half. Less than half by default: with exactly half, one site ties with all others together.
    share: float = field(default=0.4, metadata=LATER)  # of any weight by claimed counts, what one site has at most
    drawn_bytes: int = field(default=1 << 30, metadata=LATER)  # of features or sequences drawn for claimed counts, all sites


@dataclass(frozen=True)
class Contact:
    """Two clients within reach of each other: from when, for how long, and how fast."""

    a: ClientId
    b: ClientId
    start: str  # with its zone, "2026-12-24T18:00:00Z"
    seconds: float  # how long the window is open
    bytes_per_second: float  # in each direction
    encounter: int = 1  # the exchange that it belongs to; two windows of a pair in one encounter add up


@dataclass(frozen=True)
class Topology:
    """Who hears whom where clients meet each other instead of a server, and how often they meet.

    Each encounter is a round of its own, with a plan of its own: it names the encounter and, by its digest, the plan before.
    """

    kind: Literal["mesh", "ring", "random", "contacts"] = "mesh"
    peers: int = 0  # random: how many others each client hears, drawn anew in every encounter
    contacts: tuple[Contact, ...] = ()  # contacts: the schedule
    encounters: int = 1  # so many exchanges follow each other
    encounter: int = 1  # this round is that one of them
    after: str = ""  # digest of the plan of the encounter before


@dataclass(frozen=True)
class Plan:
    """Agreed before the round; its digest is the round's name."""

    task: Task
    method: str
    settings: Any  # the method's Settings
    clients: tuple[ClientId, ...]
    limits: Limits = Limits()
    seed: int = 0
    data: Mapping[str, Json] = field(default_factory=dict)  # simulation only: dataset, its digest, partition
    quorum: int = 0  # the server phase needs so many uploads; 0: one of each client
    deadline: str = ""  # until when to wait for the others once the quorum is there, "2026-12-24T18:00:00Z"
    topology: Topology | None = None  # who hears whom, for methods that only pass things on; None: everybody

    def as_json(self) -> dict[str, Json]:
        waiting = {"quorum": self.quorum, "deadline": self.deadline}
        return {
            "version": 1,
            "task": {"name": self.task.name, "classes": list(self.task.classes), "image": list(self.task.image)},
            "method": self.method,
            "settings": said(self.settings),
            "clients": list(self.clients),
            "limits": said(self.limits),
            "seed": self.seed,
            "data": dict(self.data),
            **({"round": waiting} if any(waiting.values()) else {}),
            **({"topology": json.loads(canonical(asdict(self.topology)))} if self.topology else {}),
        }

    @property
    def digest(self) -> str:
        return digest_of(self.as_json())


def neighbours(plan: Plan, client: ClientId) -> tuple[ClientId, ...]:
    """Whom this client hears in this round, sorted; without a topology everybody else.

    Random neighbours are the `peers` others with the smallest hash of seed, encounter and both names: in a new plan
    without a client the next one takes its place and nothing else changes; `osfl forget` fills no place in a standing round.
    """
    others = sorted(set(plan.clients) - {client})
    topology = plan.topology
    if topology is None or topology.kind == "mesh":
        return tuple(others)
    if topology.kind == "ring":
        ring = sorted({*plan.clients, client})
        here = ring.index(client)
        return tuple(sorted({ring[here - 1], ring[(here + 1) % len(ring)]} - {client}))
    if topology.kind == "random":
        from osfl.seeds import derive

        drawn = sorted(others, key=lambda other: derive(plan.seed, "neighbours", topology.encounter, client, other))
        return tuple(sorted(drawn[: topology.peers]))
    pairs = [(contact.a, contact.b) for contact in topology.contacts if contact.encounter == topology.encounter]
    return tuple(sorted({b if a == client else a for a, b in pairs if client in (a, b)}))


# --- what is kept at a client ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """Images as uint8 (n, channels, height, width) and labels as int64 (n,), both in memory."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def subset(self, index: torch.Tensor) -> Dataset:
        return Dataset(self.images[index], self.labels[index])


@dataclass(frozen=True)
class Shard:
    """One client's data. Only its own process sees it."""

    client: ClientId
    train: Dataset
    val: Dataset
    digest: str = ""  # of the images and labels; names work that may be reused on the same data


# --- what is said ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Payload:
    """Named tensors and what they mean."""

    tensors: Tensors
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """The one message of a client. Methods fill the payload; the walk sets sender and round."""

    client: ClientId
    plan: str
    payload: Payload


@dataclass(frozen=True)
class Release:
    """What the server gives back: a shared part, and a part of its own for each client that has one."""

    shared: Payload
    personal: Mapping[ClientId, Payload] = field(default_factory=dict)

    def for_client(self, client: ClientId) -> Payload:
        """The shared part overlaid with the client's own."""
        own = self.personal.get(client)
        if own is None:
            return self.shared
        return Payload({**self.shared.tensors, **own.tensors}, {**self.shared.facts, **own.facts})


@dataclass(frozen=True)
class Field:
    """One line of a contract. A string in `shape` is a free dimension that must agree across tensors:
    tokens ("n", 5, 768), labels ("n",) with below=7."""

    dtype: str  # as safetensors names it: F32, F16, I64, U8, ...
    shape: tuple[int | str, ...]
    required: bool = True
    below: int | None = None  # integer values must be in [0, below)
    group: str = field(default="", metadata=LATER)  # tensors of one group come together or not at all
    choice: str = field(default="", metadata=LATER)  # of the tensors that name the same choice at least one is there
    low: float | None = field(default=None, metadata=LATER)  # no value is below
    positive_sum: bool = field(default=False, metadata=LATER)  # the values add up to more than zero
    needs: tuple[str, ...] = field(default=(), metadata=LATER)  # facts without which the tensor cannot be used


Contract: TypeAlias = Mapping[str, Field]  # tensor name -> field: exactly what an upload may hold


# --- what a method provides ------------------------------------------------------------------------------------------


def quiet(what: str, done: int, total: int) -> None:
    pass


def _serial(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    return [work(item) for item in items]


def _again(key: Json, make: Callable[[], Payload]) -> Payload:
    return make()


def unseen(title: str, figure: Json) -> None:
    pass


def unscored(done: int, total: int, model: Callable[[], Payload]) -> None:
    pass


@dataclass(frozen=True)
class Context:
    """Everything that is not data."""

    plan: Plan
    device: torch.device
    progress: Progress = quiet
    scratch: Path | None = None  # survives a crash; empty when the phase starts for the first time
    map: Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]] = _serial  # over clients or models, in parallel
    once: Callable[[Json, Callable[[], Payload]], Payload] = _again  # reuse work that this key names completely
    show: Callable[[str, Json], None] = unseen  # a picture for the report, as osfl.reports.figures describes
    # (done, total, make): the server's model on its way, as `build` understands it; a simulation scores it, others do not ask
    milestone: Callable[[int, int, Callable[[], Payload]], None] = unscored
    previous: Payload | None = None  # what `personalize` gave this client one encounter earlier

    @property
    def encounter(self) -> tuple[int, ...]:
        """A label for what is drawn anew in later encounters; none in the first, so that a single one keeps its numbers."""
        number = self.plan.topology.encounter if self.plan.topology else 1
        return (number,) if number > 1 else ()

    def generator(self, *labels: str | int) -> torch.Generator:
        from osfl.seeds import torch_generator

        return torch_generator(self.plan.seed, *labels)


@runtime_checkable
class Method(Protocol):
    """One paper, both sides in one file. The constructor stores hyper-parameters; data goes to the verbs."""

    Settings: ClassVar[type]
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]]
    DEVIATIONS: ClassVar[Sequence[str]]

    def __init__(self, task: Task, settings: Any) -> None: ...
    def problems(self, clients: int) -> Sequence[str]: ...
    def architectures(self) -> Sequence[str]: ...
    def contract(self, architecture: str) -> Contract: ...
    def client_phase(self, shard: Shard, ctx: Context) -> Payload: ...
    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release: ...
    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload: ...
    def build(self, payload: Payload) -> nn.Module: ...


@runtime_checkable
class Relaying(Protocol):
    """Optional, for methods whose server only passes things on: clients can meet each other without one."""

    def relay(self, client: ClientId, uploads: Sequence[Upload], ctx: Context) -> Payload:
        """What this client gets of its neighbours' uploads, which are sorted by name; there may be none."""
        ...


def relayed(method: Relaying, uploads: Sequence[Upload], ctx: Context) -> Release:
    """The server phase of a method that relays: to each client that spoke, what its neighbours said."""
    said = list(uploads)  # a round opens and checks them anew each time they are asked for
    return Release(Payload({}), {u.client: relay_to(method, u.client, said, ctx) for u in said})


def relay_to(method: Relaying, client: ClientId, uploads: Sequence[Upload], ctx: Context) -> Payload:
    """The same for one client, as a site does it that has imported its neighbours' bundles itself."""
    heard = neighbours(ctx.plan, client)
    return method.relay(client, sorted((u for u in uploads if u.client in heard), key=lambda u: u.client), ctx)


@runtime_checkable
class Reviewing(Protocol):
    """Optional, for methods whose clients note in their payloads what only all of them together show."""

    def review(self, payloads: Mapping[ClientId, Payload]) -> Mapping[str, Json]:
        """Figures by title (see osfl.reports.figures), made of the clients' finished payloads."""
        ...


@runtime_checkable
class Previewing(Protocol):
    """Optional, for `osfl inspect`: what a message looks like, as figures by title (see osfl.reports.figures)."""

    def preview(self, payload: Payload, ctx: Context) -> Mapping[str, Json]: ...


@dataclass(frozen=True)
class Exposed:
    """What of one class can be read out of an upload, beside the site's own images of that class; rows of pixels or features.

    The egress check compares them (osfl.exposure).
    """

    label: int
    candidates: Mapping[str, torch.Tensor]  # by kind, (m, d): each row might be one image
    train: torch.Tensor  # (n, d): what it was computed from
    held_out: torch.Tensor  # (m, d): images of the class that were not used
    mean: torch.Tensor | None = None  # (1, d), with `directions` (k, d): combinations of them might be images
    directions: torch.Tensor | None = None
    setting: str = "least"  # what to raise where a candidate is too near


@runtime_checkable
class Exposing(Protocol):
    """For methods that send generators, statistics or synthetic data: what the egress check and `osfl inspect` attack."""

    def exposed(self, payload: Payload, shard: Shard, ctx: Context) -> Iterable[Exposed]: ...


@runtime_checkable
class Separable(Protocol):
    """Optional, for methods whose uploads hold a part of their own for each class: single classes can be forgotten, too.

    Where only some settings send classes apart, `separable()` tells. Where something else has seen the class as well, a
    string `inseparable` says so: it goes into the certificate.
    """

    def without_class(self, payload: Payload, label: int) -> Payload:
        """An upload's payload as if the client had no image of this class; 0 `samples`: nothing is left."""
        ...


@runtime_checkable
class Joint(Protocol):
    """Optional, for methods whose clients answer together in the end: what they exchange for it is counted and shown."""

    def after_round(self, payloads: Mapping[ClientId, Payload]) -> Payload | None:
        """One model of all clients' models, as `build` understands it; None where each client answers alone."""
        ...


@runtime_checkable
class Generative(Protocol):
    """Optional, for methods that make images: a simulation compares them with real ones."""

    def samples(self, uploads: Sequence[Upload], ctx: Context) -> Dataset:
        """The synthetic images and their labels, as the classifier is trained on them."""
        ...


@runtime_checkable
class Foretelling(Protocol):
    """Optional, for `osfl estimate`: methods whose server's work is known from the settings."""

    def server_flops(self, clients: Sequence[ClientId]) -> float:
        """Operations of the server phase, as the meter will count them."""
        ...


@runtime_checkable
class Tokenizing(Protocol):
    """Optional, for methods that make features instead of images: a simulation compares them with those of real images."""

    def tokens(self, uploads: Sequence[Upload], ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """The synthetic features (n, ...) and their labels, as the classifier is trained on them; n = 0 where it is not."""
        ...

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        """The same features of real images, uint8 (n, channels, height, width)."""
        ...


@dataclass(frozen=True)
class Exchange:
    """A message that a multi-round reference sends `times` times; its bytes are measured like those of an upload."""

    payload: Payload
    times: int = 1


@dataclass(frozen=True)
class Simulated:
    """What a reference returns: a release, and all that had to travel for it, by client."""

    release: Release
    up: Mapping[ClientId, Sequence[Exchange]] = field(default_factory=dict)
    down: Mapping[ClientId, Sequence[Exchange]] = field(default_factory=dict)
    client_seconds: float = 0.0  # of the work that clients would have done; the rest is the server's
    client_flops: float = 0.0


@runtime_checkable
class Reference(Protocol):
    """What one-shot methods are measured against. It may pool data or speak many times, so it exists in simulation only."""

    Settings: ClassVar[type]
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]]
    DEVIATIONS: ClassVar[Sequence[str]]

    def __init__(self, task: Task, settings: Any) -> None: ...
    def problems(self, clients: int) -> Sequence[str]: ...
    def simulate(self, shards: Sequence[Shard], ctx: Context) -> Simulated: ...
    def build(self, payload: Payload) -> nn.Module: ...


class Configured:
    """Stores task and settings. `Settings` defaults equal the paper's; PRESETS name what smaller budgets change."""

    Settings: ClassVar[type]
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "cpu": {}, "smoke": {}}
    DEVIATIONS: ClassVar[Sequence[str]] = ()  # where we depart from the paper whatever the settings, a sentence each

    def __init__(self, task: Task, settings: Any) -> None:
        self.task = task
        self.settings = settings

    def problems(self, clients: int) -> Sequence[str]:
        """What is wrong with these settings for a round of so many clients, a sentence each; asked before it starts."""
        return ()

    def departures(self) -> Sequence[str]:
        """Where these settings depart from the paper in a way that no changed value says, a sentence each."""
        return ()


class OneShot(Configured):
    """The usual one-shot method: one architecture, and the client uses the release as it is."""

    NEEDS: ClassVar[Sequence[str]] = ()  # facts without which an upload cannot be used

    def needs(self) -> Sequence[str]:
        """The facts that the gate asks of every upload."""
        return self.NEEDS

    def architectures(self) -> Sequence[str]:
        return (getattr(self.settings, "architecture", ""),)

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        return release.for_client(shard.client)
