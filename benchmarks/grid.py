"""Cells of the papers' tables at CPU scale: `osfl compare` on real data, resumable, one committed record a cell.

    python -m benchmarks.grid                     the cells in order; what is finished is not repeated
    python -m benchmarks.grid blood-n5-a0.1       one cell
    python -m benchmarks.grid blood-silos --skip=edm   without the variants that say so; they can follow later
    python -m benchmarks.grid blood-silos --only=edm   these alone, for a record that has the others; elsewhere, too.
                                                  With = before it a whole label: --only==fedmitr has no fedmitr@lambda1=0
    python -m benchmarks.grid CELL --seeds=1,2    these seeds alone, for a record that has the others
    python -m benchmarks.grid CELL --replace      although the record has rows of other images, or from another start, that go
    python -m benchmarks.grid CELL --workers=1    a process a core, each with cells of its own: faster where clients are tiny
    python -m benchmarks.grid brain-a0.5 --audit  attacks FALCON's features, too (osfl audit)
    python -m benchmarks.grid --collect           no runs: records of what is finished so far, and in all what is missing

Runs go to runs/grid/<cell>; interrupt and start again as you like. docs/results.md is written from the records alone
(`python -m benchmarks.results`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.joining import joined, lost
from osfl.core.result import read_result, write_json
from osfl.core.topology import parse_topology
from osfl.evaluation.comparison import METRICS as ALL
from osfl.evaluation.comparison import summarize
from osfl.evaluation.gains import with_gains
from osfl.ingredients.training.uploaded_vits import tuned_alike
from osfl.runtime.environment import describe_environment
from osfl.runtime.machine import Machine
from osfl.runtime.workers import default_workers
from osfl.simulate.audit import Attempt, audit
from osfl.simulate.compare import compare
from osfl.simulate.simulation import Simulation, prepare

RECORDS = Path(__file__).parent / "records"
SEEDS = (0, 1, 2)
REFERENCES = (
    "local_only",
    "ensemble",
    "ensemble@ensemble=probabilities",
    "ensemble@ensemble=class_count",
    "ensemble@ensemble=odds",
    "fedavg",
    "centralized",
)
# ours: sums of features, one release for all, each site's prior, and what mirrored images add; and the controls of everything
# that personalizes: one classifier, corrected by how often a site has each class
ONESUM = (
    "onesum",
    "onesum@prior=site",
    "onesum@prior=site@blend=0",
    "onesum@symmetry=flip",
    "onesum@symmetry=flip@prior=site",
    "onesum@head=ridge",
)
PEERS = tuple(f"onesum@prior=site@topology=random:5@encounters={times}" for times in (1, 3))  # terms instead of models
ROUND_CELLS = ("onesum@symmetry=square", "onesum@symmetry=square@prior=site")  # cells and lesions have no upright
PHOTOGRAPHS = tuple(f"onesum@mean_color=0{more}" for more in ("", "@symmetry=flip", "@prior=site"))  # color says little there
WITH_PRIOR = ("ensemble@ensemble=odds@personalize=prior",)
FACTORY_PRIOR = ("federated_factory@personalize=prior",)
ENCODED = ("onesum@features=encoder", "onesum@features=encoder@prior=site", "onesum")
DATA_FREE = ("dafl", "dense", "coboosting", "fedftg", "deepinversion", "fedisca", "fedbicross")
ALONE = "fedbicross@server=none"  # control: the same stage 3 from each client's own model, without any server
ABLATIONS = (
    "local_only@epochs=40",  # controls of personalized methods: their clients train 20 + 20 epochs,
    "local_only@recalibrate_bn=true",  # and FedBiCross' take statistics of batch norm afresh
    "fedbicross@weights=uniform",
    "fedbicross@weights=intra",
    "fedbicross@weights=similarity",
    "fedbicross@personalize=false",
    "fedbicross@clusters=1",
)
FACTORY = (  # generators instead of classifiers, beside many rounds: FederatedFactory's tables
    "centralized",
    "local_only",
    "fedavg",
    "fedavg_rounds",
    "fedprox",
    "scaffold",
    "feddyn",
    "federated_factory",
    "federated_factory@mode=peer",
    "federated_factory@factory=edm",
    "federated_factory@mode=peer@factory=edm",
)
OWN_TEACHER = "falcon@ensemble=uniform@alpha=0.5"  # FALCON with the teacher of its Eq. 10 and the weight of its Eq. 13
# and its generator, too, but with the preset's rate, batch, length and number of components
FALCON_NEAR = f"{OWN_TEACHER}@whiten=false@generator_patience=0@wire=float32"
# and those as well: what is left of the preset is the encoder and the sizes of networks
FALCON_PAPER = f"{FALCON_NEAR}@generator_lr=0.0001@generator_batch=256@generator_epochs=400@components=20"
TOKENS = (  # features instead of models: FALCON's tables and its ablations
    "centralized_tokens",
    "falcon@server=average",
    "fedpft",
    "fedcgs",
    "falcon",
    "falcon@alpha=0",
    "falcon@order=ar",
    "falcon@order=nar",
    "falcon@resolution=112",
)
# Each step of a generator asks every client, and there are 70 of them, or ten ViTs: a quarter of the preset's steps and images.
# One cell of each table has such rows with the whole preset, too, to see what that costs them.
SPARING = "@generators=1@server_epochs=4"
FEDFTG = "fedftg@iterations=15"  # sparing in its way: it makes no pool in epochs
MEETINGS = (  # neighbors instead of a server: FOL's tables
    "local_only",
    "fol",
    "fol@answer=ensemble",
    "fol@align=false",
    "fol@align=false@answer=ensemble",
    "fedavg",
    "fedavg_rounds@rounds=E",
    f"dense{SPARING}",
    f"coboosting{SPARING}",
)
VITS = (  # transformers at the server: FedMITR's tables and its ablations
    "centralized",
    "local_only",
    "ensemble",
    "ensemble@ensemble=class_count",
    "ensemble@ensemble=odds",
    "fedavg",
    "fedmitr",
    "deepinversion_vit",
    "fedmitr@lambda1=0",
    "fedmitr@lambda2=0",
    "fedmitr@mask=0@kd=0@lambda1=1@lambda2=0",
    f"dense{SPARING}",
    f"coboosting{SPARING}",
    FEDFTG,
)
CONTROLS = (  # in FOL's first cell of each dataset: students of models that were not aligned, from where the paper begins.
    # In its very first cell besides: aligned ones from there; alone, with statistics that lag; shown as many images as FOL's
    # students are in three encounters, as they are, and shifted and mirrored; one encounter in which Theorem 2 is measured
    "fol@align=false@start=own",
    "fol@start=own",
    "local_only@recalibrate_bn=false",
    "local_only@epochs=250",
    "local_only@epochs=250@augment=flip+crop",
    "fol@encounters=1@rate_steps=50",
)
# one encounter of aligned models from where the paper's student begins; and at a strength that prunes filters, which
# validation images allow (5; more of it cost accuracy, see FOL's card), with both theorems measured
PRUNING = ("fol@encounters=1@start=own", "fol@encounters=1@start=own@sparsity=5@rate_steps=50")
# how images are found decides what FedMITR is: as published, and at the rate of Sparse Model Inversion
PIXELS = ("fedmitr@pixel_lr=0.001@clamp=false@scales=1@start=1", "fedmitr@pixel_lr=0.25@scales=1@start=1")
# fusion has models alone, no class counts; and where the student ended, which methods with generators release
BARE = tuple(
    f"{name}{options}"
    for options in ("@ensemble=logits@labels=uniform@balance=0", "@student_share=1")
    for name in ("fedmitr", "deepinversion_vit")
)
# what the share of dropped patches and the weights of L_TR do. Shares are ours, beside the preset's 0.3 (the paper tries 0.1 to
# 0.4); weights, beside 0.5, are the paper's
SWEEP = (
    *(f"fedmitr@mask={share}" for share in ("0.1", "0.5", "0.7")),
    *(f"fedmitr@{term}={weight}" for term in ("lambda1", "lambda2") for weight in ("0.25", "0.75", "1")),
)
# the paper's server, setting by setting, for as many epochs as the preset has (how many it had was not published)
AS_PUBLISHED = (
    "fedmitr@images=64@steps=100@pixel_lr=0.001@clamp=false@scales=1@start=1@adversarial=1@labels=uniform@ensemble=logits@votes=1"
    "@balance=0@student_lr=0.001@student_cosine=false@student_clip=0@student_share=1",
)
# ours: all clients inverted as one, all images first, and then a student that learns until it is done
CLOSER = "@invert=ensemble@order=images_first@student_epochs=24@student_share=1"
NEARER = tuple(f"{name}{CLOSER}" for name in ("fedmitr", "deepinversion_vit"))
# what the first ViT cell is beside, at equal accuracy (its Table V): ten rounds of two epochs, twice the clients' work (and
# SCAFFOLD's control variates need SGD)
ROUNDS = ("fedavg_rounds@epochs=2", "fedprox@epochs=2", "scaffold@epochs=2@optimizer=sgd@lr=0.01")
NORMS, RISKS = "Gradient norms of the student", "Theorem 1: risk of student and ensemble"  # what runs measure of theorems,
DESCENT, PRUNED = "Theorem 2: distance to the distilled optimum, last layer only", "Filters pruned of the neighbors' models"
ALWAYS = (
    "scores.global.accuracy",
    "scores.global.auroc",
    "scores.clients.own.mean",
    "scores.clients.own.worst",
    "costs.upload_bytes",
    "costs.download_bytes",
    "costs.client_seconds",
    "costs.server_seconds",
)
WHERE_THERE = (  # kept in a record only for the methods that have them
    "scores.clients.own.median",
    "gains.mean",
    "gains.median",
    "gains.worst",
    "gains.share",
    "costs.flops_per_sample",
    "costs.inference_bytes",
    "costs.flops",
    "costs.bytes",
    "costs.messages_per_client",
    "generators.overall.frechet",
    "generators.overall.kernel",
    "generators.bound.error",
    "generators.bound.value",
    "tokens.overall.mmd",
    "tokens.overall.mmd_floor",
    *(metric for metric in ALL if metric.startswith("reconstruction.")),
)


def medical(dataset: str, clients: int, alpha: str, samples: int | None = 4000) -> Simulation:
    return Simulation("fedavg", dataset, clients, f"dirichlet:{alpha}", "cpu", samples=samples)


def generated(dataset: str, partition: str, samples: int | None = None) -> Simulation:
    """Silos: as many clients as classes, each with one of them."""
    clients = None if partition == "silos" else 5
    return Simulation("federated_factory", dataset, clients, partition, "cpu", samples=samples)


def encoded(dataset: str, partition: str, side: int = 224, **changes: str) -> Simulation:
    """One token for the whole image, at half its side, and one for each quarter."""
    clients = None if partition == "domains" else 5
    geometry = {} if side == 224 else {"resolution": side, "window": side // 2, "stride": side // 2}
    return Simulation("falcon", dataset, clients, partition, "cpu", changes={**changes, **geometry}, image_size=side)


def exchange(dataset: str, clients: int, skew: str, samples: int) -> Simulation:
    """Few images a client, five neighbors each, three encounters. Clients this small make few steps in 20 epochs, and their BN
    statistics lag behind: all methods' clients train longer and take them afresh, or what passes for a gain would be that."""
    trained = {"architecture": "cnn-w8", "epochs": 60, "batch_size": 32, "recalibrate_bn": True}
    return Simulation(
        "fol",
        dataset,
        clients,
        f"dirichlet:{skew}",
        "cpu",
        changes=trained,
        samples=samples,
        topology=parse_topology("random:5", 3),
        test_samples=1000,
    )


