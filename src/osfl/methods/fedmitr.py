"""FedMITR — the server inverts uploaded ViTs sparsely, and learns from every patch of what it finds.

Paper: Shen et al., "Provable Sparse Inversion and Token Relabel Enhanced One-shot Federated Learning with ViTs", 2026,
https://arxiv.org/abs/2605.10748. Clients fine-tune a ViT as they like and upload it. Algorithm 1 is `PatchServer.learn`; the
inversion loss and the stopped patches are `invert_sparsely`, L_TR is `relabel_terms`. Its ablations are settings: KD only is
`mask=0 lambda1=0 lambda2=0` (the method deepinversion_vit), pseudo-labels only `mask=0 kd=0 lambda1=1 lambda2=0`, without CLS
`lambda1=0`, without KL `lambda2=0`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from osfl.core.errors import UsageError
from osfl.core.method import Context, Phase
from osfl.core.types import ClientId, Dataset, Json, Payload, Presets, Release, Upload
from osfl.ingredients.distillation.token_relabel import (
    PatchServer,
    Terms,
    kept_samples,
    lipschitz,
    relabel_flops,
    relabel_work,
    shortened_inversion,
)
from osfl.ingredients.generators.synthesis import out_of_range
from osfl.ingredients.inversion.sparse import Events, events_of
from osfl.ingredients.statistics.site_prior import OneClassifier
from osfl.ingredients.training.model_method import ModelMethod
from osfl.ingredients.training.uploaded_vits import (
    VIT_CPU,
    VIT_PRIVATE,
    VIT_SMOKE,
    UploadedVits,
    as_drawn,
    counts_needed,
    vit_student_problems,
)


@dataclass(frozen=True)
class Settings(UploadedVits):
    mask: float = 0.3  # r, share of the patches that are stopped; 0 = dense inversion
    stops: str = ""  # "step:share,step:share" instead of one stop of `mask` at half of the steps
    kd: float = 1.0  # weight of distillation on whole images
    lambda1: float = 0.5  # weight of the label on kept patches
    lambda2: float = 0.5  # weight of distillation on dropped patches
    probe: int = 8  # images an epoch whose gradient norms are recorded (the theorem)


class FedMitr(OneClassifier, ModelMethod):
    Settings = Settings
    PRESETS: ClassVar[Presets] = {
        "paper": {},
        "smi": {"pixel_lr": 0.25, "steps": 4000, "clamp": True, "stops": "50:0.3,100:0.3,200:0.3,300:0.3"},
        "ours": {"pixel_lr": 0.1, "clamp": True},  # the paper's budget with images that leave the noise
        "cpu": VIT_CPU,
        "smoke": {**VIT_SMOKE, "probe": 2},
    }
    COMBINES = True
    PRIVATE = VIT_PRIVATE
    DEVIATIONS = (
        "when patches are stopped, how many server epochs there are and where the server starts was not published: one stop at "
        "half of the steps, 50 epochs, and the clients' average unless the settings say otherwise",
        "clients start from random weights unless `pretrained` names a file (the paper: ImageNet)",
        "stopped pixels are frozen: total variation does not smooth them on",
        "the JS term is as in Sparse Model Inversion's code unless divergence=textbook: expectation under the mixture, T = 3, "
        "probabilities clamped to [0.01, 0.99], as most of them are where there are many classes",
        "client and server see the same patches in the JS term; once patches are stopped, shifts are by whole patches",
        "synthetic images are kept as 16-bit floats, and the clients are asked about each image once",
        "the last iterate is reported, or with `student_share` below 1 a point on the straight way to it",
    )

    def events(self) -> Events:
        return events_of(self.settings.stops, self.settings.steps, self.settings.mask)

    def terms(self) -> Terms:
        return Terms(self.settings.kd, self.settings.lambda1, self.settings.lambda2)

    def problems(self, clients: int) -> list[str]:
        s, found = self.settings, super().problems(clients)
        events: Events = ()
        found += out_of_range(s, (), ("mask", "kd", "lambda1", "lambda2", "probe"), ())
        try:
            events = self.events()
        except UsageError as error:
            found += error.problems
        if not (s.kd or s.lambda1 or (s.lambda2 and events)):
            found.append("setting 'kd': with lambda1 = 0 and no dropped patches to relabel, the server would learn nothing")
        return found + vit_student_problems(s, self.architectures(), events)

    def needs_counts(self) -> bool:
        return counts_needed(self.settings)

    def server_flops(self, clients: Sequence[ClientId]) -> float:
        return relabel_flops(self, clients, self.settings.inversion(self.events()), self.terms())

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        return {**super().shortened(), **shortened_inversion(self)}

    def keeps(self) -> Sequence[str]:
        return () if self.settings.pool_epochs else ("server_epochs",)

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        return relabel_work(self.settings) if phase == "server" else super().work(phase, images, clients)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        server = self._learned(uploads, ctx)
        server.show()
        server.keep_samples()
        released = server.release()
        measured: dict[str, Json] = {"gradient_norms": lipschitz(server.norms)} if len(server.norms) else {}
        release = Release(Payload(released.tensors, {**released.facts, **measured}))
        return as_drawn(release, uploads, self.settings, ctx)

    def _learned(self, uploads: Sequence[Upload], ctx: Context) -> PatchServer:
        server = PatchServer(
            self, uploads, ctx, "fedmitr", self.settings.inversion(self.events()), self.terms(), self.settings.probe
        )
        server.learn()
        return server

    def samples(self, uploads: Sequence[Upload], ctx: Context) -> Dataset:
        return kept_samples("fedmitr", uploads, self, ctx, lambda: self._learned(uploads, ctx))
