"""Tables of what a server's work takes, for the page of speed: time to accuracy, growth with the clients, a thousand sites, a
coordinator's memory, what bounds inversion, and what `osfl estimate` says beforehand. A record that is not there is said to be
missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"


def tables() -> list[str]:
    parts = {
        "time_to_accuracy": _time_to_accuracy,
        "server_growth": _growth,
        "thousand_sites": _thousand_sites,
        "server_memory": _memory,
        "inversion_bounds": _bounds,
        "estimates": _estimates,
    }
    lines: list[str] = []
    for name, table in parts.items():
        path = RECORDS / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            lines += [*table(record["figures"]), "", f"[Record](../../benchmarks/records/{name}.json), {record['date']}.", ""]
        else:
            lines += [f"`{name}` has no record yet (`python -m benchmarks.bench {name}`).", ""]
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f}"


def _time_to_accuracy(figures: Mapping[str, Any]) -> list[str]:
    near, public = figures["near"], figures["public_code_seconds"]
    rows = []
    for method, row in figures["methods"].items():
        aim, reached = row.get("public_code"), row.get("seconds_to_public_code")
        rows.append(
            [
                method,
                str(len(row["seeds"])),
                f"{100 * row['final_accuracy']:.1f} %",
                _seconds(row["seconds_to_near_final"]),
                _seconds(row["seconds_in_all"]),
                "–" if aim is None else f"{100 * aim:.0f} %: {_seconds(reached)}",
                f"{row['times_faster']:.0f}" if "times_faster" in row else "–",
            ]
        )
    return [
        "## Time to accuracy",
        "",
        f"Processor seconds of the server phase, one thread, {figures['cell']}, `cpu` presets: until {near:.0%} of the own",
        "final accuracy, and until public code's accuracy after its full run on shards made the same way; the slowest of the",
        f"seeds. Public code had {public:.0f} s of one core and clients with ResNet-18 of width 16; ours are smaller,",
        "and the server's model may start from their average and weigh teachers by class counts. So the last column compares",
        "whole settings. A method is first scored after a part of its work: what it reached earlier is not seen. Not here:",
        "FedBiCross, whose models are the clusters'.",
        "",
        *_table(["method", "seeds", "final", f"to {near:.0%} of it", "in all", "to public code", "times faster"], rows),
    ]


def _growth(figures: Mapping[str, Any]) -> list[str]:
    rows = []
    for method, row in figures["methods"].items():
        cells = [f"{seconds:.2f}" for seconds in row["cpu_seconds"].values()]
        note = figures["compare_all_pairs"].get(method, "")
        rows.append([method, *cells, f"{row['exponent']:.2f}", note])
    clients = list(next(iter(figures["methods"].values()))["cpu_seconds"])
    return [
        "## Growth with the clients",
        "",
        "Processor seconds of the server phase, `smoke` presets on digits, measured once; the exponent is the slope from the",
        f"second to the third number of clients, 1 is linear, the aim at most {figures['aim']}. What is computed for all",
        "pairs of clients is named in the last column and has no aim. FedISCA and DeepInversion invert all as one here.",
        "",
        *_table(["method", *(f"{n} clients" for n in clients), "exponent", ""], rows),
    ]


def _thousand_sites(figures: Mapping[str, Any]) -> list[str]:
    rows, head = [], ("10", "30", "100", "300", "1000")
    for method, row in figures["methods"].items():
        found = [row.get(sites) for sites in head]
        cells = ["–" if one is None else f"{one['cpu_seconds']:.1f} s, {one['peak_mb']:.0f} MB" for one in found]
        rows.append([method, *cells, f"{row['times_linear']:.2f}" if "times_linear" in row else "–"])
    return [
        "## A thousand sites",
        "",
        "Processor seconds and peak memory of whole simulated rounds, `smoke` presets,",
        f"{figures['images_a_site']} digits a site; the last column is the time of the most sites over that of 100, times how",
        "many more they are: the aim is at most 1.3. FOL's clients have 2 neighbors. With all others n clients align n (n - 1)",
        "models, each on one client's images and towards that client's own model, so that no two clients share any of this",
        "work: quadratic by its definition. FedMITR makes two images of each client in an epoch, and each client's network",
        "answers all of them, which is quadratic, too (Algorithm 1), as is FALCON's teacher (Eq. 10): these two grow faster",
        "than the sites. FedBiCross has as many clusters as the root of n, and they learn from each other.",
        "",
        *_table(["method", *(f"{int(sites):,} sites" for sites in head), "times linear"], rows),
    ]


def _bounds(figures: Mapping[str, Any]) -> list[str]:
    rows, passes = [], ("elementwise and rest", "batch norm", "pooling")
    for name, row in figures.items():
        if not isinstance(row, dict):
            continue
        kinds = row["operators"]
        parts = [f"{kind} {100 * one['share_of_time']:.0f}" for kind, one in list(kinds.items())[:4]]
        shares = [f"{100 * row[key]:.0f} %" for key in ("share_of_peak", "convolutions_alone")]
        moved = [f"{kind} {kinds[kind]['gb_per_second']:.0f}" for kind in passes]
        rows.append([name, *shares, ", ".join(parts), ", ".join(moved)])
    return [
        "## What bounds inversion",
        "",
        "Processor time of one thread; the peak is a matrix product of the same run,",
        f"{figures['gflops_peak']:.0f} GFLOP/s. Convolutions may exceed it, since their algorithms multiply less than the",
        "formula that counts them. The rest is memory traffic: batch norm with its statistics, pooling, total variation and",
        "the optimizer read and write every activation, and compute little with it. The last column is what they move; a",
        f"copy of 64 MB moves {figures['copy_gb_per_second']:.0f} GB/s. So they are bound by memory, or by the processor's",
        "cache where activations fit into it: only fewer passes over the activations would help.",
        "",
        *_table(["work", "share of the peak", "convolutions alone", "largest shares of time, %", "GB/s"], rows),
    ]


def _memory(figures: Mapping[str, Any]) -> list[str]:
    rows = []
    for method, row in figures.items():
        cells = [f"{one['peak_mb']:.0f} MB ({one['uploads_mb']:.0f} MB received)" for one in row["sites"].values()]
        rows.append([method, *cells, f"{row['peak_times']:.2f}"])
    return [
        "## Memory of a coordinator",
        "",
        "The most that is resident from the opening of a round to its release; the aim is at most 1.5 times that of ten sites.",
        "OneSum has a record of its own, in its card.",
        "",
        *_table(["method", "10 sites", "1,000 sites", "times"], rows),
    ]


def _estimates(figures: Mapping[str, Any]) -> list[str]:
    rows = []
    for method, row in figures["methods"].items():
        ratios = [row["ratios"].get(key) for key in ("flops", "seconds", "memory_bytes", "upload_bytes")]
        missed = ", ".join(figures["outside"].get(method, ()))
        rows.append([method, *("–" if one is None else f"{one:.2f}" for one in ratios), missed])
    least = figures.get("or_seconds")
    nothing = f" (less than {least} seconds are no difference)" if least else ""
    near = sum("seconds" not in figures["outside"].get(method, ()) for method in figures["methods"])
    return [
        "## What `osfl estimate` says beforehand",
        "",
        "Estimate over measurement: `cpu` presets on the embedded digits, five clients, one seed, all phases together; seconds",
        "of the processor at equal pace, memory that of the whole process. The last column names what is more than",
        f"{figures['within']} times off, in all or in one phase{nothing}. Seconds are within it for {near} of "
        f"{len(figures['methods'])} methods. Short",
        "rehearsals are continued along straight lines: what they do not show, such as fuller batches, is where they are off.",
        "",
        *_table(["method", "operations", "seconds", "memory", "bytes sent", "off"], rows),
    ]
