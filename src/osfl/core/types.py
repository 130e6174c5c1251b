"""What is exchanged in a round: plan, payload, upload, release. What a method provides is in osfl.core.method.

    image folder ─► Shards ─client_phase─► Payload ─► Upload ─pack─► bytes ─transport─► inbox(gate)
                                                                                           │
    report ◄─ Result ◄─evaluate─ Model ◄─build─ Payload ◄─personalize─ Release ◄─server_phase┘

Each client sends one `Upload`. This file imports nothing of ours and needs no torch at run time, so that the program that
reads uploads of others (`osfl.wire`) stays small.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

    Tensors: TypeAlias = Mapping[str, torch.Tensor]  # named: "model/head.weight"; never positional lists

ClientId: TypeAlias = str
Json: TypeAlias = Any  # None, bool, int, float, str, and lists and string-keyed dicts of them
Facts: TypeAlias = Mapping[str, Json]  # small and readable: sample counts, architecture name
Progress: TypeAlias = Callable[[str, int, int], None]  # (what, done, total)
Presets: TypeAlias = Mapping[str, Mapping[str, Json]]  # of a method: settings that each of its presets changes
Item = TypeVar("Item")
Out = TypeVar("Out")


class RunMap(Protocol):
    """Work on each of some items, in parallel where there are workers; what comes out is in the order of the items."""

    def __call__(self, work: Callable[[Item], Out], items: Iterable[Item], /) -> list[Out]: ...


def one_by_one(work: Callable[[Item], Out], items: Iterable[Item], /) -> list[Out]:
    """Without workers: clients that personalize run side by side already."""
    return [work(item) for item in items]


Kind: TypeAlias = Literal["multiclass", "multilabel"]  # one class an image; or several, or none


def canonical(value: Json) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII, no NaN. Digests and signatures are taken of it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest_of(value: Json) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


# Marks a field that was added after rounds had been agreed: at its default it is left out of a plan's JSON, so that plans that
# were made before keep their digests.
ADDED: Mapping[str, bool] = {"added": True}


def settings_as_json(settings: Any) -> dict[str, Json]:
    """A method's settings as a plan names them."""
    if not is_dataclass(settings):
        return dict(settings)
    values = asdict(settings)  # type: ignore[arg-type]
    return {f.name: values[f.name] for f in fields(settings) if not ("added" in f.metadata and values[f.name] == f.default)}


# --- what a round is about -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is to be learned: the classes, and images as (channels, height, width)."""

    name: str
    classes: tuple[str, ...]
    image: tuple[int, int, int]
    kind: Kind = "multiclass"

    @property
    def several(self) -> bool:
        """Whether an image may be of several classes, or of none."""
        return self.kind == "multilabel"

    def as_json(self) -> dict[str, Json]:
        """As plans name it; the kind that was there first is not named, so that plans keep their digests."""
        found = {"name": self.name, "classes": list(self.classes), "image": list(self.image)}
        return found if self.kind == "multiclass" else {**found, "kind": self.kind}


@dataclass(frozen=True)
class Limits:
    """What a coordinator accepts at most, and how far a round relies on what sites claim."""

    upload_bytes: int = 2 << 30  # of one upload
    header_bytes: int = 1 << 20  # of its header
    facts_bytes: int = 64 << 10  # of its facts
    samples: int = field(default=1_000_000, metadata=ADDED)  # images that a site may claim; `osfl check` finds a closer bound
    class_samples: int = field(default=1_000_000, metadata=ADDED)  # images of one class that a site may claim
    # No more than half. Less than half by default: with exactly half, one site ties with all others together.
    share: float = field(default=0.4, metadata=ADDED)  # of any weight by claimed counts, what one site has at most
    drawn_bytes: int = field(default=1 << 30, metadata=ADDED)  # of features or sequences drawn for claimed counts, all sites


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
    """Which clients exchange with which where there is no server, and how often they exchange.

    Each encounter is a round of its own, with a plan of its own: it names the encounter and, by its digest, the plan before.
    """

    kind: Literal["mesh", "ring", "random", "contacts"] = "mesh"
    peers: int = 0  # random: number of neighbors of each client, drawn anew in every encounter
    contacts: tuple[Contact, ...] = ()  # contacts: the schedule
    encounters: int = 1  # so many exchanges follow each other
    encounter: int = 1  # this round is that one of them
    after: str = ""  # digest of the plan of the encounter before


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of a round: the least noise that is (epsilon, delta)-private."""

    epsilon: float  # how much one image may change what is learned about it; smaller is more private
    delta: float  # how often that may fail; well below one over the number of images
    # site: each site adds all of it, against the server, too; share: sites' noise adds up to it, for a trusted server or, in a
    # secure sum, against the server, too
    noise: Literal["site", "share"] = "site"
    # share: so many sites of the quorum may tell others their noise; the other sites' noise alone keeps epsilon
    colluders: int = field(default=0, metadata=ADDED)


@dataclass(frozen=True)
class Judging:
    """How the server treats sites that may be malicious: what it does with suspicions, and how it combines what sites sent."""

    # ask: the server phase waits until the coordinator leaves a suspected site out or keeps it; note: it goes on, noted
    suspects: Literal["ask", "note", "off"] = "ask"
    # mean: as the method has it; median, trimmed (a quarter of the weight at each end) and geometric (median) are robust
    combine: Literal["mean", "median", "trimmed", "geometric"] = "mean"


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
    topology: Topology | None = None  # neighbors, for methods without a server; None: everybody
    late: bool = False  # an upload that comes after the release makes the next release; for methods that only add
    secure_sum: bool = False  # uploads are masked: the server learns their sum only; for methods that need no more
    privacy: Privacy | None = None  # noise on what sites send; None: none
    private_randomness: bool = False  # a site's batch order and augmentation come from a secret of its own, not from the seed
    judging: Judging = Judging()  # what happens where an upload contradicts the others

    def as_json(self) -> dict[str, Json]:
        chosen = {name: True for name in ("late", "secure_sum", "private_randomness") if getattr(self, name)}
        waiting = {"quorum": self.quorum, "deadline": self.deadline, **chosen}
        return {
            "version": 1,
            "task": self.task.as_json(),
            "method": self.method,
            "settings": settings_as_json(self.settings),
            "clients": list(self.clients),
            "limits": settings_as_json(self.limits),
            "seed": self.seed,
            "data": dict(self.data),
            **({"round": waiting} if any(waiting.values()) else {}),
            **({"privacy": settings_as_json(self.privacy)} if self.privacy else {}),
            **({"judging": asdict(self.judging)} if self.judging != Judging() else {}),
            **({"topology": json.loads(canonical(asdict(self.topology)))} if self.topology else {}),
        }

    @property
    def digest(self) -> str:
        return digest_of(self.as_json())


# --- what is kept at a client ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """Images as uint8 (n, channels, height, width) and labels as int64: (n,), or multi-label (n, classes) of 0 and 1.

    Images may be a memory-mapped file (osfl.data.mapped): nothing writes into them.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def shows(self, label: int) -> torch.Tensor:
        """(n,) which images are of the class."""
        return self.labels == label if self.labels.ndim == 1 else self.labels[:, label] > 0

    def class_counts(self, classes: int) -> torch.Tensor:
        """(classes,) how many images are of each class."""
        return self.labels.bincount(minlength=classes) if self.labels.ndim == 1 else self.labels.sum(0)

    def subset(self, index: torch.Tensor) -> Dataset:
        return Dataset(self.images[index], self.labels[index])


