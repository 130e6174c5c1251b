"""FedBiCross: its three stages by their invariants, its variants, and what is refused."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Release, Upload
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.inversion.trajectories import Learner, Lesson, Lessons, Trajectory
from osfl.ingredients.statistics.simplex import project
from osfl.methods.fedbicross import FedBiCross, Settings
from osfl.models.build import build_model
from osfl.models.folding import freeze
from osfl.models.inputs import to_input
from osfl.models.naming import named
from osfl.models.norms import recalibrated_bn
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

SMOKE: Settings = resolve_settings(FedBiCross, "smoke")
CLIENTS = "abc"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a run: more threads would only wait for each other on layers this small."""
    with compute_threads(1):
        yield


def uploads(settings: Settings, clients: str = CLIENTS, same: bool = False) -> list[Upload]:
    method = FedBiCross(TASK, settings)
    return [
        Upload(c, "", method.client_phase(shard("a" if same else c, seed=0 if same else i), context(settings, clients)))
        for i, c in enumerate(clients)
    ]


def run(settings: Settings, ups: list[Upload] | None = None, clients: str = CLIENTS) -> Release:
    return FedBiCross(TASK, settings).server_phase(ups or uploads(settings, clients), context(settings, clients))


def watching(settings: Settings, shown: dict[str, Any]) -> Context:
    plain = context(settings, CLIENTS)
    return Context(plain.plan, plain.device, show=lambda title, figure: shown.__setitem__(title, figure))


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def constant(*logits: float) -> nn.Module:
    """A network that gives the same answer to every image."""
    network = build_model("cnn-w4", TASK, rng(0)).eval()
    with torch.no_grad():
        network.head.weight.zero_()  # type: ignore[union-attr, operator]
        network.head.bias.copy_(torch.tensor(logits))  # type: ignore[union-attr, operator]
    return network


def uploaded(members: Sequence[nn.Module]) -> list[Upload]:
    facts = {"architecture": "cnn-w4", "samples": 24}
    return [Upload(c, "", Payload(named(member, "model"), facts)) for c, member in zip(CLIENTS, members, strict=False)]


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
    maker = method._teacher(ups, members, [0, 1], ctx)
    lessons = Lessons([maker], ups, method, ctx).take(range(1))[0] * 3
    path = method._follow(1, method._learner(ups, [0], ctx), lessons, torch.full((3,), 1 / 3).double(), *method._split(ctx), 0)
    assert torch.allclose(path, torch.full_like(path, 1 / 3), atol=1e-9)


def test_learned_weights_prefer_what_helps_the_own_validation() -> None:
    """One cluster teaches what the own validation images say, the other the opposite: the first gets all the weight."""
    settings = replace(SMOKE, clusters=2, steps=16, temperature=4.0)
    method, ups, ctx = FedBiCross(TASK, settings), uploads(settings), context(settings, CLIENTS)
    maker = method._teacher(ups, [method.build(u.payload) for u in ups], [0], ctx)
    made = Lessons([maker], ups, method, ctx).take(range(1))[0][0]
    message = torch.tensor([8.0, 0.0, 0.0]).expand_as(made.clean)
    own, bad = (Lesson(made.trajectory, sign * message, sign * message) for sign in (1, -1))
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
    [
        {"weights": "similarity"},
        {"clustering": "parameters"},
        {"clustering": "hierarchical"},
        {"raw_weights": True},
        {"noise_teacher": "batch_stats"},
        {"ensemble": "class_count", "labels": "seen"},
        {"init": "average"},
        {"every": 2},
    ],
)
def test_variants_run(change: dict[str, Any]) -> None:
    release = run(replace(SMOKE, repetitions=1, clusters=2, **change))
    assert all(bool(t.isfinite().all()) for p in release.personal.values() for t in p.tensors.values() if t.is_floating_point())


def test_cnn_and_resnet_clients_together() -> None:
    settings = replace(SMOKE, architecture="a:cnn-w4,*:resnet18-w8", clusters=2, repetitions=1)
    release, method = run(settings), FedBiCross(TASK, settings)
    own = method.personalize(release, shard("a"), context(settings, CLIENTS))
    assert method.build(own)(torch.zeros(2, *TASK.image)).shape == (2, 3)


# --- stage 1: who is with whom, and the weights to begin with ---


@pytest.mark.parametrize("clients, clusters", [(2, 2), (5, 3), (10, 4), (20, 5)])
def test_unless_set_there_are_as_many_clusters_as_in_the_paper_s_tables(clients: int, clusters: int) -> None:
    members = [build_model("cnn-w4", TASK, rng(i)).eval() for i in range(clients)]
    groups, weights = FedBiCross(TASK, SMOKE)._clusters(members, context(SMOKE, CLIENTS))
    assert len(groups) == clusters
    assert torch.equal(weights, torch.full((clusters, clusters), 1 / clusters, dtype=torch.float64))


