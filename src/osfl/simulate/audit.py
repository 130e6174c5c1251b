"""Privacy attacks on a finished simulated round, for every method. Not part of a run, because they take long.

The round folder keeps the uploads and its plan names the data, so a round can be audited at any time after it. The attacks are
in osfl.evaluation.privacy; which of them apply follows from what the method exposes: a classifier in an upload
(`upload_model`), what the egress check reads out of it (`exposed`), samples, tokens, the release. What is found goes into
results.json, the report and the model card; the release is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from osfl.core.errors import RoundError
from osfl.core.method import Context, Method, quiet
from osfl.core.registry import is_reference, load
from osfl.core.result import Audit, Canaries, Membership, Presence, Readout, Rebuilt, Result, Shares, read_result, write_json
from osfl.core.seeds import numpy_generator
from osfl.core.types import ClientId, Dataset, Payload, Progress, Release, Shard, Upload
from osfl.data.source import together
from osfl.evaluation.privacy.attributes import answered_shares, distance, set_area, shares_from_batch_norm
from osfl.evaluation.privacy.inversion import invert, judge_rebuilt
from osfl.evaluation.privacy.membership import attacks, lira
from osfl.evaluation.privacy.rates import Floats, Mask, area, at_few_false_positives, exceeds_bound, share, threshold
from osfl.evaluation.privacy.reconstruction import DECODER, Effort, attack, side_of
from osfl.evaluation.privacy.signals import CONFIDENCE, model_signals, upload_signals
from osfl.evaluation.privacy.verdict import not_shown, population, verdict
from osfl.evaluation.tokens import features_by_kind, judge_tokens
from osfl.reports.model_card import write_model_card
from osfl.reports.page import write_report
from osfl.rounds.exposure import attack as read_out
from osfl.rounds.exposure import worst
from osfl.rounds.folder import Round, existing_round
from osfl.rounds.phases import computing
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import payload_digest
from osfl.simulate.shadows import Pool, all_as_training, client_phase, pools, shadow_rounds, with_images
from osfl.simulate.simulation import Federation

SERVER, PEERS, OUTSIDER, ALL = "server", "peers", "outsider", "all"
_NEVER = 800  # canaries that are never planted, to find a threshold and to count false alarms
_PROBES = 20  # test images a class, whose answers tell how often a model saw each class
_MADE = 8  # images a class that are made from one upload
_SET = 16  # images of a site by which its presence is told


@dataclass(frozen=True)
class Attempt:
    """How much `osfl audit` tries."""

    shadows: int = 4  # rounds that are repeated with other images; 0: thresholds only
    canaries: int = 10  # images that are planted into one more client phase
    images: int = 400  # members of each client that are asked for, at most
    inversion: int = 100  # steps of model inversion
    minutes: float = 10.0  # shadows of the release are left out if their server phases would take longer


@dataclass(frozen=True)
class Scene:
    """One finished round, its images, and the images that are asked for."""

    method: Method
    uploads: Sequence[Upload]
    release: Release
    shards: Mapping[ClientId, Shard]
    test: Dataset
    pools: Sequence[Pool]
    ctx: Context
    attempt: Attempt
    party: str  # who else than the server has the uploads

    @property
    def classes(self) -> int:
        return len(self.ctx.plan.task.classes)

    @property
    def seed(self) -> int:
        return self.ctx.plan.seed


def audit(
    folder: Path,
    federation: Federation,
    *,
    attempt: Attempt = Attempt(),
    effort: Effort = Effort(),
    machine: Machine = Machine(),
    progress: Progress = quiet,
) -> Result:
    """Attack this finished round, and write down what was found.

    Its page is drawn without the runs that a comparison showed beside it; `osfl report` on the comparison shows them again.
    """
    result, plan = read_result(folder), federation.plan
    if plan.task.several:
        raise RoundError(
            "the attacks ask what a model knows about an image of one class, and here an image may have several (multi-label)",
            field="task.kind",
            expected="multiclass",
            got=plan.task.kind,
            fix="Audit a simulation of the same method on labels of one class.",
        )
    method = load(plan.method)(plan.task, plan.settings)
    with existing_round(folder, plan) as fl_round, computing(plan, machine, progress, fl_round.scratch) as ctx:
        scene = _scene(method, federation, fl_round, ctx, attempt)
        _decode_tokens(result, scene, federation, effort)
        result["audit"] = _attack(scene, result["costs"]["server_seconds"])
        fl_round.tidy()
    write_json(folder / "results.json", result)
    write_report(result, folder / "report")
    write_model_card(result, folder)
    return result


def _scene(method: Method, federation: Federation, fl_round: Round, ctx: Context, attempt: Attempt) -> Scene:
    published = fl_round.release()
    assert published is not None
    hidden = is_reference(method) or fl_round.plan.secure_sum  # nothing that a server could look at
    uploads = [] if hidden else [upload for upload in fl_round.uploads()[0] if upload.payload.tensors]
    shards = {shard.client: shard for shard in federation.shards if shard.client in fl_round.present}
    if method.adds_held_out(fl_round.plan):
        shards = {client: all_as_training(shard) for client, shard in shards.items()}
    asked = pools([shards[client] for client in sorted(shards)], federation.test, attempt.images, ctx.plan.seed)
    if (ctx.plan.topology and ctx.plan.topology.encounter > 1) or hidden:  # nothing that a shadow could repeat
        attempt = replace(attempt, shadows=0)
    party = PEERS if ctx.plan.topology or _passed_on(uploads, published[0]) else ""
    return Scene(method, uploads, published[0], shards, federation.test, asked, ctx, attempt, party)


def _passed_on(uploads: Sequence[Upload], release: Release) -> bool:
    """Whether other clients get the uploads themselves: exchanged, or as they are in the release."""
    given = {digest for part in (release.shared, *release.personal.values()) for digest in _digests(part)}
    sent = [digest for upload in uploads for digest in _digests(upload.payload)]
    return bool(sent) and sum(digest in given for digest in sent) > len(sent) / 2


def _digests(payload: Payload) -> list[str]:
    return [payload_digest(Payload({"": tensor})) for tensor in payload.tensors.values()]


def _attack(scene: Scene, server_seconds: float) -> Audit:
    """All attacks that apply, in the order of their cost."""
    shadows = scene.attempt.shadows // 2 * 2
    phases, seen = shadow_rounds(scene.method, scene.pools, scene.shards, shadows, scene.ctx) if shadows else ([], {})
    at_server = membership_of_uploads(scene, phases, seen)
    slow = bool(shadows) and server_seconds * shadows > 60 * scene.attempt.minutes
    outside, presence = membership_of_release(scene, [] if slow else phases, seen)
    found: Audit = {
        "shadows": shadows,
        "population": population(scene.pools, shadows),
        "replayed": _replayed(scene) if scene.uploads and shadows else None,
        "membership": [*at_server, *outside],
        "canaries": _canaries(scene, phases) if phases and scene.uploads and scene.attempt.canaries else [],
        "rebuilt": _rebuilt(scene),
        "readout": _readout(scene),
        "shares": _shares(scene),
        "presence": presence,
        "verdict": [],
        "not_shown": [],
    }
    found["verdict"] = verdict(found, scene.party)
    found["not_shown"] = not_shown(found, slow, bool(scene.ctx.plan.secure_sum), is_reference(scene.method))
    return found


# --- membership ----------------------------------------------------------------------------------------------------------


def membership_of_uploads(scene: Scene, phases: Sequence[Sequence[Upload]], seen: Mapping[ClientId, Mask]) -> list[Membership]:
    """Every client's upload against its own pool; the rows are those of all clients together, scores side by side."""
    by_attack: dict[tuple[str, str], list[tuple[ClientId, Floats, Mask]]] = {}
    done = {upload.client: upload for upload in scene.uploads}
    for place, pool in enumerate(scene.pools):
        if pool.client not in done or not len(pool.member):
            continue
        scene.ctx.progress("membership", place, len(scene.pools))
        target = upload_signals(scene.method, done[pool.client], pool.data, scene.ctx)
        shadows = [upload_signals(scene.method, phase[place], pool.data, scene.ctx) for phase in phases]
        for key, scores in _scores(target, shadows, seen.get(pool.client)).items():
            by_attack.setdefault(key, []).append((pool.client, scores, pool.member))
    rows = []
    for (signal_name, attacked), parts in by_attack.items():
        for of, chosen in ((ALL, parts), *(((c, [(c, s, m)]) for c, s, m in parts) if len(parts) > 1 else ())):
            if of == ALL or attacked == "lira":
                rows += _rows(scene, (SERVER, scene.party), of, attacked, signal_name, chosen)
    return rows


