"""What a method provides, and the context that it computes with. See docs/architecture.md for one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from osfl.core.errors import UsageError
from osfl.core.topology import neighbors
from osfl.core.types import (
    ClientId,
    Contract,
    Dataset,
    Exposed,
    Json,
    Kind,
    Payload,
    Plan,
    Presets,
    Probed,
    Progress,
    Release,
    RunMap,
    Shard,
    Simulated,
    Summand,
    Task,
    Total,
    Upload,
    one_by_one,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


Phase = Literal["client", "server", "personalize"]  # of a round; a reference has `client` and `server`


def quiet(what: str, done: int, total: int) -> None:
    pass


def _compute(key: Json, make: Callable[[], Payload]) -> Payload:
    return make()


def ignore_figure(title: str, figure: Json) -> None:
    pass


def ignore_milestone(done: int, total: int, model: Callable[[], Payload]) -> None:
    pass


@dataclass(frozen=True)
class Part:
    """A piece of a server phase that needs nothing of the other pieces: one client's images, or one class of one client."""

    clients: tuple[ClientId, ...]  # whose uploads it reads, in this order
    payload: Payload  # what it needs besides
    key: Callable[[], Json] | None = None  # names its work completely: it is then done once and kept


PartWork = Callable[[Any, Sequence[Upload], Part, "Context"], Payload]  # of a module: another process finds it by its name
Spread = Callable[["Method", PartWork, Sequence[Upload], Sequence[Part], "Context"], list[Payload]]


@dataclass(frozen=True)
class Context:
    """Everything that is not data."""

    plan: Plan
    device: torch.device
    progress: Progress = quiet
    scratch: Path | None = None  # survives a crash; empty when the phase starts for the first time
    map: RunMap = one_by_one  # over clients or models, in parallel
    get_or_compute: Callable[[Json, Callable[[], Payload]], Payload] = _compute  # reuse work that this key names completely
    show: Callable[[str, Json], None] = ignore_figure  # a picture for the report, as osfl.reports.figures describes
    # (done, total, make): an intermediate model of the server, as `build` takes it; only a simulation scores it
    milestone: Callable[[int, int, Callable[[], Payload]], None] = ignore_milestone
    previous: Payload | None = None  # what `personalize` gave this client one encounter earlier
    secret: bytes = b""  # where the plan asks for private randomness: what a client draws from in the place of the seed
    devices: Sequence[torch.device] = ()  # where there are several: `device` is the first
    elsewhere: Spread | None = None  # other processes that compute parts of the server phase (osfl.simulate.ray)

    @property
    def spreads(self) -> bool:
        """Whether `spread` computes parts on other processes or devices."""
        return self.elsewhere is not None or len(self.devices) > 1

    def spread(
        self,
        method: Method,
        work: PartWork,
        uploads: Sequence[Upload],
        parts: Sequence[Part],
        here: Callable[[Part], Payload] | None = None,
    ) -> list[Payload]:
        """`work(method, its uploads, part, ctx)` for each part, in their order: on other processes where there are some, on the
        devices in turn where there are several, and else here, side by side.

        `here` is the same work with networks that this process has built already. Each part draws from generators that
        its own names seed, so that it does not matter where it is computed.
        """
        if self.elsewhere is not None:
            return self.elsewhere(method, work, uploads, parts, self)
        if here is not None and not self.spreads:
            return self.map(lambda part: self._kept(part, here), parts)
        places = {upload.client: place for place, upload in enumerate(uploads)}

        def on_device(numbered: tuple[int, Part]) -> Payload:
            number, part = numbered
            mine = replace(self, device=self.devices[number % len(self.devices)]) if self.devices else self
            return self._kept(part, lambda part: work(method, [uploads[places[c]] for c in part.clients], part, mine))

        return self.map(on_device, list(enumerate(parts)))

    def _kept(self, part: Part, work: Callable[[Part], Payload]) -> Payload:
        return work(part) if part.key is None else self.get_or_compute(part.key(), lambda: work(part))

    def for_client(self, client: ClientId) -> Context:
        """The same on the device that computes for this client. Which one follows from its place in the plan, not from which
        is free: on devices that round differently, a run that was interrupted ends with the same bytes."""
        if len(self.devices) < 2 or client not in self.plan.clients:
            return self
        return replace(self, device=self.devices[self.plan.clients.index(client) % len(self.devices)])

    @property
    def encounter(self) -> tuple[int, ...]:
        """A label for what is drawn anew in later encounters; none in the first, so that a single one keeps its numbers."""
        number = self.plan.topology.encounter if self.plan.topology else 1
        return (number,) if number > 1 else ()

    def generator(self, *labels: str | int) -> torch.Generator:
        """What these labels draw, from the plan's seed. With a secret all that names a client is drawn from that instead; what
        clients share, such as the weights that all begin with, still follows from the seed."""
        from osfl.core.seeds import torch_generator

        own = bool(self.secret) and not set(labels).isdisjoint(self.plan.clients)
        return torch_generator(int.from_bytes(self.secret, "big") if own else self.plan.seed, *labels)