@pytest.mark.parametrize(
    "clustering, groups",
    [("predictions", [[0, 1], [2]]), ("hierarchical", [[0, 2], [1]]), ("parameters", [[0, 2], [1]])],
)
def test_clients_are_grouped_by_what_the_setting_says(clustering: str, groups: list[list[int]]) -> None:
    """The first answers as the second does, but has nearly the third's weights."""
    members = [constant(5.0, 0.0, 0.0), constant(5.0, 0.0, 0.0), constant(0.0, 5.0, 0.0)]
    with torch.no_grad():
        members[1].stages[0].conv.weight.add_(100.0)  # type: ignore[index, union-attr]
    settings = replace(SMOKE, clusters=2, clustering=clustering)  # type: ignore[arg-type]
    assert FedBiCross(TASK, settings)._clusters(members, context(settings, CLIENTS))[0] == groups


def test_similarity_weights_by_hand() -> None:
    """256 equal answers are 16 times as far apart as one is; the weights fall with the distance and stay as they are."""
    output = [(0.0, 0.0, 0.0), (0.2, 0.0, 0.0), (0.0, 0.0, 0.6)]
    points = torch.tensor(output, dtype=torch.float64).softmax(-1)
    apart = [[16 * math.dist(one.tolist(), other.tolist()) for other in points] for one in points]
    expected = [[math.exp(-gap) / sum(math.exp(-other) for other in row) for gap in row] for row in apart]
    settings = replace(SMOKE, clusters=3, weights="similarity", repetitions=1)
    released = run(settings, uploaded([constant(*logits) for logits in output])).shared.facts["weights"]
    assert torch.allclose(torch.tensor(released), torch.tensor(expected), atol=1e-5)
    assert expected[0][1] > 2 * expected[0][2]


# --- stage 2: the bi-level step ---


def lessons_by_hand(steps: int = 4, n: int = 8) -> list[Lesson]:
    times = tuple((t + 1) / steps for t in range(steps))

    def one(j: int) -> Lesson:
        images = torch.randn((steps, n, *TASK.image), generator=rng(j)) + j
        clean, noisy = 6 * torch.randn((2, steps, n, 3), generator=rng(10 + j))
        return Lesson(Trajectory(images, times, torch.arange(n) % 3), clean, noisy)

    return [one(j) for j in range(3)]


def loss_by_hand(
    network: nn.Module, at: Mapping[str, torch.Tensor], one: Lesson, place: int, index: torch.Tensor
) -> torch.Tensor:
    output = torch.func.functional_call(network, dict(at), (one.trajectory.images[place][index],))
    share = 1 - one.trajectory.times[place]
    return share * kd_loss(one.noisy[place][index], output, 4.0) + (1 - share) * kd_loss(one.clean[place][index], output, 4.0)


@pytest.mark.parametrize("k, raw, clip", [(0, False, 0.0), (0, True, 0.0), (2, False, 0.0), (2, True, 0.0), (2, False, 0.5)])
def test_the_bilevel_step_descends_on_the_own_validation_loss_of_the_moved_student(k: int, raw: bool, clip: float) -> None:
    """The slope of L_val(G - η Σ_j w_j g_j) in w, which autograd finds by itself through the inner step."""
    settings = replace(SMOKE, weight_lr=0.1 if raw else 0.05, raw_weights=raw, student_clip=clip)
    lessons, lr, train, val = lessons_by_hand(), 0.05, torch.arange(6), torch.arange(6, 8)
    network = build_model("cnn-w4", TASK, rng(0)).train()
    learner, at = Learner(copy.deepcopy(network), 4.0), dict(network.named_parameters())
    weights = torch.tensor([0.5, 0.2, 0.3], requires_grad=True)
    slopes = [torch.autograd.grad(loss_by_hand(network, at, one, 1, train), list(at.values())) for one in lessons]
    total = [sum(w * g for w, g in zip(weights, parts, strict=True)) for parts in zip(*slopes, strict=True)]
    size = torch.stack([part.norm() for part in total]).norm()
    moved = {name: at[name] - lr * part * (clip / size if clip else 1.0) for name, part in zip(at, total, strict=True)}
    (slope,) = torch.autograd.grad(loss_by_hand(network, moved, lessons[k], 1, val), weights)
    start = weights.detach().double()
    expected = project(start - settings.weight_lr * slope.double() / (1.0 if raw else float(slope.abs().max())))
    learned = FedBiCross(TASK, settings)._bilevel_step(k, learner, lessons, start, 1, train, val, lr)
    assert all(torch.allclose(p, moved[name], atol=1e-5) for name, p in learner.model.named_parameters())
    assert bool(size > clip) and torch.allclose(learned, expected, atol=1e-4)
    assert float((learned - start).abs().max()) > 0.02


