"""Deterministic clustering that no order of clients changes."""

import pytest
import torch

from osfl.core.errors import TrainingError
from osfl.core.types import Task
from osfl.ingredients.statistics.kmeans import kmeans
from osfl.methods.fedbicross.clustering import hierarchical, members_of, parameters, predictions, similarity
from osfl.models.build import build_model
from osfl.runtime.workers import Workers

TASK = Task("toy", ("a", "b", "c"), (1, 8, 8))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs() -> torch.Tensor:
    """Three groups of two, far apart."""
    middle = torch.tensor([[0.0, 0], [10, 0], [0, 10]], dtype=torch.float64).repeat_interleave(2, 0)
    return middle + 0.1 * torch.randn((6, 2), dtype=torch.float64, generator=rng(1))


@pytest.mark.parametrize("cluster", [lambda x, k: kmeans(x, k, rng()), hierarchical])
def test_groups_are_found(cluster) -> None:  # type: ignore[no-untyped-def]
    assert cluster(blobs(), 3) == [0, 0, 1, 1, 2, 2]
    assert cluster(blobs(), 6) == [0, 1, 2, 3, 4, 5]
    assert cluster(blobs(), 1) == [0] * 6


@pytest.mark.parametrize("seed", range(5))
def test_order_changes_only_the_numbering(seed: int) -> None:
    order = torch.randperm(6, generator=rng(seed))
    shuffled = kmeans(blobs()[order], 3, rng())
    assert {frozenset(order[group].tolist()) for group in members_of(shuffled)} == {
        frozenset(group) for group in members_of(kmeans(blobs(), 3, rng()))
    }


def test_equal_points_share_a_group_even_if_that_leaves_fewer() -> None:
    points = torch.tensor([[0.0], [0.0], [5.0], [5.0]], dtype=torch.float64)
    assert kmeans(points, 2, rng()) == [0, 0, 1, 1]
    assert kmeans(points, 4, rng()) == [0, 0, 1, 1]


@pytest.mark.parametrize("k", [0, 7])
def test_more_clusters_than_clients_is_an_error(k: int) -> None:
    with pytest.raises(TrainingError, match="more clusters than clients") as caught:
        kmeans(blobs(), k, rng())
    assert caught.value.field == "clusters"


def test_models_that_answer_alike_exchange() -> None:
    """Two groups of identical models are separated by their predictions and by their parameters."""
    first, second = (build_model("cnn-w4", TASK, rng(seed)) for seed in (0, 1))
    models = [m.eval() for m in (first, second, first, second)]
    points = predictions(models, TASK.image, rng(2), Workers(1).map)
    assert points.shape == (4, 256 * 3) and torch.allclose(points.view(4, 256, 3).sum(-1), torch.ones(4, 256).double())
    assert kmeans(points, 2, rng()) == kmeans(parameters(models), 2, rng()) == [0, 1, 0, 1]


def test_parameters_need_one_architecture() -> None:
    with pytest.raises(TrainingError, match="different architectures"):
        parameters([build_model("cnn-w4", TASK, rng()), build_model("cnn-w8", TASK, rng())])


def test_similarity_prefers_the_near() -> None:
    weights = similarity(blobs(), [[0, 1], [2, 3], [4, 5]])
    assert torch.allclose(weights.sum(1), torch.ones(3).double()) and torch.all(weights.argmax(1) == torch.arange(3))


def test_weights_by_similarity_by_hand() -> None:
    """Centers (1, 0) and (1, 3): a softmax of minus the distances 0 and 3, whatever the groups' sizes."""
    points = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    other = 1 / (1 + torch.tensor(3.0, dtype=torch.float64).exp())
    assert torch.allclose(similarity(points, [[0, 1], [2]]), torch.stack([1 - other, other, other, 1 - other]).view(2, 2))


def test_a_cluster_that_empties_takes_a_point_from_a_larger_one() -> None:
    """With this start one of four clusters is left without points on the way."""
    points = torch.randn((12, 2), generator=rng(11628)).double()
    assert len(set(kmeans(points, 4, rng(11628), starts=1))) == 4
