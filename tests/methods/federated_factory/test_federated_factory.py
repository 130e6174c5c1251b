"""FederatedFactory: exact forgetting at the method, both protocols, small classes, interrupted sampling."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import FilesError, TrainingError
from osfl.core.method import Context
from osfl.core.seeds import torch_generator
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Limits, Payload, Release, Shard, Upload
from osfl.methods.federated_factory import CPU, FederatedFactory, Settings
from osfl.methods.federated_factory.cells import prefix
from osfl.models.build import build_model
from osfl.models.naming import named
from osfl.rounds.egress import check_payload
from osfl.rounds.finished import load_model
from osfl.rounds.storage import load_model_of
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import PayloadCache, payload_digest, to_raw
from osfl.runtime.workers import Workers, compute_threads
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run_federation
from osfl.wire.bundle import size_of
from tests.methods.conftest import TASK, context, shard

SMALL = replace(resolve_settings(FederatedFactory, "smoke"), images_per_class=12, mixture_dims=6, mixture_components=2, least=3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a run computes."""
    with compute_threads(1):
        yield


def method(**changes: Any) -> FederatedFactory:
    return FederatedFactory(TASK, replace(SMALL, **changes))


def ctx(clients: Sequence[str] = "abc") -> Context:
    return context(SMALL, clients)


def uploads_of(one: FederatedFactory, clients: str = "abc") -> list[Upload]:
    return [Upload(name, "", one.client_phase(shard(name, seed=i), ctx(clients))) for i, name in enumerate(clients)]


def without(upload: Upload, label: int) -> Upload:
    """The upload as it would be with the tensors of one class deleted, and nothing else."""
    kept = {name: value for name, value in upload.payload.tensors.items() if not name.startswith(prefix(label))}
    return Upload(upload.client, "", Payload(kept, upload.payload.facts))


def never_had(client: str, seed: int, label: int) -> Shard:
    """The same client without any image of one class."""
    whole = shard(client, seed=seed)
    kept = torch.nonzero(whole.train.labels != label).flatten()
    return Shard(client, whole.train.subset(kept), whole.val, f"{whole.digest}-without-{label}")


def digests(release: Release) -> list[str]:
    return [payload_digest(release.shared), *(payload_digest(release.personal[c]) for c in sorted(release.personal))]


# --- forgetting ---


@pytest.mark.parametrize("mode", ["central", "peer"])
@pytest.mark.parametrize("factory", ["mixture", "vae", "edm"])
def test_forgetting_a_client_a_class_or_a_cell_is_exact(mode: str, factory: str) -> None:
    """Deleted tensors give bit for bit the release of a round that never had them."""
    one = method(mode=mode, factory=factory, edm_images=32)
    everyone = uploads_of(one)
    whole = one.server_phase(everyone, ctx())

    client = one.server_phase([u for u in everyone if u.client != "b"], ctx())
    joined = [Upload(name, "", one.client_phase(shard(name, seed=i), ctx("ac"))) for i, name in ((0, "a"), (2, "c"))]
    assert digests(client) == digests(one.server_phase(joined, ctx("ac"))) != digests(whole)

    row = one.server_phase([without(u, 1) for u in everyone], ctx())
    fewer = [Upload(n, "", one.client_phase(never_had(n, i, 1), ctx())) for i, n in enumerate("abc")]
    assert digests(row) == digests(one.server_phase(fewer, ctx())) != digests(whole)

    cell = one.server_phase([everyone[0], without(everyone[1], 2), everyone[2]], ctx())
    mixed = [everyone[0], Upload("b", "", one.client_phase(never_had("b", 1, 2), ctx())), everyone[2]]
    assert digests(cell) == digests(one.server_phase(mixed, ctx())) != digests(whole)


