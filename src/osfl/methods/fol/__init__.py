"""FOL — neighbors exchange models once; each client builds the best model for its own images from them.

Paper: Huang, Shu, "Federated Oriented Learning: A Practical One-Shot Personalized Federated Learning Framework", ICML 2025,
https://openreview.net/forum?id=jwjvkWsePB; no public code. No server: a neighbor's model is fine-tuned, pruned
towards the own model and tuned again (`methods/fol/alignment.py`); the best of them and of the own model on held-out images
become an ensemble with weights on the simplex (`methods/fol/selection.py`), which teaches the own model (`_taught`). FOL is the
student, FOL-A the ensemble (`answer=ensemble`); FOL-N and FOL-AN are the same without alignment (`align=false`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.method import Context, Phase, relayed
from osfl.core.types import ADDED, ClientId, Contract, Json, Payload, Release, Shard, Upload, one_by_one
from osfl.ingredients.distillation.student import Pool, distill
from osfl.ingredients.ensembles.ensemble import Ensemble, fast_logits
from osfl.ingredients.ensembles.gathering import gather, members
from osfl.ingredients.statistics.averaging import average
from osfl.ingredients.training.local import (
    CPU_TRAINING,
    SMOKE_TRAINING,
    Training,
    augment,
    classifier,
    local_model,
    not_positive,
    too_low,
)
from osfl.ingredients.training.model_method import ModelMethod, digests_of
from osfl.methods.fol.alignment import Alignment, aligned, alignment_problems, likeness
from osfl.methods.fol.bounds import Descent, head_descent, head_loss, risk_gap
from osfl.methods.fol.figures import exchange_figures
from osfl.methods.fol.pruning import layers_of, pull
from osfl.methods.fol.selection import Candidate, accuracy, best, simplex_weights
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.naming import ModelError, halved, halved_contract, named, widened
from osfl.models.norms import recalibrated_bn
from osfl.models.output_checks import sane
from osfl.models.slimming import load_slim, slim

AS_OTHERS = {"weight_decay": Training.weight_decay}  # so that the local models are those of all methods
MEMBERS = "members/"  # where the ensemble's models are in a personal payload, beside the student's `model/`


@dataclass(frozen=True)
class Settings(Training, Alignment):
    batch_size: int = 32
    weight_decay: float = 1e-3
    schedule: Literal["steps", "cosine", "constant"] = "constant"
    answer: Literal["student", "ensemble"] = "student"  # FOL or FOL-A: who answers in the end
    align: bool = True  # false: FOL-N and FOL-AN, neighbors' models as they came
    top: int = 3  # K: members of the ensemble, chosen among the neighbors and the own model
    fit_on: Literal["train", "train+val"] = "train"  # images that the ensemble's weights are fitted on
    evenness: float = 0.0  # ρ ‖w - 1/K‖²: training images flatter the own model, which has seen them most often
    start: Literal["own", "average"] = field(default="own", metadata=ADDED)  # of the student; average: of the ensemble's models
    student_epochs: int = 20  # passes over the client's images when the ensemble is distilled
    student_lr: float = 1e-3  # learning rate of the distillation
    student_batch: int = 32  # images a step of the distillation
    temperature: float = 3.0  # T of the distillation
    scaled: bool = False  # true: T² KL, so that gradients do not shrink with T
    anchor: float = 1e-3  # λ ‖θ - θ_before‖²
    copies: int = 0  # so many shifted and mirrored copies of each image are shown to ensemble and student, too
    blends: int = field(default=0, metadata=ADDED)  # and so many mixtures of each image with another one of the client
    track: bool = False  # the student's BN statistics follow its batches; false: they stay as they were where it began
    wire: Literal["float32", "float16"] = field(default="float32", metadata=ADDED)  # of the model that travels
    rate_steps: int = 0  # above 0: so many steps of a convex head are measured against Theorem 2's rate


@dataclass(frozen=True)
class Candidates:
    """One client among the candidates for its ensemble: itself first, then its neighbors by name."""

    shard: Shard
    pool: Mapping[ClientId, Payload]
    models: Mapping[ClientId, nn.Module]
    images: torch.Tensor  # the shard's, training images first
    labels: torch.Tensor
    logits: torch.Tensor  # (candidates, images, classes)
    left_out: Sequence[ClientId] = ()  # neighbors whose models do not answer with usable numbers

    @property
    def trained(self) -> slice:
        return slice(len(self.shard.train))

    @property
    def judged(self) -> slice:
        """Held-out images, or all where a client is too small to hold any out."""
        return slice(len(self.shard.train), None) if len(self.shard.val) else slice(None)

    def answers(self, names: Iterable[ClientId]) -> torch.Tensor:
        places = list(self.models)
        return self.logits[[places.index(name) for name in names]]

    def scores(self) -> dict[ClientId, float]:
        """Accuracy of every candidate on held-out images."""
        return {
            name: accuracy(row[self.judged], self.labels[self.judged])
            for name, row in zip(self.models, self.logits, strict=True)
        }


class Fol(ModelMethod):
    Settings = Settings
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "cpu": {  # chosen on validation images of bloodcells-28; see the method's card
            **CPU_TRAINING,
            **AS_OTHERS,
            "recalibrate_personal_bn": True,
            "align_lr": 0.01,
            "attraction": 0.01,
            "sparsity": 2.0,
            "sparsity_unshared": 2.0,
            "top": 6,
            "fit_on": "train+val",
            "evenness": 1.0,
            "start": "average",
            "student_epochs": 8,
            "student_lr": 0.02,
            "student_batch": 64,
            "scaled": True,
            "copies": 3,
            "blends": 4,
        },
        "smoke": {
            **SMOKE_TRAINING,
            **AS_OTHERS,
            "finetune_epochs": 1,
            "prune_epochs": 1,
            "post_epochs": 1,
            "align_lr": 0.02,
            "sparsity": 1.0,
            "student_epochs": 1,
            "student_lr": 0.02,
            "rate_steps": 5,
        },
    }
    DEVIATIONS = (
        "gates are folded into the weights; both penalties of the pruning stage are proximal steps after each optimizer step",
        "the ensemble's weights sum to 1 and are fitted by projected descent from the best member; the paper does not say how",
        "λ ‖θ - θ_before‖² is a proximal step, too: any λ is stable",
        "a tenth of a client's images is held out (the paper: 15 %); without any, candidates are scored on training images",
        "E encounters exchange students, also where the ensemble answers",
        "the head is never pruned: a class must not lose its logit; the student's batch-norm statistics stay as they were "
        "where it began unless `track` is set, and its distillation has no weight decay (the paper does not say)",
    )

    # --- before the exchange ---

    def problems(self, clients: int) -> list[str]:
        least = {
            "top": 1,
            "student_epochs": 0,
            "student_batch": 2,
            "anchor": 0,
            "copies": 0,
            "blends": 0,
            "evenness": 0,
            "rate_steps": 0,
        }
        s = self.settings
        flat = s.rate_steps and s.anchor == 0  # then the loss of Theorem 2 has no single optimum
        return [
            *super().problems(clients),
            *alignment_problems(s),
            *too_low(s, least),
            *not_positive(s, "student_lr", "temperature"),
            *(["setting 'rate_steps': Theorem 2 needs an anchor above 0; expected 0, or --set anchor=..."] if flat else []),
        ]

    def contract(self, architecture: str) -> Contract:
        whole = super().contract(architecture)
        return halved_contract(whole) if self.settings.wire == "float16" else whole

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        own = self._own(shard, ctx)
        return Payload(halved(own.tensors), own.facts) if self.settings.wire == "float16" else own

    def _own(self, shard: Shard, ctx: Context) -> Payload:
        """θ_before: the student of the encounter before, or the local model that all methods share."""
        if ctx.previous is None:
            return local_model(shard, self.task, self.settings, ctx)
        tensors = {name: value for name, value in ctx.previous.tensors.items() if name.startswith("model/")}
        return Payload(tensors, {name: ctx.previous.facts[name] for name in ("architecture", "samples")})

    # --- the exchange ---

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        return relayed(self, uploads, ctx)

    def relay(self, client: ClientId, uploads: Sequence[Upload], ctx: Context) -> Payload:
        return gather({upload.client: upload.payload for upload in uploads})

    # --- after the exchange ---

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        one = {"prune_epochs": (1, 1), "post_epochs": (1, 1)}
        return {**super().shortened(), "finetune_epochs": (1, 2), "student_epochs": (1, 2), **one}

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        """Afterwards a client aligns each neighbor's model, in passes that cost alike, and distills the ensemble."""
        s = self.settings
        if phase != "personalize":
            return (1,) if phase == "server" else super().work(phase, images, clients)
        aligned = (s.finetune_epochs + s.prune_epochs + s.post_epochs) if s.align else 0
        return (1, images, images * s.epochs, images * aligned, images * s.student_epochs)

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        own = self._own(shard, ctx)
        parts = members(release.for_client(shard.client))
        received = {name: Payload(widened(part.tensors), part.facts) for name, part in parts.items()}
        if not received:  # Q = 0 is Local
            return ctx.previous or own
        key: dict[str, object] = {
            "what": "fol",
            "version": 3,
            "settings": asdict(replace(self.settings, answer="student")),
            "client": shard.client,
            "data": shard.digest,
            "models": digests_of([Upload(name, "", part) for name, part in received.items()]),
            "own": digests_of([Upload(shard.client, "", own)]),
            "seed": ctx.plan.seed,
            "task": asdict(self.task),
            "device": ctx.device.type,
            "encounter": list(ctx.encounter),
        }
        both = ctx.get_or_compute(key, lambda: self._learn_from(received, own, shard, ctx))
        return both if self.settings.answer == "ensemble" else _student_of(both)

    def _learn_from(self, received: Mapping[ClientId, Payload], own: Payload, shard: Shard, ctx: Context) -> Payload:
        """Candidates, ensemble and student of one encounter, all in one payload."""
        found = self._candidates(received, own, shard, ctx)
        if len(found.pool) == 1:  # no upload that it received can be used: as if there were none
            return _as_before(ctx.previous or own, found.left_out)
        weights = self._weigh(found)
        teacher = torch.tensordot(torch.tensor(list(weights.values())), found.answers(weights), 1)  # A_w, (images, classes)
        student = self._taught(found, weights, teacher, ctx)
        ensemble = gather({name: _member(found, name, weight) for name, weight in weights.items()}, MEMBERS)
        notes = {
            "bytes": {"kept": _bytes(ensemble.tensors), "whole": sum(_bytes(found.pool[name].tensors) for name in weights)},
            "candidates": {name: _short(score) for name, score in found.scores().items()},
            "pruned": {name: part.facts["pruned"] for name, part in found.pool.items() if "pruned" in part.facts},
            "left_out": list(found.left_out),
            **self._measured(found, student, teacher, ctx.device),
        }
        return Payload({**named(student, "model"), **ensemble.tensors}, {**own.facts, **ensemble.facts, "notes": notes})

    def _candidates(self, received: Mapping[ClientId, Payload], own: Payload, shard: Shard, ctx: Context) -> Candidates:
        """Prepare every neighbor's model, and compute the outputs of all candidates on the own images once. A neighbor
        whose model explodes is left out and named in the report; it must not spoil the exchange for those that receive it."""
        usable = [name for name in sorted(received) if self._answers(name, received[name], shard, ctx.device)]
        ready = {name: self._prepared(name, received[name], own, shard, ctx) for name in usable}
        pool = {shard.client: own, **{name: payload for name, payload in ready.items() if payload is not None}}
        models = {name: classifier(payload, self.task).to(ctx.device) for name, payload in pool.items()}
        images = torch.cat([shard.train.images, shard.val.images])
        logits = fast_logits(list(models.values()), images, run_map=one_by_one, device=ctx.device).cpu()
        labels, left_out = torch.cat([shard.train.labels, shard.val.labels]), sorted(received.keys() - pool.keys())
        return Candidates(shard, pool, models, images, labels, logits, left_out)

    def _weigh(self, found: Candidates) -> dict[ClientId, float]:
        """The K best candidates and their weights in A_w; who would have none is left out."""
        mine = found.models[found.shard.client]
        candidates = [Candidate(name, score, likeness(found.models[name], mine)) for name, score in found.scores().items()]
        chosen = [candidate.name for candidate in best(candidates, self.settings.top)]
        fitted = slice(None) if self.settings.fit_on == "train+val" else found.trained
        weights = simplex_weights(found.answers(chosen)[:, fitted], found.labels[fitted], self.settings.evenness)
        return {name: float(w) for name, w in zip(chosen, weights, strict=True) if w > 0}

    def _answers(self, name: ClientId, given: Payload, shard: Shard, device: torch.device) -> bool:
        """Whether a neighbor's model gives usable numbers on the own images; a broken one is refused by name."""
        try:
            model = classifier(given, self.task)
        except ModelError as error:
            error.client = name
            raise
        broken = [key for key, value in given.tensors.items() if not bool(torch.isfinite(value).all())]
        if broken:
            raise TrainingError(
                "a neighbor's model holds numbers that are not finite",
                client=name,
                field=broken[0],
                fix="Ask for it again, or leave this neighbor out.",
            )
        return _sane(model, shard, device)

    def _prepared(self, name: ClientId, given: Payload, own: Payload, shard: Shard, ctx: Context) -> Payload | None:
        """A neighbor's model ready to be judged; None where alignment, which sees it in training mode, makes it explode."""
        if not self.settings.align:
            return given
        try:
            found = aligned(name, given, own, shard, self.settings, self.task, ctx)
        except TrainingError:
            return None
        return found if _sane(classifier(found, self.task), shard, ctx.device) else None

    def _taught(self, found: Candidates, weights: Mapping[ClientId, float], teacher: torch.Tensor, ctx: Context) -> nn.Module:
        """argmin KL(softmax(A_w/T) ‖ softmax(f/T)) + λ ‖θ - θ_before‖² over the training images."""
        s, rng = self.settings, ctx.generator("student", found.shard.client, *ctx.encounter)
        student, before = self._begin(found, weights, ctx.device), found.models[found.shard.client]
        anchors = [parameter.detach().clone() for parameter in before.parameters()]
        pairs = list(zip(student.parameters(), anchors, strict=True))

        def stay_near(_: nn.Module, lr: float) -> None:
            for parameter, anchor in pairs:
                pull(parameter, anchor, lr * s.anchor)

        lessons = self._lessons(found, weights, teacher[found.trained], rng, ctx.device)
        try:
            distill(
                student,
                lessons,
                rng,
                epochs=s.student_epochs,
                batch_size=s.student_batch,
                lr=s.student_lr,
                momentum=s.momentum,
                weight_decay=0.0,
                temperature=s.temperature,
                soft=1.0 if s.scaled else 1 / s.temperature**2,
                schedule=s.schedule,
                clip=s.clip,
                after=stay_near,
                track=s.track,
                device=ctx.device,
            )
        except TrainingError as error:
            error.client, error.field = found.shard.client, "student_lr"
            error.fix = "Lower it (`--set student_lr=...`), or clip gradients (`--set clip=5`)."
            raise
        return recalibrated_bn(student, found.shard.train.images) if s.track and s.recalibrate_personal_bn else student

    def _begin(self, found: Candidates, weights: Mapping[ClientId, float], device: torch.device) -> nn.Module:
        """Where the student begins: θ_before, or the w-weighted average of the members that have its architecture, with BN
        statistics of the own images. As it is, the average is worse than θ_before; but the ensemble's outputs are learned
        sooner from there (the method's card)."""
        mine = found.pool[found.shard.client]
        alike = {name: w for name, w in weights.items() if found.pool[name].facts["architecture"] == mine.facts["architecture"]}
        if self.settings.start == "own" or not alike:
            return copy.deepcopy(found.models[found.shard.client])
        mean = average([found.pool[name].tensors for name in alike], list(alike.values()))
        return recalibrated_bn(classifier(Payload(mean, mine.facts), self.task).to(device), found.shard.train.images)

    def _lessons(
        self,
        found: Candidates,
        weights: Mapping[ClientId, float],
        teacher: torch.Tensor,
        rng: torch.Generator,
        device: torch.device,
    ) -> Pool:
        """The training images and changed copies of them, each with the output of A_w on it."""
        images = found.shard.train.images
        more = [augment(images, "flip+crop", rng) for _ in range(self.settings.copies)]
        more += [blended(augment(images, "flip+crop", rng), rng) for _ in range(self.settings.blends)]
        if not more:
            return Pool(to_input(images), teacher)
        answers = fast_logits(
            [found.models[name] for name in weights], torch.cat(more), run_map=one_by_one, device=device
        ).cpu()
        notes = torch.tensordot(torch.tensor(list(weights.values())), answers, 1)
        return Pool(to_input(torch.cat([images, *more])), torch.cat([teacher, notes]))

    # --- what theory promises ---

    def _measured(self, found: Candidates, student: nn.Module, teacher: torch.Tensor, device: torch.device) -> dict[str, Json]:
        """Theorem 1 on held-out images and, if asked for, Theorem 2 on the training images (`methods/fol/bounds.py`)."""
        answers = fast_logits([student], found.images[found.judged], run_map=one_by_one, device=device)[0].cpu()
        gap = asdict(risk_gap(teacher[found.judged], answers, found.labels[found.judged], self.settings.temperature))
        notes: dict[str, Json] = {"gap": {name: _short(value) for name, value in gap.items()}}
        if self.settings.rate_steps:
            descent = asdict(self._descent(found, teacher[found.trained], device))
            notes["descent"] = {name: [_short(value) for value in row] for name, row in descent.items()}
        return notes

    def _descent(self, found: Candidates, teacher: torch.Tensor, device: torch.device) -> Descent:
        """Only the last layer of the own model learns from the ensemble, its other layers stay."""
        s, before = self.settings, found.models[found.shard.client]
        last = layers_of(before)[-1].module
        assert last.bias is not None
        with torch.no_grad():
            features = before.features(to_input(found.shard.train.images, device)).cpu()  # type: ignore[operator]
            head = torch.cat([last.weight, last.bias[:, None]], 1).cpu()
        scale = s.temperature**2 if s.scaled else 1.0  # of the KL, as in `_taught`
        loss = head_loss(features, teacher, head, temperature=s.temperature, strength=s.anchor, scale=scale)
        return head_descent(loss, s.rate_steps)

    def review(self, payloads: Mapping[ClientId, Payload]) -> dict[str, Json]:
        """Pictures of all clients together: what they chose, what was pruned, and theory beside measurement."""
        notes = {client: payload.facts["notes"] for client, payload in payloads.items() if "notes" in payload.facts}
        chosen = {client: _weights_of(payloads[client]) for client in notes}
        return exchange_figures(notes, {client: w.get(client, 0.0) if w else 1.0 for client, w in chosen.items()})

    # --- in the end ---

    def build(self, payload: Payload) -> nn.Module:
        parts = members(payload, MEMBERS) if self.settings.answer == "ensemble" else {}
        if not parts:
            return super().build(payload)
        weights = torch.tensor([float(part.facts["weight"]) for part in parts.values()])
        return Ensemble([self._slim_classifier(part) for part in parts.values()], "logits", weights).eval()

    def _slim_classifier(self, payload: Payload) -> nn.Module:
        model = build_model(str(payload.facts["architecture"]), self.task)
        load_slim(model, payload.tensors, "model")
        return model.eval()