# the demo that needs no weights: digits at 16 px, fixed random convolutions on 8 px
WEIGHTLESS = {"encoder": "random", "resolution": 16, "window": 8, "stride": 8}


def uploaded_vits(name: str, partition: str, clients: int = 10) -> Simulation:
    """All clients of all methods fine-tune a file that `benchmarks.pretrain_vit` makes, in the same way. Digits are not
    mirrored and start from drawn signs, as in `osfl demo`; as a control, and drawn larger, from the file of the blood cells."""
    if name == "digits":
        return Simulation(
            "fedmitr",
            "digits",
            clients,
            partition,
            "cpu",
            changes={**tuned_alike(), "augment": "none", "pretrained": "vit_signs"},
        )
    start = "blood" if name == "digits28" else name  # `blood-again` is the same start, made on another processor
    made = json.loads((RECORDS / f"pretrain-{start}.json").read_text(encoding="utf-8"))
    same = {**tuned_alike(), "pretrained": made["file"], "pretrained_sha256": made["sha256"]}
    if name == "digits28":
        return Simulation(
            "fedmitr", "digits", clients, partition, "cpu", changes={**same, "augment": "none"}, image_size=28, channels=3
        )
    dataset = "cifar10-subset" if name == "cifar" else "bloodcells-28"
    return Simulation("fedmitr", dataset, clients, partition, "cpu", changes=same, samples=4000)


