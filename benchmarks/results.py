"""Write docs/results.md, docs/results/*.md and the table of OneSum's card from the committed records; no typed figures.

python -m benchmarks.results
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import advice, claims, onesum_card, scale_page
from benchmarks.claims_picture import alone, picture
from benchmarks.grid import CELLS, FACTORY_PRIOR, RECORDS, WITH_PRIOR, missing
from osfl.reports.curves import lines as curve
from osfl.reports.svg import tag

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
FOLDER = PAGE.with_suffix("")  # the pages that docs/results.md links to
HEAD = """# Results

Do the claims of the papers hold in our records? Each claim is a difference between two methods in the same cells (dataset,
partition, number of clients), seed by seed. *Inconclusive*: the 95 % interval of the mean difference includes zero. *With all
taken together*: so many claims at once would let some pass by chance; these hold nevertheless. The last column shows the first
claim of each method; [all claims](results/claims.md), with whose recipe each was asked of, are on a page of their own.
"""
READ = """## How to read the tables

These pages are written by `python -m benchmarks.results` from `benchmarks/records/`. Figures are mean ± standard deviation over
seeds, in percent.

- *own*: accuracy on the clients' own class distributions, averaged. *global*: accuracy on the whole test set.
- *Controls of own accuracy*: `ensemble@ensemble=odds@personalize=prior` and `federated_factory@personalize=prior` only weigh
  the classes as a client has them, and train nothing there. Claims of FedBiCross and FOL about own accuracy are judged against
  both; a cell without them says why.
- *gain over local*: *own* minus *own* of training alone, in points. *clients that gain*: share of clients above training alone.
- *published*: what the paper reports for its nearest cell, beside rows of the same method and metric only: own accuracy for
  FedBiCross (ResNet-18), global accuracy for FederatedFactory (ResNet-50, EDM2), FedMITR (DeiT-Tiny from ImageNet) and FALCON
  (DINOv2-base at 448 px). Do not compare it with our figures directly: our cells use networks of 30 k to 200 k parameters or
  features of frozen encoders (EfficientNet-Lite0; a ViT-S in `brain-vit-*`, random ones in `digits-tokens`), few images and our
  own splits.
- *Fréchet distance* and *excess-risk estimate* describe generators, on features that [each run names](generators.md). An
  estimate above 1 bounds nothing.
"""


@dataclass(frozen=True)
class Change:
    """Something that rows made before it lack."""

    text: str
    concerns: Callable[[str, str], bool]  # cell, and the row's label
    older: Callable[[Mapping[str, Any]], bool]  # whether a row was made before it


def _is(*methods: str) -> Callable[[str, str], bool]:
    return lambda _, label: label.partition("@")[0] in methods


def _made_before(day: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: str(row["date"]) < day


_ALONE = _is("local_only", "centralized", "centralized_tokens", "fol", "onesum")
CHANGES = (
    Change(
        "weights by claimed counts had no upper bound (`limits.share`, 0.4 now)",
        lambda cell, label: not _ALONE(cell, label),
        _made_before("2026-11-18"),
    ),
    Change(
        "classes with one or two images at a site were used (`least`, 3 now)",
        _is("falcon", "fedpft", "fedcgs"),
        lambda row: "least" not in row["settings"],
    ),
    Change(
        "parts of a generator could rest on fewer than ten images (`least`, 10 now)",
        _is("federated_factory"),
        lambda row: "least" not in row["settings"],
    ),
    Change(
        "FedCGS' preset had the total covariance (`covariance=within` with shrinkage now)",
        _is("fedcgs"),
        lambda row: row["settings"].get("covariance") == "total",
    ),
    Change("the sites of `xray*` shared patients", lambda cell, _: cell.startswith("xray"), _made_before("2026-11-19")),
)


def older_rows(records: Sequence[dict[str, Any]]) -> list[str]:
    """By day, how many rows were made; and which of them lack what was changed since."""
    rows = [
        (record["cell"], label, {"date": record["date"], **row})
        for record in records
        for label, row in record["methods"].items()
    ]
    days = Counter(str(row["date"]) for _, _, row in rows)
    made = ", ".join(f"{day} ({days[day]})" for day in sorted(days))
    lines = [
        "## Which code made which rows",
        "",
        f"Each row has its date in the record. The {len(rows)} rows in {len(records)} cells were made on: {made}.",
        "Rows that are older than a change of the code differ from what the same command gives today:",
        "",
    ]
    for change in CHANGES:
        asked = [(cell, change.older(row)) for cell, label, row in rows if change.concerns(cell, label)]
        old = sum(older for _, older in asked)
        if old:
            cells = len({cell for cell, older in asked if older})
            lines.append(f"- {change.text}: {old} of {len(asked)} such rows, in {cells} cells.")
    return [*lines, ""]


@dataclass(frozen=True)
class Control:
    """A row with the site's prior, a control of own accuracy, that cells are left without; and why."""

    label: str
    cells: Callable[[str], bool]
    why: str


