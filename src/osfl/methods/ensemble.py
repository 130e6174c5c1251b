"""Ensemble — every client's model answers, and the answers are combined; the upper reference of distillation methods.

Nothing is trained at the server: it passes all models on, so the download grows with the number of clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from osfl.core.method import Context
from osfl.core.types import Judging, Limits, Payload, Release, Upload
from osfl.ingredients.ensembles.ensemble import COUNTED
from osfl.ingredients.ensembles.gathering import gather, members
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior, corrected, without_site_prior
from osfl.ingredients.training.local import Training
from osfl.ingredients.training.model_method import Combine, ModelMethod, teacher_ensemble


@dataclass(frozen=True)
class Settings(SitePrior, Training):
    # Under label skew the choice matters more than anything else: averaging probabilities beats logits by several points,
    # weighting each client per class by how much of that class it has seen by tens of points; comparing only the classes
    # that a client knows (`odds`) is as good or better where some have little but one class.
    ensemble: Combine = "logits"  # what is averaged, and how it is weighted


class EnsembleOfClients(OneClassifier, ModelMethod):
    Settings = Settings
    PRIVATE = {**ModelMethod.PRIVATE, "ensemble": "logits"}  # noqa: RUF012
    TASKS = ("multiclass", "multilabel")
    COMBINES = True

    def problems(self, clients: int) -> list[str]:
        found = super().problems(clients)
        if self.settings.ensemble == "odds" and self.task.several:
            found.append("setting 'ensemble': odds compares classes of which an image has one; set ensemble=class_count")
        return found

    def needs_counts(self) -> bool:
        return bool(self.settings.ensemble in COUNTED)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        gathered, share = gather({upload.client: upload.payload for upload in uploads}), ctx.plan.limits.share
        found = {"share": share, "combine": ctx.plan.judging.combine}  # who builds the ensemble has no plan
        usual = {"share": Limits().share, "combine": Judging().combine}
        return Release(Payload(gathered.tensors, {**gathered.facts, **{k: v for k, v in found.items() if v != usual[k]}}))

    def build(self, payload: Payload) -> nn.Module:
        return corrected(self._together(without_site_prior(payload)), payload)

    def _together(self, payload: Payload) -> nn.Module:
        share = float(payload.facts.get("share", Limits().share))
        uploads = [Upload(client, "", part) for client, part in members(payload).items()]
        models = [super(EnsembleOfClients, self).build(upload.payload) for upload in uploads]
        how = payload.facts.get("combine", Judging().combine)
        return teacher_ensemble(uploads, models, self.settings.ensemble, self.task, share, how)