_TOKENS = {
    "brain": ("brain-mri-subset", 224),
    "xray": ("chest-xray-448-subset", 224),
    "xray448": ("chest-xray-448-subset", 448),
    "blood360": ("bloodcells-360-subset", 360),
}
_GENERATED = {
    "digits": ("digits", None),
    "blood": ("bloodcells-28", 4000),
    "retina": ("retinamnist", None),
    "cifar": ("cifar10-subset", 4000),
}
_MET = (("cifar", "cifar10-subset", 30, 3000), ("blood", "bloodcells-28", 70, 2800), ("skin", "skinlesions-28", 70, 2800))
_FEWER = {("skin", "0.1"): 30}  # clients, where 70 do not all get images: two thirds of the lesions are of one class
_SHARES = {"a0.05": "dirichlet:0.05", "a0.1": "dirichlet:0.1", "a0.3": "dirichlet:0.3", "c1": "classes:1", "c3": "classes:3"}
CELLS: Mapping[str, Simulation] = {
    "blood-n5-a0.1": medical("bloodcells-28", 5, "0.1"),
    "blood-n5-a0.3": medical("bloodcells-28", 5, "0.3"),
    "blood-n5-a0.5": medical("bloodcells-28", 5, "0.5"),
    **{f"blood-n10-a{alpha}": medical("bloodcells-28", 10, alpha) for alpha in ("0.1", "0.3", "0.5")},
    **{f"skin-n5-a{alpha}": medical("skinlesions-28", 5, alpha) for alpha in ("0.1", "0.3", "0.5")},
    **{f"pneumonia-n5-a{alpha}": medical("pneumoniamnist", 5, alpha) for alpha in ("0.1", "0.3", "0.5")},
    "digits-tokens": Simulation("falcon", "digits", 5, "dirichlet:0.1", "cpu", changes=WEIGHTLESS),
    "pacs-domains": encoded("pacs-subset", "domains"),
    **{
        f"{name}-a{alpha}": encoded(dataset, f"dirichlet:{alpha}", side)
        for name, (dataset, side) in _TOKENS.items()
        for alpha in ("0.1", "0.3", "0.5")
    },
    **{
        f"brain-vit-a{alpha}": encoded(_TOKENS["brain"][0], f"dirichlet:{alpha}", encoder="vit_small_saliency")
        for alpha in ("0.1", "0.3", "0.5")
    },
    **{f"{name}-silos": generated(dataset, "silos", samples) for name, (dataset, samples) in _GENERATED.items()},
    **{
        f"factory-{name}-n5-a0.1": generated(dataset, "dirichlet:0.1", samples)
        for name, (dataset, samples) in _GENERATED.items()
    },
    **{
        f"{name}-meet-n{(number := _FEWER.get((name, skew), clients))}-a{skew}": exchange(dataset, number, skew, samples)
        for name, dataset, clients, samples in _MET
        for skew in ("0.3", "0.1", "0.7", "0.5")
    },
    **{
        f"{name}-vit-n10-{label}": uploaded_vits(name, partition)
        for name in ("blood", "cifar")
        for label, partition in _SHARES.items()
    },
    **{f"blood-vit-n{clients}-a0.1": uploaded_vits("blood", "dirichlet:0.1", clients) for clients in (5, 20)},
    **{f"digits-vit-n5-{label}": uploaded_vits("digits", _SHARES[label], 5) for label in ("a0.05", "a0.1", "a0.3", "c3")},
    "digits-vit-n10-c1": uploaded_vits("digits", "classes:1"),  # five clients of one class each would leave five to nobody
    **{f"digits-vit-n{clients}-a0.1": uploaded_vits("digits", "dirichlet:0.1", clients) for clients in (10, 20)},
    **{f"digits28-vit-n5-{label}": uploaded_vits("digits28", _SHARES[label], 5) for label in ("a0.1", "c3")},
    **{f"blood-again-vit-n10-{label}": uploaded_vits("blood-again", _SHARES[label]) for label in ("a0.1", "c3")},
}
# What the papers print for the nearest cell of theirs. FedBiCross, its tables (first version): own accuracy, ResNet-18,
# official splits and full size, as many clusters as here (3 of 5 clients, 4 of 10).
# FederatedFactory: global accuracy, ResNet-50. FALCON: global accuracy, DINOv2-base at 448 px.
# FedMITR: global accuracy, DeiT-Tiny from ImageNet at 224 px.
_ROWS = (
    "fedavg",
    "dafl",
    "dense",
    "fedisca",
    "coboosting",
    "fedbicross",
    "fedbicross@weights=intra",
    "fedbicross@weights=uniform",
    "fedbicross@weights=similarity",
    "fedbicross@personalize=false",
    "fedbicross@clusters=1",
)
_BICROSS = {
    cell: dict(zip(_ROWS, values, strict=True))
    for cell, values in {
        "blood-n5-a0.1": (14.23, 13.42, 42.34, 48.49, 54.75, 83.31, 80.01, 81.66, 82.99, 77.69, 76.47),
        "blood-n5-a0.3": (17.35, 15.74, 50.45, 53.28, 58.41, 87.67, 83.07, 84.44, 85.13, 81.15, 78.40),
        "blood-n5-a0.5": (18.26, 17.03, 75.78, 79.83, 80.32, 90.13, 85.92, 86.17, 87.02, 84.16, 82.64),
        "blood-n10-a0.1": (13.58, 12.74, 38.62, 44.28, 49.52, 78.67, 72.91, 75.14, 76.23, 67.26, 65.48),
        "blood-n10-a0.3": (16.28, 14.73, 45.12, 48.60, 54.10, 84.13, 77.93, 79.81, 80.85, 74.48, 73.08),
        "blood-n10-a0.5": (17.41, 16.07, 64.45, 74.31, 72.89, 84.26, 80.56, 82.18, 83.45, 75.89, 74.76),
        "skin-n5-a0.1": (15.62, 15.96, 16.85, 18.12, 38.29, 65.82, 60.08, 61.79, 63.05, 57.69, 51.28),
        "skin-n5-a0.3": (17.24, 17.71, 18.45, 21.84, 46.08, 71.45, 66.12, 67.30, 67.44, 65.31, 59.35),
        "skin-n5-a0.5": (64.62, 66.31, 66.56, 68.05, 67.40, 71.29, 69.10, 70.13, 71.16, 73.05, 69.09),
    }.items()
}
_VIT_ROWS = ("fedavg", FEDFTG, f"dense{SPARING}", f"coboosting{SPARING}", "deepinversion_vit", "fedmitr")
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    **_BICROSS,
    "cifar-silos": {
        "centralized": 94.69,
        "fedavg_rounds": 11.36,
        "fedprox": 18.08,
        "scaffold": 12.99,
        "feddyn": 10.12,
        "federated_factory@factory=edm": 84.30,
        "federated_factory@mode=peer@factory=edm": 90.57,
    },
    "blood-silos": {
        "centralized": 91.23,
        "fedavg_rounds": 21.88,
        "fedprox": 20.18,
        "scaffold": 22.60,
        "feddyn": 19.47,
        "federated_factory@factory=edm": 91.17,
        "federated_factory@mode=peer@factory=edm": 86.38,
    },
    "retina-silos": {
        "centralized": 47.20,
        "fedavg_rounds": 43.50,
        "fedprox": 43.50,
        "scaffold": 43.50,
        "feddyn": 43.50,
        "federated_factory@factory=edm": 46.75,
        "federated_factory@mode=peer@factory=edm": 49.30,
    },
    "factory-cifar-n5-a0.1": {"fedavg_rounds": 89.76, "fedprox": 89.67, "scaffold": 79.26, "feddyn": 61.82},
    "factory-blood-n5-a0.1": {"fedavg_rounds": 83.46, "fedprox": 84.11, "scaffold": 82.31, "feddyn": 64.93},
    "factory-retina-n5-a0.1": {"fedavg_rounds": 45.20, "fedprox": 45.45, "scaffold": 43.50, "feddyn": 45.25},
    # FALCON's FedAvg is not here: it trains whole networks for many rounds, our row averages classifiers of tokens once
    "pacs-domains": {"fedpft": 96.03, "fedcgs": 97.50, "falcon": 96.42},
    "brain-a0.1": {"fedpft": 74.09, "fedcgs": 64.72, "falcon": 83.33},
    "brain-a0.3": {"fedpft": 74.38, "fedcgs": 69.04, "falcon": 85.60},
    "brain-a0.5": {"fedpft": 77.74, "fedcgs": 62.79, "falcon": 85.16},
    **{
        f"{name}-a{alpha}": dict(zip(("fedpft", "fedcgs", "falcon"), values, strict=True))
        for name in ("xray", "xray448")
        for alpha, values in {
            "0.1": (72.65, 77.62, 82.41),
            "0.3": (75.27, 79.12, 88.92),
            "0.5": (76.74, 76.90, 89.22),
        }.items()
    },
    **{
        f"cifar-vit-n10-{label}": dict(zip(_VIT_ROWS, values, strict=True))
        for label, values in {
            "a0.05": (15.87, 16.16, 16.41, 17.31, 22.01, 26.78),
            "a0.1": (24.30, 25.05, 25.19, 26.88, 33.77, 36.97),
            "a0.3": (37.93, 40.01, 39.02, 40.57, 44.63, 51.69),
            "c1": (9.10, 9.59, 9.28, 9.37, 9.77, 13.98),
            "c3": (20.12, 21.88, 20.99, 21.26, 28.06, 33.85),
        }.items()
    },
}


