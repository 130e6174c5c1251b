"""Averages that bear some members that lie, by hand-made numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from osfl.core.errors import UsageError
from osfl.core.plan import check_plan, plan_from, write_plan
from osfl.core.registry import load
from osfl.core.types import Judging, Upload
from osfl.evaluation.scores import metrics, probabilities
from osfl.ingredients.ensembles.ensemble import Ensemble, combine
from osfl.ingredients.generators import synthesis
from osfl.ingredients.inversion import trajectories
from osfl.ingredients.statistics.averaging import ROBUST, Combine, geometric_weights, robust_average
from osfl.methods.falcon import Falcon
from osfl.runtime.workers import compute_threads
from osfl.simulate.checks import small_federation
from osfl.simulate.simulation import Simulation, prepare
from tests.rounds.judging.uploads import sent


def members(*values: float) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor([value, -value], dtype=torch.float32), "seen": torch.tensor(3)} for value in values]


@pytest.mark.parametrize(
    ("how", "values", "weights", "expected"),
    [
        ("median", (1, 2, 100), (1, 1, 1), 2),
        ("median", (1, 2, 3, 100), (1, 1, 1, 1), 2.5),
        ("median", (1, 2, 100), (3, 1, 1), 1),  # who has most of the weight
        ("trimmed", (1, 2, 3, 4, 100), (1, 1, 1, 1, 1), 3),
        ("trimmed", (0, 10), (1, 1), 5),
        ("geometric", (1, 1, 1, 100), (1, 1, 1, 1), 1),
        ("geometric", (0, 1), (1, 1), 0.5),
    ],
)
def test_by_hand(how: Combine, values: tuple[float, ...], weights: tuple[float, ...], expected: float) -> None:
    found = robust_average(members(*values), weights, how)
    assert found["w"].tolist() == pytest.approx([expected, -expected], abs=1e-4) and int(found["seen"]) == 3


def test_the_geometric_median_is_a_mixture_of_members() -> None:
    rng = torch.Generator().manual_seed(0)
    some = [{"w": torch.randn(20, generator=rng)} for _ in range(6)]
    weights = geometric_weights(some, torch.ones(6, dtype=torch.float64))
    assert float(weights.sum()) == pytest.approx(1) and bool((weights >= 0).all())


@pytest.mark.parametrize("how", ROBUST)
def test_one_huge_site_does_not_move_fedavg(how: Combine) -> None:
    federation = small_federation("fedavg", "iid", 5)
    plan = replace(federation.plan, judging=Judging(combine=how))
    assert plan_from({**plan.as_json()}, "plan") == plan and f'combine = "{how}"' in write_plan(plan)
    assert plan.digest != federation.plan.digest and "judging" not in federation.plan.as_json()
    with compute_threads(1):
        method, ctx, honest = sent(federation)
        ctx = replace(ctx, plan=plan)
        huge = {name: t * 1000 if t.is_floating_point() else t for name, t in honest["client-01"].tensors.items()}
        changed = {**honest, "client-01": replace(honest["client-01"], tensors=huge)}
        first, second = (
            method.server_phase([Upload(c, "", p) for c, p in all_of.items()], ctx) for all_of in (honest, changed)
        )
    for name, tensor in first.shared.tensors.items():
        if tensor.ndim > 1:
            assert float((second.shared.tensors[name] - tensor).norm()) < 2 * float(tensor.norm())


def log(*rows: tuple[float, ...]) -> torch.Tensor:
    """Logits of members, (members, 1, classes), whose probabilities are these."""
    return torch.tensor(rows).log()[:, None]


ANSWERS = log((0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.1, 0.1, 0.8))


@pytest.mark.parametrize(
    ("mode", "how", "expected"),
    [
        ("probabilities", "median", (0.6, 0.2, 0.1)),
        (
            "probabilities",
            "trimmed",
            (0.5, 0.2, 0.8 / 3),
        ),  # of each outer member a twelfth stays
        ("logits", "median", (0.6, 0.2, 0.1)),
    ],
)
def test_answers_by_hand(mode: str, how: Combine, expected: tuple[float, ...]) -> None:
    found = combine(ANSWERS, mode, robust=how).softmax(-1)[0]
    if how == "trimmed":
        columns = [sorted(column) for column in zip(*ANSWERS[:, 0].exp().tolist(), strict=True)]
        expected = tuple((low / 12 + middle / 3 + high / 12) / (1 / 2) for low, middle, high in columns)
    torch.testing.assert_close(found, torch.tensor(expected) / sum(expected))


def test_the_geometric_median_of_answers_by_hand() -> None:
    """Three members alike and one apart: it is where the three are. Two of equal weight: between them."""
    alike = torch.cat([ANSWERS[:1]] * 3 + [ANSWERS[2:]])
    torch.testing.assert_close(
        combine(alike, "probabilities", robust="geometric").exp(), ANSWERS[0].exp(), atol=1e-4, rtol=1e-3
    )
    mean = combine(ANSWERS[1:], "logits")
    torch.testing.assert_close(combine(ANSWERS[1:], "logits", robust="geometric"), mean)


def test_weights_of_a_class_count_in_its_median() -> None:
    """Of the first class the third member has seen most, of the others nothing: there it has no vote."""
    counts = torch.tensor([[1.0, 5.0, 5.0], [1.0, 5.0, 5.0], [9.0, 0.0, 0.0]])
    found = combine(ANSWERS, "class_count", counts, robust="median").exp()[0]
    expected = torch.tensor([0.1, (0.2 + 0.3) / 2, 0.1])
    torch.testing.assert_close(found, expected / expected.sum())
    capped = combine(ANSWERS, "class_count", counts, share=0.4, robust="median").exp()[0]
    assert float(capped[0]) > 2 * float(found[0])  # with less than half of the weight it is outvoted


@pytest.mark.parametrize("how", ROBUST)
def test_classes_of_which_an_image_may_have_several(how: Combine) -> None:
    class Fixed(torch.nn.Module):
        def __init__(self, *chances: float) -> None:
            super().__init__()
            self.logits = torch.tensor(chances).logit()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits.expand(len(x), -1)

    chances = ((0.9, 0.2), (0.9, 0.2), (0.9, 0.2), (0.9, 0.2), (0.0001, 0.9999))
    together = Ensemble([Fixed(*one) for one in chances], "probabilities", several=True, robust=how)
    torch.testing.assert_close(together(torch.zeros(1, 1)).sigmoid(), torch.tensor([[0.9, 0.2]]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("mode", ["logits", "probabilities"])
@pytest.mark.parametrize("how", ROBUST)
def test_gradients_reach_the_image_through_a_robust_answer(mode: str, how: Combine) -> None:
    logits = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    combine(logits, mode, robust=how).square().sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all()) and bool(logits.grad.any())


ANSWERING = ("ensemble", "dafl", "dense", "deepinversion", "fedisca", "fedbicross", "fedmitr", "deepinversion_vit")


@pytest.mark.parametrize("name", ANSWERING)
def test_methods_that_combine_answers_have_the_rules_of_their_mode(name: str) -> None:
    plan = small_federation(name).plan
    for mode, rules in {"logits": ROBUST, "class_count": ("median", "trimmed"), "odds": ()}.items():
        settings = replace(plan.settings, ensemble=mode)
        assert tuple(load(name)(plan.task, settings).robust()) == rules
    check_plan(replace(plan, settings=replace(plan.settings, ensemble="logits"), judging=Judging(combine="geometric")))


def test_a_loud_member_decides_no_robust_ensemble() -> None:
    """One of five answers everything with its first class, as loudly as it can: the mean of logits is then its answer."""
    changes = {"ensemble": "logits", "architecture": "cnn-w4", "epochs": 12}
    federation = prepare(Simulation("ensemble", "digits", 5, "iid", "cpu", 0, changes, samples=600, image_size=8))
    with compute_threads(1):
        method, ctx, honest = sent(federation)
        weight, bias = list(honest["client-01"].tensors)[-2:]
        quiet = {weight: torch.zeros_like(honest["client-01"].tensors[weight]), bias: torch.tensor([1e4] + [0.0] * 9)}
        loud = replace(honest["client-01"], tensors={**honest["client-01"].tensors, **quiet})
        uploads = [Upload(client, "", payload) for client, payload in sorted({**honest, "client-01": loud}.items())]
        given = dict[str, float]()
        rules: tuple[Combine, ...] = ("mean", *ROBUST)
        for how in rules:
            plan = replace(ctx.plan, judging=Judging(combine=how))
            model = method.build(method.server_phase(uploads, replace(ctx, plan=plan)).shared)
            answers = probabilities(model, federation.test.images, ctx.device, ctx.map)
            given[how] = metrics(answers, federation.test.labels.numpy())["accuracy"] or 0.0
    assert given["mean"] < 0.2 and min(given[how] for how in ROBUST) > 0.6, given


def test_a_distilled_student_follows_the_robust_teacher() -> None:
    """The teachers of DENSE and its heirs, and of inversion along trajectories, keep the rule in copies and new weights."""
    rows = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]], [[900.0, 0.0]]])
    nets = [torch.nn.Identity()] * 3
    one = synthesis.Teacher(nets, "logits", torch.ones(3), watch=False, robust="median")
    assert one.combined(rows).tolist() == [[0.0, 1.0]]
    one.weigh(torch.tensor([1.0, 1.0, 1.5]))
    assert one.combined(rows).tolist() == [[0.0, 1.0]]
    two = trajectories.Teacher(("a", "b", "c"), nets, robust="median").of(nets)
    assert two.combine(rows).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("how", ROBUST)
def test_a_loud_classifier_is_not_falcon_s_teacher(how: Combine) -> None:
    """One of five clients answers every sequence with the first class for sure; the mean gives it a fifth."""
    federation = small_federation("falcon", "iid", 5, samples=200)
    plan = replace(federation.plan, settings=replace(federation.plan.settings, ensemble="uniform"))
    check_plan(replace(plan, judging=Judging(combine=how)))
    with compute_threads(1):
        method, ctx, honest = sent(replace(federation, plan=plan))
        assert isinstance(method, Falcon)
        own = honest["client-01"].tensors
        bias = next(name for name, t in own.items() if name.startswith("classifier/") and tuple(t.shape) == (10,))
        loud = {bias: own[bias] + torch.eye(10)[0] * 1e4}
        uploads = [Upload(client, "", payload) for client, payload in sorted(honest.items())]
        lied = [replace(uploads[0], payload=replace(uploads[0].payload, tensors={**own, **loud})), *uploads[1:]]
        x = method.tokens(uploads, ctx)[0]
        before, mean = (method._teacher(some, x, ctx) for some in (uploads, lied))
        robust = method._teacher(lied, x, replace(ctx, plan=replace(plan, judging=Judging(combine=how))))
    assert float((mean[:, 0] - before[:, 0]).median()) > 0.15
    assert float((robust[:, 0] - before[:, 0]).median()) < 0.05
    torch.testing.assert_close(robust.sum(1), torch.ones(len(x)))


def test_other_methods_refuse_a_rule_that_they_lack() -> None:
    with pytest.raises(UsageError, match=r"judging.combine: fedpft has no 'median'"):
        check_plan(replace(small_federation("fedpft").plan, judging=Judging(combine="median")))
    with pytest.raises(UsageError, match=r"the ensemble mode 'odds' has no rule 'median'"):
        combine(ANSWERS, "odds", torch.ones(3, 3), robust="median")
