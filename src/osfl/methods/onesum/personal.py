"""What a site makes of OneSum's release: the classes weighed as it has them, and a part of the answer from its own network.

p(c | x) = (1 - beta) softmax(tau l_c(x; lambda) + ln p_site(c)) + beta p_network(c | x). The site chooses lambda, tau and beta
on its held-out images alone: by their log-likelihood, where each step away from the default has to gain `STEP` nats over all
of them. A site with few held-out images keeps the default; accuracy would jump with every image, likelihood does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch
from torch import nn

from osfl.core.method import Context
from osfl.core.types import Payload, Shard, Task, one_by_one
from osfl.ingredients.ensembles.ensemble import fast_logits
from osfl.ingredients.statistics.site_prior import corrected_prior, site_log_prior
from osfl.ingredients.training.local import classifier, local_model
from osfl.methods.onesum.feature_map import FeatureMap
from osfl.methods.onesum.head import Classifier, Head, Moments, head_of, lda
from osfl.methods.onesum.settings import Settings, has_network

FACTORS = (1.0, 3.0, 10.0, 30.0)  # on the release's lambda: a site of few classes wants more shrinkage than all sites together
SOFTNESS = (0.5, 1.0, 2.0)  # on the setting `temperature`
BLENDS = (0.0, 0.25, 0.5)  # beta
STEP = 2.0  # nats that the held-out images must gain together for each step on one of these grids
MOST = 0.5  # lambda up to which the default raises it; on photographs the release's own is above
NETWORK = "network/"  # the site's own network in its payload
_LEAST = -20.0  # log-probability below which an image is not worse: one outlier decides nothing


@dataclass(frozen=True)
class Choice:
    """How a site answers."""

    factor: float  # on the release's lambda
    softness: float  # on `temperature`
    blend: float  # beta


def answer_of_site(method: FeatureMap, shared: Payload, shard: Shard, ctx: Context) -> Payload:
    """tau l_c + ln(n_kc + 0.01), and beside it the site's own network."""
    head = head_of(shared.tensors)
    prior = corrected_prior(site_log_prior(shard.train.labels, len(method.task.classes)), head.prior)
    network = _network(shard, method.task, method.settings, ctx)
    heads = offered(shared.tensors, head)
    choice = _chosen(method, heads, prior, network, float(shared.facts["shrinkage"]), shard, ctx)
    softness = torch.tensor([choice.softness * method.settings.temperature], dtype=torch.float64)
    own = replace(heads[choice.factor], prior=prior, temperature=softness)
    kept = {name: value for name, value in shared.tensors.items() if not name.startswith("sites/")}
    facts = {**shared.facts, "site": asdict(choice)}
    if network is None or not choice.blend:
        return Payload({**kept, **own.tensors()}, facts)
    weights = {NETWORK + name: value for name, value in network.tensors.items()}
    return Payload({**kept, **own.tensors(), **weights}, {**facts, "network": dict(network.facts)})


def _network(shard: Shard, task: Task, settings: Settings, ctx: Context) -> Payload | None:
    """The site's own network; none where the site has one class, of which a network learns nothing."""
    if not has_network(settings) or len(set(shard.train.labels.tolist())) < 2:
        return None
    return local_model(shard, task, settings, ctx)


def _chosen(
    method: FeatureMap,
    heads: Mapping[float, Head],
    prior: torch.Tensor,
    network: Payload | None,
    shrinkage: float,
    shard: Shard,
    ctx: Context,
) -> Choice:
    """By the site's held-out images where it has any and the plan leaves it to them."""
    if method.settings.blend != "auto":
        return Choice(1.0, 1.0, float(method.settings.blend) if network is not None else 0.0)
    if not len(shard.val) or ctx.plan.privacy is not None:  # in a private round they are in the sums
        start = default_choice(network is not None, shrinkage)
        return start if start.factor in heads else replace(start, factor=1.0)
    features, tau = method.encode(shard.val.images, ctx), method.settings.temperature
    plain = {f: replace(h, prior=torch.zeros_like(prior), temperature=torch.ones(1)) for f, h in heads.items()}
    scores = {f: tau * Classifier(one)(features).double() for f, one in plain.items()}
    of_network = None
    if network is not None:
        of_network = (
            fast_logits([classifier(network, method.task)], shard.val.images, run_map=one_by_one)[0].double().log_softmax(1)
        )
    return choose({0: prior, **scores}, of_network, shard.val.labels, shrinkage)


