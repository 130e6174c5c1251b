"""Made-up runs that look like real ones: same shapes, same oddities, no training."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any, cast

import pytest

from osfl.core.result import Encounter, Result

Sampler = Callable[..., Result]
Runs = Callable[..., list[Result]]

HOSTILE = '<script>alert("x")</script>'
BLOOD = [
    "basophil",
    "eosinophil",
    "erythroblast",
    "immature granulocytes (myelocytes, metamyelocytes)",
    "lymphocyte",
    "monocyte",
    "neutrophil",
    "platelet",
]


def class_names(count: int) -> list[str]:
    if count == 2:
        return ["normal", "pneumonia"]
    if count == 8:
        return BLOOD
    return [str(digit) for digit in range(10)] if count == 10 else [f"class number {index}" for index in range(count)]


def client_names(count: int, odd: bool) -> list[str]:
    names = [f"site-{index:02d}" for index in range(count)]
    if odd:
        names[0] = HOSTILE
        names[1] = "Universitätsklinikum für Hämatologie und Onkologie, Standort Nord-West, Gebäude 14"
        if count > 2:
            names[2] = "東京大学医学部附属病院"
    return names


def png(shade: int) -> str:
    """A gray 8×8 PNG in base64."""
    rows = b"".join(b"\x00" + bytes(((shade + 20 * x + 9 * y) % 256) for x in range(8)) for y in range(8))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def all_figures() -> dict[str, Any]:
    steps = list(range(0, 2001, 100))
    return {
        "Synthetic images": {
            "kind": "gallery",
            "note": "One row a class.",
            "images": [{"png": png(17 * i), "caption": f"class {i}"} for i in range(12)],
        },
        "Similarity of clients": {
            "kind": "heatmap",
            "rows": ["a", "b", "c"],
            "columns": ["a", "b", "c"],
            "values": [[1, 0.25, 0.031], [0.25, 1, 0.5], [0.031, 0.5, 1]],
            "unit": "cosine",
        },
        "Loss while distilling": {
            "kind": "lines",
            "x": steps,
            "x_label": "step",
            "y_label": "loss",
            "series": {
                "cross entropy": [2.3 * 0.99 ** (s / 20) for s in steps],
                "batch-norm statistics": [None if s < 300 else 1.1 for s in steps],
                "total variation": [0.4 + s / 4000 for s in steps],
            },
        },
        "Confidence": {
            "kind": "histogram",
            "bins": [i / 10 for i in range(11)],
            "x_label": "confidence",
            "series": {"members": [1, 2, 3, 4, 8, 12, 20, 30, 60, 120], "others": [2, 4, 7, 9, 12, 18, 25, 33, 40, 70]},
        },
        "Plane": {"kind": "scatter", "series": {"a": {"real": [[0, 1], [2, 3.5]], "synthetic": [[1, 1]]}, "b": {"real": []}}},
    }


def sample_generators(labels: list[str], clients: list[str]) -> dict[str, Any]:
    """What evaluation says of generators: one class is copied, one has too few images."""
    rng = random.Random(len(labels))
    row = {
        "synthetic": 400,
        "training": 1964,
        "held_out": 310,
        "compared": 200,
        "frechet": 2853.1,
        "frechet_floor": 359.2,
        "kernel": 37.02,
        "kernel_floor": -0.0511,
        "nearest_ratio": 1.03,
        "copied": 0.02,
        "copied_floor": 0.0,
        "verdict": "no sign of copying",
        "error": 1.6,
    }
    rows = {name: dict(row) for name in labels}
    rows[labels[0]] |= {"verdict": "copies", "copied": 0.97, "nearest_ratio": 0.04}
    rows[labels[-1]] |= {
        "verdict": "too few to say",
        "training": 3,
        "compared": 3,
        "copied": None,
        "copied_floor": None,
        "nearest_ratio": None,
        "error": None,
        "frechet": None,
    }
    points = {
        name: {kind: [[rng.gauss(i, 1), rng.gauss(-i, 1)] for _ in range(12)] for kind in ("real", "synthetic")}
        for i, name in enumerate(labels)
    }
    return {
        "space": "EfficientNet-Lite0 (ImageNet) features at 64 px",
        "frechet_name": "FD",
        "kernel_name": "KD",
        "overall": {**row, "verdict": "", "copied": None, "copied_floor": None, "nearest_ratio": None, "error": None},
        "classes": rows,
        "clients": dict.fromkeys(clients, 1.6) | {clients[-1]: None},
        "bound": {
            "value": 1.79,
            "error": 1.6,
            "prior_shift": 0.0764,
            "dimensions": 8,
            "left_out": [labels[-1]],
            "infinite": [],
        },
        "warnings": [f"Generators copy training images of {labels[0]}: whoever has the generator has these images."],
        "figures": {
            "Pairs": {"kind": "gallery", "wide": True, "images": [{"png": png(9 * i), "caption": "a pair"} for i in range(9)]},
            "Plane": {"kind": "scatter", "series": points, "note": "Rings are real."},
        },
    }


def sample_result(
    method: str = "ensemble",
    clients: int = 5,
    classes: int = 8,
    seed: int = 0,
    accuracy: float = 0.78,
    odd: bool = False,
    auroc: float | None = 0.954,
    personalized: bool = False,
    messages: int = 1,
    upload: int = 1_243_392,
    figures: bool | dict[str, Any] = False,
    generators: bool = False,
    **replaced: Any,
) -> Result:
    """A run with label skew; `odd` gives clients, classes and settings names that try to break a page."""
    rng = random.Random(f"{clients}/{classes}")
    names, labels = client_names(clients, odd), class_names(classes)
    labels = [*labels[:-1], f"{labels[-1]} & <b>'x'</b>"] if odd else labels
    counts = [[int(rng.paretovariate(0.7) * 20) % 1400 if rng.random() < 0.6 else 0 for _ in labels] for _ in names]
    counts = [[row[0] + 8, *row[1:]] for row in counts]
    noise = random.Random(f"{method}/{seed}")
    hit = [max(0.02, min(0.995, accuracy + noise.uniform(-0.25, 0.2))) for _ in labels]
    totals = [rng.randint(60, 430) for _ in labels]
    confusion = [_row(i, total, share, len(labels)) for i, (total, share) in enumerate(zip(totals, hit, strict=True))]
    own = {name: max(0.05, min(1.0, accuracy + noise.uniform(-0.3, 0.2))) for name in names}
    up = dict.fromkeys(names, upload * messages) if messages else dict.fromkeys(names, 0)
    result: dict[str, Any] = {
        "schema": 1,
        "method": method,
        "preset": "cpu",
        "seed": seed,
        "command": f"osfl run --method {method} --dataset bloodcells-28 --clients {clients} --partition dirichlet:0.1 "
        f"--preset cpu --seed {seed} --out runs/{method}",
        "plan_digest": "3f9a" * 16,
        "release_digest": "b07c" * 16,
        "models_digest": "55e1" * 16,
        "task": {"name": "bloodcells-28", "classes": labels, "image": [3, 28, 28]},
        "data": {
            "dataset": "bloodcells-28",
            "digest": "9d" * 32,
            "partition": "dirichlet:0.1",
            "samples": None,
            "evaluated_on": "test",
            "train_images": 11959,
            "test_images": sum(totals),
            "license": "CC BY 4.0",
        },
        "clients": [
            {"client": name, "train": sum(row) - sum(row) // 10, "val": sum(row) // 10, "class_counts": row}
            for name, row in zip(names, counts, strict=True)
        ],
        "settings": {
            "architecture": "resnet18",
            "width": 16,
            "epochs": 20,
            "learning_rate": 0.01,
            "ensemble": "logits",
            "milestones": [10, 15],
            **({HOSTILE: HOSTILE} if odd else {}),
        },
        "deviations": ["20 local epochs instead of 200 (preset cpu).", "ResNet-18 with 16 channels in the first stage."],
        "scores": {
            "global": {
                "accuracy": accuracy,
                "balanced_accuracy": accuracy - 0.04,
                "f1": accuracy - 0.05,
                "ece": 0.083,
                "auroc": auroc and 0.5 + auroc * accuracy / 2,
                "nll": 0.71,
            },
            "clients": {
                "own": _spread(own),
                "everyone": _spread({name: accuracy - 0.01 * i * personalized for i, name in enumerate(names)}),
            },
            "personalized": personalized,
            "majority": 0.195,
            "per_class": dict(zip(labels, [None, *hit[1:]] if odd else hit, strict=True)),
            "confusion": confusion,
        },
        "costs": {
            "upload_bytes": sum(up.values()),
            "download_bytes": sum(up.values()) * 5,
            "upload_bytes_by_client": up,
            "download_bytes_by_client": {name: 5 * value for name, value in up.items()},
            "messages_per_client": messages,
            "client_seconds": 184.25,
            "server_seconds": 3.0714,
            "wall_seconds": 98.2,
            "phases": {
                "client": {"seconds": 184.25, "flops": 3.21e12 * max(1, messages), "peak_bytes": 812_000_000},
                "server": {"seconds": 3.0714, "flops": 0.0, "peak_bytes": 640_500_000},
                "personalize": {"seconds": 0.0, "flops": 0.0, "peak_bytes": 640_500_000},
                "evaluate": {"seconds": 6.5, "flops": 4.4e11, "peak_bytes": 700_000_000},
            },
        },
        "environment": {
            "osfl": "0.1.0",
            "python": "3.11.2",
            "torch": "2.13.0+cpu",
            "device": "cpu",
            "workers": 2,
            "threads": 1,
            "processor": "x86_64, 2 cores",
        },
    }
    if figures:
        result["figures"] = all_figures() if figures is True else figures
    if generators:
        result["generators"] = sample_generators(labels, names)
    return cast("Result", {**result, **replaced})


def sample_encounters(result: Result, count: int = 3) -> list[Encounter]:
    """As many encounters as asked for, each with the clients' scores of the run."""
    scores = result["scores"]["clients"]
    return [
        {
            "encounter": number,
            "plan_digest": "",
            "release_digest": "",
            "models_digest": "",
            "accuracy": 0.5,
            "own": scores["own"],
            "everyone": scores["everyone"],
            "upload_bytes": 0,
            "download_bytes": 0,
        }
        for number in range(1, count + 1)
    ]