def test_statistics_follow_only_clusters_with_a_weight() -> None:
    """Nor do they follow the validation images, whatever is learned on them."""
    lessons, train, val = lessons_by_hand(), torch.arange(6), torch.arange(6, 8)
    network = build_model("cnn-w4", TASK, rng(0))
    learner = Learner(copy.deepcopy(network), 4.0)
    FedBiCross(TASK, SMOKE)._bilevel_step(2, learner, lessons, torch.tensor([0.0, 1.0, 0.0]), 1, train, val, 0.05)
    network.train()(lessons[1].trajectory.images[1][train])
    found, expected = ({n: b for n, b in m.named_buffers() if "running" in n} for m in (learner.model, network))
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items()) and expected


def test_weights_go_on_from_repetition_to_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    follow = FedBiCross._follow

    def noted(self: FedBiCross, k: int, learner: Learner, lessons: Sequence[Lesson], weights: torch.Tensor, *rest: Any) -> Any:
        path = follow(self, k, learner, lessons, weights, *rest)
        visited[rest[-1], k] = weights.clone(), path
        return path

    monkeypatch.setattr(FedBiCross, "_follow", noted)
    shown: dict[str, Any] = {}
    settings = replace(SMOKE, clusters=2, repetitions=3)
    release = FedBiCross(TASK, settings).server_phase(uploads(settings), watching(settings, shown))
    assert sorted(visited) == [(repetition, k) for repetition in range(3) for k in range(2)]
    for k in range(2):
        assert visited[0, k][0].tolist() == [0.5, 0.5]
        assert all(torch.equal(visited[r + 1, k][0], visited[r, k][1][-1]) for r in range(2))
        assert not torch.equal(visited[2, k][0], visited[0, k][0])
        assert release.shared.facts["weights"][k] == pytest.approx(visited[2, k][1][-1].tolist(), abs=1e-6)
        for j in range(2):
            line = shown["Weights while learning"]["series"][f"cluster {k + 1} from cluster {j + 1}"]
            assert line == torch.cat([visited[r, k][1][:, j] for r in range(3)]).tolist()


# --- stage 3 ---


@pytest.mark.parametrize("recalibrate", [False, True])
def test_one_step_of_stage_three_by_hand(recalibrate: bool) -> None:
    """From the cluster's model, one SGD step on CE + 0.5 KL(cluster || own) + 0.3 KL(local || own) over all images."""
    settings = replace(
        SMOKE, architecture="cnn-w4", clip=0.0, personal_lr=0.1, personal_batch=24, recalibrate_personal_bn=recalibrate
    )
    method, mine, ctx = FedBiCross(TASK, settings), shard("a"), context(settings, CLIENTS)
    images, labels = to_input(mine.train.images), mine.train.labels
    cluster = build_model("cnn-w4", TASK, rng(5))
    with torch.no_grad():
        cluster.train()(torch.randn((16, *TASK.image), generator=rng(6)))
    release = Release(Payload({}), {"a": Payload(named(cluster, "model"), {"architecture": "cnn-w4", "cluster": 0})})
    local = method.build(method.client_phase(mine, ctx))
    own = recalibrated_bn(cluster, mine.train.images) if recalibrate else copy.deepcopy(cluster).eval()
    guides = [model(images).softmax(-1).detach() for model in (own, local)]
    output = own.train()(images)
    pulls = [(p * (p.log() - output.log_softmax(-1))).sum(-1).mean() for p in guides]
    (functional.cross_entropy(output, labels) + 0.5 * pulls[0] + 0.3 * pulls[1]).backward()
    with torch.no_grad():
        for parameter in own.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
    got = method.personalize(release, mine, ctx).tensors
    assert all(torch.allclose(got[name], tensor, atol=1e-5) for name, tensor in named(own, "model").items())


def test_without_a_server_stage_three_begins_at_the_own_upload() -> None:
    """The control: its model is its own, and what it learns is what stage 3 makes of that."""
    settings = replace(SMOKE, architecture="cnn-w4", server="none")
    method, mine, ctx = FedBiCross(TASK, settings), shard("a"), context(settings, CLIENTS)
    sent = {name: method.client_phase(shard(name), ctx) for name in CLIENTS}
    release = method.server_phase([Upload(name, "", payload) for name, payload in sent.items()], ctx)
    assert {name: part.tensors for name, part in release.personal.items()} == {name: p.tensors for name, p in sent.items()}
    by_hand = Release(Payload({}), {"a": Payload(sent["a"].tensors, {"architecture": "cnn-w4"})})
    got, expected = (method.personalize(one, mine, ctx).tensors for one in (release, by_hand))
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert any(not torch.equal(got[name], value) for name, value in sent["a"].tensors.items())


