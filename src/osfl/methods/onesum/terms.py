"""What a site's term of the sums holds, and what no images can have: the server asks both before it adds."""

from __future__ import annotations

import torch

from osfl.core.errors import RoundError, go_on_without
from osfl.core.sums import ALL_SITES
from osfl.core.types import Payload, Plan, Task, Upload
from osfl.ingredients.statistics.gaussians import Statistics, packed, unpacked
from osfl.ingredients.statistics.one_vs_rest import images_in
from osfl.ingredients.training.one_upload import working_on
from osfl.methods.onesum.differential_privacy import Noise, check_noise, largest
from osfl.methods.onesum.features import LEVELS


def check_claims(upload: Upload, plan: Plan) -> None:
    """n_c of a site, within what the plan lets a site claim; noise is no claim."""
    counts, limits = upload.payload.tensors["counts"].double(), plan.limits
    sites = len(plan.clients) if upload.client == ALL_SITES else 1
    noise = largest(plan).counts if plan.privacy is not None else 0.0
    if bool((counts < -noise).any()):
        raise RoundError(
            "it claims fewer images than none",
            client=upload.client,
            field="counts",
            expected=f"at least {-noise:.0f}",
            got=int(counts.min()),
            fix=go_on_without(upload.client),
        )
    images, of_a_class = float(images_in(counts, plan.task)), float(counts[: len(plan.task.classes)].max())
    claims = (("samples", images - noise * len(counts)), ("class_samples", of_a_class - noise))
    for name, images in claims:
        if images > sites * getattr(limits, name):
            raise RoundError(
                "it claims more images than the plan allows a site",
                client=upload.client,
                field="counts",
                expected=f"at most {sites * getattr(limits, name)} (limits.{name})",
                got=int(images),
                fix=go_on_without(upload.client),
            )


def check_features(upload: Upload, expected: str) -> None:
    """Sums of other features than the plan's mean something else; who has them is named."""
    if upload.payload.facts.get("features") != expected:
        raise RoundError(
            "this upload was made with other features than the plan's",
            client=upload.client,
            field="facts.features",
            expected=expected,
            got=str(upload.payload.facts.get("features", "nothing")),
            fix="The site needs the plan's encoder file or seed, and this version of osfl; or go on without it: "
            f"`osfl server ROUND --exclude {upload.client}`.",
        )


def checked_term(upload: Upload, plan: Plan, vectors: int) -> Statistics:
    """What an upload says, in steps of the grid; G stays folded. A term that no images can have is refused by name."""
    with working_on(upload.client):
        term = sums_of(upload.payload)
        if plan.privacy is None:
            _check_bounds(term, vectors, Noise(0.0, 0.0, 0.0), plan.task)
            _check_scatter(term, vectors, plan.task)
        else:
            check_noise(upload, plan)
            _check_bounds(term, vectors, largest(plan), plan.task)
    return term


def _check_bounds(term: Statistics, vectors: int, noise: Noise, task: Task) -> None:
    """|A_c| <= n_c b and |G_ij| <= n b^2, and no more beyond than noise can be."""
    counts = (term.counts + noise.counts) * vectors
    images = images_in(counts, task)
    if task.several and bool((counts > images).any()):
        raise RoundError("it claims more images of a class than images", field="counts", expected=f"at most {images:.0f}")
    if bool((term.sums.abs() > counts[:, None] * LEVELS + noise.sums).any()):
        raise RoundError("its class sums do not fit its counts", field="sums", expected="at most count times bound")
    if bool((term.gram.abs() > images * LEVELS**2 + noise.gram).any()):
        raise RoundError("its second moments do not fit its counts", field="gram", expected="at most count times bound squared")


def _check_scatter(term: Statistics, vectors: int, task: Task) -> None:
    """G - sum_c A_c A_c^T / n_c is positive semidefinite, as sums of images are; with noise it may not be."""
    counts, sums = term.counts * vectors, term.sums
    if task.several:  # classes overlap: only all images together are one set
        counts, sums = counts[-1:], sums[-1:]
    scatter = unpacked(term.gram) - (sums / counts.clamp_min(1)[:, None]).T @ sums
    slack = 1e-8 * float(term.gram.abs().max()) + 1e-3
    if int(torch.linalg.cholesky_ex(scatter + slack * torch.eye(len(scatter), dtype=torch.float64)).info):
        raise RoundError(
            "its second moments are not those of any images with its class sums and counts",
            field="gram",
            expected="a positive semidefinite scatter within classes",
        )


def sums_of(payload: Payload) -> Statistics:
    """The tensors of a term, whatever they say; G stays folded."""
    return Statistics(payload.tensors["sums"].double(), gram_of(payload), payload.tensors["counts"].double())


def gram_of(payload: Payload) -> torch.Tensor:
    """Second moments of all classes in steps of the grid, folded, in float64, which holds those of one site exactly."""
    if "factor" in payload.tensors:
        rows = payload.tensors["factor"].double()
        return packed((rows.T @ rows).round())  # G is whole numbers, which rounding finds again
    if "gram" in payload.tensors:
        return payload.tensors["gram"].double()
    return torch.stack(list(grams_of(payload).values())).double().sum(0)


def grams_of(payload: Payload) -> dict[int, torch.Tensor]:
    """Second moments by class, folded."""
    named = {name: value for name, value in payload.tensors.items() if name.endswith("/gram")}
    return {int(name.split("/")[0].removeprefix("class-")): value for name, value in named.items()}


def to_whole(values: torch.Tensor) -> torch.Tensor:
    return values.round().to(torch.int64)


def no_images(classes: int, d: int) -> Statistics:
    triangle = d * (d + 1) // 2
    sums, gram, counts = (torch.zeros(shape, dtype=torch.float64) for shape in ((classes, d), (triangle,), (classes,)))
    return Statistics(sums, gram, counts)
