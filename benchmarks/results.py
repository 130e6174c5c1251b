"""Write docs/results.md from the committed records; nothing in it is typed by hand.

    python -m benchmarks.results
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.grid import CELLS, RECORDS

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
HEAD = """# What we measured

Written by `python -m benchmarks.results` from `benchmarks/records/`. Mean ± standard deviation over seeds, in per cent.
*own* is the accuracy on the clients' own class distributions, averaged; *global* is the accuracy on the whole test set.
*published* is what the paper prints for its nearest cell: own accuracy for FedBiCross (ResNet-18), global accuracy for
FederatedFactory (ResNet-50, EDM2) and FALCON (DINOv2-base at 448 px; its FedAvg trains for many rounds). Read it beside
ours, not against it: our cells use a CNN of 30 k parameters or EfficientNet-Lite0 features, few images and splits of our own.
"""


def percent(row: dict[str, Any] | None) -> str:
    if not row or row["mean"] is None:
        return "–"
    few = "" if row["n"] == 3 else f" (n={row['n']})"
    return f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}{few}"


def table(record: dict[str, Any]) -> list[str]:
    lines = [f"## {record['cell']}", "", f"`{record['command']}` ({record['date']}, {len(record['seeds'])} seeds)", "",
             f"| method | own | worst client | global | AUROC | upload, all | server s | published {record['published_is']} |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for label, row in record["methods"].items():
        published = record["published_percent"].get(label)
        auroc = row["scores.global.auroc"]["mean"]
        lines.append(
            f"| {label} | {percent(row['scores.clients.own.mean'])} | {percent(row['scores.clients.own.worst'])} "
            f"| {percent(row['scores.global.accuracy'])} | {'–' if auroc is None else f'{auroc:.3f}'} "
            f"| {row['costs.upload_bytes']['mean'] / 1e6:.2f} MB | {row['costs.server_seconds']['mean']:.1f} "
            f"| {'–' if published is None else f'{published:.1f}'} |"
        )
    if record["missing"]:
        lines += ["", f"Still without all seeds: {', '.join(record['missing'])}."]
    return [*lines, ""]


def speeds() -> list[str]:
    """Every ratio that a benchmark measured in one run, ours against the straightforward version."""
    lines = ["## Speed", "", "Ratios to a straightforward version at equal results, each of one run of `make bench`.", "",
             "| what | times faster | aim | share of the peak | measured |", "|---|---|---|---|---|"]  # fmt: skip
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for part, figures in sorted(record.get("figures", {}).items()):
            if isinstance(figures, dict) and "speedup" in figures:
                aim, share = figures.get("aim"), figures.get("share_of_peak")
                lines.append(f"| {path.stem}: {part} | {figures['speedup']:.2f} | {'–' if aim is None else f'{aim:.2f}'} "
                             f"| {'–' if share is None else f'{100 * share:.0f} %'} | {record['date']} |")  # fmt: skip
    return [*lines, ""]


def main() -> None:
    there = [cell for cell in CELLS if (RECORDS / f"{cell}.json").exists()]
    lines = [HEAD]
    for cell in there:
        lines += table(json.loads((RECORDS / f"{cell}.json").read_text(encoding="utf-8")))
    missing = [cell for cell in CELLS if cell not in there]
    if missing:
        lines += [f"Cells still empty: {', '.join(missing)}. `python -m benchmarks.grid CELL` fills one.", ""]
    lines += speeds()
    PAGE.write_text("\n".join(lines), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
