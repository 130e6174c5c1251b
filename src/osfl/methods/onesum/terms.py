"""What a site's term of the sums holds, and what no images can have: the server asks both before it adds."""

from __future__ import annotations

from dataclasses import replace

import torch

from osfl.core.errors import RoundError
from osfl.core.types import Payload, Plan, Task, Upload
from osfl.ingredients.statistics.gaussians import Statistics, packed, positive_semidefinite, upper_triangle
from osfl.ingredients.statistics.private_sums import Noise, check_bounds, check_noise, largest, sites_in
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.ingredients.training.one_upload import working_on


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
            check_bounds(term, vectors, Noise(0.0, 0.0, 0.0), plan.task)
            _check_scatter(term, vectors, plan.task)
        else:
            check_noise(upload, plan)
            check_bounds(
                replace(term, counts=images_of(upload.payload, plan)), vectors, largest(plan, sites_in(upload)), plan.task
            )
    return term


def _check_scatter(term: Statistics, vectors: int, task: Task) -> None:
    """G - sum_c A_c A_c^T / n_c is positive semidefinite, as sums of images are; with noise it may not be."""
    counts, sums = term.counts * vectors, term.sums
    if task.several:  # classes overlap: only all images together are one set
        counts, sums = counts[-1:], sums[-1:]
    scatter = upper_triangle(term.gram).addmm_((sums / counts.clamp_min(1)[:, None]).T, sums, alpha=-1)
    if not positive_semidefinite(scatter, 1e-8 * float(term.gram.abs().max()) + 1e-3):
        raise RoundError(
            "its second moments are not those of any images with its class sums and counts",
            field="gram",
            expected="a positive semidefinite scatter within classes",
        )


def images_of(payload: Payload, plan: Plan) -> torch.Tensor:
    """n_c in images; in a private round counts are in steps."""
    return payload.tensors["counts"].double() / (LEVELS if plan.privacy is not None else 1)


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
