"""Write docs/results.md from the committed records; nothing in it is typed by hand.

python -m benchmarks.results
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import claims
from benchmarks.claims_picture import alone, picture
from benchmarks.grid import CELLS, RECORDS, missing
from osfl.reports.curves import lines as curve
from osfl.reports.svg import tag

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
HEAD = """# What we measured

Written by `python -m benchmarks.results` from `benchmarks/records/`. Mean ± standard deviation over seeds, in per cent.
*own* is the accuracy on the clients' own class distributions, averaged; *global* is the accuracy on the whole test set.
*gain over local* is *own* minus that of training alone, in points; *clients that gain* is the share of clients above it.
*published* is what the paper prints for its nearest cell: own accuracy for FedBiCross (ResNet-18), global accuracy for
FederatedFactory (ResNet-50, EDM2), FedMITR (DeiT-Tiny from ImageNet) and FALCON (DINOv2-base at 448 px; its FedAvg trains for
many rounds). Read it beside ours, not against it: our cells use networks of 30 k to 200 k
parameters or features of frozen encoders (EfficientNet-Lite0; a ViT-S in `brain-vit-*`, random ones in `digits-tokens`), few
images and splits of our own. *Fréchet distance* and *excess-risk estimate* are of generators, on features that
[each run names](generators.md); an estimate above 1 bounds nothing.

Each row has its date in the record. Rows of FederatedFactory's mixtures were made again on 2026-11-18, when no part of a
generator could rest on fewer than ten images any more. Other rows are older, and differ from what the same command gives today
in three ways: no site's weight by claimed counts was capped (`limits.share`, 0.4 now), FALCON, FedPFT and FedCGS used classes
of one and two images at a site (`least`, 3 now), and the sites of `xray*` shared patients.
"""


def percent(row: dict[str, Any] | None) -> str:
    if not row or row["mean"] is None:
        return "–"
    few = "" if row["n"] == 3 else f" (n={row['n']})"
    return f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}{few}"


METRICS = {"own": "scores.clients.own.mean", "global": "scores.global.accuracy"}
EXTRA: Mapping[str, tuple[str, float, str]] = {  # shown in the cells that have them: heading, factor, format
    "scores.clients.own.median": ("median client", 100, ".1f"),
    "gains.mean": ("gain over local", 100, "+.1f"),
    "gains.share": ("clients that gain", 100, ".0f"),
    "costs.inference_bytes": ("to answer together, MB", 1e-6, ".2f"),
    "costs.flops": ("all computing, TFLOP", 1e-12, ".2f"),
    "costs.bytes": ("sent both ways, MB", 1e-6, ".2f"),
    "generators.overall.frechet": ("Fréchet distance", 1, ".1f"),
    "generators.bound.value": ("excess-risk estimate", 1, ".1f"),
}


def table(record: dict[str, Any]) -> list[str]:
    rows = record["methods"]
    extra = [metric for metric in EXTRA if any(_mean(row, metric) is not None for row in rows.values())]
    heads = [
        "method",
        "own",
        "worst client",
        "global",
        "AUROC",
        "upload, all",
        "server s",
        *(EXTRA[m][0] for m in extra),
        f"published {record['published_is']}",
    ]
    lines = [
        f"## {record['cell']}",
        "",
        f"`{record['command']}` ({record['date']}, {len(record['seeds'])} seeds)",
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
    ]
    for label, row in rows.items():
        cells = [
            label,
            percent(row["scores.clients.own.mean"]),
            percent(row["scores.clients.own.worst"]),
            percent(row["scores.global.accuracy"]),
            _spelled(_mean(row, "scores.global.auroc"), 1, ".3f"),
            f"{row['costs.upload_bytes']['mean'] / 1e6:.2f} MB",
            f"{row['costs.server_seconds']['mean']:.1f}",
            *(_spelled(_mean(row, metric), *EXTRA[metric][1:]) for metric in extra),
            _spelled(record["published_percent"].get(label), 1, ".1f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for label, row in rows.items():
        if "own_by_encounter" in row:
            own = [f"{100 * statistics.fmean(values):.1f}" for _, values in sorted(row["own_by_encounter"].items())]
            lines += ["", f"{label}, own accuracy after each encounter: {', '.join(own)}."]
    lines += features(record)
    if starts := started_from(rows):
        lines += ["", f"Clients start from {' and '.join(starts)}."]
    if lacking := missing(record["cell"], rows):
        lines += ["", f"Still without all seeds: {', '.join(lacking)}."]
    return [*lines, ""]


def started_from(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """The weights that clients fine-tuned, and the first digits of a file's sha256: another processor makes other bytes."""
    said = [row["settings"] for row in rows.values()]
    return sorted(
        {
            f"`{one['pretrained']}`" + (f" ({one['pretrained_sha256'][:12]}…)" if one.get("pretrained_sha256") else "")
            for one in said
            if one.get("pretrained")
        }
    )


def _mean(row: dict[str, Any], metric: str) -> float | None:
    found = row.get(metric)
    return None if found is None else found["mean"]


def _spelled(value: float | None, factor: float, form: str) -> str:
    return "–" if value is None else format(factor * value, form)