def membership_of_release(
    scene: Scene, phases: Sequence[Sequence[Upload]], seen: Mapping[ClientId, Mask]
) -> tuple[list[Membership], list[Presence]]:
    """The released model (each client's own, where there is no common one) against all pools."""
    release = scene.release
    passed_on = scene.ctx.plan.topology is not None or (scene.party and release.personal)  # no model of the server's
    if passed_on or not (release.shared.tensors or release.personal):
        return [], []
    method, ctx = scene.method, scene.ctx
    target, shadows = _released(method, release, scene.pools), []
    phases = [] if ctx.plan.secure_sum else phases
    for number, phase in enumerate(phases):
        ctx.progress("shadow server phases", number, len(phases))
        scratch = None if ctx.scratch is None else ctx.scratch / "audit" / f"server-{number}"
        made = method.server_phase(phase, replace(ctx, scratch=scratch))
        shadows.append(_released(method, made, scene.pools))
    by_attack: dict[tuple[str, str], list[tuple[ClientId, Floats, Mask]]] = {}
    for pool in scene.pools:
        if len(pool.member):
            mine = model_signals(target[pool.client], pool.data, ctx.device)
            theirs = [model_signals(models[pool.client], pool.data, ctx.device) for models in shadows]
            for key, scores in _scores(mine, theirs, seen.get(pool.client)).items():
                by_attack.setdefault(key, []).append((pool.client, scores, pool.member))
    rows = [
        row for (name, attacked), parts in by_attack.items() for row in _rows(scene, (OUTSIDER,), ALL, attacked, name, parts)
    ]
    best = by_attack.get(("loss", "lira"), by_attack.get(("loss", "loss"), []))
    return rows, [_presence(scene, *part) for part in best]


