"""Methods whose clients upload fine-tuned vision transformers: their settings, presets, and what cannot work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from osfl.core.errors import UsageError
from osfl.core.method import Context
from osfl.core.types import ADDED, Release, Upload
from osfl.ingredients.distillation.order import StudyOrder, order_problems
from osfl.ingredients.ensembles.ensemble import COUNTED
from osfl.ingredients.generators.synthesis import out_of_range, student_problems
from osfl.ingredients.inversion.sparse import Events, VitPixels, vit_pixel_problems
from osfl.ingredients.statistics.site_prior import SitePrior, with_class_shares
from osfl.ingredients.training.local import PRIVATE_TRAINING, SMOKE_TRAINING, Training
from osfl.ingredients.training.model_method import Combine, Student
from osfl.models.architectures import parse


@dataclass(frozen=True)
class UploadedVits(SitePrior, Student, VitPixels, StudyOrder, Training):
    """How clients fine-tune ViTs, and what the server makes of them; defaults are FedMITR's."""

    architecture: str = "deit_tiny"  # a ViT; "client-01:deit_small,*:deit_tiny" gives clients their own
    epochs: int = 50  # passes over the client's images
    batch_size: int = 64
    weight_decay: float = 1e-4
    schedule: Literal["steps", "cosine", "constant"] = "constant"  # of the clients
    init: Literal["random", "average", "client", "pretrained"] = "average"  # not published; its tables suggest one-round FedAvg
    ensemble: Combine = "logits"  # how clients become one; class_count and odds add class counts to the upload
    balance: float = 0.0  # strength of the correction of outputs for the client's class frequencies; needs class counts
    labels: Literal["uniform", "seen", "counts"] = "uniform"  # seen: classes the client has; counts: as often as it does
    server_epochs: int = 50  # T: each makes new images and passes over all so far; not published
    pool_epochs: int = 0  # newest epochs whose images the student still sees; 0 = all
    invert: Literal["clients", "ensemble"] = field(default="clients", metadata=ADDED)  # each by itself, or all as one
    passes: int = 1  # of the student over the pool, each epoch
    student_batch: int = 64  # images a step of the student
    student_lr: float = 1e-3  # SGD
    student_momentum: float = 0.9  # of its SGD
    student_decay: float = 1e-4  # weight decay
    student_cosine: bool = False  # bring the student's learning rate to zero over the epochs
    student_clip: float = 0.0  # largest gradient norm; 0 = do not clip
    student_share: float = field(default=1.0, metadata=ADDED)  # share of its update from the start that is released
    temperature: float = 1.0  # of distillation
    votes: float = field(default=1.0, metadata=ADDED)  # class_count, odds, size: power of the counts; 0 = alike


# ViTs from pretrained weights, for two cores; chosen on validation images of bloodcells-28, see FedMITR's card.
VIT_CPU: Mapping[str, object] = {
    "architecture": "vit",
    "epochs": 10,
    "batch_size": 32,
    "optimizer": "adam",
    "lr": 1e-3,
    "weight_decay": 0.0,
    "schedule": "cosine",
    "augment": "flip",
    "clip": 1.0,
    "images": 16,
    "steps": 24,
    "pixel_lr": 0.1,
    "clamp": True,
    "scales": 6,
    "start": 0.5,
    "adversarial": 0.0,
    "labels": "counts",
    "server_epochs": 6,
    "ensemble": "odds",
    "votes": 0.5,
    "balance": 0.5,
    "student_lr": 0.01,
    "student_cosine": True,
    "student_clip": 5.0,
    "student_share": 0.6,
}
VIT_SMOKE: Mapping[str, object] = {
    **SMOKE_TRAINING,
    "architecture": "vit-p4-w16-d2-h2",
    "pixel_lr": 0.1,
    "clamp": True,
    "images": 8,
    "steps": 4,
    "server_epochs": 2,
    "student_batch": 16,
}


# What a round with [privacy] begins with: no class counts are sent.
VIT_PRIVATE: Mapping[str, object] = {**PRIVATE_TRAINING, "labels": "uniform", "ensemble": "logits", "balance": 0.0}


def tuned_alike() -> dict[str, object]:
    """How clients train in the `cpu` preset: for the other methods of a comparison, so that all have the same uploads."""
    return {
        key: VIT_CPU[key]
        for key in ("architecture", "epochs", "batch_size", "optimizer", "lr", "weight_decay", "schedule", "augment", "clip")
    }


def counts_needed(settings: Any) -> bool:
    """Whether clients must say how many images of each class they have."""
    return bool(settings.ensemble in COUNTED or settings.labels != "uniform" or settings.balance)


def as_drawn(release: Release, uploads: Sequence[Upload], settings: Any, ctx: Context) -> Release:
    """The release, and where sites correct it the classes' shares if images were drawn in them (`labels=counts`)."""
    return with_class_shares(release, uploads, settings, ctx.plan.limits.share) if settings.labels == "counts" else release


POSITIVE = ("server_epochs", "passes", "student_lr", "temperature")
NOT_NEGATIVE = ("balance", "votes", "pool_epochs", "student_momentum", "student_decay", "student_clip")


def vit_student_problems(settings: Any, architectures: Sequence[str], events: Events = ()) -> list[str]:
    """All that is wrong with the server's part, a sentence each."""
    found = out_of_range(settings, POSITIVE, NOT_NEGATIVE, ("student_batch",)) + student_problems(settings, architectures)
    if not 0 < settings.student_share <= 1:
        found.append(f"setting 'student_share': expected a share above 0, at most 1, got {settings.student_share}")
    elif settings.student_share < 1 and settings.init in ("random", "pretrained"):  # a pretrained start has a random head
        found.append(
            "setting 'student_share': an average with a random head is no classifier; take it whole (`--set "
            "student_share=1`) or start from weights that know something (`--set init=average`)"
        )
    return (
        found
        + order_problems(settings)
        + vit_pixel_problems(settings, events)
        + _patch_problems([*architectures, settings.student])
    )


def _patch_problems(architectures: Sequence[str]) -> list[str]:
    """Everyone needs the same patches: a patch that one client dropped must be a patch of the others, too."""
    patches: dict[str, int] = {}
    for name in filter(None, architectures):
        try:
            entry, options = parse(name)
        except UsageError:
            continue  # reported already where the architecture was checked
        if entry.family != "vit":
            return [
                f"setting 'architecture': {name!r} has no patches to drop; use a vision transformer such as 'vit' or "
                "'deit_tiny'"
            ]
        patches[name] = options["p"]
    if len(set(patches.values())) > 1:
        sizes = ", ".join(f"{name} has {size}" for name, size in patches.items())
        return [f"setting 'architecture': clients and server need one patch size; {sizes}"]
    return []
