"""Short runs of a plan, and what they let expect of the whole one: operations, seconds, bytes.

A rehearsal takes the clients, the architecture and the sizes of the plan, a few images, and short values of the settings that
count steps (`Method.shortened`). Each further one lengthens one of them. What a phase costs is then fitted as a sum of what the
method says that it grows with (`Method.work`), and continued to the plan's own settings and images. Where there are many
clients, some of them rehearse, and half as many: what grows with the clients is continued along that line.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from osfl.core.method import Method, Phase, quiet
from osfl.core.names import architecture_rule
from osfl.core.registry import is_reference, load
from osfl.core.topology import all_encounters
from osfl.core.types import ClientId, Dataset, Plan, Shard, Topology
from osfl.ingredients.tokens.store import Apart, features_apart, share_kept
from osfl.models.architectures import architecture_for
from osfl.rounds.folder import contracts_of, open_round, simulated_key
from osfl.rounds.phases import computing
from osfl.runtime.machine import Machine
from osfl.runtime.meter import counting
from osfl.runtime.tensor_bytes import TensorBytes
from osfl.simulate.run import RunHistory, run_phases
from osfl.simulate.simulation import Federation

FIRST = 8  # images a client in the first rehearsal, which shows how many the others can have
MOST = 256  # images a client in the others, at most; the longer one has twice as many
TARGET = 8.0  # seconds that a rehearsal may take, for batches as full as the run's; a large network takes longer anyway
ENOUGH = 0.5  # seconds that a longer setting has to add: less is lost in what else the computer does, and then continued
NOISE = 0.1  # of seconds, as part of the longest rehearsal
CROWD = 24  # clients from which on only some rehearse: 8 and 16
Quantity = str  # "flops", "seconds", "tensor_bytes"
PHASES: Sequence[Phase] = ("client", "server", "personalize")


@dataclass(frozen=True)
class Costs:
    """What one rehearsal cost: a row of figures for each client and phase ("" is everybody), and bytes sent."""

    settings: Any
    images: Mapping[ClientId, int]
    rows: Mapping[tuple[str, ClientId], Mapping[str, float]]
    up: Mapping[ClientId, int]
    down: Mapping[ClientId, int]
    messages: int

    def figure(self, phase: str, client: ClientId, quantity: Quantity) -> float:
        return float(self.rows.get((phase, client), {}).get(quantity, 0))


@dataclass(frozen=True)
class Expected:
    """What the whole run will cost: for each client, and "" for the server."""

    figures: Mapping[Quantity, Mapping[Phase, Mapping[ClientId, float]]]
    up: Mapping[ClientId, int]
    down: Mapping[ClientId, int]
    messages: int
    rehearsed: Sequence[str]  # what was continued, from which values to which, a few words each
    kept: float = 0.0  # of the images that rehearsals encoded, the part whose features are in the user's cache

    def total(self, quantity: Quantity, phase: Phase) -> float:
        return sum(self.figures[quantity][phase].values())

    def most(self, quantity: Quantity, phase: Phase) -> float:
        return max(self.figures[quantity][phase].values(), default=0.0)


def expected(federation: Federation, machine: Machine, *, tensors: bool = True) -> Expected:
    """Rehearse, and continue to the whole run. `tensors`: count bytes of tensors, too, in rehearsals of their own."""
    crowd = federation.plan.topology is None and len(federation.shards) > CROWD
    if not crowd:
        return _expected(federation, machine, tensors)
    some = [_some_of(federation, CROWD // 3), _some_of(federation, 2 * CROWD // 3)]
    fewer, more = (_expected(one, machine, tensors) for one in some)
    return _for_everybody(fewer, more, federation)


def _expected(federation: Federation, machine: Machine, tensors: bool) -> Expected:
    plan = federation.plan
    shortened = _shortened(plan)
    with tempfile.TemporaryDirectory(prefix="osfl-estimate-") as place:
        stage = Stage(federation, machine, Path(place))
        images, begun = stage.images(shortened.base)
        wanted = _variants(federation, shortened, images)
        timed = [stage.rehearse(settings, count, "timed") for settings, count in (wanted[1:] if begun else wanted)]
        timed = [begun, *timed] if begun else timed
        timed += _longer(stage, shortened, timed, images[0])
        counted = []
        if tensors:
            with TensorBytes() as counter, counting(counter):
                rehearsals = _kept_variants(plan, shortened, images)
                counted = [stage.rehearse(settings, count, "counted") for settings, count in rehearsals]
        kept = share_kept(stage.features["timed"])
    figures = {
        "flops": _continued(timed, federation, "flops", _work),
        "seconds": _continued(timed, federation, _clock(machine), _work),
        "tensor_bytes": _continued(counted, federation, "tensor_bytes", _sizes) if tensors else {},
    }
    known = _method(plan, plan.settings).server_flops(plan.clients)
    if known is not None:
        figures["flops"]["server"] = {"": known}
    first, longer = timed[0], timed[min(1, len(timed) - 1)]
    up, down = (_bytes(timed, federation, way) for way in ("up", "down"))
    words = [
        f"{name} {_text(values[0])} and {_text(values[1])} → {_text(getattr(plan.settings, name))}"
        for name, values in shortened.varied.items()
    ]
    few, more, real = (max(one.values()) for one in (first.images, longer.images, _real(federation)))
    words += [f"images a client {few} and {more} → {real}"] if few < real else []
    return Expected(figures, up, down, _messages(first, plan), words, kept)


def _clock(machine: Machine) -> Quantity:
    """Seconds of the processor, which other programs do not lengthen; a GPU has its own, beside it."""
    return "processor_seconds" if machine.device == "cpu" else "seconds"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- which rehearsals ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shortened:
    """The shortest settings, and those that are lengthened one by one, with both values."""

    base: Any
    varied: Mapping[str, tuple[Any, Any]]


def _shortened(plan: Plan) -> Shortened:
    """Settings that are short already stay as they are."""
    wanted = _method(plan, plan.settings).shortened()
    pairs = {name: _below(values, getattr(plan.settings, name)) for name, values in wanted.items()}
    base = replace(plan.settings, **{name: short for name, (short, _) in pairs.items()})
    return Shortened(base, {name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


def _below(values: tuple[Any, Any], real: Any) -> tuple[Any, Any]:
    return values if isinstance(real, str) else (min(values[0], real), min(values[1], real))


def _kept_variants(plan: Plan, shortened: Shortened, images: tuple[int, int]) -> Iterator[tuple[Any, int]]:
    """The same for memory, where only settings matter whose work is kept. All are long in the first rehearsal: what a second
    turn finds of the first is not there in a single one."""
    kept = {name: shortened.varied[name] for name in _method(plan, plan.settings).keeps() if name in shortened.varied}
    base = replace(shortened.base, **{name: longer for name, (_, longer) in shortened.varied.items()})
    yield base, images[0]
    if images[1] > images[0]:
        yield base, images[1]
    for name, (short, longer) in kept.items():
        more = min(getattr(plan.settings, name), 2 * longer - short)
        if more > longer:
            yield replace(base, **{name: more}), images[0]


def _variants(federation: Federation, shortened: Shortened, images: tuple[int, int]) -> list[tuple[Any, int]]:
    """Settings and images a client of each rehearsal: the shortest, one with more images, one for each longer setting, and
    still longer ones until they tell apart what the whole run needs to know."""
    found = [(shortened.base, images[0])]
    if images[1] > images[0]:
        found.append((shortened.base, images[1]))
    found += [(replace(shortened.base, **{name: longer}), images[0]) for name, (_, longer) in shortened.varied.items()]
    for name, (short, longer) in shortened.varied.items():
        more = longer if isinstance(longer, str) else min(getattr(federation.plan.settings, name), 2 * longer - short)
        if more != longer and not _determined(federation, found):
            found.append((replace(shortened.base, **{name: more}), images[0]))
    return found


def _longer(stage: Stage, shortened: Shortened, timed: Sequence[Costs], images: int) -> list[Costs]:
    """Rehearsals with still more of each setting, up to the plan's own, until what it adds can be measured."""
    found, base = list[Costs](), stage.seconds(timed[0])
    for name, (_, value) in shortened.varied.items():
        real = getattr(stage.federation.plan.settings, name)
        added = next(stage.seconds(costs) for costs in timed if getattr(costs.settings, name) == value) - base
        while not isinstance(value, str) and value < real and added < ENOUGH:
            value = min(real, value * min(8, max(2, int(ENOUGH / max(added, 1e-3)))))
            found.append(stage.rehearse(replace(shortened.base, **{name: value}), images, "timed"))
            added = stage.seconds(found[-1]) - base
    return found


