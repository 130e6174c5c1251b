"""FedLMG — clients send classifiers; the server lets each guide a pretrained diffusion model, and trains on the images.

One of FALCON's baselines (local-model-guided diffusion). For every client and class, latents of the diffusion model are
corrected at each step by CE and batch-norm statistics of the client's classifier (`guided_images`); the server's model is
trained on the union of the images. Needs `osfl[diffusion]` and a pipeline on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from osfl.core.method import Context, Part, Phase
from osfl.core.types import ClientId, Dataset, Json, Payload, Release, Upload
from osfl.ingredients.generators.pictures import by_class
from osfl.ingredients.inversion.pixels import Watched
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior
from osfl.ingredients.training.local import CPU_TRAINING, SMOKE_TRAINING, Training, fit
from osfl.ingredients.training.model_method import ModelMethod, Student, counts_of, digests_of, start_student
from osfl.ingredients.training.one_upload import working_on
from osfl.methods.fedlmg.guided_diffusion import Guidance, guidance_problems, guided_images
from osfl.models.inputs import to_input
from osfl.models.latent_prior import Prior, load_prior, prior_problems
from osfl.models.naming import named


@dataclass(frozen=True)
class Settings(SitePrior, Training, Student, Guidance):
    per_class: int = 30  # images of each class that a client has, guided by it; the paper leaves it open
    server_epochs: int = 60  # of the server's model on all images; otherwise it trains as clients do


class FedLMG(OneClassifier, ModelMethod):
    Settings = Settings
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "cpu": {**CPU_TRAINING, "pipeline": "toy", "per_class": 16, "diffusion_steps": 25, "server_epochs": 20},
        "smoke": {
            **SMOKE_TRAINING,
            "pipeline": "toy",
            "per_class": 2,
            "diffusion_steps": 3,
            "first_corrections": 1,
            "server_epochs": 1,
        },
    }
    DEVIATIONS = (
        "the noise that the diffusion model sees is taken as given when latents are corrected: no way back through it",
        "R_BN is taken over all images that a client guides for a class at once: statistics of one image say little",
        "the pipeline 'toy' knows nothing about images: with it, this is no more than inversion of small images",
    )

    def problems(self, clients: int) -> list[str]:
        s = self.settings
        low = {"per_class": 1, "server_epochs": 1}
        found = [f"setting {k!r}: expected at least {v}, got {getattr(s, k)}" for k, v in low.items() if getattr(s, k) < v]
        if "{}" not in s.prompt or set("{}") & set(s.prompt.replace("{}", "")):
            found.append(f"setting 'prompt': expected {{}} for the class and no other braces, got {s.prompt!r}")
        return [*super().problems(clients), *guidance_problems(s), *prior_problems(s.pipeline, s.pipeline_sha256), *found]

    def needs_counts(self) -> bool:
        return True

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        return {**super().shortened(), "diffusion_steps": (2, 4)}

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        s = self.settings
        return (1, s.diffusion_steps, s.server_epochs) if phase == "server" else super().work(phase, images, clients)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        uploads = sorted(uploads, key=lambda upload: upload.client)
        student, architecture = start_student(uploads, self, ctx)
        made = self.pool(uploads, ctx)
        ctx.show("Synthetic images", by_class(to_input(made.images), made.labels, self.task.classes))
        training = replace(self.settings, epochs=self.settings.server_epochs)
        fit(
            student,
            made,
            training,
            ctx.generator("server"),
            device=ctx.device,
            progress=lambda done, total: ctx.progress("learns", done, total),
        )
        return Release(Payload(named(student.cpu(), "model"), {"architecture": architecture}))

    def pool(self, uploads: Sequence[Upload], ctx: Context) -> Dataset:
        """The union of all clients' images; each client's images of a class are kept on their own."""
        uploads = sorted(uploads, key=lambda upload: upload.client)
        s, prior = self.settings, self._prior(ctx)
        digests, seen = digests_of(uploads), counts_of(uploads, len(self.task.classes))
        elsewhere = {} if ctx.device.type == "cpu" else {"device": ctx.device.type}  # other devices round otherwise
        key = {"what": "fedlmg", "settings": asdict(s), "seed": ctx.plan.seed, "task": asdict(self.task), **elsewhere}

        def cell(client: ClientId, label: int) -> Part:
            own: dict[str, Json] = {**key, "upload": digests[client], "label": label, "client": client}
            return Part((client,), Payload({}, {"label": label}), lambda: own)

        sent = {upload.client: upload for upload in uploads}
        cells = [cell(client, int(c)) for client, row in zip(sent, seen, strict=True) for c in row.nonzero().flatten()]
        made = ctx.spread(self, guided_cell, uploads, cells, lambda part: self._images(sent[part.clients[0]], part, prior, ctx))
        images = torch.cat([payload.tensors["images"] for payload in made])
        whole = [(len(one.tensors["images"]), part.payload.facts["label"]) for one, part in zip(made, cells, strict=True)]
        labels = torch.cat([torch.full((count,), label) for count, label in whole])
        return Dataset(images, labels)

    def _prior(self, ctx: Context) -> Prior:
        s = self.settings
        prompts = [s.prompt.replace("{}", name) for name in self.task.classes]
        return load_prior(s.pipeline, s.pipeline_sha256, self.task.image[0], prompts, s.prompt_guidance, ctx.device)

    def _images(self, upload: Upload, part: Part, prior: Prior, ctx: Context) -> Payload:
        label = part.payload.facts["label"]
        rng = ctx.generator("images", upload.client, label)
        labels = torch.full((self.settings.per_class,), label)
        with working_on(upload.client):
            member = Watched(self.build(upload.payload))
            images = guided_images(prior, member, labels, self.task.image, self.settings, rng, ctx.device)
        return Payload({"images": images})


def guided_cell(method: FedLMG, uploads: Sequence[Upload], part: Part, ctx: Context) -> Payload:
    """The images of one class that one client guides, wherever they are computed."""
    return method._images(uploads[0], part, method._prior(ctx), ctx)