def record(cell: str, replaces: bool = False) -> Path | None:
    """Write the record of a cell from its finished runs and from what it says already; fewer seeds are seen by `n`."""
    folder = Path("runs/grid") / cell
    finished = [folder / label / f"seed{seed}" for label in methods_of(cell) for seed in SEEDS]
    finished = [path for path in finished if (path / "results.json").exists()]
    if not finished:
        return None
    today = time.strftime("%Y-%m-%d", time.gmtime())
    results = with_gains([read_result(path) for path in finished])
    labels = [path.parent.name for path in finished]
    summary = summarize(results, labels=labels)
    found: dict[str, Any] = {
        label: {metric: row[metric] for metric in (*ALWAYS, *WHERE_THERE) if metric in ALWAYS or row[metric]["n"]}
        for label, row in summary["methods"].items()
    }
    for label, result in zip(labels, results, strict=True):
        found[label].update(settings=result["settings"], deviations=result["deviations"])
        found[label].setdefault("release_digests", {})[f"seed{result['seed']}"] = result["release_digest"]
        if theorem := measured(result["figures"]):
            found[label].setdefault("measured", {})[f"seed{result['seed']}"] = theorem
        for one in result.get("encounters", ()):
            own = found[label].setdefault("own_by_encounter", {}).setdefault(str(one["encounter"]), [])
            own.append(one["own"]["mean"])
        found[label]["date"] = today
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{cell}.json"
    made = {
        "cell": cell,
        "command": f"python -m benchmarks.grid {cell}",
        "simulation": CELLS[cell].command(cell),
        "date": today,
        "seeds": list(SEEDS),
        "environment": describe_environment(Machine(), default_workers()),
        "data": summary["data"],
        "methods": found,
        "equal_accuracy": summary["equal_accuracy"],
        "published_percent": dict(PUBLISHED.get(cell, {})),
        "published_is": "global" if CELLS[cell].method in ("federated_factory", "falcon", "fedmitr") else "own",
    }
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made = joined(before, made, methods_of(cell))
    wanted = [label for label in lost(before, made) if label in methods_of(cell)]
    if wanted and not replaces:
        raise SystemExit(
            f"{path} has rows that do not go with these runs (other images, settings or start file), and would "
            f"lose {', '.join(wanted)}. Run all of the cell's rows first, or say --replace."
        )
    write_json(path, {**made, "missing": missing(cell, made["methods"])})
    return path