@dataclass(frozen=True)
class Shard:
    """One client's data. Only its own process sees it."""

    client: ClientId
    train: Dataset
    val: Dataset
    digest: str = ""  # of the images and labels; names work that may be reused on the same data


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Payload:
    """Named tensors and what they mean."""

    tensors: Tensors
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """The one message of a client. Methods fill the payload; the run sets sender and round."""

    client: ClientId
    plan: str
    payload: Payload


@dataclass(frozen=True)
class Total:
    """An exact sum over uploads, where a release follows from nothing else; of one upload it is that upload's term.

    Whole numbers: adding and subtracting terms gives the same bits in any order.
    """

    tensors: Tensors  # int64, by name
    images: Mapping[ClientId, int]  # how many each client in it claims

    def __add__(self, other: Total) -> Total:
        return Total({n: t + other.tensors[n] for n, t in self.tensors.items()}, {**self.images, **other.images})

    def __sub__(self, other: Total) -> Total:
        left = {client: n for client, n in self.images.items() if client not in other.images}
        return Total({n: t - other.tensors[n] for n, t in self.tensors.items()}, left)


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
    group: str = field(default="", metadata=ADDED)  # tensors of one group come together or not at all
    choice: str = field(default="", metadata=ADDED)  # of the tensors that name the same choice at least one is there
    low: float | None = field(default=None, metadata=ADDED)  # no value is below
    positive_sum: bool = field(default=False, metadata=ADDED)  # the values add up to more than zero
    needs: tuple[str, ...] = field(default=(), metadata=ADDED)  # facts without which the tensor cannot be used


Contract: TypeAlias = Mapping[str, Field]  # tensor name -> field: exactly what an upload may hold


@dataclass(frozen=True)
class Summand:
    """One tensor of a secure sum (osfl.core.sums): how large a site's values may be follows from the plan."""

    shape: tuple[int, ...]
    bound: float  # no value of one site is further from zero
    whole: bool = False  # whole numbers, which are added as they are; others are rounded to steps


@dataclass(frozen=True)
class Exposed:
    """What of one class can be read out of an upload, beside the site's own images of that class; rows of pixels or features.

    The egress check compares them (osfl.rounds.exposure).
    """

    label: int  # the number after the last class: of all images, among them those of no class (multi-label)
    candidates: Mapping[str, torch.Tensor]  # by kind, (m, d): each row might be one image
    train: torch.Tensor  # (n, d): what it was computed from
    held_out: torch.Tensor  # (m, d): images of the class that were not used
    mean: torch.Tensor | None = None  # (1, d), with `directions` (k, d): combinations of them might be images
    directions: torch.Tensor | None = None
    moments: Callable[[], torch.Tensor] | None = None  # (d, d): sum of z z^T; classes that share one sum share the function
    summed: int = 0  # rows in that sum
    # What a candidate that is too near stops: any upload; that of a real site alone, while a simulation goes on and says so;
    # or none, where the plan accepts it.
    stops: Literal["all", "real", "none"] = "all"
    setting: str = "least"  # what to raise where a candidate is too near


@dataclass(frozen=True)
class Probed:
    """What of an upload can be compared with what other sites sent (osfl.rounds.judging). No image of any site is needed."""

    counts: Sequence[float] = ()  # images of each class that it claims; empty: it does not say
    classifier: torch.nn.Module | None = None  # answers the points of all sites; where there are none, public images
    points: torch.Tensor | None = None  # (n, ...) what it says its classes look like: samples, tokens, or class means
    labels: torch.Tensor | None = None  # (n,)
    variance: torch.Tensor | None = None  # (d,) within classes, where the points are class means
    pixels: bool = False  # points are uint8 images


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