def test_a_cell_that_leaves_does_not_touch_the_others_images() -> None:
    one = method(images_per_class=12)
    everyone = uploads_of(one)
    before, after = one.samples(everyone, ctx()), one.samples([without(u, 1) for u in everyone], ctx())
    assert torch.equal(after.images, before.images[before.labels != 1])
    assert before.images.dtype == torch.uint8 and before.labels.tolist() == sorted(before.labels.tolist())


def test_separable_uploads_lose_a_class_as_if_it_had_never_been_there() -> None:
    one = method()
    whole = one.client_phase(shard("b", seed=1), ctx())
    never = one.client_phase(never_had("b", 1, 2), ctx())
    assert payload_digest(one.without_class(whole, 2)) == payload_digest(never)


# --- what travels ---


def test_an_upload_holds_a_generator_for_each_class_with_enough_images() -> None:
    """Classes of one and two images stay at home, one of three is sent, an absent one is no mistake."""
    whole = shard("a")
    few = Shard("a", whole.train.subset(torch.tensor([1, 4, 7, 2, 5])), whole.val, "few")  # labels go 0, 1, 2, 0, 1, ...
    one = method()
    payload = one.client_phase(few, ctx())
    assert {name.split("/")[0] for name in payload.tensors} == {"class-1"}
    assert payload.facts["class_counts"] == [0, 3, 2]
    check_payload(payload, one.contract(""), few, TASK, Limits())
    release = one.server_phase([Upload("a", "", payload)], ctx("a"))
    assert one.build(release.shared)(torch.zeros(2, *TASK.image)).shape == (2, 3)
    made = one.samples([Upload("a", "", payload)], ctx("a"))
    assert made.labels.tolist() == [1] * 12


def test_copies_of_an_image_are_one_image() -> None:
    """Whatever a generator learned from them would be that image."""
    whole = shard("a")
    copies = whole.train.subset(torch.tensor([1, 1, 1, 1, 2, 5, 8]))
    payload = method().client_phase(Shard("a", copies, whole.val, "copies"), ctx())
    assert {name.split("/")[0] for name in payload.tensors} == {"class-2"} and payload.facts["class_counts"] == [0, 4, 3]


def test_nobody_has_a_generator() -> None:
    alone = shard("a")
    single = Shard("a", alone.train.subset(torch.tensor([0])), alone.val, "single")
    one = method()
    payload = one.client_phase(single, ctx("a"))
    assert not payload.tensors
    with pytest.raises(TrainingError, match="no client has sent a generator"):
        one.server_phase([Upload("a", "", payload)], ctx("a"))


def test_quotas_decide_the_pool() -> None:
    one = method(images_per_class=10)
    a, b = uploads_of(one, "ab")
    unequal = Upload("b", "", Payload(b.payload.tensors, {**b.payload.facts, "class_counts": [24, 8, 8]}))
    pool = one.samples([unequal, without(a, 2)], ctx("ab"))
    assert torch.bincount(pool.labels).tolist() == [10, 10, 10]
    empirical = FederatedFactory(TASK, replace(SMALL, images_per_class=10, prior="empirical"))
    capped = empirical.samples([unequal, a], ctx("ab"))
    assert torch.bincount(capped.labels).tolist() == [14, 8, 8]  # b counts as a does: 22.4, 12.8 and 12.8 of 48
    plan = replace(ctx("ab").plan, limits=replace(ctx("ab").plan.limits, share=1.0))
    natural = empirical.samples([unequal, a], replace(ctx("ab"), plan=plan))
    assert torch.bincount(natural.labels).tolist() == [15, 8, 7]  # of 32, 16 and 16 real ones; the tie goes to the first


def test_silos_have_a_diagonal_matrix(tmp_path: Path) -> None:
    federation = small_federation("federated_factory", "silos", None)
    shown: dict[str, Any] = {}
    one = FederatedFactory(federation.plan.task, federation.plan.settings)
    quiet = Context(federation.plan, torch.device("cpu"), show=shown.__setitem__)
    one.server_phase([Upload(s.client, "", one.client_phase(s, quiet)) for s in federation.shards], quiet)
    values = torch.tensor(shown["Generative matrix"]["values"])
    assert int((values > 0).sum()) == len(values) and bool((values.max(1).values == SMOKE_IMAGES).all())
    assert len(shown["Synthetic images"]["images"]) == 6 * len(values)


