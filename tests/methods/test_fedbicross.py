"""FedBiCross: its three stages by their invariants (methods sheet 3.7, tests 16 to 18), its variants, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from osfl.errors import TrainingError
from osfl.ingredients.trajectories import Lessons
from osfl.methods.fedbicross import FedBiCross, Settings
from osfl.plan import resolve_settings
from osfl.protocol import Context, Release, Upload
from osfl.workers import compute_threads

from .conftest import TASK, context, shard

SMOKE: Settings = resolve_settings(FedBiCross, "smoke")
CLIENTS = "abc"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the walk runs: more threads would only wait for each other on layers this small."""
    with compute_threads(1):
        yield


def uploads(settings: Settings, clients: str = CLIENTS, same: bool = False) -> list[Upload]:
    method = FedBiCross(TASK, settings)
    return [Upload(c, "", method.client_phase(shard("a" if same else c, seed=0 if same else i), context(settings, clients)))
            for i, c in enumerate(clients)]  # fmt: skip


def run(settings: Settings, ups: list[Upload] | None = None, clients: str = CLIENTS) -> Release:
    return FedBiCross(TASK, settings).server_phase(ups or uploads(settings, clients), context(settings, clients))


def test_defaults_are_the_published_ones() -> None:
    s = Settings()
    assert (s.steps, s.images, s.pixel_lr, s.tv, s.bn, s.temperature) == (500, 256, 0.05, 2.5e-5, 10.0, 20.0)
    assert (s.gamma, s.delta, s.personal_epochs, s.validation, s.repetitions) == (0.5, 0.3, 10, 0.2, 1)


def test_one_model_a_cluster_reaches_its_clients() -> None:
    release = run(replace(SMOKE, clusters=2))
    groups, weights = release.shared.facts["clusters"], torch.tensor(release.shared.facts["weights"])
    assert sorted(c for group in groups for c in group) == list(CLIENTS) and len(groups) == 2
    assert torch.allclose(weights.sum(1), torch.ones(2), atol=1e-5) and bool((weights >= 0).all())
    for k, group in enumerate(groups):
        assert {release.personal[client].facts["cluster"] for client in group} == {k}
        first = release.personal[group[0]].tensors
        assert all(torch.equal(first[n], t) for c in group for n, t in release.personal[c].tensors.items())


@pytest.mark.parametrize("weights, expected", [("intra", [[1, 0], [0, 1]]), ("uniform", [[0.5, 0.5], [0.5, 0.5]])])
def test_fixed_weights_stay(weights: str, expected: list[list[float]]) -> None:
    assert run(replace(SMOKE, clusters=2, weights=weights)).shared.facts["weights"] == expected  # type: ignore[arg-type]


def test_one_cluster_has_weight_one() -> None:
    assert run(replace(SMOKE, clusters=1)).shared.facts["weights"] == [[1.0]]


def test_identical_clients_fall_into_one_cluster() -> None:
    """Duplicates never part, whatever K; so there is one cluster with weight one."""
    settings = replace(SMOKE, clusters=2)
    release = run(settings, uploads(settings, "ab", same=True), "ab")
    assert release.shared.facts["clusters"] == [["a", "b"]] and release.shared.facts["weights"] == [[1.0]]


def test_identical_clusters_keep_uniform_weights() -> None:
    """The same images and answers in every cluster: equal gradients, so the learned weights do not move."""
    settings = replace(SMOKE, clusters=2, repetitions=1)
    method, ups = FedBiCross(TASK, settings), uploads(settings)
    ctx = context(settings, CLIENTS)
    members = [method.build(u.payload) for u in ups]
    maker = method._teacher(ups, members, [0, 1])
    lessons = Lessons([maker], ups, method, ctx).take(range(1))[0] * 3
    path = method._follow(1, method._learner(ups, [0], ctx), lessons, torch.full((3,), 1 / 3).double(), *method._split(ctx), 0)
    assert torch.allclose(path, torch.full_like(path, 1 / 3), atol=1e-9)


def test_learned_weights_prefer_what_helps_the_own_validation() -> None:
    """One cluster teaches what the own validation images say, the other the opposite: the first gets all the weight."""
    from osfl.ingredients.trajectories import Lesson

    settings = replace(SMOKE, clusters=2, steps=16, temperature=4.0)
    method, ups, ctx = FedBiCross(TASK, settings), uploads(settings), context(settings, CLIENTS)
    maker = method._teacher(ups, [method.build(u.payload) for u in ups], [0])
    made = Lessons([maker], ups, method, ctx).take(range(1))[0][0]
    says = torch.tensor([8.0, 0.0, 0.0]).expand_as(made.clean)
    own, bad = (Lesson(made.trajectory, sign * says, sign * says) for sign in (1, -1))
    start = torch.full((2,), 0.5).double()
    path = method._follow(0, method._learner(ups, [0], ctx), [own, bad], start, *method._split(ctx), 0)
    assert float(path[-1, 0]) > 0.9


