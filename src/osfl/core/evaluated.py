"""evaluation.json: what a finished model scored on labeled images, with every key explained. Pages are drawn from it alone.

The schema carries a version. Adding a key keeps it; renaming, removing or changing the meaning of one raises it.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

from osfl.core.types import Json

SCHEMA = 1


class Estimate(TypedDict):
    """A score and its bootstrap interval. None: it does not exist, such as an AUROC with images of one class."""

    value: float | None
    low: float | None
    high: float | None


class ClassScores(TypedDict):
    images: int  # of this class, by their labels
    recall: Estimate  # share of the images of this class that were answered so
    precision: Estimate  # share of these answers that were right; None where the model never answers so
    specificity: Estimate  # share of the other classes' images that were answered otherwise
    f1: Estimate
    auroc: Estimate  # this class against all others
    ap: NotRequired[Estimate]  # average precision; multi-label only, as is:
    threshold: NotRequired[float]  # probability from which on the answer is yes


class Bin(TypedDict):
    """Images whose highest probability is in (low, high]."""

    low: float
    high: float
    images: int
    confidence: float  # mean of their highest probability
    accuracy: float


class GroupScores(TypedDict):
    """The images of one scanner, ward, sex, ..."""

    images: int
    people: int | None  # None: not known who is shown
    majority: float
    metrics: dict[str, Estimate]


class Evaluation(TypedDict):
    schema: int
    model: dict[str, Json]  # where it was found, method, round, client, release; a checkpoint's sha256 and architecture
    task: dict[str, Json]  # name, classes, image; kind where it is multilabel
    thresholds: NotRequired[str]  # multi-label: where they come from, a sentence
    data: dict[str, Json]  # name, digest, part (test, validation or all), images, people, column of the groups, findings
    interval: dict[str, Json]  # level, resamples, what is resampled (images or people)
    headline: str  # the metric to read first
    rule: str  # why that one, a sentence
    majority: float  # share of the most frequent class: what a constant answer reaches
    metrics: dict[str, Estimate]  # accuracy, balanced_accuracy, auroc, f1, ece, nll: as `scores.global` of results.json
    per_class: dict[str, ClassScores]
    confusion: list[list[float]]  # counts; rows = truth, columns = answer; multi-label: empty
    calibration: list[Bin]  # bins without images are left out
    groups: dict[str, GroupScores]  # by value of the column; empty where none was named
    cautions: list[str]  # what a reader should know before any number
    command: str  # repeats it
    environment: dict[str, Json]
