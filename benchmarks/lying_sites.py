"""What one site that lies does to a round, and whether the judgment before the server phase names it.

    python -m benchmarks.bench lying_sites       # half an hour on one core; interrupted, it goes on
    python -m benchmarks.lying_sites             # the tables of docs/lying_sites.md from the record
    python -m benchmarks.lying_sites "10 sites"  # forget rows with this in their name: `bench` makes them again

Digits and blood cells (28 pixels), 5 and 10 sites by a Dirichlet partition, the `cpu` preset with fewer epochs for methods that
train networks. The first site, or of ten sites the first two, lies. Accuracy on the test images: of the round without
the liars, with them, and with what the judgment named left out. What was not run is listed with the reason. The false
alarms of honest rounds are counted by `honest_rounds`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import kept_figures, write_record
from osfl.core.errors import OsflError
from osfl.core.method import Context, Method
from osfl.core.registry import load
from osfl.core.types import ClientId, Dataset, Payload, Shard, Upload
from osfl.evaluation.scores import metrics, probabilities
from osfl.ingredients.training.uploaded_vits import tuned_alike
from osfl.rounds.judging.judge import judge
from osfl.runtime.workers import Workers, compute_threads
from osfl.simulate.simulation import Federation, Simulation, prepare

SHORT = {"epochs": 8, "architecture": "cnn-w16"}
RANDOM = {"encoder": "random", "resolution": 16, "window": 8, "stride": 8}  # tokens of features that need no file
VITS = {**tuned_alike(), "augment": "none", "pretrained": "vit_signs"}  # a start that is part of the package
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "FedAvg": ("fedavg", SHORT),
    "ensemble by class counts": ("ensemble", {**SHORT, "ensemble": "class_count"}),
    "FederatedFactory": ("federated_factory", {"images_per_class": 200, "epochs": 6, "architecture": "cnn-w16"}),
    "FedCGS": ("fedcgs", {**RANDOM, "tokens": "global"}),
    "FedPFT": ("fedpft", {**RANDOM, "tokens": "global", "epochs": 30}),
    "FALCON": ("falcon", {**RANDOM, "generator_epochs": 15}),
    "OneSum": ("onesum", {}),
    "FedBiCross": ("fedbicross", {**SHORT, "images": 32, "steps": 30, "repetitions": 1}),
    "FedMITR": ("fedmitr", {**VITS, "steps": 12, "server_epochs": 2}),
    "FOL": ("fol", {**SHORT, "student_epochs": 4, "copies": 1, "blends": 1}),
}
ASKED = 2  # honest sites of FOL whose own models are measured
Attack = Callable[["Lied"], Payload]


class Lied:
    """What a site that lies has at hand: its own upload and shard, another site's upload, and the method."""

    def __init__(self, method: Method, shard: Shard, own: Payload, other: Payload, ctx: Context, classes: int) -> None:
        self.method, self.shard, self.own, self.other, self.ctx, self.classes = method, shard, own, other, ctx, classes

    def trained_on(self, labels: torch.Tensor) -> Payload:
        data = Dataset(self.shard.train.images, labels)
        val = Dataset(self.shard.val.images, (self.shard.val.labels + 1) % self.classes)
        shard = replace(self.shard, train=data, val=val, digest=self.shard.digest + " lied")
        return self.method.client_phase(shard, self.ctx)

    def changed(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Payload:
        tensors = {name: change(name, t) for name, t in self.own.tensors.items()}
        return Payload(tensors, self.own.facts)

    def head(self) -> list[str]:
        """The last layer: weight and bias with a row a class."""
        rows = [n for n, t in self.own.tensors.items() if t.is_floating_point() and t.ndim and t.shape[0] == self.classes]
        return [name for name in rows if name not in ("sums",)][-2:]


def label_flip(lied: Lied) -> Payload:
    """Trained on images with the next class's label."""
    return lied.trained_on((lied.shard.train.labels + 1) % lied.classes)


def head_flip(lied: Lied) -> Payload:
    """An honest classifier whose outputs change places."""
    head = lied.head()
    return lied.changed(lambda name, t: t.roll(1, 0) if name in head else t)


def constant(lied: Lied) -> Payload:
    """A classifier that answers one class, and claims as many images as the gate lets through."""
    head = lied.head()

    def change(name: str, t: torch.Tensor) -> torch.Tensor:
        if name not in head:
            return t
        return torch.zeros_like(t) if t.ndim > 1 else torch.eye(lied.classes, dtype=t.dtype)[0] * 50

    images = 1_000_000
    facts = {**lied.own.facts, "samples": images}
    if "class_counts" in facts:
        facts["class_counts"] = [images // lied.classes] * lied.classes
    return Payload(lied.changed(change).tensors, facts)


def scaled(lied: Lied) -> Payload:
    """All numbers times ten."""
    return lied.changed(lambda name, t: t * 10 if t.is_floating_point() and "running" not in name else t)


def one_image(lied: Lied) -> Payload:
    """Generators of one image: of each class always the same."""
    data, kept = lied.shard.train, []
    for label in data.labels.unique():
        places = (data.labels == label).nonzero().flatten()
        kept.append(places[:1].expand(len(places)))
    places = torch.cat(kept)
    noise = torch.randint(0, 3, data.images[places].shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    train = Dataset(data.images[places].clamp_max(252) + noise, data.labels[places])  # a mixture refuses equal images
    return lied.method.client_phase(replace(lied.shard, train=train, digest=lied.shard.digest + " one"), lied.ctx)


def shifted(lied: Lied) -> Payload:
    """Statistics of images that are negatives: finite, well formed, a covariance."""
    train = Dataset(255 - lied.shard.train.images, lied.shard.train.labels)
    return lied.method.client_phase(replace(lied.shard, train=train, digest=lied.shard.digest + " shifted"), lied.ctx)


def off_distribution(lied: Lied) -> Payload:
    """Images of noise under the site's labels."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, lied.shard.train.images.shape, generator=rng, dtype=torch.uint8)
    train = Dataset(images, lied.shard.train.labels)
    return lied.method.client_phase(replace(lied.shard, train=train, digest=lied.shard.digest + " noise"), lied.ctx)


def copied(lied: Lied) -> Payload:
    """Another site's upload as its own."""
    return lied.other


NETWORKS = ("FedAvg", "ensemble by class counts", "FedBiCross", "FedMITR", "FOL")
ATTACKS: Mapping[str, tuple[Attack, Sequence[str]]] = {
    "label flip": (label_flip, tuple(CASES)),
    "head flip": (head_flip, (*NETWORKS, "FALCON")),
    "constant model, most images claimed": (constant, NETWORKS),
    "scaled weights": (scaled, NETWORKS),
    "one-image generator": (one_image, ("FederatedFactory", "FedPFT", "FALCON")),
    "shifted statistics": (shifted, ("FedCGS", "OneSum")),
    "off-distribution": (off_distribution, tuple(CASES)),
    "copy of another site": (copied, tuple(CASES)),
}


def federation(case: str, data: str, sites: int, partition: str, seed: int) -> Federation:
    method, changes = CASES[case]
    some = 2000 if data == "bloodcells-28" else None
    return prepare(Simulation(method, data, sites, partition, "cpu", seed, changes, samples=some))


def sent_by_all(made: Federation) -> tuple[Method, Context, dict[str, Payload]]:
    method = load(made.plan.method)(made.plan.task, made.plan.settings)
    ctx = Context(made.plan, torch.device("cpu"), map=Workers(1).map)
    return method, ctx, {shard.client: method.client_phase(shard, ctx) for shard in made.shards}


def attacked(
    case: str, data: str, sites: int, partition: str, seed: int, attacks: Sequence[str] | None = None
) -> dict[str, Any]:
    """Every attack that fits a method, or some, on one round."""
    made = federation(case, data, sites, partition, seed)
    liars = [shard.client for shard in made.shards[: 1 if sites < 10 else 2]]
    with compute_threads(1):
        method, ctx, sent = sent_by_all(made)
        honest = [Upload(c, "", sent[c]) for c in sorted(sent)]
        without = [u for u in honest if u.client not in liars]
        alarms = {one.client: one.rule for one in judge(method, honest, ctx)}
        rows: dict[str, Any] = {
            "without liars": _accuracy(method, without, made, ctx, liars),
            "alarms of the honest round": alarms,
        }
        for attack, (change, cases) in ATTACKS.items():
            if case not in cases or (attacks is not None and attack not in attacks):
                continue
            lies = {}
            for shard in made.shards:
                if shard.client in liars:
                    others = [c for c in sorted(sent) if c not in liars]
                    lied = Lied(method, shard, sent[shard.client], sent[others[0]], ctx, len(made.plan.task.classes))
                    lies[shard.client] = change(lied)
            uploads = [Upload(c, "", lies.get(c, sent[c])) for c in sorted(sent)]
            found = judge(method, uploads, ctx)
            named = sorted({one.client for one in found})
            kept = [u for u in uploads if u.client not in named] or uploads
            rows[attack] = {
                "with": _accuracy(method, uploads, made, ctx, liars),
                "defended": _accuracy(method, kept, made, ctx, liars),
                "named": sorted(set(named) & set(liars)),
                "others named": sorted(set(named) - set(liars)),
                "rules": sorted({one.rule for one in found}),
            }
            print(case, data, sites, partition, seed, attack, json.dumps(rows[attack]), file=sys.stderr, flush=True)
    return {"liars": liars, **rows}


def _accuracy(
    method: Method, uploads: Sequence[Upload], made: Federation, ctx: Context, liars: Sequence[ClientId]
) -> float | None:
    """Of the server's model on all test images; where each site gets one of its own, the mean of the honest sites', and where
    sites make theirs of the release, of the first two."""
    try:
        release = method.server_phase(uploads, ctx)
        own = [part for client, part in sorted(release.personal.items()) if client not in liars]
        if ctx.plan.method == "fol":
            honest = [shard for shard in made.shards if shard.client not in liars]
            own = [method.personalize(release, shard, ctx) for shard in honest[:ASKED]]
        found = []
        for payload in own or [release.shared]:
            answers = probabilities(method.build(payload), made.test.images, ctx.device, ctx.map)
            found.append(metrics(answers, made.test.labels.numpy())["accuracy"] or 0.0)
    except (OsflError, ArithmeticError, ValueError, RuntimeError) as error:  # a round that a liar stops has no accuracy
        print(type(error).__name__, str(error)[:100], file=sys.stderr)
        return None
    return round(sum(found) / len(found), 3)


ROUNDS = (  # data, sites, partition, seed; images of blood cells for two cores
    ("digits", 5, "dirichlet:0.5", 1),
    ("digits", 5, "dirichlet:0.3", 2),
    ("digits", 5, "dirichlet:0.5", 6),
    ("digits", 10, "dirichlet:0.5", 3),
    ("bloodcells-28", 5, "dirichlet:0.5", 4),
    ("bloodcells-28", 10, "dirichlet:0.5", 5),
)
SLOW = ("FedBiCross", "FALCON", "FedMITR", "FOL")  # rounds with digits and 5 sites, seed 1, alone


FEW_CLASSES = [  # rounds in which sites have few classes in common; counted apart
    (case, ("digits", sites, "dirichlet:0.1", seed))
    for case in ("FedAvg", "ensemble by class counts", "FederatedFactory", "OneSum")
    for sites, seed in ((5, 7), (5, 8), (10, 9))
]
CELLS = [(case, one) for number, one in enumerate(ROUNDS) for case in CASES if not number or case not in SLOW]


def run() -> dict[str, Any]:
    """The table and its summary. Each cell is written when it is there, and not made again."""
    start, rows = time.perf_counter(), dict[str, Any](kept_figures("lying_sites").get("table", {}))
    for case, (data, sites, partition, seed) in sorted(CELLS, key=lambda cell: cell[0] in SLOW):
        name = f"{case}, {data}, {sites} sites, {partition}, seed {seed}"
        if name not in rows:
            rows[name] = attacked(case, data, sites, partition, seed)
            write_record("lying_sites", _figures(rows, CELLS), time.perf_counter() - start)
    run_few_classes()
    return _figures(rows, CELLS)


def run_few_classes() -> None:
    """Label flips where sites have few classes in common."""
    for case, (data, sites, partition, seed) in FEW_CLASSES:
        rows = dict[str, Any](kept_figures("lying_sites").get("few classes", {}))
        name = f"{case}, {data}, {sites} sites, {partition}, seed {seed}"
        if name not in rows:
            rows[name] = attacked(case, data, sites, partition, seed, ("label flip",))
            table = kept_figures("lying_sites").get("table", {})
            write_record("lying_sites", {**_figures(table, CELLS), "few classes": rows}, 0.0)


def _figures(rows: Mapping[str, Any], cells: Sequence[tuple[str, tuple[str, int, str, int]]]) -> dict[str, Any]:
    names = [f"{case}, {data}, {sites} sites, {partition}, seed {seed}" for case, (data, sites, partition, seed) in cells]
    not_run = {name: "the run was interrupted" for name in names if name not in rows}
    elsewhere = dict.fromkeys(
        SLOW, "digits with 5 sites only: what server or sites compute of the uploads takes most of their time"
    )
    kept = {"few classes": few} if (few := kept_figures("lying_sites").get("few classes")) else {}
    return {"table": dict(rows), "summary": summary(rows), "not run": {**not_run, **elsewhere}, **kept}


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By attack: rounds, in how many every liar was named, in how many an honest site was (besides the one that a liar
    copied, which nobody can tell from it), and in how many the defended accuracy is within two points."""
    found: dict[str, Any] = {}
    for row in rows.values():
        for attack in ATTACKS:
            if attack not in row:
                continue
            one, clean = row[attack], row["without liars"] or 0.0
            kept = one["defended"] is not None and one["defended"] >= clean - 0.02
            named = one["named"] == row["liars"]
            copied = 1 if attack == "copy of another site" else 0
            honest = len(one["others named"]) > copied
            counted = found.setdefault(attack, dict.fromkeys(COUNTED, 0))
            for key, value in zip(COUNTED, (True, named, honest, kept, named or kept), strict=True):
                counted[key] += value
    return {**found, "all attacks": {key: sum(one[key] for one in found.values()) for key in COUNTED}}


PAGE = Path(__file__).parent.parent / "docs" / "lying_sites.md"
AIM = 0.95
BEGIN, END = "<!-- lies: written by `python -m benchmarks.lying_sites` -->", "<!-- end of lies -->"


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """By attack and method: mean accuracy without the liars, with them, and with what was named left out; how often."""
    lines = [
        "| attack | method | rounds | all liars named | an honest site named | without liars | with them | defended |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for attack, (_, cases) in ATTACKS.items():
        for case in cases:
            found = [row for name, row in rows.items() if name.startswith(f"{case}, ") and attack in row]
            if not found:
                continue
            counted = summary({str(number): row for number, row in enumerate(found)})[attack]
            means = [_mean([row["without liars"] for row in found])]
            means += [_mean([row[attack][key] for row in found]) for key in ("with", "defended")]
            numbers = [counted[key] for key in COUNTED[:3]]
            lines.append(f"| {attack} | {case} | {' | '.join(map(str, [*numbers, *means]))} |")
    return "\n".join(lines)


def sentences(figures: Mapping[str, Any]) -> str:
    """What was counted over all attacks, and what was not run."""
    rows, whole = figures["table"], figures["summary"]["all attacks"]
    rounds, named, honest, _, either = (whole[key] for key in COUNTED)
    lines = [
        f"In {named} of {rounds} attacked rounds ({named / rounds:.0%}) every liar was named.",
        f"In {either} ({either / rounds:.0%}) every liar was named or accuracy stayed within two points.",
        f"In {honest} an honest site was named, besides one that was copied.",
        f"The aim is {AIM:.0%} named or within two points: {'met' if either >= AIM * rounds else 'missed'}. The rounds:",
        "",
        *(f"- {name}" for name in rows),
        "",
        "Not run:",
        "",
        *(f"- {name}: {why}" for name, why in figures["not run"].items()),
        *_few_classes(figures.get("few classes", {})),
    ]
    return "\n".join(lines)


def _few_classes(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence on label flips at Dirichlet 0.1, which are not in the table."""
    if not rows:
        return []
    counted = summary(rows)["label flip"]
    rounds, named, honest, _, either = (counted[key] for key in COUNTED)
    return [
        "",
        "Apart from these, label flips where sites have few classes in common (digits, Dirichlet 0.1): every liar was named in",
        f"{named} of {rounds} rounds, named or within two points in {either}, an honest site named in {honest}.",
    ]


def _mean(values: Sequence[float | None]) -> str:
    """In per cent; a round that a liar stopped has no accuracy, and then there is no mean."""
    kept = [value for value in values if value is not None]
    return f"{sum(kept) / len(kept):.1%}" if len(kept) == len(values) else "stopped"


def write_page() -> None:
    figures = kept_figures("lying_sites")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = f"{before}{BEGIN}\n\n{sentences(figures)}\n\n{table(figures['table'])}\n\n{END}{rest.split(END)[1]}"
    PAGE.write_text(text, encoding="utf-8")


COUNTED = ("rounds", "all liars named", "an honest site named", "within two points", "named or within")


def forget_rows(text: str) -> None:
    """A rule has changed that these rows depend on."""
    rows = {name: row for name, row in kept_figures("lying_sites")["table"].items() if text not in name}
    write_record("lying_sites", _figures(rows, CELLS), 0.0)


if __name__ == "__main__":
    forget_rows(sys.argv[1]) if len(sys.argv) > 1 else write_page()
