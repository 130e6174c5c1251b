"""The whole judgment: a good pool, a copied one, one that lacks a class; by class, by client, and in JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Shard
from osfl.evaluation.embedding import Space, available_space, random_space
from osfl.evaluation.generator_samples import per_class
from osfl.evaluation.generators import judge
from osfl.runtime.workers import Workers

CLASSES = ("dark", "bright", "rare")
CPU = torch.device("cpu")


def pictures(label: int, count: int, seed: int) -> torch.Tensor:
    """Smooth color images, brighter by class."""
    rng = torch.Generator().manual_seed(1000 * label + seed)
    rough = torch.randn(count, 3, 4, 4, generator=rng) * 25
    smooth = torch.nn.functional.interpolate(rough, (16, 16), mode="bicubic")
    return (70 + 50 * label + smooth).round().clamp(0, 255).to(torch.uint8)


def dataset(counts: tuple[int, int, int], seed: int) -> Dataset:
    images = torch.cat([pictures(label, count, seed) for label, count in enumerate(counts)])
    return Dataset(images, torch.repeat_interleave(torch.arange(3), torch.tensor(counts)))


EMPTY = Dataset(torch.zeros(0, 3, 16, 16, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
SHARDS = [
    Shard("a", dataset((80, 0, 0), 1), EMPTY),
    Shard("b", dataset((0, 60, 0), 1), EMPTY),
    Shard("c", dataset((0, 40, 3), 2), EMPTY),
]
HELD_OUT = dataset((60, 60, 4), 7)


def judged(pool: Dataset, shards: list[Shard] = SHARDS, workers: int = 1) -> Any:
    return judge(
        pool,
        shards,
        HELD_OUT,
        CLASSES,
        draw=lambda *labels: torch_generator(0, *labels),
        device=CPU,
        run_map=Workers(workers).map,
        space=random_space(),
    )


@pytest.fixture(scope="module")
def honest() -> Any:
    return judged(dataset((70, 70, 70), 3))


def test_a_good_pool_reaches_the_floor_and_a_bad_one_does_not(honest: Any) -> None:
    for name in ("dark", "bright"):
        row = honest["classes"][name]
        assert row["verdict"] == "no sign of copying" and row["compared"] == 60
        assert row["frechet"] == pytest.approx(row["frechet_floor"], rel=0.3)
        assert abs(row["error"]) < 1
    darker = dataset((70, 70, 70), 3)
    wrong = judged(Dataset(darker.images // 2, darker.labels))
    for name in ("dark", "bright"):
        assert wrong["classes"][name]["frechet"] > 5 * honest["classes"][name]["frechet"]
        assert wrong["classes"][name]["kernel"] > 10 * abs(honest["classes"][name]["kernel"])
    assert wrong["bound"]["value"] > honest["bound"]["value"] >= 0


def test_a_class_of_three_images_gets_no_verdict_and_is_left_out(honest: Any) -> None:
    row = honest["classes"]["rare"]
    assert row["verdict"] == "too few to say" and row["training"] == 3 and row["error"] is None and row["compared"] == 3
    assert honest["bound"]["left_out"] == ["rare"]
    assert honest["warnings"] == ["Too few images to say whether generators copy: rare."]


def test_a_factory_that_copies_is_named() -> None:
    train = Dataset(torch.cat([s.train.images for s in SHARDS]), torch.cat([s.train.labels for s in SHARDS]))
    found = judged(train)
    assert found["classes"]["dark"]["copied"] == 1 and found["classes"]["dark"]["nearest_ratio"] == 0
    assert found["warnings"][0].startswith("Generators copy training images of dark, bright:")


def test_the_pool_of_a_silo_has_the_error_of_its_client(honest: Any) -> None:
    assert honest["clients"]["a"] == pytest.approx(honest["classes"]["dark"]["error"])
    assert honest["clients"]["b"] is not None and honest["clients"]["c"] is not None
    weights = {"dark": 80 / 180, "bright": 100 / 180}
    mean = sum(w * honest["classes"][name]["error"] for name, w in weights.items())
    assert honest["bound"]["error"] == pytest.approx(mean)
    assert honest["bound"]["value"] == pytest.approx(2 * math.sqrt(max(0, mean) / 2))


def test_a_class_without_images_has_no_bound() -> None:
    found = judged(dataset((70, 0, 0), 3))
    assert found["bound"]["infinite"] == ["bright", "rare"] and found["bound"]["value"] is None
    assert found["bound"]["prior_shift"] is None and found["classes"]["bright"]["frechet"] is None
    assert "No synthetic images of bright, rare." in found["warnings"]


def test_an_empty_pool_and_a_constant_one_are_reported() -> None:
    nothing = judged(EMPTY)
    assert nothing["figures"] == {} and nothing["overall"]["compared"] == 0 and nothing["bound"]["value"] is None
    json.dumps(nothing, allow_nan=False)
    labels = torch.repeat_interleave(torch.arange(3), 40)
    same = judged(Dataset(torch.full((120, 3, 16, 16), 90, dtype=torch.uint8), labels))
    assert set(same["bound"]["infinite"]) >= {"dark", "bright"}
    json.dumps(same, allow_nan=False)


def test_figures_are_of_known_kinds_and_say_the_space(honest: Any) -> None:
    kinds = {title: figure["kind"] for title, figure in honest["figures"].items()}
    assert kinds == {
        "Synthetic images and the nearest training images": "gallery",
        "Fidelity, cumulative": "lines",
        "Fidelity, histogram": "histogram",
        "Diversity, cumulative": "lines",
        "Diversity, histogram": "histogram",
        "Real and synthetic images in the plane (t-SNE)": "scatter",
    }
    for title in ("Fidelity, cumulative", "Diversity, histogram"):
        assert honest["space"] in honest["figures"][title]["x_label"]
    for row in honest["figures"]["Fidelity, cumulative"]["series"].values():
        assert row == sorted(row) and row[-1] == 1
    counts = honest["figures"]["Fidelity, histogram"]["series"]
    assert {name: sum(row) for name, row in counts.items()} == {"synthetic": 123, "held-out real": 123}
    json.dumps(honest, allow_nan=False)


def test_neither_workers_nor_the_order_of_clients_change_anything(honest: Any) -> None:
    again = judged(dataset((70, 70, 70), 3), SHARDS[::-1], workers=2)
    assert {**again, "clients": dict(sorted(again["clients"].items()))} == honest


def test_the_number_of_images_is_limited() -> None:
    assert [per_class(classes) for classes in (2, 8, 16, 1000)] == [200, 200, 100, 10]


def test_only_inception_may_be_called_fid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_DATA", str(tmp_path))
    space = available_space()
    assert space.name.startswith("fixed random") and (space.frechet, space.kernel) == ("FD", "KD")


def test_random_features_are_the_same_everywhere_and_see_gray_images() -> None:
    images = pictures(1, 70, 1)
    one, two = (random_space().embed(images, CPU, Workers(workers).map) for workers in (1, 2))
    assert one.shape == (70, 896) and one.dtype == torch.float64 and torch.equal(one, two)
    gray = random_space().embed(images[:3, :1], CPU, Workers(1).map)
    assert torch.allclose(gray, random_space().embed(images[:3, :1].repeat(1, 3, 1, 1), CPU, Workers(1).map), atol=1e-5)
    assert isinstance(random_space(), Space)


def test_a_client_s_error_is_that_of_its_classes_by_how_many_images_it_has() -> None:
    shards = [Shard("c", dataset((40, 100, 0), 1), EMPTY, "c")]
    found = judged(dataset((70, 70, 0), 3), shards)
    dark, bright = (found["classes"][name]["error"] for name in ("dark", "bright"))
    assert found["clients"]["c"] == pytest.approx((40 * dark + 100 * bright) / 140) != pytest.approx((dark + bright) / 2)


def test_the_prior_shift_is_what_the_pool_s_balance_adds(honest: Any) -> None:
    shares = [80 / 183, 100 / 183, 3 / 183]
    assert honest["bound"]["prior_shift"] == pytest.approx(sum(p * math.log(3 * p) for p in shares))


def test_curves_measure_synthetic_images_not_the_others() -> None:
    """One image again and again: equally far from the training images each time, and no distance to the next of its kind."""
    labels = torch.repeat_interleave(torch.arange(2), 40)
    shards = [Shard("c", dataset((60, 60, 0), 1), EMPTY, "c")]
    same = judged(Dataset(torch.full((80, 3, 16, 16), 90, dtype=torch.uint8), labels), shards)["figures"]
    assert same["Diversity, cumulative"]["series"]["synthetic"][1] == 1
    assert same["Diversity, cumulative"]["series"]["real training"][1] == 0
    assert sum(n > 0 for n in same["Fidelity, histogram"]["series"]["synthetic"]) <= 2  # a distance a class
    assert sum(n > 0 for n in same["Fidelity, histogram"]["series"]["held-out real"]) > 2


def test_pairs_show_the_closest_first_and_begin_with_the_class_that_copies() -> None:
    honest_dark, copied_bright = dataset((70, 0, 0), 3), torch.cat([s.train.images[s.train.labels == 1] for s in SHARDS])
    pool = Dataset(torch.cat([honest_dark.images, copied_bright]), torch.tensor([0] * 70 + [1] * len(copied_bright)))
    gallery = judged(pool)["figures"]["Synthetic images and the nearest training images"]["images"]
    captions = [image["caption"] for image in gallery]
    assert captions[:2] == ["bright, closest pair: 0.000", "bright, median pair: 0.000"]
    closest, median = (float(caption.rsplit(" ", 1)[1]) for caption in captions[2:4])
    assert captions[2].startswith("dark, closest pair") and 0 < closest < median


def test_copies_are_looked_for_among_all_training_images() -> None:
    """Not only among those that are drawn for the distances."""
    many = Dataset(pictures(0, 1000, 1), torch.zeros(1000, dtype=torch.int64))
    pool = Dataset(many.images[:300], many.labels[:300])
    found = judged(pool, [Shard("c", many, EMPTY, "c")])["classes"]["dark"]
    assert found["copied"] == 1 and found["nearest_ratio"] == 0


def test_the_floor_knows_nothing_of_the_pool(honest: Any) -> None:
    """It is held-out images against training images, whatever the generators make."""
    pool = dataset((70, 70, 70), 3)
    other = judged(Dataset(pool.images // 2, pool.labels))
    for name in ("dark", "bright"):
        for figure in ("frechet_floor", "kernel_floor"):
            assert other["classes"][name][figure] == honest["classes"][name][figure]


def test_a_client_with_a_collapsed_generator_has_no_finite_error() -> None:
    """Leaving the worst class out would make its error smaller."""
    shards = [Shard("c", dataset((80, 80, 0), 1), EMPTY, "c")]
    good = dataset((70, 0, 0), 3)
    constant = Dataset(
        torch.cat([good.images, torch.full((70, 3, 16, 16), 120, dtype=torch.uint8)]), torch.tensor([0] * 70 + [1] * 70)
    )
    for pool in (constant, good):
        found = judged(pool, shards)
        assert found["bound"]["infinite"] == ["bright"] and found["clients"]["c"] is None
