"""From finished models to results.json: scores, costs, and what the method's own material is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from osfl.core.code import code_digest
from osfl.core.method import Context, Method
from osfl.core.registry import is_reference
from osfl.core.result import SCHEMA, Costs, Course, Generators, Phase, Result, Tokens
from osfl.core.settings import deviations
from osfl.core.topology import topology_summary
from osfl.core.types import ClientId, Exchange, Payload, digest_of
from osfl.data import grouped
from osfl.evaluation.course import course_of
from osfl.evaluation.generators import judge
from osfl.evaluation.multilabel import score_labels
from osfl.evaluation.planes import model_plane
from osfl.evaluation.scores import score
from osfl.evaluation.tokens import features_by_kind, judge_tokens
from osfl.ingredients.statistics.site_prior import weighed_by_site
from osfl.models.input_facts import describe_inputs
from osfl.rounds.folder import Round
from osfl.rounds.judgment import suspicions
from osfl.rounds.state import JUDGMENT
from osfl.runtime.meter import measure, reset_peak_memory
from osfl.runtime.payloads import payload_digest, to_raw
from osfl.simulate.simulation import Federation
from osfl.wire.bundle import size_of


@dataclass(frozen=True)
class Traffic:
    """Bytes sent and received, by client, and the number of uploads of each client."""

    up: Mapping[ClientId, int]
    down: Mapping[ClientId, int]
    messages: int


def evaluate(
    method: Method,
    federation: Federation,
    payloads: Mapping[ClientId, Payload],
    traffic: Traffic,
    fl_round: Round,
    ctx: Context,
) -> Result:
    """The result of a round, without its command and its wall-clock time."""
    joint = method.after_round(payloads)
    exchanged = {} if joint is None else {"inference_bytes": _exchanged(payloads, fl_round)}
    payloads = payloads if joint is None else dict.fromkeys(payloads, joint)
    built: dict[int, nn.Module] = {}
    for payload in payloads.values():
        if id(payload) not in built:
            built[id(payload)] = method.build(payload)
    models = {client: built[id(payload)] for client, payload in payloads.items()}
    published = fl_round.release()
    assert published is not None
    plan, classes = federation.plan, federation.plan.task.classes
    reset_peak_memory()
    ctx.progress("evaluate", 0, 1)
    with measure() as meter:
        personalized = joint is None and any((fl_round.folder / "models").glob("*.safetensors"))
        how: dict[str, Any] = {"device": ctx.device, "run_map": ctx.map, "domains": federation.domains}
        if plan.task.several:
            scores = score_labels(models, federation.test, classes, federation.shards, personalized=personalized, **how)
        else:
            how["weighed"] = _weighed(method, payloads, federation)
            scores = score(models, federation.test, classes, federation.counts, personalized=personalized, **how)
        judged = _generators(method, federation, models, fl_round, ctx)
        course = _course(method, federation, fl_round, ctx)
        compared = _tokens(method, federation, fl_round, ctx)
    fl_round.note("evaluate", meter.as_json())
    ctx.progress("evaluate", 1, 1)
    described = plan.as_json()
    result: Result = {
        "schema": SCHEMA,
        "method": plan.method,
        "preset": "",
        "seed": plan.seed,
        "command": "",
        "plan_digest": plan.digest,
        "release_digest": published[1],
        "content_digest": fl_round.release_content(),
        "models_digest": digest_of({client: payload_digest(payload) for client, payload in payloads.items()}),
        "task": described["task"],
        "data": _data(federation),
        "clients": [
            {"client": s.client, "train": len(s.train), "val": len(s.val), "class_counts": list(federation.counts[s.client])}
            for s in federation.shards
        ],
        "settings": described["settings"],
        "deviations": deviations(method, plan.settings),
        "scores": scores,
        "costs": {**_costs(traffic, fl_round), **exchanged},  # type: ignore[typeddict-item]
        "environment": {},
        "code": code_digest(type(method)),
        "inputs": describe_inputs(plan.settings, plan.task.image[1], federation.source.native),
        "figures": fl_round.figures() | dict(method.review(payloads)),
    }
    if plan.privacy is not None:
        result["privacy"] = stated = method.privacy_statement(published[0], fl_round.uploads()[0], plan)
        result["deviations"].append(f"noise for differential privacy is on {', '.join(stated['noised'])}")
    if (fl_round.folder / JUDGMENT).exists():
        result["suspicions"] = [dict(one) for one in suspicions(fl_round.folder, fl_round.uploads()[1])]
    if judged is not None:
        result["generators"] = judged
    if plan.topology is not None:
        result["topology"] = topology_summary(plan.topology)
    if course["at"]:
        result["course"] = course
    if compared is not None:
        result["tokens"] = compared
    return result


def _weighed(
    method: Method, payloads: Mapping[ClientId, Payload], federation: Federation
) -> Callable[[ClientId, object], object] | None:
    """How a client weighs the answers of its model by its own class shares, where the method's models allow it."""
    found = {client: method.learned_prior(payload) for client, payload in payloads.items()}
    learned = {client: one for client, one in found.items() if one is not None}
    if len(learned) < len(found):
        return None
    labels = {shard.client: shard.train.labels for shard in federation.shards}

    def weighed(client: ClientId, probability: Any) -> Any:
        return weighed_by_site(torch.from_numpy(probability), *learned[client], labels[client]).numpy()

    return weighed