SMOKE_IMAGES = resolve_settings(FederatedFactory, "smoke").images_per_class


# --- protocol B ---


def test_generators_are_passed_on_to_those_who_lack_them() -> None:
    lacking, balance = method(mode="peer", fill="lacking"), method(mode="peer", fill="balance")
    a, b, c = uploads_of(lacking)
    silo = [without(without(a, 1), 2), without(without(b, 0), 2), c]
    given = lacking.server_phase(silo, ctx()).personal
    assert [cell[:2] for cell in given["a"].facts["cells"]] == [[1, "b"], [1, "c"], [2, "c"]]
    assert given["c"].facts["cells"] == [] and not given["c"].tensors
    everything = balance.server_phase(silo, ctx()).personal
    assert [cell[:2] for cell in everything["c"].facts["cells"]] == [[0, "a"], [1, "b"]]
    assert torch.equal(everything["c"].tensors["a/class-0/mean"], a.payload.tensors["class-0/mean"])


def test_an_expert_sees_its_own_images_and_as_many_synthetic_ones_as_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Dataset] = []
    learn = FederatedFactory._learn

    def watched(self: FederatedFactory, data: Dataset, *rest: Any) -> Payload:
        seen.append(data)
        return learn(self, data, *rest)

    monkeypatch.setattr(FederatedFactory, "_learn", watched)
    mine = never_had("a", 0, 2)  # 8 of class 0, 8 of class 1
    for fill, counts in (("lacking", [8, 8, 12]), ("balance", [12, 12, 12]), ("all", [20, 20, 12])):
        one = method(mode="peer", fill=fill)
        sent = [Upload("a", "", one.client_phase(mine, ctx("ab"))), uploads_of(one, "ab")[1]]
        one.personalize(one.server_phase(sent, ctx("ab")), mine, ctx("ab"))
        assert torch.bincount(seen[-1].labels).tolist() == counts
        assert torch.equal(seen[-1].images[: len(mine.train)], mine.train.images)


def test_peers_answer_as_a_product_and_its_bytes_are_counted(tmp_path: Path) -> None:
    federation = small_federation("federated_factory", "silos", None)
    peers = replace(federation, plan=replace(federation.plan, settings=replace(federation.plan.settings, mode="peer")))
    result = run_federation(peers, tmp_path / "a", {"preset": "smoke", "command": ""})
    files = sorted((tmp_path / "a" / "models").glob("*.safetensors"))
    assert len(files) == len(federation.shards) and not result["scores"]["personalized"]
    total = sum(path.stat().st_size for path in files) * (len(files) - 1)
    assert abs(result["costs"]["inference_bytes"] / total - 1) < 0.2  # a bundle is a little larger than a plain file
    joint, task = load_model(tmp_path / "a")
    experts = [load_model(tmp_path / "a", path.stem)[0] for path in files]
    x = torch.linspace(-1, 1, 3 * 64).reshape(3, *task.image)
    logs = torch.stack([e(x).log_softmax(-1).clamp_min(torch.log(torch.tensor(peers.plan.settings.floor))) for e in experts])
    assert torch.allclose(joint(x), logs.sum(0).log_softmax(-1), atol=1e-4)
    backwards = replace(peers, shards=list(reversed(peers.shards)))
    again = run_federation(backwards, tmp_path / "b", {"preset": "smoke", "command": ""}, machine=Machine(workers=2))
    assert again["models_digest"] == result["models_digest"] and again["release_digest"] == result["release_digest"]
    assert "answer together" in (tmp_path / "a" / "report" / "index.html").read_text(encoding="utf-8")