def _scores(
    target: Mapping[str, Floats], shadows: Sequence[Mapping[str, Floats]], seen: Mask | None
) -> dict[tuple[str, str], Floats]:
    """Scores by signal and attack; confidence is a threshold alone."""
    found: dict[tuple[str, str], Floats] = {}
    for name, signal in target.items():
        compared = bool(shadows) and name != CONFIDENCE and all(name in one for one in shadows)
        table = np.stack([one[name] for one in shadows]) if compared else None
        found |= {(name, attacked): scores for attacked, scores in attacks(name, signal, table, seen).items()}
    return found


def _released(method: Method, release: Release, asked: Sequence[Pool]) -> dict[ClientId, nn.Module]:
    """The model that each client has of a release; one and the same where there are no personal parts."""
    if not release.personal:
        return dict.fromkeys([pool.client for pool in asked], method.build(release.shared))
    return {pool.client: method.build(release.for_client(pool.client)) for pool in asked}


def _rows(
    scene: Scene, parties: Sequence[str], of: str, attacked: str, signal: str, parts: Sequence[tuple[ClientId, Floats, Mask]]
) -> list[Membership]:
    members = np.concatenate([scores[member] for _, scores, member in parts])
    others = np.concatenate([scores[~member] for _, scores, member in parts])
    row: dict[str, object] = {
        "of": of,
        "attack": attacked,
        "signal": signal,
        "members": len(members),
        "others": len(others),
        "auc": area(members, others),
        "tpr": dict(at_few_false_positives(members, others)),
    }
    if scene.ctx.plan.privacy is not None:
        row["exceeds_bound"] = exceeds_bound(members, others, *_promise(scene, parties))
    return [{"party": party, **row} for party in parties if party]  # type: ignore[typeddict-item]


def _promise(scene: Scene, parties: Sequence[str]) -> tuple[float, float]:
    """Epsilon and delta against these parties, as the release states them."""
    stated = scene.method.privacy_statement(scene.release, scene.uploads, scene.ctx.plan)
    epsilon = stated["epsilon_release" if OUTSIDER in parties else "epsilon_term"]
    return (float("inf") if epsilon is None else float(epsilon)), float(stated["delta"])


def _presence(scene: Scene, client: ClientId, scores: Floats, member: Mask) -> Presence:
    rng = numpy_generator(scene.seed, "audit", "presence", client)
    return {"of": client, "images": _SET, "auc": set_area(scores[member], scores[~member], _SET, rng)}