def _sane(model: nn.Module, shard: Shard, device: torch.device) -> bool:
    """Whether a model answers the own images with usable numbers."""
    return sane(fast_logits([model], shard.train.images, run_map=one_by_one, device=device))


def _member(found: Candidates, name: ClientId, weight: float) -> Payload:
    """A model of the ensemble without the filters that pruning has silenced."""
    facts = {"architecture": found.pool[name].facts["architecture"], "weight": weight}
    return Payload(named(slim(found.models[name]), "model"), facts)


def blended(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Mixup: each image mixed with a random one by a random share; in between, an ensemble is better than a label."""
    share = torch.rand((len(images), 1, 1, 1), generator=rng)
    others = images[torch.randperm(len(images), generator=rng)]
    return (share * images + (1 - share) * others).round().to(images.dtype)


def _as_before(kept: Payload, left_out: Sequence[ClientId]) -> Payload:
    """What a client had before this encounter, and whom it could not use."""
    facts = {name: value for name, value in kept.facts.items() if name != "notes"}
    return Payload(kept.tensors, {**facts, "notes": {"left_out": list(left_out)}})


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in tensors.values())


def _student_of(both: Payload) -> Payload:
    """What is left where the student answers: its model, and what its client has seen."""
    tensors = {name: value for name, value in both.tensors.items() if name.startswith("model/")}
    facts = {name: value for name, value in both.facts.items() if name != "members"}
    return Payload(tensors, {**facts, "weights": weights} if (weights := _weights_of(both)) else facts)


def _weights_of(payload: Payload) -> dict[ClientId, float]:
    """w of the ensemble, whether or not its members are still there; empty where there never was one."""
    found: dict[ClientId, float] = payload.facts.get("weights") or {
        name: facts["weight"] for name, facts in payload.facts.get("members", {}).items()
    }
    return found


def _short(value: float) -> float:
    return float(f"{value:.6g}")