def test_each_client_may_ask_its_own_expert(tmp_path: Path) -> None:
    federation = small_federation("federated_factory")
    alone = replace(federation.plan.settings, mode="peer", inference="own")
    result = run_federation(
        replace(federation, plan=replace(federation.plan, settings=alone)), tmp_path, {"preset": "", "command": ""}
    )
    assert result["scores"]["personalized"] and "inference_bytes" not in result["costs"]


def test_who_learns_how_long_from_what_and_from_which_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have their own number of epochs, or the classifier's; both get noise; nobody shares an order of images."""
    used: list[tuple[int, bool, int]] = []

    def watched(model: Any, data: Dataset, settings: Any, rng: torch.Generator, *, noise: float, **options: Any) -> None:
        used.append((settings.epochs, noise > 0, rng.initial_seed()))

    monkeypatch.setattr("osfl.methods.federated_factory.fit", watched)
    sent = uploads_of(method(), "ab")
    for mode, noise, own, epochs in (("central", 0.3, 0, 1), ("central", 0.0, 0, 1), ("peer", 0.3, 7, 1), ("peer", 0.3, 0, 5)):
        one = method(mode=mode, noise_std=noise, expert_epochs=own, epochs=epochs)
        release = one.server_phase(sent, ctx("ab"))
        for i, client in enumerate("ab" if mode == "peer" else ""):
            one.personalize(release, shard(client, seed=i), ctx("ab"))
    assert [epochs for epochs, _, _ in used] == [1, 1, 7, 7, 5, 5]
    assert [noisy for _, noisy, _ in used] == [True, False, True, True, True, True]
    assert len({seed for _, _, seed in used}) == 3  # the server's, and one for each expert


def test_the_product_has_the_floor_of_the_settings() -> None:
    one = method(mode="peer", floor=0.01)
    experts = {
        c: Payload(named(build_model("cnn-w8", TASK, torch_generator(i)), "model"), {"architecture": "cnn-w8"})
        for i, c in enumerate("ab")
    }
    joint = one.after_round(experts)
    assert joint is not None and one.build(joint).floor == 0.01
    assert method(mode="peer", inference="own").after_round(experts) is None


def test_to_answer_together_every_expert_goes_to_all_others(tmp_path: Path) -> None:
    """K (K - 1) transfers, as the bundles that they would be."""
    federation = small_federation("federated_factory")
    peers = replace(federation, plan=replace(federation.plan, settings=replace(federation.plan.settings, mode="peer")))
    result = run_federation(peers, tmp_path, {"preset": "smoke", "command": ""})
    total = 0
    for client in peers.plan.clients:
        kept = load_model_of(tmp_path / "models" / f"{client}.safetensors")
        assert kept is not None
        total += 2 * size_of("upload", client, peers.plan.digest, to_raw(kept[0].tensors), dict(kept[0].facts))
    assert result["costs"]["inference_bytes"] == total


# --- going on after a failure ---


class FullDisk:
    """A cache that has room for so many things."""

    def __init__(self, folder: Path, room: int) -> None:
        self.cache, self.room, self.made = PayloadCache(folder), room, 0

    def get_or_compute(self, key: Any, make: Callable[[], Payload]) -> Payload:
        def counted() -> Payload:
            if self.made == self.room:
                raise OSError(28, "No space left on device", "scratch/cache")
            self.made += 1
            return make()

        return self.cache.get_or_compute(key, counted)


def test_a_disk_that_fills_while_sampling_loses_nothing(tmp_path: Path) -> None:
    one = method()
    uploads = uploads_of(one)
    expected = one.server_phase(uploads, ctx())
    disk = FullDisk(tmp_path, room=4)
    with pytest.raises(FilesError, match="No space left") as caught:
        one.server_phase(uploads, replace(ctx(), get_or_compute=disk.get_or_compute))
    assert "Free some disk space and run the same command again" in str(caught.value) and "class 'b'" in str(caught.value)
    disk.room, disk.made = 100, 0
    finished = one.server_phase(uploads, replace(ctx(), get_or_compute=disk.get_or_compute))
    assert disk.made == 9 - 4  # what was sampled before is not sampled again
    assert digests(finished) == digests(expected)