def _determined(federation: Federation, rehearsals: Sequence[tuple[Any, int]]) -> bool:
    """Whether the whole run's columns are a sum of the rehearsals' in every phase: then weights that fit them fit it."""
    plan, most, count = federation.plan, max(_real(federation).values()), len(federation.shards)
    for phase in PHASES:
        many = count if phase == "server" else 1
        rows = [_method(plan, settings).work(phase, many * images, plan.clients) for settings, images in rehearsals]
        rows.append(_method(plan, plan.settings).work(phase, many * most, plan.clients))
        x = torch.tensor(rows, dtype=torch.float64)
        x = x / x[:-1].abs().amax(0).clamp_min(1e-300)
        x = x / x.norm(dim=1, keepdim=True)
        if torch.linalg.matrix_rank(x, rtol=1e-9) > torch.linalg.matrix_rank(x[:-1], rtol=1e-9):
            return False
    return True


@dataclass(frozen=True)
class Stage:
    """Where a federation rehearses: one worker, in a folder of its own, where finished client models are kept."""

    federation: Federation
    machine: Machine
    place: Path
    features: dict[str, Apart] = field(default_factory=dict)

    def images(self, settings: Any) -> tuple[tuple[int, int], Costs | None]:
        """How many images a client the rehearsals have, by how long a first one takes; and that one, if it is one of them."""
        most = max(_real(self.federation).values())
        if _method(self.federation.plan, settings).every_image():
            return (most, most), None
        if MOST <= FIRST:
            return (FIRST, min(2 * FIRST, most)), None
        took = self.rehearse(settings, FIRST, "set up")
        if self.seconds(took) < TARGET:  # else what is only done once does not count beside it
            took = self.rehearse(settings, FIRST, "timed")
        count = min(max(FIRST, int(FIRST * TARGET / max(self.seconds(took), 1e-3))), MOST, max(1, most // 2))
        return (count, min(2 * count, most)), took if count == FIRST else None

    def seconds(self, costs: Costs) -> float:
        return sum(row[_clock(self.machine)] for row in costs.rows.values())

    def rehearse(self, settings: Any, images: int, cache: str) -> Costs:
        """All phases with these settings, so many images a client, and all of each class that a method needs."""
        plan = replace(self.federation.plan, settings=settings, topology=_wide(self.federation.plan.topology))
        least = max(1, int(getattr(settings, "least", 1)))
        shards = [_small(shard, images, least) for shard in self.federation.shards]
        small = replace(self.federation, plan=plan, shards=shards)
        features = self.features.setdefault(cache, Apart(self.place / f"{cache} features"))
        with tempfile.TemporaryDirectory(dir=self.place) as folder, features_apart(features):
            return run_unevaluated(small, Path(folder), self.machine, self.place / cache)


def run_unevaluated(federation: Federation, folder: Path, machine: Machine, cache: Path | None = None) -> Costs:
    """All phases of all encounters with one worker, and what they cost."""
    history, rows = RunHistory(), dict[tuple[str, ClientId], dict[str, float]]()
    up, down, messages = dict[ClientId, int](), dict[ClientId, int](), 0
    machine = replace(machine, workers=1, engine="local")
    for number, plan in enumerate(all_encounters(federation.plan), 1):
        method, out = _method(plan, plan.settings), folder / str(number)
        contracts = {} if is_reference(method) else contracts_of(method, plan)
        enrolled = {client: simulated_key(plan.seed, client).public_hex for client in plan.clients}
        with (
            open_round(out, plan, contracts, enrolled, simulated_key(plan.seed, "server")) as fl_round,
            computing(plan, machine, quiet, fl_round.scratch, cache=cache) as ctx,
        ):
            traffic, _ = run_phases(method, replace(federation, plan=plan), fl_round, ctx, history, machine)
            for key, note in fl_round.journal().items():
                _add(rows.setdefault(key, {}), note)
        for total, sent in ((up, traffic.up), (down, traffic.down)):
            for client, size in sent.items():
                total[client] = total.get(client, 0) + size
        messages += traffic.messages
        history = RunHistory((), out)
    if is_reference(_method(federation.plan, federation.plan.settings)):
        rows = _of_a_reference(rows)
    images = {shard.client: len(shard.train) for shard in federation.shards}
    return Costs(federation.plan.settings, images, rows, up, down, messages)


def _add(row: dict[str, float], note: Mapping[str, Any]) -> None:
    """Figures of one encounter to those before it; of bytes the most."""
    for name in ("flops", "seconds", "processor_seconds"):
        row[name] = row.get(name, 0.0) + float(note.get(name, 0.0))
    for name in ("tensor_bytes", "peak_bytes"):
        row[name] = max(row.get(name, 0.0), float(note.get(name, 0)))


def _of_a_reference(rows: Mapping[tuple[str, ClientId], dict[str, float]]) -> dict[tuple[str, ClientId], dict[str, float]]:
    """One meter runs over all of it, clients and server: whoever computes has its seconds and its tensors."""
    client, server = rows[("client", "")], rows[("server", "")]
    if client["flops"]:
        both = {name: server[name] for name in ("processor_seconds", "tensor_bytes")}
        both["seconds"] = client["seconds"] + server["seconds"]
        return {("client", ""): {**client, **both}}
    return {("server", ""): server}


def _method(plan: Plan, settings: Any) -> Method:
    return load(plan.method)(plan.task, settings)


def _wide(topology: Topology | None) -> Topology | None:
    """The same meetings with windows that everything fits into: whether it does is what is asked."""
    if topology is None:
        return None
    return replace(topology, contacts=tuple(replace(contact, bytes_per_second=1e15) for contact in topology.contacts))


def _small(shard: Shard, images: int, least: int) -> Shard:
    train = few_of(shard.train, images, least)
    held_out = -(-len(shard.val) * len(train) // max(1, len(shard.train)))
    val = shard.val.subset(torch.arange(min(held_out, len(shard.val))))
    return replace(shard, train=train, val=val, digest=f"{shard.digest}-{len(train)}")  # what is kept is kept by it


def few_of(data: Dataset, count: int, least: int) -> Dataset:
    """So many images from the start; and of each class as many as it needs to count with a method, where there are so many."""
    kept = torch.zeros(len(data), dtype=torch.bool)
    kept[:count] = True
    classes = int(data.labels.max()) + 1 if data.labels.ndim == 1 else data.labels.shape[1]
    for label in range(classes):
        kept[data.shows(label).nonzero()[:least, 0]] = True
    return data.subset(kept.nonzero()[:, 0])


# --- from rehearsals to the whole run --------------------------------------------------------------------------------------

Columns = Callable[[Method, Phase, int, Sequence[ClientId]], Sequence[float]]


def _work(method: Method, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
    return method.work(phase, images, clients)


def _sizes(method: Method, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
    """Memory: a constant, images, and each setting whose work is kept."""
    return (1, images, *(float(getattr(method.settings, name)) for name in method.keeps()))


def _continued(
    rehearsed: Sequence[Costs], federation: Federation, quantity: str, columns: Columns
) -> dict[Phase, dict[ClientId, float]]:
    """Each phase's figure at the plan's own settings and images. Clients of one architecture share what a step and an image
    cost; what each costs once is its own, because it depends on its classes, too."""
    plan, found = federation.plan, dict[Phase, dict[ClientId, float]]()
    method, real = _method(federation.plan, federation.plan.settings), _real(federation)
    for phase in PHASES:
        alone = phase == "server" or is_reference(method)
        found[phase] = {}
        for group in [[""]] if alone else _alike(plan, list(real)):
            seen = {client: _seen(rehearsed, phase, client, quantity, columns, plan) for client in group}
            weights = _weights(list(seen.values()), quantity.endswith("seconds"))
            for client, one in seen.items():
                at = columns(method, phase, sum(real.values()) if alone else real[client], plan.clients)
                once = one.left(weights) if len(group) > 1 else 0.0
                found[phase][client] = max(0.0, once) + float(sum(w * x for w, x in zip(weights, at, strict=True)))
    return found


@dataclass(frozen=True)
class _Seen:
    """What the rehearsals show of one client, or of the server: a row of columns for each, its figure, and its operations."""

    rows: torch.Tensor
    values: torch.Tensor
    flops: torch.Tensor

    def changes(self) -> _Seen:
        """From the mean of the rehearsals: what is the same in all of them drops out."""
        return _Seen(*(part - part.mean(0) for part in (self.rows, self.values, self.flops)))

    def left(self, weights: Sequence[float]) -> float:
        """What the columns do not explain, in the mean."""
        return float((self.values - self.rows @ torch.tensor(weights, dtype=torch.float64)).mean())


def _seen(rehearsed: Sequence[Costs], phase: Phase, client: ClientId, quantity: str, columns: Columns, plan: Plan) -> _Seen:
    rows = []
    for costs in rehearsed:
        images = costs.images[client] if client else sum(costs.images.values())
        rows.append(columns(_method(plan, costs.settings), phase, images, plan.clients))
    figures = ([costs.figure(phase, client, name) for costs in rehearsed] for name in (quantity, "flops"))
    return _Seen(*(torch.tensor(part, dtype=torch.float64) for part in (rows, *figures)))


def _weights(seen: Sequence[_Seen], seconds: bool) -> list[float]:
    """One client, or the server: of all columns. Several: of what changes within each, the rest is each one's own."""
    found = [one.changes() for one in seen] if len(seen) > 1 else list(seen)
    rows, values, flops = (torch.cat([getattr(one, part) for one in found]).tolist() for part in ("rows", "values", "flops"))
    return nonnegative_fit(rows, values, by_operations(rows, values, flops) if seconds else ())


def _real(federation: Federation) -> dict[ClientId, int]:
    return {shard.client: len(shard.train) for shard in federation.shards}


def _alike(plan: Plan, clients: Sequence[ClientId]) -> list[list[ClientId]]:
    """Clients by the architecture that the plan gives them."""
    spec = getattr(plan.settings, "architecture", "")
    if not any(architecture_rule(part)[0] for part in spec.split(",")):
        return [list(clients)]
    named: dict[str, list[ClientId]] = {}
    for client in clients:
        named.setdefault(architecture_for(spec, client), []).append(client)
    return list(named.values())


def by_operations(rows: Sequence[Sequence[float]], seconds: Sequence[float], flops: Sequence[float]) -> list[float]:
    """Weights of the columns if every operation took the same time: what short rehearsals cannot tell apart is near that."""
    _, pace = nonnegative_fit([(1.0, count) for count in flops], seconds)
    return [pace * weight for weight in nonnegative_fit(rows, flops)]


def nonnegative_fit(rows: Sequence[Sequence[float]], values: Sequence[float], near: Sequence[float] = ()) -> list[float]:
    """Weights of the columns, none below zero, whose sums come nearest to the values (least squares). Values are uncertain by
    `NOISE` of the largest; a weight that they leave open is the one in `near`, uncertain by itself."""
    x, y = torch.tensor(rows, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    if not bool((y > 0).any()):
        return [0.0] * x.shape[1]
    top, scale = float(y.max()), x.abs().amax(0).clamp_min(1e-300)
    x, y, used = x / scale, y / top, [i for i in range(x.shape[1]) if bool((x[:, i] != 0).any())]
    for i in used if near else ():
        expects = near[i] * float(scale[i]) / top
        if expects > 1e-6:  # else there is nothing known of it: work that no operations are counted for, such as copying
            x = torch.cat([x, torch.zeros(1, x.shape[1], dtype=x.dtype).index_fill_(1, torch.tensor(i), NOISE / expects)])
            y = torch.cat([y, y.new_tensor([NOISE])])
    best, least = torch.zeros(x.shape[1], dtype=torch.float64), float("inf")
    for count in range(len(used), 0, -1):  # of columns that say the same, those that grow: the constant comes first
        for chosen in reversed(list(itertools.combinations(used, count))):
            if int(torch.linalg.matrix_rank(x[:, chosen])) < count:
                continue
            found = torch.linalg.lstsq(x[:, chosen], y[:, None], driver="gelsd").solution[:, 0]
            if bool((found < -1e-9).any()):
                continue
            error = float((x[:, chosen] @ found - y).square().sum())
            if error < least * (1 - 1e-6) - 1e-15:
                least, best = error, torch.zeros_like(best).index_copy_(0, torch.tensor(chosen), found.clamp_min(0))
    return cast("list[float]", (best / scale * top).tolist())


def _bytes(rehearsed: Sequence[Costs], federation: Federation, way: str) -> dict[ClientId, int]:
    """Bytes at the real number of images, client by client, and for the real number of rounds."""
    few, more = rehearsed[0], rehearsed[1 if len(rehearsed) > 1 else 0]
    times = _messages(few, federation.plan) / max(1, few.messages)
    less, found = getattr(few, way), getattr(more, way)
    sizes = {}
    for shard in federation.shards:
        client = shard.client
        step = more.images[client] - few.images[client]
        slope = (found[client] - less[client]) / step if step else 0.0
        sizes[client] = round(times * (less[client] + slope * (len(shard.train) - few.images[client])))
    return sizes


def _messages(rehearsed: Costs, plan: Plan) -> int:
    """As often as in the rehearsal, or as the rounds of a multi-round reference say."""
    rounds = getattr(plan.settings, "rounds", None)
    return int(rounds) if rounds is not None and is_reference(load(plan.method)) else rehearsed.messages


# --- many clients ------------------------------------------------------------------------------------------------------------


def _some_of(federation: Federation, count: int) -> Federation:
    """The federation of some of its clients, evenly picked."""
    every = len(federation.shards)
    shards = [federation.shards[i * every // count] for i in range(count)]
    clients = tuple(sorted(shard.client for shard in shards))
    return replace(federation, plan=replace(federation.plan, clients=clients), shards=shards)


def _for_everybody(fewer: Expected, more: Expected, federation: Federation) -> Expected:
    """The line through both numbers of clients: for the server its total, for a client the mean, with its own images."""
    counts = [len(one.up) for one in (fewer, more)]
    everybody = [shard.client for shard in federation.shards]

    def along(low: float, high: float) -> float:
        return max(0.0, low + (high - low) / (counts[1] - counts[0]) * (len(everybody) - counts[0]))

    def figures(quantity: Quantity, phase: Phase) -> dict[ClientId, float]:
        low, high = fewer.figures[quantity][phase], more.figures[quantity][phase]
        if set(high) == {""}:
            return {"": along(low[""], high[""])}
        mean = sum(high.values()) / len(high)
        if phase == "personalize":  # neighbors' models are more where there are more neighbors
            mean = along(sum(low.values()) / len(low), mean)
        return {client: high.get(client, mean) if phase == "client" else mean for client in everybody}

    def sizes(low: Mapping[ClientId, int], high: Mapping[ClientId, int], grows: bool) -> dict[ClientId, int]:
        mean = sum(high.values()) / len(high)
        mean = along(sum(low.values()) / len(low), mean) if grows else mean
        return {client: round(mean) if grows else high.get(client, round(mean)) for client in everybody}

    found = {q: {phase: figures(q, phase) for phase in PHASES} if more.figures[q] else {} for q in more.figures}
    words = [*more.rehearsed, f"clients {counts[0]} and {counts[1]} → {len(everybody)}"]
    up, down = sizes(fewer.up, more.up, False), sizes(fewer.down, more.down, True)
    return Expected(found, up, down, more.messages, words, more.kept)
