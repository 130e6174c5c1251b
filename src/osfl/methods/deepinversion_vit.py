"""DeepInversion for ViTs — images are inverted with all patches to the last step, and distilled without relabeling patches.

The baseline of FedMITR's tables: its loop with dense inversion and only KL(E(x) || S(x)), which equals FedMITR's variant "KD
only" to the bit. ViTs have no batch norm, so the paper's statistics term (Yin et al., CVPR 2020) is absent; `deepinversion` is
the method for networks that have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from osfl.core.method import Context, Phase
from osfl.core.types import ClientId, Dataset, Presets, Release, Upload
from osfl.ingredients.distillation.token_relabel import (
    KD_ONLY,
    PatchServer,
    kept_samples,
    relabel_flops,
    relabel_work,
    shortened_inversion,
)
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


class DeepInversionVit(OneClassifier, ModelMethod):
    Settings = UploadedVits
    PRESETS: ClassVar[Presets] = {"paper": {}, "ours": {"pixel_lr": 0.1, "clamp": True}, "cpu": VIT_CPU, "smoke": VIT_SMOKE}
    COMBINES = True
    PRIVATE = VIT_PRIVATE
    DEVIATIONS = (
        "as FedMITR's tables use it: client by client, against the server's model as it is, from the clients' average",
        "clients start from random weights unless `pretrained` names a file (the paper: ImageNet)",
        "synthetic images are kept as 16-bit floats, and the clients are asked about each image once",
    )

    def problems(self, clients: int) -> list[str]:
        return super().problems(clients) + vit_student_problems(self.settings, self.architectures())

    def needs_counts(self) -> bool:
        return counts_needed(self.settings)

    def server_flops(self, clients: Sequence[ClientId]) -> float:
        return relabel_flops(self, clients, self.settings.inversion(), KD_ONLY)

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
        return as_drawn(Release(server.release()), uploads, self.settings, ctx)

    def _learned(self, uploads: Sequence[Upload], ctx: Context) -> PatchServer:
        server = PatchServer(self, uploads, ctx, "deepinversion_vit", self.settings.inversion(), KD_ONLY)
        server.learn()
        return server

    def samples(self, uploads: Sequence[Upload], ctx: Context) -> Dataset:
        return kept_samples("deepinversion_vit", uploads, self, ctx, lambda: self._learned(uploads, ctx))
