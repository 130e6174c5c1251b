"""Which metric to read first. Accuracy rewards the answer "always the most frequent class" where classes are unbalanced."""

from __future__ import annotations

from collections.abc import Sequence

from osfl.core.errors import UsageError, nearest
from osfl.core.result import Result

UNBALANCED = 1.5  # the most frequent class has so many times the images of the rarest one
CHOICES = ("accuracy", "balanced_accuracy", "auroc", "f1")
NAMES = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "auroc": "AUROC", "f1": "macro F1"}


def headline(counts: Sequence[float], chosen: str = "", several: bool = False) -> tuple[str, str]:
    """The metric and why it is this one, from the test images of each class; `chosen` (`--metric`) overrides the rule.
    `several`: multi-label images."""
    if chosen:
        if chosen not in CHOICES:
            raise UsageError(
                f"there is no metric {chosen!r}.{nearest(chosen, CHOICES)}",
                field="metric",
                fix=f"Choose {' or '.join(CHOICES)}.",
            )
        return chosen, "it was chosen with --metric"
    if several:
        return "auroc", "an image may have several classes, and accuracy is high for rare ones whatever a model does"
    present = [count for count in counts if count > 0]
    if len(present) < 2:
        return "accuracy", "there are test images of fewer than two classes"
    ratio = max(present) / min(present)
    if ratio < UNBALANCED:
        return "accuracy", f"the test images are balanced (no class has {UNBALANCED} times the images of another)"
    times = f"{ratio:.2g}" if ratio < 100 else f"{ratio:,.0f}"
    return "balanced_accuracy", f"the test images are unbalanced (one class has {times} times the images of another)"


def constant_answer(metric: str, counts: Sequence[float]) -> float:
    """What "always the most frequent class" reaches; a model that does not exceed it has learned nothing of use."""
    present = [count for count in counts if count > 0]
    if not present:
        return 0.0
    share = max(present) / sum(present)
    return {
        "accuracy": share,
        "balanced_accuracy": 1 / len(present),
        "auroc": 0.5,
        "f1": 2 * share / (1 + share) / len(present),
    }[metric]


def constant_labels(metric: str, majority: float, counts: Sequence[float], images: float) -> float:
    """The same where an image may have several classes. Accuracy (`majority`): each class always gets its more frequent answer;
    F1: always yes, over the classes that some of the images have."""
    always_yes = [2 * count / (images + count) for count in counts if count > 0]
    f1 = sum(always_yes) / len(always_yes) if always_yes else 0.0
    return {"accuracy": majority, "f1": f1}.get(metric, 0.5)


# --- of finished runs -------------------------------------------------------------------------------------------------

SMOKE = "Smoke run: a trial of everything in seconds. Its figures say nothing about a method."


def judged_counts(result: Result) -> list[float]:
    """Images of each class that a run was judged on; empty where it has no confusion matrix."""
    return [sum(row) for row in result["scores"].get("confusion", ())]


def headline_of(result: Result, chosen: str = "") -> tuple[str, str]:
    return headline(judged_counts(result), chosen, is_multilabel(result))


def is_multilabel(result: Result) -> bool:
    return "labels" in result["scores"]


def constant_answer_of(result: Result, metric: str) -> float:
    """The same for a finished run."""
    if not is_multilabel(result):
        return constant_answer(metric, judged_counts(result))
    counts = [row["images"] for row in result["scores"]["labels"].values()]
    return constant_labels(metric, result["scores"]["majority"], counts, result["data"]["test_images"])


def is_smoke(result: Result) -> bool:
    return result["preset"] == "smoke"