CONTROLS = (
    Control(
        *WITH_PRIOR,
        lambda cell: cell.startswith(("blood-vit", "cifar-vit", "digits28-vit")),
        "the clients' transformers start from a file that has other bytes when another processor makes it again, so a new row "
        "would not go with these",
    ),
    Control(
        *FACTORY_PRIOR,
        lambda cell: "-meet-" in cell,
        "the server learns from the generators of 30 or 70 sites, which takes 660 s a seed (one seed of `cifar-meet-n30-a0.1`)",
    ),
    Control(*WITH_PRIOR, lambda cell: True, "not run for lack of time, 25 to 100 s a seed"),
    Control(*FACTORY_PRIOR, lambda cell: True, "not run for lack of time, 30 to 60 s a seed"),
)


def why_no_control(cell: str, lacking: Sequence[str]) -> list[str]:
    """A sentence for each row with the site's prior that is missing."""
    rows = [label for label in lacking if label in (*WITH_PRIOR, *FACTORY_PRIOR)]
    found = [(label, next(one.why for one in CONTROLS if one.label == label and one.cells(cell))) for label in rows]
    return [line for label, why in found for line in ("", f"Control of own accuracy that is missing, {label}: {why}.")]


@dataclass(frozen=True)
class Regime:
    """Cells that belong on one page: one kind of model, data and partition."""

    file: str
    title: str
    setup: str
    has: Callable[[str], bool]


REGIMES = (
    Regime(
        "medical-dirichlet.md",
        "Medical images, Dirichlet label skew",
        "FedBiCross and other data-free methods. Clients upload a CNN; 5 or 10 clients; blood cells, skin lesions, pneumonia.",
        lambda cell: cell.startswith(("blood-n", "skin-n", "pneumonia-n")),
    ),
    Regime(
        "silos.md",
        "Silos: each client holds classes of its own",
        "FederatedFactory. Clients upload generators; multi-round methods are the references.",
        lambda cell: cell.endswith("-silos"),
    ),
    Regime(
        "generators-dirichlet.md",
        "Generators, Dirichlet label skew",
        "FederatedFactory with 5 clients at Dirichlet 0.1.",
        lambda cell: cell.startswith("factory-"),
    ),
    Regime(
        "tokens.md",
        "Features of frozen encoders",
        "FALCON, FedPFT and FedCGS. Clients upload synthetic token sequences or statistics of features.",
        lambda cell: CELLS[cell].method == "falcon",
    ),
    Regime(
        "exchange.md",
        "Exchange between neighbors, without a server",
        "FOL with 30 or 70 clients that exchange models with five neighbors in three encounters.",
        lambda cell: "-meet-" in cell,
    ),
    Regime(
        "vision-transformers.md",
        "Vision transformers",
        "FedMITR and DeepInversion. Clients fine-tune a ViT from the same weights and upload it.",
        lambda cell: "-vit-n" in cell,
    ),
)
OTHERS = {  # pages beside the regimes -> title and what they answer
    "claims.md": ("All claims", "every claim with its difference, interval, and the cells where it fails"),
    "clients.md": ("More clients", "the same images, shared among more clients"),
    "speed.md": ("Speed", "how much faster than a straightforward version, time to accuracy, and growth with the clients"),
}
UP = "[How to read the tables](../results.md#how-to-read-the-tables)."


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
        *([f"published {record['published_is']}"] if record.get("published_percent") else []),
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
        ]
        if record.get("published_percent"):
            cells.append(_spelled(record["published_percent"].get(label), 1, ".1f"))
        lines.append(f"| {' | '.join(cells)} |")
    for label, row in rows.items():
        if "own_by_encounter" in row:
            own = [f"{100 * statistics.fmean(values):.1f}" for _, values in sorted(row["own_by_encounter"].items())]
            lines += ["", f"{label}, own accuracy after each encounter: {', '.join(own)}."]
    lines += features(record)
    if starts := started_from(rows):
        lines += ["", f"Clients start from {' and '.join(starts)}."]
    if lacking := missing(record["cell"], rows):
        lines += ["", f"Still without all seeds: {', '.join(lacking)}.", *why_no_control(record["cell"], lacking)]
    return [*lines, ""]


