"""What fits into a contact window, and when a site has received the uploads of all its neighbors.

A window carries a bundle in each direction. Windows of one pair in one encounter add up: a transfer that was cut goes on
where it stopped, over Flower (osfl.deploy.flower.chunks) and by copying tools that can. A bundle that does not fit is refused
before the contact. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from osfl.core.errors import UploadBlocked
from osfl.core.tensors import nbytes
from osfl.core.topology import opens
from osfl.core.types import ClientId, Contact, Contract, Field, Plan, Topology
from osfl.wire.bundle import promised_size


class Size(NamedTuple):
    """Bytes of a bundle, and of them those that 16-bit numbers would save, and those that are weights."""

    bundle: int
    halving: int = 0
    weights: int = 0


Sizes = Mapping[ClientId, Size]


def capacity(contact: Contact) -> int:
    """Bytes that get through in each direction while the window is open."""
    return math.floor(contact.seconds * contact.bytes_per_second)


def windows(plan: Plan, client: ClientId) -> dict[ClientId, int]:
    """Bytes that this client can send to each neighbor in this encounter; empty without a schedule."""
    found: dict[ClientId, int] = {}
    for contact in _contacts_of(plan.topology):
        if client in (contact.a, contact.b):
            other = contact.b if contact.a == client else contact.a
            found[other] = found.get(other, 0) + capacity(contact)
    return found


def _contacts_of(topology: Topology | None, encounter: int | None = None) -> list[Contact]:
    """The windows of an encounter, of the plan's own one unless another is named, in the order of time."""
    if topology is None:
        return []
    number = topology.encounter if encounter is None else encounter
    return sorted((c for c in topology.contacts if c.encounter == number), key=lambda c: (opens(c), c.a, c.b))


def check_windows(plan: Plan, client: ClientId, size: int, contract: Contract, *, least: bool = False) -> None:
    """Refuse a bundle of this size before the contact, if a neighbor would get only a part of it.

    `least`: the size is what any bundle of this contract has at least; asked before a client trains in vain.
    """
    tight = {other: room for other, room in sorted(windows(plan, client).items()) if room < size}
    if tight:
        room = min(tight.values())
        raise UploadBlocked(
            f"its bundle does not fit into the window with {', '.join(tight)}",
            client=client,
            field="topology.contacts",
            expected=f"at most {room:,} bytes",
            got=f"{'at least ' if least else ''}{size:,} bytes",
            fix=f"{what_would_fit(sized(plan, contract, size), room)} Or agree on a plan without the contact(s) with "
            f"{', '.join(tight)}: "
            "fewer neighbors exchange, and each upload fits.",
        )


def least_bytes(plan: Plan, client: ClientId, architecture: str, contract: Contract, samples: int = 1) -> int:
    """What a client's bundle has at least, to the byte where nothing is left open: the required tensors, free dimensions
    counting nothing, their names and hashes, and the facts that model uploads have."""
    kinds = {
        name: (field.dtype, tuple(side if isinstance(side, int) else 0 for side in field.shape))
        for name, field in contract.items()
        if field.required
    }
    return promised_size("upload", client, plan.digest, kinds, {"architecture": architecture, "samples": samples})


def halving(plan: Plan, contract: Contract) -> int:
    """Bytes that 16-bit numbers would save; 0 where the method has no such setting, or has them already."""
    if getattr(plan.settings, "wire", "") != "float32":
        return 0
    return sum(_fixed_bytes(field) for field in contract.values() if field.dtype == "F32") // 2


def sized(plan: Plan, contract: Contract, size: int) -> Size:
    """A bundle of so many bytes, and what of it could be saved."""
    weights = sum(_fixed_bytes(field) for field in contract.values() if field.dtype in ("F32", "F16"))
    return Size(size, halving(plan, contract), weights)


def _fixed_bytes(field: Field) -> int:
    sides = tuple(side for side in field.shape if isinstance(side, int))
    return nbytes(field.dtype, sides) if len(sides) == len(field.shape) else 0


