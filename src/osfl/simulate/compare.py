"""Several methods on the same shards and seeds, summarized in one comparison."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from osfl.core.code import code_digest
from osfl.core.errors import UsageError
from osfl.core.method import quiet
from osfl.core.registry import given_as, load
from osfl.core.result import Result, write_json
from osfl.core.types import Json, Progress
from osfl.evaluation.comparison import summarize
from osfl.evaluation.gains import with_gains
from osfl.reports.comparison import write_comparison
from osfl.reports.page import write_report
from osfl.rounds.state import check_holds_no_other
from osfl.runtime.machine import Machine
from osfl.simulate.run import run, within
from osfl.simulate.simulation import Simulation, for_methods, prepare_all
from osfl.simulate.tracking.tracker import Log


def compare(
    simulation: Simulation,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path | str,
    *,
    machine: Machine = Machine(),
    progress: Progress = quiet,
    metric: str = "",
    fresh: bool = False,
    logs: Sequence[Log] = (),
) -> dict[str, Json]:
    """Several methods on the same shards. Each client model is trained once and shared by all that upload it.

    `metric`: what is read first (osfl.core.headline). Runs that are finished stand; the comparison names those whose method's
    code has changed since, and `fresh` repeats all. `logs`: trackers that get each result, and the comparison.
    """
    out = Path(out)
    check_holds_no_other(out, "comparison.json")
    methods = list(dict.fromkeys(methods))
    if not methods or not seeds:
        raise UsageError(
            f"there is no {'seed' if methods else 'method'} to compare with", field="seeds" if methods else "methods"
        )
    results: list[tuple[str, Result]] = []
    changed: dict[str, None] = {}
    for seed in seeds:
        variants = for_methods(replace(simulation, seed=seed), methods)
        federations = prepare_all(variants)  # all plans are checked before the first method starts, or a run is discarded
        if fresh and not results:
            _discard(out, methods, seeds)
        for label, variant, federation in zip(methods, variants, federations, strict=True):
            before = (out / label / f"seed{seed}" / "results.json").exists()
            where = f"{label} seed {seed}"
            result = run(
                variant,
                out / label / f"seed{seed}",
                machine=machine,
                progress=within(progress, where),
                cache=out / "cache",
                federation=federation,
                logs=logs,
            )
            results.append((label, result))
            if before and result.get("code") != code_digest(load(variant.method)):
                changed[label] = None
            progress(f"{where} done", len(results), len(seeds) * len(methods))
    results = [(label, result) for (label, _), result in zip(results, with_gains([r for _, r in results]), strict=True)]
    comparison = summarize(
        [result for _, result in results],
        labels=[label for label, _ in results],
        paths=[f"{label}/seed{result['seed']}" for label, result in results],
        command=_compare_command(simulation, methods, seeds, out, metric),
        metric=metric,
    )
    comparison["changed"] = list(changed)
    for label, result in results:  # again, now that every reference is known
        others: list[Result] = [
            {**r, "method": other} for other, r in results if other != label and r["seed"] == result["seed"]
        ]
        write_report(result, out / label / f"seed{result['seed']}" / "report", others)
    write_json(out / "comparison.json", comparison)
    write_comparison(comparison, [result for _, result in results], out / "report")
    for log in logs:
        log.comparison(comparison, [result for _, result in results], out)
    return comparison


def _discard(out: Path, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """The runs of this comparison and the client models that they share; nothing that is not a run's folder."""
    for folder in [out / label / f"seed{seed}" for label in methods for seed in seeds]:
        if (folder / "plan.json").exists():
            shutil.rmtree(folder)
    if (out / "cache").is_dir():
        shutil.rmtree(out / "cache")


def _given(label: str) -> str:
    """A variant as it is named on a command line."""
    name, at, rest = label.partition("@")
    return f"{given_as(name)}{at}{rest}"


def _compare_command(simulation: Simulation, methods: Sequence[str], seeds: Sequence[int], out: Path, metric: str) -> str:
    one = f"osfl run --method {shlex.quote(given_as(simulation.method))} "
    methods = [_given(label) for label in methods]
    several = f"osfl compare --methods {shlex.quote(','.join(methods))} "
    text = simulation.command(str(out)).replace(one, several, 1)
    text += f" --metric {metric}" if metric else ""
    return text.replace(f"--seed {simulation.seed} ", f"--seeds {','.join(map(str, seeds))} ", 1)