def started_from(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """The weights that clients fine-tuned, and the first digits of a file's sha256: another processor makes other bytes."""
    settings = [row["settings"] for row in rows.values()]
    return sorted(
        {
            f"`{one['pretrained']}`" + (f" ({one['pretrained_sha256'][:12]}…)" if one.get("pretrained_sha256") else "")
            for one in settings
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
        "# Speed",
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
    return [*lines, "", *scale_page.tables()]


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
    lines = [
        "# More clients",
        "",
        f"Cells that differ only in the number of clients N: the same images, shared among more. {UP}",
    ]
    for (of, share), cells in families(records).items():
        numbers, judged = sorted(cells), cells[min(cells)]["published_is"]
        both = [label for label in cells[numbers[0]]["methods"] if all(label in cells[n]["methods"] for n in numbers)]
        if len(numbers) > 2:
            path = FOLDER / f"clients-{of}-{share}.svg"
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
    """Synthetic features, where a method makes some: their discrepancy, their price, and what attackers drew."""
    rows = {label: row for label, row in record["methods"].items() if row.get("tokens.overall.mmd", {}).get("n")}
    if not rows:
        return []
    head = [
        "",
        "| synthetic features | MMD (floor) | GFLOP each | attacker: PSNR / SSIM from real | synthetic | nothing "
        "| best of all for each original: real | synthetic |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return [*head, *(_features(label, row) for label, row in rows.items())]


def _features(label: str, row: dict[str, Any]) -> str:
    mmd, floor = (row[f"tokens.overall.{key}"]["mean"] for key in ("mmd", "mmd_floor"))
    price = row.get("costs.flops_per_sample", {}).get("mean")
    attacks = " | ".join(
        _drawn(row, source) for source in ("real", "synthetic", "blind", "real_by_original", "synthetic_by_original")
    )
    return f"| {label} | {mmd:.4f} ({floor:.4f}) | {'–' if price is None else f'{price / 1e9:.2g}'} | {attacks} |"


def _drawn(row: dict[str, Any], source: str) -> str:
    """By the attacker who has similar images."""
    found = [row.get(f"reconstruction.attackers.similar images.{source}.{key}", {}).get("mean") for key in ("psnr", "ssim")]
    return "–" if None in found else f"{found[0]:.1f} dB / {found[1]:.2f}"


def regime_page(regime: Regime, records: Sequence[dict[str, Any]]) -> list[str]:
    """One page: what the cells have in common, then a table a cell."""
    shown = [record for record in records if regime.has(record["cell"])]
    links = ", ".join(f"[{one['cell']}](#{anchor(one['cell'])})" for one in shown)
    lines = [f"# {regime.title}", "", f"{regime.setup} {UP}", "", f"Cells: {links}.", ""]
    for record in shown:
        lines += table(record)
    if empty := [cell for cell in CELLS if regime.has(cell) and cell not in {one["cell"] for one in shown}]:
        lines += [f"Cells still empty: {', '.join(empty)}. `python -m benchmarks.grid CELL` fills one.", ""]
    return lines


def anchor(heading: str) -> str:
    """The name of a heading in a link, as GitHub and MkDocs write it: without dots."""
    return heading.lower().replace(".", "").replace(" ", "-")


def summary(judged: Sequence[claims.Judged], records: Sequence[dict[str, Any]]) -> list[str]:
    """The first screen: claims condensed, the picture, and where the tables are."""
    lines = [HEAD, *claims.condensed(judged), "## Which page has which results", "", "| page | what it shows |", "|---|---|"]
    lines += [f"| [{one.title}]({FOLDER.name}/{one.file}) | {one.setup} |" for one in REGIMES]
    lines += [f"| [{title}]({FOLDER.name}/{file}) | {answer} |" for file, (title, answer) in OTHERS.items()]
    pictured = "![Claims of the papers with the differences in our records and their 95 % intervals](claims.svg)"
    return [*lines, "", "## All claims in one picture", "", pictured, "", READ, *older_rows(records)]


def main() -> None:
    advice.main(["--judge"])  # the package has a table of the same records
    there = [cell for cell in CELLS if (RECORDS / f"{cell}.json").exists()]
    records = [json.loads((RECORDS / f"{cell}.json").read_text(encoding="utf-8")) for cell in there]
    judged = claims.judge(records)
    FOLDER.mkdir(exist_ok=True)
    PAGE.with_name("claims.svg").write_text(picture(judged), encoding="utf-8")
    pages = {FOLDER / regime.file: regime_page(regime, records) for regime in REGIMES}
    pages |= {FOLDER / "claims.md": claims.table(judged), FOLDER / "clients.md": over_clients(records)}
    pages |= {FOLDER / "speed.md": speeds(), PAGE: summary(judged, records)}
    for path, lines in pages.items():
        path.write_text("\n".join(lines), encoding="utf-8")
        print(path)
    print(onesum_card.write(records))


if __name__ == "__main__":
    main()