# --- what else an upload shows -----------------------------------------------------------------------------------------------


def _replayed(scene: Scene) -> bool:
    """Whether the same images give the same upload again: then whoever guesses all images of a site can check the guess."""
    upload = min(scene.uploads, key=lambda one: len(scene.shards[one.client].train))
    shard = scene.shards[upload.client]
    again = client_phase(scene.method, with_images(shard, shard.train), scene.ctx)
    return payload_digest(Payload(again.tensors)) == payload_digest(Payload(upload.payload.tensors))


def _rebuilt(scene: Scene) -> list[Rebuilt]:
    """Images from classifiers (inversion) or generators (samples), of every client."""
    rows = []
    for place, upload in enumerate(scene.uploads):
        scene.ctx.progress("reconstruction", place, len(scene.uploads))
        made, how = _made(scene, upload)
        shard = scene.shards[upload.client]
        others = together([shard.val, scene.test])
        row = None if made is None else judge_rebuilt(SERVER, upload.client, how, made, shard.train, others)
        rows += [] if row is None else [row]
    return rows


def _made(scene: Scene, upload: Upload) -> tuple[Dataset | None, str]:
    method, ctx, shape = scene.method, scene.ctx, scene.ctx.plan.task.image
    model = method.upload_model(upload, ctx)
    if model is None:
        if not method.provides("samples"):
            return None, ""
        pool = method.samples([upload], ctx)
        kept = [(pool.labels == c).nonzero().flatten()[: 2 * _MADE] for c in range(scene.classes)]
        few = pool.subset(torch.cat(kept))
        return Dataset(few.images.float() / 255, few.labels), "samples"
    if method.provides("encode"):  # its classifier looks at features; tokens have a decoder of their own
        return None, ""
    held = sorted(set(scene.shards[upload.client].train.labels.tolist()))
    labels = torch.tensor(held).repeat_interleave(_MADE)
    rng = ctx.generator("audit", "inversion", upload.client)
    return Dataset(invert(model, labels, shape, rng, scene.attempt.inversion, ctx.device), labels), "model inversion"


def _readout(scene: Scene) -> list[Readout]:
    """The egress check's attack, with its own images: the least ratio of each kind of candidate, also of kinds that stop real
    sites alone, or nobody."""
    if not scene.method.provides("exposed"):
        return []
    rows: list[Readout] = []
    for upload in scene.uploads:
        found = read_out(scene.method.exposed(upload.payload, scene.shards[upload.client], scene.ctx))
        found = [one for one in found if one.residuals is None]  # spans show no image; `leverage` tells members by them
        for what in sorted({one.what for one in found}):
            most = worst([one for one in found if one.what == what], ("all", "real", "none"))
            rows += [] if most is None else [{"of": upload.client, "what": what, "ratio": most.ratio}]
    return rows


def _shares(scene: Scene) -> list[Shares]:
    """Each client's shares of the classes, told from its upload."""
    rows: list[Shares] = []
    labels = scene.test.labels
    index = torch.cat([(labels == c).nonzero().flatten()[:_PROBES] for c in range(scene.classes)])
    probes = scene.test.subset(index)
    for upload in scene.uploads:
        counts = torch.bincount(scene.shards[upload.client].train.labels, minlength=scene.classes).tolist()
        guesses: dict[str, Floats | None] = {}
        if "class_counts" in upload.payload.facts or "counts" in upload.payload.tensors:
            sent = upload.payload.facts.get("class_counts") or upload.payload.tensors["counts"].tolist()
            how = "sent with noise" if scene.ctx.plan.privacy is not None else "sent in the clear"
            guesses[how] = np.asarray(sent, float).clip(0) / max(1.0, float(np.clip(sent, 0, None).sum()))
        elif (model := scene.method.upload_model(upload, scene.ctx)) is not None:
            guesses["answers"] = answered_shares(model, probes, scene.classes, scene.ctx.device)
            guesses["batch norm statistics"] = shares_from_batch_norm(model, probes, scene.classes, scene.ctx.device)
        alike = distance(np.full(scene.classes, 1 / scene.classes), counts)
        rows += [
            {"of": upload.client, "how": how, "distance": distance(found, counts), "blind": alike}
            for how, found in guesses.items()
            if found is not None
        ]
    return rows


