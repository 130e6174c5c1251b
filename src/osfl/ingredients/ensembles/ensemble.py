"""Ensembles of classifiers: the rules that combine their outputs, and fast evaluation of all members.

Averaging logits and averaging probabilities are different teachers, so the mode is always named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError, UsageError
from osfl.core.types import RunMap
from osfl.ingredients.ensembles.odds import odds
from osfl.ingredients.statistics.averaging import ROBUST, robust_values
from osfl.ingredients.statistics.averaging import Combine as Robust
from osfl.ingredients.statistics.claimed_counts import capped
from osfl.models.flops import forward_flops
from osfl.models.folding import freeze
from osfl.models.inputs import to_input
from osfl.runtime.meter import spend
from osfl.runtime.workers import Workers

MODES: Mapping[str, str] = {
    "logits": "mean of logits",
    "probabilities": "mean of probabilities",
    "size": "mean of probabilities, weighted by the number of training images",
    "class_count": "mean of probabilities, each class weighted by who has seen how much of it",
    "odds": "what fits best to the differences between classes that each member has seen",
}
COUNTED = ("class_count", "odds")  # need to know how many images of each class a member has seen
_LEAST = 1e-12  # probability of a class beside a robust rule, which gives some none
_FLOOR = -27.631  # log 1e-12: what a class gets that no member may vote for; finite, so that losses stay finite


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"unknown ensemble mode '{mode}'", field="mode", fix=f"Choose one of {', '.join(MODES)}.")


def robust_rules(mode: str) -> Sequence[str]:
    """The robust rules that an ensemble mode has: `odds` solves for all members at once, and where each class has weights of
    its own no member has one for its whole answer, as the geometric median needs."""
    return {"odds": (), "class_count": ROBUST[:2]}.get(mode, ROBUST)


def weights_for(mode: str, counts: torch.Tensor) -> torch.Tensor:
    """Voting weights from label counts (members, classes): (members,), or the counts for modes that are `COUNTED`."""
    check_mode(mode)
    counts = counts.to(torch.float64)
    if mode == "size":
        return counts.sum(1)
    return counts if mode in COUNTED else torch.ones(len(counts), dtype=torch.float64)


class Ensemble(nn.Module):
    """Members of any architectures; `forward` gives logits (modes `logits` and `odds`), or log-probabilities.

    `weights` has one number a member, or one a member and class; only their proportions over the members matter. Those that
    come from claimed counts are capped: no member has more than `share`, in all or of a class. `several`: multi-label, where
    each class has a probability of its own. `robust`: what takes the place of the weighted mean.
    """

    weights: torch.Tensor
    voted: torch.Tensor | None

    def __init__(
        self,
        members: Sequence[nn.Module],
        mode: str = "logits",
        weights: torch.Tensor | None = None,
        share: float = 1.0,
        several: bool = False,
        robust: Robust = "mean",
    ) -> None:
        super().__init__()
        _check_rule(mode, robust)
        self.mode, self.share, self.several, self.robust = mode, share, several, robust
        self.members = nn.ModuleList(members)  # a plain list would escape eval(), to() and modules()
        self.register_buffer("weights", _shares(mode, weights, len(members), share))
        # known beforehand, not asked of the weights in each pass: operations are counted without any values
        self.register_buffer("voted", _voted(self.weights), persistent=False)

    def extra_repr(self) -> str:
        # two modes are two networks: they cost different operations
        return self.mode if self.robust == "mean" else f"{self.mode}, {self.robust}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.stack([member(x) for member in self.members])
        if self.several and self.mode != "logits":
            return _mix_each(logits, self.weights.to(logits).view(len(logits), 1, -1), self.robust)
        return _combine(logits, self.mode, self.weights, self.voted, share=self.share, robust=self.robust)


class Combination:
    """An ensemble rule with its weights, checked once: members' logits (members, batch, classes) become one answer.

    The answer has logits or log-probabilities, (batch, classes), finite. `share`: the cap of weights by claimed counts.
    """

    def __init__(
        self,
        members: int,
        mode: str = "logits",
        weights: torch.Tensor | None = None,
        share: float = 1.0,
        robust: Robust = "mean",
    ) -> None:
        _check_rule(mode, robust)
        self.mode, self.share, self.robust = mode, share, robust
        self.shares = _shares(mode, weights, members, share)
        self.voted = _voted(self.shares)

    def __call__(self, logits: torch.Tensor, member_weights: torch.Tensor | None = None) -> torch.Tensor:
        """`member_weights` (members,), for odds only, whose weights are counts: how much each member counts besides."""
        if self.shares.device != logits.device:  # once: a copy at each step would make a GPU wait
            self.shares = self.shares.to(logits.device)
            self.voted = None if self.voted is None else self.voted.to(logits.device)
        return _combine(logits, self.mode, self.shares, self.voted, member_weights, self.share, self.robust)


def combine(
    logits: torch.Tensor,
    mode: str = "logits",
    weights: torch.Tensor | None = None,
    member_weights: torch.Tensor | None = None,
    share: float = 1.0,
    robust: Robust = "mean",
) -> torch.Tensor:
    """The same, where it is asked for once."""
    return Combination(len(logits), mode, weights, share, robust)(logits, member_weights)


def _check_rule(mode: str, robust: Robust) -> None:
    check_mode(mode)
    if robust not in ("mean", *robust_rules(mode)):
        known = ", ".join(("mean", *robust_rules(mode)))
        raise UsageError(
            f"the ensemble mode '{mode}' has no rule '{robust}'",
            field="judging.combine",
            fix=f"Choose one of {known}, or another ensemble mode.",
        )


def _combine(
    logits: torch.Tensor,
    mode: str,
    shares: torch.Tensor,
    voted: torch.Tensor | None,
    member_weights: torch.Tensor | None = None,
    share: float = 1.0,
    robust: Robust = "mean",
) -> torch.Tensor:
    voted = None if voted is None else voted.to(logits.device)
    if mode == "odds":
        return _only(
            odds(logits, shares.to(logits), None if member_weights is None else member_weights.to(logits), share), voted
        )
    shares = shares.to(logits).view(len(logits), 1, -1)  # (members, 1, 1 or classes)
    if robust != "mean":
        return _robust(logits, mode, shares, voted, robust)
    if mode == "logits":
        return (shares * logits).sum(0)
    return _mix(logits.log_softmax(-1), shares, voted)


def _shares(mode: str, weights: torch.Tensor | None, members: int, share: float = 1.0) -> torch.Tensor:
    """Weights as shares of one over the members (a class that nobody has keeps zeros), capped; for odds, the counts as they
    are: there the votes made of them are capped."""
    if weights is None:
        if mode in ("size", *COUNTED):
            raise TrainingError(f"the ensemble mode '{mode}' needs weights", field="weights", fix="Pass label counts.")
        weights = torch.ones(members)
    weights = weights.detach().to(torch.float64)
    total = weights.sum(0)
    fits = weights.ndim in (1, 2) and len(weights) == members
    if not fits or not weights.isfinite().all() or (weights < 0).any() or not (total > 0).any():
        raise TrainingError(
            f"ensemble weights of shape {list(weights.shape)} do not suit {members} members",
            field="weights",
            expected="finite, not negative, not all zero, one row a member",
            fix="Check the sample counts that the clients reported.",
        )
    if mode == "odds":
        return weights.to(torch.float32)
    weights = capped(weights, share)
    total = weights.sum(0)
    return (weights / total.where(total > 0, 1.0)).to(torch.float32)


def _voted(shares: torch.Tensor) -> torch.Tensor | None:
    """The classes that some member may vote for, or None where that is all of them."""
    votes = (shares > 0).any(0)
    return None if bool(votes.all()) else votes.nonzero().flatten()


def _mix(log_p: torch.Tensor, shares: torch.Tensor, voted: torch.Tensor | None) -> torch.Tensor:
    """log of the weighted mean of probabilities, renormalized per sample over the classes that anyone has seen."""
    votes = log_p + shares.log()  # a member without a vote adds exp(-inf) = 0
    votes = votes if voted is None else votes.index_select(-1, voted)
    return _placed(votes.logsumexp(0).log_softmax(-1), voted, log_p.shape[-1])


def _robust(logits: torch.Tensor, mode: str, shares: torch.Tensor, voted: torch.Tensor | None, how: Robust) -> torch.Tensor:
    """Logits, or probabilities, by a robust rule; probabilities are renormalized over the classes that anyone has seen."""
    if mode == "logits":
        return robust_values(logits, shares, how)
    scores = robust_values(logits.softmax(-1), shares, how).clamp_min(_LEAST).log()
    some = scores if voted is None else scores.index_select(-1, voted)
    return _placed(some.log_softmax(-1), voted, scores.shape[-1])


def _mix_each(logits: torch.Tensor, shares: torch.Tensor, robust: Robust = "mean") -> torch.Tensor:
    """Log-odds of the weighted mean of each class's own probability; lowest for a class that nobody may vote for."""
    if robust != "mean":
        found = robust_values(logits.sigmoid(), shares, robust).clamp(_LEAST, 1 - 1e-7)
        return torch.where(shares.sum(0) > 0, found.logit(), _FLOOR)
    yes, no = ((functional.logsigmoid(side) + shares.log()).logsumexp(0) for side in (logits, -logits))
    return torch.where(shares.sum(0) > 0, yes - no, _FLOOR)


