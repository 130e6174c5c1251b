"""FedAvg, one round — clients train from a common start, the server averages their weights.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
With one round and skewed labels it is near chance; that is the expected result and the reason for the other methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from osfl.core.errors import UsageError
from osfl.core.method import Context
from osfl.core.types import ADDED, Field, Payload, Plan, Release, Summand, Upload
from osfl.ingredients.statistics.averaging import ROBUST, combined
from osfl.ingredients.statistics.claimed_counts import sizes_of
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior, site_prior_problems, with_class_shares
from osfl.ingredients.training.local import Training, not_positive, training_problems
from osfl.ingredients.training.model_method import ModelMethod

_COUNTER = 1 << 40  # batches that a network can have seen


@dataclass(frozen=True)
class Settings(SitePrior, Training):
    weighting: Literal["samples", "uniform"] = "samples"  # Eq. 1 of the paper weights by sample count
    bound: float = field(default=1024.0, metadata=ADDED)  # with a secure sum: no weight or statistic may be further from zero


class FedAvg(OneClassifier, ModelMethod):
    Settings = Settings
    PRIVATE = {**ModelMethod.PRIVATE, "personalize": "none"}  # noqa: RUF012
    TASKS = ("multiclass", "multilabel")
    COMMON = ("architecture",)

    def problems(self, clients: int) -> list[str]:
        found = training_problems(self.settings, self.task, one="averaging weights needs one architecture for all clients")
        return [*found, *not_positive(self.settings, "bound"), *site_prior_problems(self.settings, self.task)]

    def needs_counts(self) -> bool:
        """To divide out the shares of the classes, as the clients saw them, where sites correct the average by theirs."""
        return bool(self.settings.personalize == "prior")

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        uniform = self.settings.weighting == "uniform"
        weights = [1.0] * len(uploads) if uniform else sizes_of(uploads, ctx.plan.limits.share).tolist()
        members = (upload.payload.tensors for upload in uploads)  # read one after the other
        found = combined(members, weights, ctx.plan.judging.combine)
        release = Release(Payload(found, {"architecture": self.settings.architecture}))
        return with_class_shares(release, uploads, self.settings, ctx.plan.limits.share)

    def robust(self) -> Sequence[str]:
        return ROBUST

    def summands(self, plan: Plan) -> dict[str, Summand]:
        """The weights of all sites, each counting as much as another: the server of a secure sum knows no counts."""
        if self.settings.weighting != "uniform":
            raise UsageError(
                "setting 'weighting': with a secure sum the server sees no site's counts; set weighting=uniform",
                field="settings",
            )
        if self.settings.personalize == "prior":
            raise UsageError(
                "setting 'personalize': with a secure sum the server sees no site's counts to divide out; set personalize=none",
                field="settings",
            )
        fields = self.contract(self.settings.architecture).items()
        return {name: _summand(one, self.settings.bound) for name, one in fields}

    def from_sum(self, total: Payload, sites: int) -> Payload:
        """The mean; a counter, such as how many batches a network has seen, becomes the rounded one."""
        counters = [name for name, one in self.contract(self.settings.architecture).items() if one.dtype == "I64"]
        mean = {name: sums // sites if name in counters else (sums / sites).float() for name, sums in total.tensors.items()}
        return Payload(mean, total.facts)


def _summand(one: Field, bound: float) -> Summand:
    shape = tuple(map(int, one.shape))
    return Summand(shape, _COUNTER, whole=True) if one.dtype == "I64" else Summand(shape, bound)
