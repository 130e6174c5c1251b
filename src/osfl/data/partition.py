"""Partitions of a dataset among clients: pure functions of labels and a seed, the same for every method.

iid                     equal shares, shuffled
dirichlet:0.1           each class spread over the clients by Dir(0.1); the usual label skew
dirichlet-client:0.1    each client draws its own class mixture from Dir(0.1); an optional second number, as in
                        dirichlet-client:0.1:0.5, is the log-normal sigma of the client sizes
classes:3               each client holds three classes
silos                   one class a client
domains                 one domain (site, style) a client
by:COLUMN               one value of a column of the table (scanner, ward, hospital) a client
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from osfl.core.errors import DataError, UsageError
from osfl.core.seeds import numpy_generator
from osfl.core.types import ClientId
from osfl.data.draws import k_classes, per_class, per_client
from osfl.data.source import Indices, Names

EXAMPLES = "iid, dirichlet:0.1, dirichlet-client:0.3, classes:3, silos, domains, by:scanner"
NATURAL = ("domains", "by")  # sites are as the data say
MIN_SIZE = 10  # a client with fewer images cannot train


@dataclass(frozen=True)
class Partition:
    """A parsed `--partition`."""

    kind: str
    alpha: float = 0.0
    sigma: float = 0.0
    classes: int = 0
    column: str = ""

    def __str__(self) -> str:
        if self.kind == "dirichlet-client" and self.sigma:
            return f"{self.kind}:{self.alpha:g}:{self.sigma:g}"
        if self.kind.startswith("dirichlet"):
            return f"{self.kind}:{self.alpha:g}"
        if self.kind == "by":
            return f"by:{self.column}"
        return f"classes:{self.classes}" if self.kind == "classes" else self.kind


def parse_partition(text: str) -> Partition:
    """`--partition dirichlet:0.1` and its relatives; a mistake is answered with examples."""
    kind, *numbers = text.strip().lower().split(":")
    reader = _READERS.get(kind)
    if reader is None:
        raise _unreadable(text, f"'{kind}' is not a kind of partition")
    return reader(text, numbers)


def _unreadable(text: str, why: str) -> UsageError:
    return UsageError(f"partition '{text}' is not understood: {why}", field="partition", fix=f"Examples: {EXAMPLES}.")


def _positive(text: str, number: str, what: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise _unreadable(text, f"{what} must be a number above 0, not '{number}'")
    return value


def _plain(text: str, numbers: list[str]) -> Partition:
    kind = text.strip().lower().split(":")[0]
    if numbers:
        raise _unreadable(text, f"'{kind}' takes no number")
    return Partition(kind)


def _dirichlet(text: str, numbers: list[str]) -> Partition:
    if len(numbers) != 1:
        raise _unreadable(text, "it takes one number, the concentration; small is skewed")
    return Partition("dirichlet", alpha=_positive(text, numbers[0], "the concentration"))


def _dirichlet_client(text: str, numbers: list[str]) -> Partition:
    if len(numbers) not in (1, 2):
        raise _unreadable(text, "it takes a concentration and at most a sigma of the client sizes")
    alpha = _positive(text, numbers[0], "the concentration")
    return Partition("dirichlet-client", alpha, _positive(text, numbers[1], "sigma") if len(numbers) == 2 else 0.0)


def _classes(text: str, numbers: list[str]) -> Partition:
    if len(numbers) != 1 or not numbers[0].isdecimal() or int(numbers[0]) < 1:
        raise _unreadable(text, "it takes a whole number above 0, the classes of a client")
    return Partition("classes", classes=int(numbers[0]))


def _by_column(text: str, parts: list[str]) -> Partition:
    column = ":".join(parts).strip()
    if not column:
        raise _unreadable(text, "it takes the name of a column of the table")
    return Partition("by", column=column)


_READERS: dict[str, Callable[[str, list[str]], Partition]] = {
    "iid": _plain,
    "silos": _plain,
    "domains": _plain,
    "dirichlet": _dirichlet,
    "dirichlet-client": _dirichlet_client,
    "classes": _classes,
    "by": _by_column,
}


def client_names(n: int) -> list[ClientId]:
    """client-01, client-02, …: padded so that they sort as numbers."""
    width = max(2, len(str(n)))
    return [f"client-{i:0{width}d}" for i in range(1, n + 1)]


def assign(
    spec: Partition | str,
    labels: Indices,
    clients: int | None,
    seed: int,
    domains: Names | None = None,
    *,
    groups: Names | None = None,
    min_size: int = MIN_SIZE,
    balance_cap: bool = False,
) -> dict[ClientId, Indices]:
    """Sorted indices into the training part for each client. No image twice, no client empty.

    With `groups` (patients) whole groups are drawn instead of images, each with its most frequent class and domain.
    """
    plan = parse_partition(spec) if isinstance(spec, str) else spec
    labels = np.asarray(labels, dtype=np.int64)
    if groups is not None:
        return _whole_groups(plan, labels, clients, seed, domains, groups, min_size, balance_cap)
    if plan.kind in NATURAL:
        return _by_domain(domains, clients)
    n = _count_clients(plan, labels, clients)
    least = max(1, min(min_size, len(labels) // (2 * n)))  # of small data at most half an equal share is asked for
    parts = _draw(plan, labels, n, numpy_generator(seed, "partition", str(plan), n), least, balance_cap)
    return {name: np.sort(part) for name, part in zip(client_names(n), parts, strict=True)}


def _whole_groups(
    plan: Partition,
    labels: Indices,
    clients: int | None,
    seed: int,
    domains: Names | None,
    groups: Names,
    min_size: int,
    balance_cap: bool,
) -> dict[ClientId, Indices]:
    """The same draw with a group in place of an image; where every image is a group of its own, the same result."""
    _, first, codes = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))  # groups in the order in which they appear, as images are
    owner = rank[codes]  # (images,) the number of each image's group
    members = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
    unit_labels = np.array([_most(labels[own]) for own in members], dtype=np.int64)
    unit_domains = None if domains is None else np.array([_most(domains[own]) for own in members], dtype=np.str_)
    if plan.kind == "silos" and (lost := sorted(set(labels.tolist()) - set(unit_labels.tolist()))):
        raise DataError(
            f"whoever shows class number {lost[0]} shows another one more often, so no client can have it",
            field="partition",
            expected="somebody who mostly shows it",
            fix="A person is at one site only. Choose another partition, for example dirichlet:0.1.",
        )
    if clients is not None and clients > len(members):
        raise DataError(
            f"{len(members)} people (groups) cannot be shared by {clients} clients",
            field="clients",
            fix="A person is at one site only: ask for fewer clients.",
        )
    least = max(1, -(-min_size * len(members) // len(labels)))  # so many people have about `min_size` images
    drawn = assign(plan, unit_labels, clients, seed, unit_domains, min_size=least, balance_cap=balance_cap)
    return {client: np.sort(np.concatenate([members[unit] for unit in units])) for client, units in drawn.items()}


def _most(values: Indices | Names) -> int | str:
    """The most frequent value; of several the smallest."""
    found, counts = np.unique(values, return_counts=True)
    most: int | str = found[int(counts.argmax())].item()
    return most


def _count_clients(plan: Partition, labels: Indices, clients: int | None) -> int:
    classes = len(np.unique(labels))
    if plan.kind == "silos":
        if clients not in (None, classes):
            raise UsageError(
                f"silos give each class to one client: {clients} clients do not fit {classes} classes",
                field="clients",
                fix=f"Use --clients {classes}, or --partition classes:1 for another number of clients.",
            )
        return classes
    if clients is None or clients < 1:
        raise UsageError(f"'{plan}' needs a number of clients", field="clients", fix="For example --clients 5.")
    if clients > len(labels):
        raise DataError(
            f"{len(labels)} training images cannot be shared by {clients} clients",
            field="clients",
            fix="Ask for fewer clients or more samples.",
        )
    return clients


def _draw(
    plan: Partition, labels: Indices, n: int, rng: np.random.Generator, least: int, balance_cap: bool
) -> Sequence[Indices]:
    if plan.kind == "iid":
        return np.array_split(rng.permutation(len(labels)), n)
    if plan.kind == "silos":
        return [np.flatnonzero(labels == value) for value in np.unique(labels)]
    if plan.kind == "classes":
        return k_classes(labels, n, plan.classes, rng)
    if plan.kind == "dirichlet-client":
        return per_client(labels, n, plan.alpha, plan.sigma, rng, least=least)
    return per_class(labels, n, plan.alpha, rng, least=least, balance_cap=balance_cap)


def _by_domain(domains: Names | None, clients: int | None) -> dict[ClientId, Indices]:
    if domains is None:
        raise UsageError(
            "this dataset has no domains", field="partition", fix=f"Use domain/class/* folders, or one of: {EXAMPLES}."
        )
    names = [str(name) for name in np.unique(domains)]
    if clients not in (None, len(names)):
        raise UsageError(
            f"each domain is a client: {clients} clients do not fit the {len(names)} domains {', '.join(names)}",
            field="clients",
            fix=f"Use --clients {len(names)}.",
        )
    slugs = domain_clients(names)
    return {slugs[name]: np.flatnonzero(domains == name) for name in names}


def domain_clients(names: Sequence[str]) -> dict[str, ClientId]:
    """Domain name → client id: lower case, words joined by '-', a number added where two would be the same."""
    slugs: dict[str, ClientId] = {}
    for name in sorted(set(names)):
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "domain"
        taken = set(slugs.values())
        slugs[name] = next(s for s in (slug, *(f"{slug}-{i}" for i in range(2, len(names) + 2))) if s not in taken)
    return slugs