def _only(scores: torch.Tensor, voted: torch.Tensor | None) -> torch.Tensor:
    """Scores (batch, classes) in which a class that nobody has seen is never the highest."""
    return scores if voted is None else _placed(scores.index_select(-1, voted), voted, scores.shape[-1])


def _placed(scores: torch.Tensor, voted: torch.Tensor | None, classes: int) -> torch.Tensor:
    """Scores of the classes that have votes among all classes; the others are below every one of them."""
    if voted is None:
        return scores
    floor = scores.detach().amin(-1, keepdim=True).clamp(max=0.0) + _FLOOR
    return floor.repeat(1, classes).index_copy(1, voted, scores)


# --- asking frozen members quickly ---------------------------------------------------------------------------------


@torch.no_grad()
def fast_logits(
    members: Sequence[nn.Module],
    images: torch.Tensor,
    *,
    run_map: RunMap | None = None,
    batch: int = 64,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Logits of every member for every image, (members, images, classes), on the device; members in parallel, frozen and
    folded.

    `images` are uint8, or floats in [-1, 1]. The same batches go through one compute thread a member, so the result
    has the same bits for any number of workers.
    """
    device = device or torch.device("cpu")
    # uint8 stays small until its batch comes
    inputs = images.to(device) if images.dtype == torch.uint8 else to_input(images, device)
    shape = tuple(images.shape[1:])

    @torch.no_grad()  # gradients are switched off per thread, and this runs in others
    def ask(place: int) -> torch.Tensor:
        teacher = freeze(members[place]).to(device)
        spend(forward_flops(teacher, shape) * len(images))
        return torch.cat([teacher(to_input(part, device)) for part in torch.split(inputs, batch)])

    return torch.stack((run_map or Workers().map)(ask, range(len(members))))
