"""Clients that upload their trained classifier as it is: the part that all such methods share, and the server's view of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import nn

from osfl.core.errors import TrainingError, UsageError, go_on_without
from osfl.core.method import Context, Method
from osfl.core.types import Contract, Json, Payload, Plan, Presets, Probed, Release, Shard, Task, Upload
from osfl.ingredients.ensembles.ensemble import Ensemble, robust_rules, weights_for
from osfl.ingredients.ensembles.paging import Networks, networks_limit
from osfl.ingredients.statistics.averaging import Combine as Robust
from osfl.ingredients.statistics.averaging import combined
from osfl.ingredients.statistics.claimed_counts import largest, samples_of, sizes_of
from osfl.ingredients.training.dp_sgd import check_mechanism, private_training_problems, training_statement
from osfl.ingredients.training.local import (
    PRIVATE_TRAINING,
    TRAINING_PRESETS,
    Training,
    architecture_problems,
    classifier,
    first_model,
    local_model,
    training_bytes,
    training_problems,
)
from osfl.ingredients.training.one_upload import working_on
from osfl.models.build import architectures_in, build_model
from osfl.models.naming import contract_of, load_named
from osfl.models.norms import norms
from osfl.models.output_checks import SANE, loudest
from osfl.runtime.payloads import payload_digest

Combine = Literal["logits", "probabilities", "size", "class_count", "odds"]


COUNTING = ("ensemble", "labels", "balance", "personalize")  # settings for some of whose values sites send class counts


class ModelMethod(Method):
    """A client trains (`local_model`) and uploads its weights with BN statistics; the paper's own steps begin at the server.

    A method that needs to know how many images of each class a client has sets `needs_counts`.
    """

    PRESETS: ClassVar[Presets] = TRAINING_PRESETS
    NEEDS = ("samples",)

    def needs_counts(self) -> bool:
        return False

    def needs(self) -> Sequence[str]:
        return (*self.NEEDS, "class_counts") if self.needs_counts() else self.NEEDS

    def problems(self, clients: int) -> list[str]:
        found = training_problems(self.settings, self.task)
        if isinstance(self.settings, Student) and self.settings.student:
            found += architecture_problems("student", self.settings.student, self.task, one="the server has one model")
        if getattr(self.settings, "init", "") == "pretrained" and not self.settings.pretrained:
            found.append("setting 'init': 'pretrained' needs weights to start from; set pretrained")
        return found

    def departures(self) -> list[str]:
        """Statistics of batch norm are what the inversion family compares images with; not every network has them."""
        if not getattr(self.settings, "bn", 0):
            return []
        bare = [name for name in self.architectures() if not norms(build_model(name, self.task))]
        return bare and [f"bn = {self.settings.bn} has no effect on {', '.join(bare)}: no batch norm to compare or adapt"]

    def only_for_clients(self) -> set[str]:
        """Settings that say how a client trains, and nothing else: without effect on models that came trained."""
        return {one.name for one in fields(Training)} - {"architecture"}

    def architectures(self) -> Sequence[str]:
        return architectures_in(self.settings.architecture)

    def contract(self, architecture: str) -> Contract:
        return contract_of(build_model(architecture, self.task), "model")

    PRIVATE: ClassVar[Mapping[str, object]] = {"architecture": "cnn-w16-g4", **PRIVATE_TRAINING}

    def privacy_problems(self, plan: Plan) -> list[str]:
        def built(name: str) -> nn.Module:
            return build_model(name, self.task)

        without = [
            f"{name}={value}" for name, value in self.PRIVATE.items() if name in COUNTING and _differs(self, name, value)
        ]
        counts = (without or ["another method"]) if self.needs_counts() else []
        return private_training_problems(built, plan, self.architectures(), counts)

    def check_upload(self, upload: Upload, ctx: Context) -> None:
        if ctx.plan.privacy is not None:
            check_mechanism(upload, ctx.plan)

    def privacy_statement(self, release: Release, uploads: Sequence[Upload], plan: Plan) -> Json:
        return training_statement(plan, uploads)

    COMBINES: ClassVar[bool] = False  # whether the server combines clients' answers by the setting `ensemble`

    def robust(self) -> Sequence[str]:
        """The rules that the setting `ensemble` allows, where answers are combined."""
        return robust_rules(self.settings.ensemble) if self.COMBINES else ()

    def device_bytes(self, images: int, memory: int, half: bool) -> int | None:
        return training_bytes(self.settings, self.task, images, memory, half)

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        payload = local_model(shard, self.task, self.settings, ctx)
        if not self.needs_counts():
            return payload
        counts = shard.train.class_counts(len(self.task.classes)).tolist()
        return Payload(payload.tensors, {**payload.facts, "class_counts": counts})

    def upload_model(self, upload: Upload, ctx: Context) -> nn.Module:
        return classifier(upload.payload, self.task)

    def probed(self, upload: Upload, ctx: Context) -> Probed:
        """The classifier, which answers public images."""
        with working_on(upload.client):
            counts = tuple(upload.payload.facts.get("class_counts", ()))
            return Probed(counts, self.upload_model(upload, ctx))

    def build(self, payload: Payload) -> nn.Module:
        return classifier(payload, self.task)


def _differs(method: ModelMethod, name: str, value: Json) -> bool:
    return bool(getattr(method.settings, name, value) != value)


@dataclass(frozen=True)
class Student:
    """Where the server's own model starts; mixed into the Settings of methods that distill one."""

    student: str = ""  # architecture of the server's model; empty = the clients', where they share one
    # average: start from one-round FedAvg of the clients' weights; client: from the model of the client with most images, for
    # models whose weights have nothing in common; pretrained: from the file that clients started from
    init: Literal["random", "average", "client", "pretrained"] = "random"  # where the server's model begins