def default_choice(network: bool, shrinkage: float) -> Choice:
    """Found on validation images of blood cells, lesions and photographs, one for all; see the card. `shrinkage`: the
    release's lambda. Beside a network it is tripled, unless it is large already."""
    if not network:
        return Choice(1.0, 1.0, 0.0)
    return Choice(3.0 if 3 * shrinkage <= MOST else 1.0, 1.0, 0.25)


def heads_for_sites(found: Moments, shrinkage: float) -> dict[str, torch.Tensor]:
    """Heads of more shrinkage beside the release's own, so that a site can choose without the sums."""
    heads = [lda(found, factor * shrinkage) for factor in FACTORS[1:]]
    return {"sites/weight": torch.stack([h.weight for h in heads]), "sites/bias": torch.stack([h.bias for h in heads])}


def offered(tensors: Mapping[str, torch.Tensor], head: Head) -> dict[float, Head]:
    """The heads of a release by their factor on lambda; the release's own alone where there are no others."""
    if "sites/weight" not in tensors:
        return {1.0: head}
    others = zip(FACTORS[1:], tensors["sites/weight"], tensors["sites/bias"], strict=True)
    return {1.0: head, **{f: Head(weight, bias, head.prior, head.temperature) for f, weight, bias in others}}


def choose(
    scores: Mapping[float, torch.Tensor], network: torch.Tensor | None, labels: torch.Tensor, shrinkage: float
) -> Choice:
    """The most likely choice, and the default where that is not clear. `scores`: tau l_c of each factor on lambda, (n, classes)
    and beside them under the key 0 the site's log prior, (classes,); `network`: log p of the site's network, (n, classes)."""
    start = default_choice(network is not None, shrinkage)
    factors = [factor for factor in scores if factor > 0]
    start = start if start.factor in factors else Choice(1.0, start.softness, start.blend)
    grid = [Choice(*one) for one in product(factors, SOFTNESS, BLENDS if network is not None else (0.0,))]

    def cost(choice: Choice) -> float:
        answers = (choice.softness * scores[choice.factor] + scores[0]).log_softmax(1)
        if network is not None:
            answers = mixed(answers, network, choice.blend)
        likelihood = answers.gather(1, labels[:, None]).clamp_min(_LEAST).sum()
        return STEP * steps(choice, start) - float(likelihood)

    return min(sorted(grid, key=lambda choice: steps(choice, start)), key=cost)


def steps(choice: Choice, start: Choice) -> int:
    """How far a choice is from the default, in steps on the three grids."""
    pairs: Sequence[tuple[tuple[float, ...], float, float]] = (
        (FACTORS, choice.factor, start.factor),
        (SOFTNESS, choice.softness, start.softness),
        (BLENDS, choice.blend, start.blend),
    )
    return sum(abs(grid.index(one) - grid.index(other)) for grid, one, other in pairs)


def mixed(answers: torch.Tensor, network: torch.Tensor, blend: float) -> torch.Tensor:
    """ln((1 - beta) p + beta q) from ln p and ln q: who is sure and wrong costs at most its share."""
    if blend <= 0:
        return answers
    if blend >= 1:
        return network
    return torch.logaddexp(answers + math.log(1 - blend), network + math.log(blend))


class Blended(nn.Module):
    """The log-probabilities of both, mixed; images in."""

    def __init__(self, summed: nn.Module, network: nn.Module, blend: float) -> None:
        super().__init__()
        self.summed, self.network, self.blend = summed, network, blend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mixed(self.summed(x).log_softmax(-1), self.network(x).log_softmax(-1), self.blend)