def what_would_fit(size: Size, room: int) -> str:
    """Advice in numbers for a bundle that is too large."""
    half = size.bundle - size.halving
    fits = "fits" if half <= room else "does not fit either"
    halved = f"With --set wire=float16 it would have about {half:,} bytes, which {fits}. " if size.halving else ""
    rest = size.bundle - size.weights  # names and hashes of tensors do not shrink with a network
    share = math.floor(100 * (room - rest) / size.weights) if size.weights else 0
    if share < 1:
        return f"{halved}No smaller architecture fits: names and hashes by themselves take {rest:,} bytes."
    return f"{halved}A smaller architecture must have at most {share}% of its weights."


# --- a whole schedule -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """What one window carries in one direction."""

    encounter: int
    start: str
    seconds: float
    sender: ClientId
    receiver: ClientId
    window_bytes: int  # what would get through
    bundle_bytes: int
    halving: int  # bytes of the bundle that 16-bit numbers would save
    weights: int  # bytes of the bundle that a smaller network has fewer of
    carried_before: int  # in earlier windows of this pair and encounter
    arrives: str  # when all of the bundle is there; "" if it is not after this window

    @property
    def fits(self) -> bool:
        return bool(self.arrives)

    @property
    def size(self) -> Size:
        return Size(self.bundle_bytes, self.halving, self.weights)

    @property
    def room(self) -> int:
        """What gets through of the bundle up to the end of this window."""
        return self.carried_before + self.window_bytes


def schedule(topology: Topology, sizes: Sizes) -> list[Pass]:
    """Every window in the order of time, both directions, for bundles of these sizes."""
    return [way for number in range(1, topology.encounters + 1) for way in _ways(topology, number, sizes)]


def _ways(topology: Topology, encounter: int, sizes: Sizes) -> Iterator[Pass]:
    carried: dict[tuple[ClientId, ClientId], int] = {}
    for contact in _contacts_of(topology, encounter):
        for sender, receiver in ((contact.a, contact.b), (contact.b, contact.a)):
            before, size = carried.get((sender, receiver), 0), sizes[sender]
            if before >= size.bundle:
                continue  # all of it arrived in an earlier window
            now = min(capacity(contact), size.bundle - before)
            carried[sender, receiver] = before + now
            whole = before + now >= size.bundle
            needs = min(contact.seconds, math.ceil((size.bundle - before) / contact.bytes_per_second)) if whole else 0
            arrives = (opens(contact) + timedelta(seconds=needs)).isoformat(timespec="seconds") if whole else ""
            yield Pass(encounter, contact.start, contact.seconds, sender, receiver, capacity(contact), *size, before, arrives)


@dataclass(frozen=True)
class Done:
    """When a site has received the uploads of all its neighbors in an encounter."""

    client: ClientId
    encounter: int
    received: int  # bundles that arrive whole
    expected: int
    at: str  # "" if some bundle never arrives whole, or nobody is met


def unmet(passes: Sequence[Pass]) -> list[Pass]:
    """The last window of every bundle that is not there after it."""
    last = {(way.encounter, way.sender, way.receiver): way for way in passes}
    return [way for way in last.values() if not way.fits]


def done_times(topology: Topology, clients: Sequence[ClientId], sizes: Sizes) -> list[Done]:
    """A client whose bundle does not fit into one of its windows sends nothing in that encounter (`check_windows`)."""
    found = []
    passes = schedule(topology, sizes)
    silent = {(way.encounter, way.sender) for way in unmet(passes)}
    for encounter in range(1, topology.encounters + 1):
        for client in clients:
            own = [way for way in passes if way.encounter == encounter and way.receiver == client]
            senders = {way.sender for way in own}
            arrived = {way.sender: way.arrives for way in own if way.fits and (encounter, way.sender) not in silent}
            at = max(arrived.values(), default="") if len(arrived) == len(senders) else ""
            found.append(Done(client, encounter, len(arrived), len(senders), at))
    return found