def _row(truth: int, total: int, share: float, size: int) -> list[float]:
    row = [0.0] * size
    row[truth] = round(total * share)
    row[(truth + 1) % size] += round((total - row[truth]) * 0.7)
    row[(truth * 3 + 2) % size] += total - sum(row)
    return row


def _spread(values: dict[str, float]) -> dict[str, Any]:
    mean = sum(values.values()) / len(values)
    std = (sum((value - mean) ** 2 for value in values.values()) / len(values)) ** 0.5
    worst = min(values, key=lambda name: values[name])
    return {"mean": mean, "std": std, "worst": values[worst], "worst_client": worst, "values": values}


@pytest.fixture(scope="session")
def sample() -> Sampler:
    return sample_result


@pytest.fixture(scope="session")
def demo_runs() -> Runs:
    return sample_runs


def sample_runs(methods: int = 5, seeds: int = 3, **more: Any) -> list[Result]:
    """A comparison as `osfl compare` would leave it: references first, then one-shot methods."""
    plan = [
        ("local_only", 0.31, 0, 0, True),
        ("ensemble", 0.62, 1, 1_243_392, False),
        ("fedavg", 0.19, 1, 1_243_392, False),
        ("fedavg_rounds", 0.83, 20, 1_243_392, False),
        ("centralized", 0.91, 0, 0, False),
    ]
    extra = [
        "falcon",
        "fedmitr",
        "fedbicross",
        "fol",
        "federated_factory",
        "fedprox",
        "scaffold",
        "feddyn",
        "deepinversion",
        "dafl",
        "dense",
        "coboosting",
        "fedftg",
        "fedisca",
        "fedpft",
        "fedcgs",
        "fedlmg",
    ]
    extra += [f"another_method_with_a_long_name_{index}" for index in range(8)]
    for index, name in enumerate(extra):
        plan.append((name, 0.55 + 0.35 * ((index * 37) % 100) / 100, 1, [1_243_392, 96_000, 4_800_000][index % 3], False))
    return [
        sample_result(
            name,
            accuracy=score + 0.01 * ((seed * 7) % 3 - 1),
            messages=messages,
            upload=up,
            personalized=own,
            seed=seed,
            generators=name == "federated_factory",
            **more,
        )
        for name, score, messages, up, own in plan[:methods]
        for seed in range(seeds)
    ]