@pytest.mark.parametrize(("schedule", "rates"), [("constant", (1, 1, 1)), ("cosine", (1, 0.75, 0.25)), ("steps", (1, 1, 0.1))])
def test_stage_three_has_momentum_and_its_own_schedule(schedule: Any, rates: tuple[float, ...]) -> None:
    """Three epochs of one batch: v <- 0.9 v + g, p <- p - rate v, with the rate of each epoch."""
    settings = replace(
        SMOKE,
        architecture="cnn-w4",
        clip=0.0,
        schedule="constant" if schedule != "constant" else "cosine",  # of local training: another one
        personal_lr=0.1,
        personal_batch=24,
        personal_epochs=3,
        personal_schedule=schedule,
    )
    method, mine, ctx = FedBiCross(TASK, settings), shard("a"), context(settings, CLIENTS)
    own, guides = build_model("cnn-w4", TASK, rng(5)), torch.randn((2, 24, 3), generator=rng(6))
    expected = copy.deepcopy(own).train()
    velocity = [torch.zeros_like(p) for p in expected.parameters()]
    for rate in rates:
        loss = method._personal_loss(expected(to_input(mine.train.images)), mine.train.labels, guides)
        slopes = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for p, v, slope in zip(expected.parameters(), velocity, slopes, strict=True):
                v.mul_(0.9).add_(slope)
                p.sub_(0.1 * rate * v)
    method._fine_tune(own, mine, guides, ctx)
    assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(own.parameters(), expected.parameters(), strict=True))
    assert not own.training


def test_personal_loss_by_hand() -> None:
    output = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.5]])
    cluster, local, labels = output.flip(0), -output, torch.tensor([0, 2])
    loss = FedBiCross(TASK, SMOKE)._personal_loss(output, labels, torch.stack([cluster, local]))

    def kl(teacher: torch.Tensor) -> torch.Tensor:
        p = teacher.softmax(-1)
        return (p * (p.log() - output.log_softmax(-1))).sum(-1).mean()

    assert float(loss) == pytest.approx(float(functional.cross_entropy(output, labels) + 0.5 * kl(cluster) + 0.3 * kl(local)))


def test_kl_terms_vanish_when_all_models_agree() -> None:
    output, labels = torch.randn((4, 3)), torch.tensor([0, 1, 2, 0])
    loss = FedBiCross(TASK, SMOKE)._personal_loss(output, labels, torch.stack([output, output]))
    assert float(loss) == pytest.approx(float(functional.cross_entropy(output, labels)), abs=1e-6)


def test_without_personalization_the_cluster_s_model_is_used() -> None:
    settings = replace(SMOKE, personalize=False)
    release = run(settings)
    own = FedBiCross(TASK, settings).personalize(release, shard("a"), context(settings, CLIENTS))
    assert all(torch.equal(own.tensors[name], tensor) for name, tensor in release.personal["a"].tensors.items())


def test_personalization_learns_the_client_s_images() -> None:
    settings = replace(SMOKE, epochs=10, batch_size=8, personal_epochs=10, personal_lr=0.05, personal_batch=8)
    method, release = FedBiCross(TASK, settings), run(settings)
    data = shard("a").train
    own = method.build(method.personalize(release, shard("a"), context(settings, CLIENTS)))
    with torch.no_grad():
        assert float((own(to_input(data.images)).argmax(1) == data.labels).float().mean()) > 0.8


# --- what is shown and what is refused ---


def test_figures() -> None:
    shown: dict[str, Any] = {}
    settings = replace(SMOKE, clusters=2, labels="seen", ensemble="class_count")
    FedBiCross(TASK, settings).server_phase(uploads(settings), watching(settings, shown))
    kinds = {title: figure["kind"] for title, figure in shown.items()}
    assert kinds == {
        "Synthetic images of cluster 1": "gallery",
        "Synthetic images of cluster 2": "gallery",
        "Cross-cluster weights": "heatmap",
        "Weights while learning": "lines",
        "Clusters": "groups",
        "Entropy of the teachers": "histogram",
    }
    clusters = shown["Clusters"]
    assert sorted(client for clients in clusters["groups"].values() for client in clients) == list(CLIENTS)
    assert clusters["classes"] == list(TASK.classes)
    assert {sum(row) for row in clusters["counts"].values()} == {len(shard("a").train)}
    assert sum(shown["Entropy of the teachers"]["series"]["own cluster"]) == 2 * settings.images