class Method:
    """What a method provides: one paper, the client's side and the server's side in one class.

    A one-shot method defines `contract`, `client_phase`, `server_phase` and `build`. A reference, which exists in simulation
    only, defines `simulate` and `build`. Everything else has a default; `provides` is true for what a class defines itself.
    """

    Settings: ClassVar[type[Any]]  # a frozen dataclass; its defaults are the paper's values
    PRESETS: ClassVar[Presets] = {"paper": {}, "cpu": {}, "smoke": {}}  # what smaller budgets change
    PRIVATE: ClassVar[Mapping[str, object]] = {}  # settings that a round with differential privacy begins with
    DEVIATIONS: ClassVar[Sequence[str]] = ()  # where we depart from the paper whatever the settings, a sentence each
    TASKS: ClassVar[Sequence[Kind]] = ("multiclass",)  # kinds of labels that it can learn
    NEEDS: ClassVar[Sequence[str]] = ()  # facts without which an upload cannot be used
    STRUCTURE: ClassVar[Sequence[str]] = ()  # numbers of the smoke preset that change an upload's size: no rehearsal takes them

    def __init__(self, task: Task, settings: Any) -> None:
        self.task = task
        self.settings = settings

    @classmethod
    def provides(cls, hook: str) -> bool:
        """Whether this class defines a method of this name itself, instead of keeping the default of `Method`."""
        return getattr(cls, hook) is not getattr(Method, hook)

    # --- settings: checked before a round starts ---------------------------------------------------------------------------

    def problems(self, clients: int) -> Sequence[str]:
        """What is wrong with these settings for a round of so many clients, a sentence each. Default: nothing."""
        return ()

    def departures(self) -> Sequence[str]:
        """Deviations of these settings from the paper that no changed value shows, a sentence each. Default: none."""
        return ()

    def only_for_clients(self) -> set[str]:
        """Names of settings that only the client phase reads. Default: none."""
        return set()

    def architectures(self) -> Sequence[str]:
        """Architectures that clients may upload. Default: the setting `architecture`."""
        return (getattr(self.settings, "architecture", ""),)

    def needs(self) -> Sequence[str]:
        """Facts that the gate asks of every upload. Default: `NEEDS`."""
        return self.NEEDS

    # --- a one-shot round ----------------------------------------------------------------------------------------------------

    def contract(self, architecture: str) -> Contract:
        """Exactly the tensors that an upload may hold: name, dtype, shape and range."""
        raise NotImplementedError

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        """Learn from one client's images, and return what it uploads."""
        raise NotImplementedError

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        """Make the release of all accepted uploads."""
        raise NotImplementedError

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        """The client's own model after the round. Default: the release as it is."""
        return release.for_client(shard.client)

    def needs_images_after_round(self) -> bool:
        """Whether `personalize` reads the client's images with these settings. Default: if the class defines it."""
        return self.provides("personalize")

    def build(self, payload: Payload) -> nn.Module:
        """The classifier that a payload of `server_phase`, `personalize` or `simulate` describes."""
        raise NotImplementedError

    def device_bytes(self, images: int, memory: int, half: bool) -> int | None:
        """Memory of its device that a client with so many images needs to train, within `memory` bytes (0: any); `DeviceError`
        where it cannot fit. Default: not known."""
        return None

    # --- a reference: what one-shot methods are measured against

    def simulate(self, shards: Sequence[Shard], ctx: Context) -> Simulated:
        """Train with pooled data or in many rounds. Such a method exists in simulation only."""
        raise NotImplementedError

    # --- rounds without a server ---------------------------------------------------------------------------------------------

    def relay(self, client: ClientId, uploads: Sequence[Upload], ctx: Context) -> Payload:
        """What this client gets of its neighbors' uploads, which are sorted by name; there may be none.

        For methods whose server only passes uploads on: their clients can exchange them without one.
        """
        raise NotImplementedError

    def after_round(self, payloads: Mapping[ClientId, Payload]) -> Payload | None:
        """One model of all clients' models, as `build` understands it. Default: None, clients predict one by one."""
        return None

    # --- sums ----------------------------------------------------------------------------------------------------------------

    def additive(self) -> bool:
        """Whether the release follows from an exact sum over the uploads. A plan may then let an upload join a finished round
        (`late`); with it, or without it again, the release is what it would be had that been so from the start. Default: no."""
        return False

    def term(self, upload: Upload) -> Total:
        """What an upload adds to the sum of an additive method; `check_upload` has let it through."""
        raise NotImplementedError

    def release_of(self, total: Total, uploads: Sequence[Upload], ctx: Context) -> Release:
        """The release of a sum over these uploads, in this order; they are opened only where the sum does not say enough."""
        raise NotImplementedError

    def check_upload(self, upload: Upload, ctx: Context) -> None:
        """Raise `RoundError` for an upload whose numbers no images can have. The server asks, and a site before it sends.
        Default: nothing is refused."""

    def probed(self, upload: Upload, ctx: Context) -> Probed:
        """What of an upload can be compared with others', before the server phase (osfl.rounds.judging). Default: the counts
        that it claims; then it is judged by its size, its numbers and copies alone."""
        return Probed(tuple(upload.payload.facts.get("class_counts", ())))

    def robust(self) -> Sequence[str]:
        """What a plan's `judging.combine` may be besides `mean`, with these settings. Default: nothing."""
        return ()

    # --- secure sum: the server sees the sum of all uploads and no upload

    COMMON: ClassVar[Sequence[str]] = ()  # facts of an upload that follow from the plan: they stay readable on a masked one

    def summands(self, plan: Plan) -> Mapping[str, Summand]:
        """The tensors of whose sum over all sites the server needs to know, and no more; for methods that allow `secure_sum`.

        Raise `UsageError` for settings with which the server needs more.
        """
        raise UsageError(
            f"round.secure_sum: the server of {plan.method} needs every upload, not only their sum",
            fix="Leave round.secure_sum out, or choose a method whose server only adds, such as onesum.",
        )

    def to_sum(self, payload: Payload) -> Mapping[str, torch.Tensor]:
        """What an upload adds to the sum, by summand; one that is left out is zero. Default: its tensors."""
        return payload.tensors

    def from_sum(self, total: Payload, sites: int) -> Payload:
        """The payload that the server phase gets as its only upload, of the sum over so many sites. Default: the sum."""
        return total

    def privacy_problems(self, plan: Plan) -> Sequence[str]:
        """Why this method cannot keep the plan's `[privacy]` with these settings, a sentence each. Default: it has no noise."""
        return (f"privacy: what sites of {plan.method} send is not a sum that noise is added to",)

    def adds_held_out(self, plan: Plan) -> bool:
        """Whether an upload is made of the site's held-out images, too, so that an audit may not take them for images that were
        not used. Default: no."""
        return False

    def privacy_statement(self, release: Release, uploads: Sequence[Upload], plan: Plan) -> Json:
        """What differential privacy holds for a release of these uploads (`DifferentialPrivacy` in osfl.core.result). Default:
        what the release says itself."""
        return release.shared.facts["privacy"]

    # --- removal of single classes

    @property
    def inseparable(self) -> str:
        """What else has seen a removed class, for the certificate of removal. Default: nothing."""
        return ""

    def separable(self) -> bool:
        """Whether uploads with these settings hold a part of their own for each class. Default: if `without_class` exists."""
        return self.provides("without_class")

    def without_class(self, payload: Payload, label: int) -> Payload:
        """An upload's payload as if the client had no image of this class; 0 `samples`: nothing is left."""
        raise NotImplementedError

    # --- what evaluation, inspection and estimates ask for

    def exposed(self, payload: Payload, shard: Shard, ctx: Context) -> Iterable[Exposed]:
        """What of an upload the egress check and `osfl inspect` attack: generators, statistics, synthetic data. Default:
        nothing."""
        return ()

    def upload_model(self, upload: Upload, ctx: Context) -> nn.Module | None:
        """The classifier that an upload is, or that follows from it alone: `osfl audit` asks what it knows. Default: for
        additive methods what the server would make of it, else none."""
        if not self.additive():
            return None
        return self.build(self.release_of(self.term(upload), [upload], ctx).shared)

    def cautions(self, payload: Payload, plan: Plan) -> Sequence[str]:
        """What whoever reads this upload can find out although the egress check lets it leave, a sentence each; the site is
        told. Default: nothing is known."""
        return ()

    def too_few(self, payload: Payload, plan: Plan) -> tuple[int, int] | None:
        """Images behind this upload, and how many a real site needs at least, where it has fewer: of so few each can be
        computed, though not by the egress check's attack. Default: any number will do."""
        return None

    def preview(self, payload: Payload, ctx: Context) -> Mapping[str, Json]:
        """What a message looks like, for `osfl inspect`: figures by title (osfl.reports.figures). Default: none."""
        return {}

    def learned_prior(self, payload: Payload) -> tuple[torch.Tensor, float] | None:
        """The log class shares that a finished classifier answers with, and the temperature on its other scores beside a site's
        own shares: a simulation then also reports the accuracy with prior correction. Default: None, nothing."""
        return None

    def review(self, payloads: Mapping[ClientId, Payload]) -> Mapping[str, Json]:
        """What only the clients' finished payloads together show: figures by title. Default: none."""
        return {}

    def server_flops(self, clients: Sequence[ClientId]) -> float | None:
        """Operations of the server phase, as the meter will count them, for `osfl estimate`. Default: None, not known."""
        return None

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        """Settings that only say how often or how long something is done, each with the two values that `osfl estimate`
        rehearses with, the shorter first; two equal values: only a setting that has to follow. Default: `epochs`,
        `server_epochs`, and of references `rounds`, once and twice."""
        names = ("epochs", "server_epochs", *(("rounds",) if self.provides("simulate") else ()))
        return {name: (1, 2) for name in names if hasattr(self.settings, name)}

    def keeps(self) -> Sequence[str]:
        """Of the settings in `shortened`, those whose work stays in memory to the end of a phase. Default: none."""
        return ()

    def every_image(self) -> bool:
        """Whether a rehearsal needs all images of a client, because its costs follow no line in their number. Default: no."""
        return False

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        """What the cost of a phase is a sum of, up to factors that rehearsals find: numbers that follow from the settings and
        from `images`, which are the client's, or in the server phase and of references those of all clients.

        Default: a constant, the images, and of a client that has `epochs` also images times epochs; of a server
        `server_epochs`, or what `server_flops` knows; of a reference all of it for each of its `rounds`.
        """
        s = self.settings
        if phase == "client" or self.provides("simulate"):
            rounds = s.rounds if self.provides("simulate") and hasattr(s, "rounds") else 1
            return (1, rounds, images, rounds * images * getattr(s, "epochs", 0))
        known = self.server_flops(clients) if phase == "server" else None
        if known is not None:
            return (1, known)
        return (1, images, getattr(s, "server_epochs", 0) if phase == "server" else 0)

    def samples(self, uploads: Sequence[Upload], ctx: Context) -> Dataset:
        """The synthetic images and their labels, as the classifier is trained on them."""
        raise NotImplementedError

    def tokens(self, uploads: Sequence[Upload], ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """The synthetic features (n, ...) and their labels, as the classifier is trained on them; n = 0 where it is not."""
        raise NotImplementedError

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        """The same features of real images, uint8 (n, channels, height, width)."""
        raise NotImplementedError


def add_up(method: Method, uploads: Iterable[Upload], ctx: Context, start: Total | None = None) -> Total:
    """The sum of the uploads' terms (and of `start`), each checked first; one upload is in memory at a time."""
    total = start
    for upload in uploads:
        method.check_upload(upload, ctx)
        term = method.term(upload)
        total = term if total is None else total + term
    assert total is not None
    return total


def relayed(method: Method, uploads: Sequence[Upload], ctx: Context) -> Release:
    """The server phase of a method that relays: each client that uploaded gets the uploads of its neighbors."""
    received = list(uploads)  # a round opens and checks them anew each time they are asked for
    return Release(Payload({}), {u.client: relay_to(method, u.client, received, ctx) for u in received})


def relay_to(method: Method, client: ClientId, uploads: Sequence[Upload], ctx: Context) -> Payload:
    """The same for one client, as a site does it that has imported its neighbors' bundles itself."""
    senders = neighbors(ctx.plan, client)
    return method.relay(client, sorted((u for u in uploads if u.client in senders), key=lambda u: u.client), ctx)
