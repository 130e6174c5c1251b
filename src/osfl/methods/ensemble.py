"""Ensemble — every client's model answers, and the answers are combined; the upper reference of distillation methods.

Nothing is trained at the server: it passes all models on, so the download grows with the number of clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from osfl.ingredients.model_upload import Combine, ModelUpload, teacher_ensemble
from osfl.ingredients.training import Training
from osfl.protocol import Context, Payload, Release, Upload


@dataclass(frozen=True)
class Settings(Training):
    # Under label skew the choice matters more than anything else: averaging probabilities beats logits by several points,
    # and weighting each client per class by how much of that class it has seen by tens of points.
    combine: Combine = "logits"  # what is averaged, and how it is weighted


class EnsembleOfClients(ModelUpload):
    Settings = Settings

    def needs_counts(self) -> bool:
        return bool(self.settings.combine == "class_count")

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        tensors = {f"{u.client}/{name}": tensor for u in uploads for name, tensor in u.payload.tensors.items()}
        return Release(Payload(tensors, {"members": {u.client: dict(u.payload.facts) for u in uploads}}))

    def build(self, payload: Payload) -> nn.Module:
        uploads = [_member(payload, client) for client in sorted(payload.facts["members"])]
        members = [super(EnsembleOfClients, self).build(upload.payload) for upload in uploads]
        return teacher_ensemble(uploads, members, self.settings.combine, len(self.task.classes))


def _member(payload: Payload, client: str) -> Upload:
    """One client's upload, as it was before the server put all of them together."""
    prefix = f"{client}/"
    own = {name.removeprefix(prefix): tensor for name, tensor in payload.tensors.items() if name.startswith(prefix)}
    return Upload(client, "", Payload(own, payload.facts["members"][client]))