def _course(method: Method, federation: Federation, fl_round: Round, ctx: Context) -> Course:
    """The server's intermediate models, scored when everything else is done: nothing is chosen by them."""
    models = {done: method.build(payload) for done, payload in fl_round.milestones().items()}
    unit = "round" if is_reference(method) else "server epoch"
    return course_of(models, unit, federation.test, device=ctx.device, run_map=ctx.map)


def _generators(
    method: Method, federation: Federation, models: Mapping[ClientId, nn.Module], fl_round: Round, ctx: Context
) -> Generators | None:
    """Synthetic images beside real ones, which only a simulation has in one place."""
    if not method.provides("samples"):
        return None
    uploads, _ = fl_round.uploads()
    with measure():  # the operations of making images are the server's, and were counted there
        pool = method.samples(uploads, ctx)
    classes = federation.plan.task.classes
    how: dict[str, Any] = {"draw": ctx.generator, "device": ctx.device, "run_map": ctx.map}
    found = judge(pool, federation.shards, federation.test, classes, **how)
    if len({id(model) for model in models.values()}) == 1:
        found["figures"] |= model_plane(next(iter(models.values())), pool, federation.test, classes, **how)
    return found


def _tokens(method: Method, federation: Federation, fl_round: Round, ctx: Context) -> Tokens | None:
    """Synthetic features beside those of real images."""
    if not method.provides("tokens"):
        return None
    uploads, _ = fl_round.uploads()
    with measure():  # drawing features was counted where it was first done
        found = features_by_kind(method, uploads, federation.shards, federation.test, ctx)
    return judge_tokens(found, federation.plan.task.classes, draw=ctx.generator)


def _exchanged(models: Mapping[ClientId, Payload], fl_round: Round) -> int:
    """Bytes of every client's model sent to each of the others, which clients that answer together need."""
    return sum(measured([Exchange(model, len(models) - 1)], client, fl_round) for client, model in models.items())


def _data(federation: Federation) -> dict[str, object]:
    sheet = federation.source.sheet
    about = {"title": sheet.title, "source": sheet.source, "license": sheet.license} if sheet else {}
    images = sum(len(shard.train) + len(shard.val) for shard in federation.shards)
    findings = grouped(federation.problems)
    return {
        **federation.data_facts,
        **federation.plan.data,
        **about,
        "train_images": images,
        "test_images": len(federation.test),
        **({"findings": findings} if findings else {}),
    }


def _costs(traffic: Traffic, fl_round: Round) -> Costs:
    phases: dict[str, Phase] = {}
    for name in ("client", "server", "personalize", "evaluate"):
        notes = [note for (phase, _), note in fl_round.journal().items() if phase == name]
        phases[name] = {
            "seconds": round_seconds(sum(note["seconds"] for note in notes)),
            "flops": sum(note["flops"] for note in notes),
            "peak_bytes": max((note["peak_bytes"] for note in notes), default=0),
        }
    costs: Costs = {
        "upload_bytes": sum(traffic.up.values()),
        "download_bytes": sum(traffic.down.values()),
        "upload_bytes_by_client": dict(traffic.up),
        "download_bytes_by_client": dict(traffic.down),
        "messages_per_client": traffic.messages,
        "client_seconds": round_seconds(phases["client"]["seconds"] + phases["personalize"]["seconds"]),
        "server_seconds": phases["server"]["seconds"],
        "wall_seconds": 0.0,
        "phases": phases,
    }
    making = [note for (phase, _), note in fl_round.journal().items() if phase != "evaluate" and note.get("made")]
    if making:
        costs["generated"] = {"samples": sum(n["made"] for n in making), "flops": sum(n["made_flops"] for n in making)}
    return costs


def round_seconds(seconds: float) -> float:
    return float(f"{seconds:.4f}")


def measured(sent: Sequence[Exchange], client: ClientId, fl_round: Round) -> int:
    """Bytes of the bundles that these messages would be."""
    return sum(
        e.times * size_of("upload", client, fl_round.plan.digest, to_raw(e.payload.tensors), dict(e.payload.facts))
        for e in sent
    )