def missing(cell: str, rows: Mapping[str, Any]) -> list[str]:
    """Rows that the cell should have and that are not there, or not with all seeds."""
    complete = [label for label, row in rows.items() if row[ALWAYS[0]]["n"] == len(SEEDS)]
    return [label for label in methods_of(cell) if label not in complete]


def updated_missing(cell: str) -> Path | None:
    """The record of a cell without runs here, if what it says is missing is not what the grid wants by now."""
    path = RECORDS / f"{cell}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if found is None or found["missing"] == missing(cell, found["methods"]):
        return None
    write_json(path, {**found, "missing": missing(cell, found["methods"])})
    return path


def measured(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What a run measured of its paper's theorems: FedMITR's gradient norms, FOL's risks beside their bound and the distance to
    its optimum beside the promised one, both as we read them and as they are printed; and what FOL pruned."""
    found: dict[str, Any] = {title: figures[title]["note"] for title in (NORMS, PRUNED) if title in figures}
    if RISKS in figures:
        gaps, bounds = (list(figures[RISKS]["series"][name]) for name in ("difference of risks", "bound: mean √(KL/2)"))
        held = sum(gap <= bound for gap, bound in zip(gaps, bounds, strict=True))
        found[RISKS] = {"clients": len(gaps), "held": held, "mean_difference": mean(gaps), "mean_bound": mean(bounds)}
        found[RISKS]["as_printed"] = figures[RISKS]["note"]
    if DESCENT in figures:
        shown = figures[DESCENT]["series"]
        held, held_as_printed = (
            sum(one <= most for one, most in zip(shown["measured"][1:], shown[name][1:], strict=True))
            for name in ("promised", "printed")
        )
        found[DESCENT] = {
            "steps": len(shown["measured"]) - 1,
            "held": held,
            "held_as_printed": held_as_printed,
            **{name: values[-1] for name, values in shown.items()},
        }
    return found


_NEAR = ("digits-vit-n5-a0.1", "digits-vit-n5-c3")
# The start of the blood cells was made again and has other bytes: cells that begin so have what all clients as one are compared
# with, once more, and are asked for nothing else
AGAIN = "blood-again"
_AGAIN = ("ensemble@ensemble=odds", "fedavg", "fedmitr", NEARER[0])


def methods_of(cell: str) -> tuple[str, ...]:
    """By whose tables a cell belongs to; FedBiCross' ablations in full in its first cell, elsewhere those of its targets. What
    16-bit sequences cost is in FALCON's first. Peers who have little of a class, but some, may fill it up or not."""
    if cell.startswith(AGAIN):
        return _AGAIN
    window = CELLS[cell].changes.get("window", 112)  # FALCON without regions: the whole image at the size of a window
    tokens = tuple(label.replace("resolution=112", f"resolution={window}") for label in TOKENS)
    tokens += ("falcon@wire=float32",) if cell == "brain-a0.1" else ()
    tokens += (OWN_TEACHER, FALCON_NEAR, FALCON_PAPER) if cell == "brain-a0.1" or cell.startswith("blood360") else ()
    tokens += (FALCON_PAPER,) if cell in ("xray-a0.1", "xray-a0.3") else ()
    vits: tuple[str, ...] = (*VITS, *ROUNDS) if cell == "blood-vit-n10-a0.1" else VITS
    vits += BARE if cell in ("blood-vit-n10-c3", "cifar-vit-n10-c3", "digits-vit-n5-a0.1") else ()
    vits += (*SWEEP, *AS_PUBLISHED) if cell == "digits-vit-n5-a0.1" else ()
    vits += NEARER if cell in _NEAR else ()
    vits += {"blood-vit-n10-c3": ("dense", *PIXELS), "cifar-vit-n10-c3": ("fedftg",)}.get(cell, ())
    topology = CELLS[cell].topology
    times = topology.encounters if topology else 1
    exchanges = tuple(label.replace("rounds=E", f"rounds={times}") for label in MEETINGS)  # as often as neighbors meet
    exchanges += CONTROLS if cell == "cifar-meet-n30-a0.3" else CONTROLS[:1] if cell.endswith("a0.3") else ()
    exchanges += ("dense", "coboosting") if cell == "cifar-meet-n30-a0.1" else ()
    exchanges += PRUNING if cell == "skin-meet-n30-a0.1" else ()
    factory: tuple[str, ...] = (
        FACTORY if CELLS[cell].partition == "silos" else (*FACTORY, "federated_factory@mode=peer@fill=balance")
    )
    if cell == "blood-silos":  # the public code augments peers' images and not the server's
        factory += ("federated_factory@augment=flip+crop", "federated_factory@mode=peer@augment=flip+crop")
    tables = {"federated_factory": factory, "falcon": tokens, "fol": exchanges, "fedmitr": vits}
    ablations: tuple[str, ...] = ABLATIONS if cell == "blood-n5-a0.1" else ABLATIONS[:4]
    ablations += (ALONE,) if cell.endswith("n5-a0.1") else ()
    return (*tables.get(CELLS[cell].method, (*REFERENCES, *DATA_FREE, *ablations)), *ours_of(cell))


def ours_of(cell: str) -> tuple[str, ...]:
    """Rows of the project's own method, and the controls with the site's prior."""
    if CELLS[cell].method == "falcon":  # the features of the demo's random encoder go beyond the usual bound
        wider = "features=encoder@bound=256" if cell == "digits-tokens" else "features=encoder"
        return tuple(label.replace("features=encoder", wider) for label in ENCODED)
    round_cells = ROUND_CELLS if CELLS[cell].dataset in ("bloodcells-28", "skinlesions-28") else ()
    upright = tuple(label for label in ONESUM if "flip" not in label) if CELLS[cell].dataset == "digits" else ONESUM
    photographs = PHOTOGRAPHS if cell in ("factory-cifar-n5-a0.1", "cifar-silos", "cifar-meet-n30-a0.1") else ()
    both = (*WITH_PRIOR, *FACTORY_PRIOR)  # FedMITR's clients start from a common file, which generators do not
    controls = {"federated_factory": both, "fedavg": both, "fol": both, "fedmitr": WITH_PRIOR}
    peers = PEERS if CELLS[cell].method == "fol" else ()
    return (*upright, *round_cells, *photographs, *peers, *controls.get(CELLS[cell].method, ()))


def attacked(cell: str) -> None:
    """FALCON's finished rounds of a cell with the reconstruction attack; a round that has it is left alone. Shadows, which take
    most of an audit, are for figures that no record of a cell has."""
    variant = replace(CELLS[cell], method="falcon")
    for seed in SEEDS:
        folder = Path("runs/grid") / cell / "falcon" / f"seed{seed}"
        if (folder / "results.json").exists():
            audit(folder, prepare(replace(variant, seed=seed)), attempt=Attempt(shadows=0))
            print(f"{time.strftime('%H:%M:%S')} {folder} attacked", flush=True)


def _line(what: str, done: int, total: int) -> None:
    if " done" in what:
        print(f"{time.strftime('%H:%M:%S')} {what} ({done}/{total})", flush=True)


_FLAGS = ("--skip=", "--only=", "--seeds=", "--workers=", "--replace", "--audit", "--collect")


def _given(names: list[str], flag: str) -> list[str]:
    return [name.removeprefix(flag) for name in names if name.startswith(flag)]


def _meant(text: str, label: str) -> bool:
    return label == text[1:] if text.startswith("=") else text in label


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name.startswith("-") and not name.startswith(_FLAGS)]:
        raise SystemExit(f"{'' if unknown[0] in ('-h', '--help') else f'unknown: {unknown[0]}'}\n{__doc__}")
    cells = [name for name in names if not name.startswith("--")] or list(CELLS)
    skipped, only = _given(names, "--skip="), _given(names, "--only=")
    workers = next((int(number) for number in _given(names, "--workers=")), None)
    seeds = next((tuple(int(seed) for seed in listed.split(",")) for listed in _given(names, "--seeds=")), SEEDS)
    for cell in cells:
        if cell not in CELLS:
            raise SystemExit(f"there is no cell {cell!r}; cells: {', '.join(CELLS)}")
        if "--collect" not in names:
            wanted = [label for label in methods_of(cell) if not any(text in label for text in skipped)]
            wanted = [label for label in wanted if not only or any(_meant(text, label) for text in only)]
            alone = replace(CELLS[cell], topology=None)
            for simulation, meets in ((CELLS[cell], True), (alone, False)):  # other methods have a server, or say how they meet
                some = [label for label in wanted if label.startswith("fol") == meets]
                folder = Path("runs/grid") / cell
                if some:
                    compare(simulation, some, seeds, folder, machine=Machine(workers=workers), progress=_line)
        if "--audit" in names and CELLS[cell].method == "falcon":
            attacked(cell)
        print(cell, record(cell, "--replace" in names) or updated_missing(cell) or "has no finished run", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