def counts_of(uploads: Sequence[Upload], classes: int) -> torch.Tensor:
    """How many images of each class each client trained on, (clients, classes); one a class where it was not uploaded."""
    rows = [upload.payload.facts.get("class_counts", [1] * classes) for upload in uploads]
    return torch.tensor(rows, dtype=torch.float64)


def teachers(uploads: Sequence[Upload], method: ModelMethod, device: torch.device | None = None) -> Networks[nn.Module]:
    """The uploaded classifiers in evaluation mode, on the device, in the order of the uploads, as many at once as there is
    memory for; one that explodes is refused by name."""
    place = device or torch.device("cpu")

    def built(number: int) -> nn.Module:
        upload = uploads[number]
        with working_on(upload.client):
            return method.build(upload.payload).to(place)

    members = Networks(len(uploads), built, networks_limit(place))
    clients = [upload.client for upload in uploads]
    for client, member in zip(clients, members, strict=True):
        if not (most := loudest(member, method.task.image)) < SANE:
            raise TrainingError(
                f"the model of {client} answers noise with numbers beyond all bounds",
                client=client,
                field="model",
                expected=f"below {SANE:g}",
                got=f"{most:.3g}",
                fix=go_on_without(client),
            )
    return members


def teacher_weights(uploads: Sequence[Upload], mode: str, classes: int) -> torch.Tensor:
    """Voting weights of the clients as they claim them, (clients,) or (clients, classes); whoever combines answers caps them.

    Weighting by class needs the counts that `needs_counts` asks for; by size, the samples.
    """
    if mode == "size":
        return torch.tensor([samples_of(upload) for upload in uploads])
    return weights_for(mode, counts_of(uploads, classes))


def teacher_ensemble(
    uploads: Sequence[Upload],
    members: Sequence[nn.Module],
    mode: str,
    task: Task,
    share: float,
    robust: Robust = "mean",
) -> Ensemble:
    """All teachers as one; nobody has more than `share` of a weight by counts."""
    weights = teacher_weights(uploads, mode, len(task.classes))
    return Ensemble(members, mode, weights, share, task.several, robust)


def start_student(uploads: Sequence[Upload], method: ModelMethod, ctx: Context) -> tuple[nn.Module, str]:
    """The server's model before it learns anything, and its architecture."""
    uploaded = sorted({str(upload.payload.facts["architecture"]) for upload in uploads})
    architecture = method.settings.student or uploaded[0]
    model = build_model(architecture, method.task, ctx.generator("student"))
    if method.settings.init == "pretrained":
        model = first_model(method.settings, architecture, method.task, ctx.generator("student"))
    if method.settings.init == "average":
        if uploaded != [architecture]:
            raise UsageError(
                f"init = 'average' needs clients that all have the student's architecture {architecture!r}, not {uploaded}",
                field="init",
                fix="Use --set init=random.",
            )
        weights = sizes_of(uploads, ctx.plan.limits.share).tolist()
        load_named(model, combined((upload.payload.tensors for upload in uploads), weights, ctx.plan.judging.combine), "model")
    if method.settings.init == "client":
        alike = [upload for upload in uploads if upload.payload.facts["architecture"] == architecture]
        if not alike:
            raise UsageError(
                f"init = 'client' needs a client with the student's architecture {architecture!r}, not {uploaded}",
                field="init",
                fix="Use --set init=random.",
            )
        load_named(model, largest(alike, ctx.plan.limits.share).payload.tensors, "model")
    return model, architecture


def digests_of(uploads: Sequence[Upload]) -> dict[str, str]:
    """What each client sent, by its digest: names the server's work completely, together with settings and seed."""
    return {upload.client: payload_digest(upload.payload) for upload in uploads}