def test_classes_of_one_client_learn_side_by_side_to_the_same_bits() -> None:
    one = method(factory="edm", edm_images=64)
    serial = one.client_phase(shard("a"), ctx())
    parallel = one.client_phase(shard("a"), replace(ctx(), map=Workers(3).map))
    assert payload_digest(serial) == payload_digest(parallel)


# --- settings ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images_per_class", 0),
        ("noise_std", -0.1),
        ("floor", 0.0),
        ("floor", 1.0),
        ("expert_epochs", -1),
        ("least", 1),
        ("unet", "w"),
        ("epochs", 0),
    ],
)
def test_wrong_settings_are_named_before_anything_starts(name: str, value: Any) -> None:
    assert not method().problems(3)
    problems = method(**{name: value}).problems(3)
    assert len(problems) == 1 and f"'{name}'" in problems[0]


def test_defaults_are_the_paper_s() -> None:
    s = resolve_settings(FederatedFactory, "paper")
    assert s == Settings() and set(CPU) <= set(Settings.__dataclass_fields__)
    assert (s.factory, s.architecture, s.epochs, s.batch_size, s.lr, s.weight_decay, s.schedule, s.augment, s.noise_std) == (
        "edm",
        "resnet50",
        300,
        128,
        0.1,
        1e-4,
        "cosine",
        "none",
        0.0,
    )
    assert (s.images_per_class, s.floor, s.edm_images, s.edm_batch, s.edm_lr, s.edm_lr_batches, s.edm_rampup) == (
        10_000,
        1e-12,
        25_000_000,
        4096,
        0.01,
        35_000,
        10_000_000,
    )
    assert (s.edm_ema, s.edm_noise_mean, s.edm_noise_std, s.edm_steps, s.dropout) == (0.05, -0.8, 1.6, 32, 0.3)


def test_the_preview_shows_each_generator_of_an_upload_and_nothing_of_a_classifier() -> None:
    upload = method().client_phase(shard("a"), ctx())
    (figure,) = method().preview(upload, ctx()).values()
    held = {image["caption"] for image in figure["images"]}
    assert figure["kind"] == "gallery" and len(figure["images"]) == 6 * len(held)
    assert held == {TASK.classes[label] for label in range(len(TASK.classes)) if f"class-{label}/" in " ".join(upload.tensors)}
    assert method().preview(Payload({"model/x": torch.zeros(2)}, {"architecture": "cnn"}), ctx()) == {}


def test_peers_cannot_follow_the_sizes_of_classes_that_they_were_not_sent() -> None:
    assert not method(mode="central", prior="empirical").problems(3)
    (problem,) = method(mode="peer", prior="empirical").problems(3)
    assert "'prior'" in problem and "mode=central" in problem


def test_a_generator_costs_once(tmp_path: Path) -> None:
    """Experts that fill up their own classes ask the generator that was trained for the upload."""
    costs = {}
    for fill in ("lacking", "balance"):
        federation = small_federation("federated_factory")
        settings = replace(federation.plan.settings, mode="peer", fill=fill, factory="vae", vae_steps=200)
        result = run_federation(
            replace(federation, plan=replace(federation.plan, settings=settings)),
            tmp_path / fill,
            {"preset": "smoke", "command": ""},
            machine=Machine(workers=1),
        )
        costs[fill] = {name: phase["flops"] for name, phase in result["costs"]["phases"].items()}
    assert costs["balance"]["client"] == costs["lacking"]["client"]
    assert costs["balance"]["personalize"] < costs["balance"]["client"] / 10