# --- canaries: can the audit see? --------------------------------------------------------------------------------------------


def _canaries(scene: Scene, phases: Sequence[Sequence[Upload]]) -> list[Canaries]:
    """Plant mislabeled test images into the largest client's phase, once more, and look for them with LiRA.

    No shadow saw any of them. Of all candidates the half that fits the shadows least is used: a wrong label that might as well
    be right is no canary. The threshold is what 1 % of canaries that were never planted exceed; another half of those says how
    often it raises a false alarm, and the round as it was how often for the very canaries.
    """
    upload = max(scene.uploads, key=lambda one: len(scene.shards[one.client].train))
    shard, place = scene.shards[upload.client], [pool.client for pool in scene.pools].index(upload.client)
    candidates = mislabeled(scene.test, scene.pools[place], 2 * (scene.attempt.canaries + _NEVER), scene.classes, scene.seed)
    count = min(scene.attempt.canaries, len(candidates) // 20)
    shadows = [upload_signals(scene.method, phase[place], candidates, scene.ctx) for phase in phases]
    main = next(iter(shadows[0]), "")
    if count < 1 or not all(main in one for one in shadows):
        return []
    strange = np.sort(np.mean([one[main] for one in shadows], 0).argsort()[: len(candidates) // 2])  # still in random order
    candidates = candidates.subset(torch.from_numpy(strange))
    shadows = [{name: values[strange] for name, values in one.items()} for one in shadows]
    chosen = candidates.subset(torch.arange(count))
    planted = client_phase(scene.method, with_images(shard, together([shard.train, chosen])), scene.ctx)
    sent = [Upload(upload.client, upload.plan, planted), upload]
    after, before = [upload_signals(scene.method, one, candidates, scene.ctx) for one in sent]
    rows: list[Canaries] = []
    for name in (name for name in after if name != CONFIDENCE and all(name in one for one in (before, *shadows))):
        table = np.stack([one[name] for one in shadows])
        unseen = np.zeros(table.shape, bool)
        scores, earlier = lira(after[name], table, unseen), lira(before[name], table, unseen)
        never = numpy_generator(scene.seed, "audit", "never planted").permutation(scores[count:])
        first, second = np.array_split(never, 2)
        limit = threshold(first, int(0.01 * len(first)))
        rows.append(
            {
                "client": upload.client,
                "signal": name,
                "planted": count,
                "found": int((scores[:count] > limit).sum()),
                "false_alarms": share(int((second > limit).sum()), len(second)),
                "found_unplanted": int((earlier[:count] > limit).sum()),
            }
        )
    return rows


def mislabeled(test: Dataset, pool: Pool, most: int, classes: int, seed: int) -> Dataset:
    """Test images under a wrong label that the client has images of, each image once."""
    rng, held = numpy_generator(seed, "audit", "canaries"), sorted(set(pool.data.labels.tolist()))
    order = rng.permutation(len(test))[:most]
    wrong = []
    for label in test.labels.numpy()[order]:
        free = [c for c in held if c != label] or [c for c in range(classes) if c != label]
        wrong.append(int(rng.choice(free)))
    return Dataset(test.images[torch.from_numpy(order)], torch.tensor(wrong))


# --- images out of tokens ------------------------------------------------------------------------------------------


def _decode_tokens(result: Result, scene: Scene, federation: Federation, effort: Effort) -> None:
    """The decoder's attack on methods that send features; one that was attacked as hard is not attacked again."""
    if not scene.method.provides("tokens") or not scene.uploads:
        return
    before, side = result.get("reconstruction"), side_of(scene.ctx.plan.task.image[1:], effort)
    if before is not None and (before["side"], before.get("decoder")) == (side, DECODER) and before["steps"] >= effort.steps:
        return
    present = list(scene.shards.values())
    found = attack(scene.method, scene.uploads, present, scene.ctx.plan.task.classes, scene.ctx, effort)
    if found is None:  # with these settings only classifiers travel
        return
    result["reconstruction"] = found
    if "tokens" not in result:  # made by an earlier version
        kinds = features_by_kind(scene.method, scene.uploads, present, federation.test, scene.ctx)
        compared = judge_tokens(kinds, scene.ctx.plan.task.classes, draw=scene.ctx.generator)
        result |= {"tokens": compared} if compared is not None else {}
