"""Privacy attacks on the uploads of a finished simulated round. Not part of a run, because they take long.

The round folder keeps the uploads and its plan names the data, so a round can be audited at any time after it. What is found
goes into its results.json, its report and its model card.
"""

from __future__ import annotations

from pathlib import Path

from osfl.core.errors import RoundError
from osfl.core.method import quiet
from osfl.core.registry import load
from osfl.core.result import Result, read_result, write_json
from osfl.core.types import Progress
from osfl.evaluation.privacy.reconstruction import DECODER, Effort, attack, side_of
from osfl.evaluation.tokens import features_by_kind, judge_tokens
from osfl.reports.model_card import write_model_card
from osfl.reports.page import write_report
from osfl.rounds.folder import existing_round
from osfl.rounds.phases import computing
from osfl.runtime.machine import Machine
from osfl.simulate.simulation import Federation


def audit(
    folder: Path, federation: Federation, *, effort: Effort = Effort(), machine: Machine = Machine(), progress: Progress = quiet
) -> Result:
    """Attack the features that the clients of this finished round sent; one that was attacked as hard is not attacked again.

    Its page is drawn without the runs that a comparison showed beside it; `osfl report` on the comparison shows them again.
    """
    result, plan = read_result(folder), federation.plan
    method = load(plan.method)(plan.task, plan.settings)
    if not method.provides("tokens"):
        raise RoundError(
            f"{plan.method} sends no features, so there is nothing to reconstruct images from",
            field="run",
            expected="a round of falcon or fedpft",
            got=plan.method,
            fix="For images that generators make, see the report's section on copies.",
        )
    before = result.get("reconstruction")
    side = side_of(plan.task.image[1:], effort)
    if before is not None and (before["side"], before.get("decoder")) == (side, DECODER) and before["steps"] >= effort.steps:
        return result
    with existing_round(folder, plan) as fl_round, computing(plan, machine, progress, fl_round.scratch) as ctx:
        uploads, _ = fl_round.uploads()
        present = [shard for shard in federation.shards if shard.client in fl_round.present]
        found = attack(method, uploads, present, plan.task.classes, ctx, effort)
        if found is None:
            raise RoundError(
                "with these settings only classifiers travel, no features",
                field="server",
                expected="distil",
                got="average",
                fix="Audit a round whose clients send sequences.",
            )
        result["reconstruction"] = found
        if "tokens" not in result:  # made by an earlier version
            kinds = features_by_kind(method, uploads, present, federation.test, ctx)
            compared = judge_tokens(kinds, plan.task.classes, draw=ctx.generator)
            result |= {"tokens": compared} if compared is not None else {}
        fl_round.tidy()
    write_json(folder / "results.json", result)
    write_report(result, folder / "report")
    write_model_card(result, folder)
    return result