def speeds() -> list[str]:
    """Every ratio that a benchmark measured in one run, ours against the straightforward version."""
    lines = [
        "## Speed",
        "",
        "Ratios to a straightforward version at equal results, each of one run of `make bench`.",
        "",
        "| what | times faster | aim | % of the peak | measured |",
        "|---|---|---|---|---|",
    ]
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for name, figures, key in _ratios(record.get("figures", {}), path.stem):
            aim, share = figures.get(key.replace("speedup", "aim")), figures.get("share_of_peak")
            share = share.get(key.removesuffix("_speedup")) if isinstance(share, dict) else share
            lines.append(
                f"| {name} | {figures[key]:.2f} | {_spelled(aim, 1, '.2f')} | {_spelled(share, 100, '.0f')} "
                f"| {record['date']} |"
            )
    return [*lines, ""]


def _ratios(figures: Any, name: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every `speedup` or `..._speedup` in a record, wherever it is, with the table that holds it."""
    if not isinstance(figures, dict):
        return
    for key, value in sorted(figures.items()):
        if key.endswith("speedup") and isinstance(value, int | float):
            yield name + (f", {key.removesuffix('_speedup')}" if key != "speedup" else ""), figures, key
        yield from _ratios(value, f"{name}: {key}")


FAMILY = re.compile(r"(?P<of>.+)-n(?P<clients>\d+)-(?P<share>.+)")
CURVE = (900, 372)  # pixels of the picture, its margins included
LINES = ("local_only", "fedavg", "dense", "coboosting", "fedbicross", "deepinversion_vit", "fedmitr")  # in the pictures


def over_clients(records: Sequence[dict[str, Any]]) -> list[str]:
    """Cells that differ in the number of clients alone, side by side; from three on with a picture."""
    lines = ["## More clients", "", "Cells that differ in the number of clients N alone: the same images, shared among more."]
    for (of, share), cells in families(records).items():
        numbers, judged = sorted(cells), cells[min(cells)]["published_is"]
        both = [label for label in cells[numbers[0]]["methods"] if all(label in cells[n]["methods"] for n in numbers)]
        if len(numbers) > 2:
            path = PAGE.with_name(f"clients-{of}-{share}.svg")
            drawn = [label for label in LINES if label in both]
            path.write_text(_curve(cells, numbers, drawn, METRICS[judged]), encoding="utf-8")
            lines += ["", f"![{of}, {share}: accuracy over the number of clients]({path.name})"]
        lines += [
            "",
            f"| {of}, {share}: {judged} | {' | '.join(f'N = {n}' for n in numbers)} |",
            "|" + "---|" * (len(numbers) + 1),
        ]
        lines += [
            f"| {label} | {' | '.join(percent(cells[n]['methods'][label][METRICS[judged]]) for n in numbers)} |"
            for label in both
        ]
    return [*lines, ""]


def families(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """(dataset, shares) -> number of clients -> record, where there are several."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for record in records:
        if match := FAMILY.fullmatch(record["cell"]):
            found.setdefault((match["of"], match["share"]), {})[int(match["clients"])] = record
    return {family: cells for family, cells in found.items() if len(cells) > 1}


def _curve(cells: Mapping[int, dict[str, Any]], numbers: Sequence[int], labels: Sequence[str], metric: str) -> str:
    series = {label: [100 * cells[n]["methods"][label][metric]["mean"] for n in numbers] for label in labels}
    drawn = curve(numbers, series, what="accuracy over the number of clients", x_label="clients", y_label="accuracy, %")
    return alone(*CURVE, tag("g", drawn, transform="translate(20 16)"))


def features(record: dict[str, Any]) -> list[str]:
    """What is said of synthetic features, where a method makes some: discrepancy, price, and what attackers drew."""
    rows = {label: row for label, row in record["methods"].items() if row.get("tokens.overall.mmd", {}).get("n")}
    if not rows:
        return []
    head = [
        "",
        "| synthetic features | MMD (floor) | GFLOP each | attacker: PSNR / SSIM from real | synthetic | nothing |",
        "|---|---|---|---|---|---|",
    ]
    return [*head, *(_features(label, row) for label, row in rows.items())]


def _features(label: str, row: dict[str, Any]) -> str:
    mmd, floor = (row[f"tokens.overall.{key}"]["mean"] for key in ("mmd", "mmd_floor"))
    price = row.get("costs.flops_per_sample", {}).get("mean")
    told = " | ".join(_drawn(row, source) for source in ("real", "synthetic", "blind"))
    return f"| {label} | {mmd:.4f} ({floor:.4f}) | {'–' if price is None else f'{price / 1e9:.2g}'} | {told} |"


def _drawn(row: dict[str, Any], source: str) -> str:
    """By the attacker who has similar images."""
    found = [row.get(f"reconstruction.attackers.similar images.{source}.{key}", {}).get("mean") for key in ("psnr", "ssim")]
    return "–" if None in found else f"{found[0]:.1f} dB / {found[1]:.2f}"


def main() -> None:
    there = [cell for cell in CELLS if (RECORDS / f"{cell}.json").exists()]
    records = [json.loads((RECORDS / f"{cell}.json").read_text(encoding="utf-8")) for cell in there]
    judged = claims.judge(records)
    PAGE.with_name("claims.svg").write_text(picture(judged), encoding="utf-8")
    lines = [HEAD, *claims.table(judged)]
    lines += over_clients(records)
    for record in records:
        lines += table(record)
    if empty := [cell for cell in CELLS if cell not in there]:
        lines += [f"Cells still empty: {', '.join(empty)}. `python -m benchmarks.grid CELL` fills one.", ""]
    lines += speeds()
    PAGE.write_text("\n".join(lines), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