def test_figures_say_who_learns_from_whom_and_which_teacher_is_undecided() -> None:
    """Two clients that are each sure of another class: together they waver between two (entropy log 2), alone never."""
    members = [constant(20.0, 0.0, 0.0), constant(0.0, 20.0, 0.0)]
    shown: dict[str, Any] = {}
    weights = torch.tensor([[0.7, 0.3], [0.1, 0.9]], dtype=torch.float64)
    history = torch.stack([torch.full((2, 2), 0.5, dtype=torch.float64), weights], 1)
    pictures = [(torch.randn((6, *TASK.image), generator=rng(k)), torch.arange(6) % 3) for k in range(2)]
    FedBiCross(TASK, SMOKE)._show(uploaded(members), members, [[0], [1]], weights, history, pictures, watching(SMOKE, shown))
    table = shown["Cross-cluster weights"]
    assert (table["row_title"], table["column_title"]) == ("student", "learns from")
    assert table["values"] == [[0.7, 0.3], [0.1, 0.9]]
    assert shown["Weights while learning"]["series"] == {
        "cluster 1 from cluster 1": [0.5, 0.7],
        "cluster 1 from cluster 2": [0.5, 0.3],
        "cluster 2 from cluster 1": [0.5, 0.1],
        "cluster 2 from cluster 2": [0.5, 0.9],
    }
    counted = shown["Entropy of the teachers"]["series"]
    torn = int(20 * math.log(2) / math.log(3))
    assert [i for i, count in enumerate(counted["all clients"]) if count] == [torn] and counted["all clients"][torn] == 12
    assert counted["own cluster"] == [12, *[0] * 19]


def test_each_network_is_frozen_once_for_the_figure_not_once_for_each_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With n clients and the root of n clusters that was most of the server's time."""
    members = [constant(20.0, 0.0, 0.0), constant(0.0, 20.0, 0.0), constant(0.0, 0.0, 20.0)]
    pictures = [(torch.randn((2 + k, *TASK.image), generator=rng(k)), torch.zeros(2 + k, dtype=torch.long)) for k in range(2)]
    frozen: list[Any] = []

    def watched(model: Any) -> Any:
        frozen.append(model)
        return freeze(model)

    monkeypatch.setattr("osfl.ingredients.ensembles.ensemble.freeze", watched)
    method, ctx = FedBiCross(TASK, SMOKE), context(SMOKE, CLIENTS)
    series = method._entropy(uploaded(members), members, [[0, 1], [2]], pictures, ctx)["series"]
    assert len(frozen) == 3 and isinstance(series, dict) and {sum(counts) for counts in series.values()} == {5}
    assert series["own cluster"][0] == 3  # those of the second cluster, whose only client never wavers


@pytest.mark.parametrize("classes", [2, 3, 5, 7, 8, 10])
def test_answers_that_are_uniform_are_counted_in_the_last_bin(classes: int) -> None:
    """Rounding may put their entropy above log C, where the histogram ends."""
    task = replace(TASK, classes=tuple("abcdefghij"[:classes]))
    network = build_model("cnn-w4", task, rng(0)).eval()
    with torch.no_grad():
        network.head.weight.zero_()  # type: ignore[union-attr, operator]
        network.head.bias.zero_()  # type: ignore[union-attr, operator]
    pictures = [(torch.randn((6, *task.image), generator=rng(1)), torch.zeros(6, dtype=torch.long))]
    figure = FedBiCross(task, SMOKE)._entropy(uploaded([network]), [network], [[0]], pictures, context(SMOKE, CLIENTS))
    assert figure["series"] == {"all clients": [*[0] * 19, 6], "own cluster": [*[0] * 19, 6]}


def test_settings_that_cannot_work_are_named() -> None:
    wrong = replace(SMOKE, steps=0, images=4, clusters=4, personal_epochs=0, validation=1.0, gamma=-1.0, personal_lr=0.0)
    named = [word.split("'")[1] for word in FedBiCross(TASK, wrong).problems(3)]
    assert named == ["images", "steps", "clusters", "validation", "personal_epochs", "gamma", "personal_lr"]


def test_fewer_uploads_than_clusters_name_the_setting() -> None:
    settings = replace(SMOKE, clusters=3)
    with pytest.raises(TrainingError, match="more clusters than clients") as caught:
        run(settings, uploads(settings)[:2])
    assert caught.value.field == "clusters"