def test_the_split_is_fixed_and_complete() -> None:
    settings = replace(SMOKE, images=50)
    method = FedBiCross(TASK, settings)
    train, val = method._split(context(settings, CLIENTS))
    assert len(val) == 10 and sorted([*train.tolist(), *val.tolist()]) == list(range(50))
    again = method._split(context(settings, "xyz"))
    assert torch.equal(train, again[0]) and torch.equal(val, again[1])


@pytest.mark.parametrize(
    "change",
    [{"weights": "similarity"}, {"clustering": "parameters"}, {"clustering": "hierarchical"}, {"raw_weights": True},
     {"noise_teacher": "batch_stats"}, {"combine": "class_count", "labels": "seen"}, {"init": "average"}, {"every": 2}],
)  # fmt: skip
def test_variants_run(change: dict[str, Any]) -> None:
    release = run(replace(SMOKE, repetitions=1, clusters=2, **change))
    assert all(bool(t.isfinite().all()) for p in release.personal.values() for t in p.tensors.values() if t.is_floating_point())


def test_cnn_and_resnet_clients_together() -> None:
    settings = replace(SMOKE, architecture="a:cnn-w4,*:resnet18-w8", clusters=2, repetitions=1)
    release, method = run(settings), FedBiCross(TASK, settings)
    own = method.personalize(release, shard("a"), context(settings, CLIENTS))
    assert method.build(own)(torch.zeros(2, *TASK.image)).shape == (2, 3)


# --- stage 3 ---


def test_personal_loss_by_hand() -> None:
    said = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.5]])
    cluster, local, labels = said.flip(0), -said, torch.tensor([0, 2])
    loss = FedBiCross(TASK, SMOKE)._personal_loss(said, labels, torch.stack([cluster, local]))

    def kl(teacher: torch.Tensor) -> torch.Tensor:
        p = teacher.softmax(-1)
        return (p * (p.log() - said.log_softmax(-1))).sum(-1).mean()

    assert float(loss) == pytest.approx(float(functional.cross_entropy(said, labels) + 0.5 * kl(cluster) + 0.3 * kl(local)))


def test_kl_terms_vanish_when_all_models_agree() -> None:
    said, labels = torch.randn((4, 3)), torch.tensor([0, 1, 2, 0])
    loss = FedBiCross(TASK, SMOKE)._personal_loss(said, labels, torch.stack([said, said]))
    assert float(loss) == pytest.approx(float(functional.cross_entropy(said, labels)), abs=1e-6)


def test_without_personalisation_the_cluster_s_model_is_used() -> None:
    settings = replace(SMOKE, personalize=False)
    release = run(settings)
    own = FedBiCross(TASK, settings).personalize(release, shard("a"), context(settings, CLIENTS))
    assert all(torch.equal(own.tensors[name], tensor) for name, tensor in release.personal["a"].tensors.items())


def test_personalisation_learns_the_client_s_images() -> None:
    settings = replace(SMOKE, epochs=10, batch_size=8, personal_epochs=10, personal_lr=0.05, personal_batch=8)
    method, release = FedBiCross(TASK, settings), run(settings)
    from osfl.models.inputs import to_input

    data = shard("a").train
    own = method.build(method.personalize(release, shard("a"), context(settings, CLIENTS)))
    with torch.no_grad():
        assert float((own(to_input(data.images)).argmax(1) == data.labels).float().mean()) > 0.8


# --- what is shown and what is refused ---


def test_figures() -> None:
    shown: dict[str, Any] = {}
    settings = replace(SMOKE, clusters=2, labels="seen", combine="class_count")
    plain = context(settings, CLIENTS)
    ctx = Context(plain.plan, plain.device, show=lambda title, figure: shown.__setitem__(title, figure))
    FedBiCross(TASK, settings).server_phase(uploads(settings), ctx)
    kinds = {title: figure["kind"] for title, figure in shown.items()}
    assert kinds == {
        "Synthetic images of cluster 1": "gallery", "Synthetic images of cluster 2": "gallery",
        "Cross-cluster weights": "heatmap", "Weights while learning": "lines", "Clusters": "heatmap",
        "Entropy of the teachers": "histogram",
    }  # fmt: skip
    assert shown["Clusters"]["columns"] == list(TASK.classes)
    assert sum(shown["Entropy of the teachers"]["series"]["own cluster"]) == 2 * settings.images


def test_settings_that_cannot_work_are_named() -> None:
    wrong = replace(SMOKE, steps=0, images=4, clusters=4, personal_epochs=0, validation=1.0, gamma=-1.0, personal_lr=0.0)
    named = [word.split("'")[1] for word in FedBiCross(TASK, wrong).problems(3)]
    assert named == ["images", "steps", "clusters", "validation", "personal_epochs", "gamma", "personal_lr"]


def test_fewer_uploads_than_clusters_name_the_setting() -> None:
    settings = replace(SMOKE, clusters=3)
    with pytest.raises(TrainingError, match="more clusters than clients") as caught:
        run(settings, uploads(settings)[:2])
    assert caught.value.field == "clusters"
