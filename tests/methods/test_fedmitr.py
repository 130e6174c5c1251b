"""FedMITR: its variants, its baseline to the bit, unlike clients, and what the report gets."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import TrainingError
from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Release, Task, Upload, settings_as_json
from osfl.ingredients.distillation.token_relabel import PatchServer, Pools, relabel_terms, study_flops, weighted
from osfl.ingredients.statistics.averaging import average
from osfl.methods.deepinversion_vit import DeepInversionVit
from osfl.methods.fedmitr import FedMitr, Settings
from osfl.models.flops import forward_flops
from osfl.models.naming import named
from osfl.models.vit import OnSubset, Vit
from osfl.reports.figures import figure_views
from osfl.runtime.meter import measure
from osfl.runtime.payloads import PayloadCache
from osfl.runtime.workers import Workers, compute_threads
from tests.methods.conftest import TASK, context, shard

SMOKE: Settings = resolve_settings(FedMitr, "smoke", {"architecture": "vit-p2-w16-d2-h2", "images": 6})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


@lru_cache
def sent(architecture: str, counts: bool) -> tuple[Upload, ...]:
    settings = replace(SMOKE, architecture=architecture, labels="seen" if counts else "uniform")
    method, ctx = FedMitr(TASK, settings), context(settings, "ab")
    return tuple(Upload(c, "", method.client_phase(shard(c, seed=i), ctx)) for i, c in enumerate("ab"))


def uploads(settings: Settings) -> tuple[Upload, ...]:
    """Clients train once for all variants of the server."""
    return sent(settings.architecture, FedMitr(TASK, settings).needs_counts())


def released(ctx: Context | None = None, **change: Any) -> Release:
    settings = replace(SMOKE, **change)
    return FedMitr(TASK, settings).server_phase(uploads(settings), ctx or context(settings, "ab"))


def weights(release: Release) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in release.shared.tensors.values()])


@lru_cache
def plain() -> torch.Tensor:
    with compute_threads(1):
        return weights(released())


def test_presets_say_how_far_pixels_go() -> None:
    paper, smi, ours = (resolve_settings(FedMitr, preset) for preset in ("paper", "smi", "ours"))
    assert (paper.pixel_lr, paper.steps, paper.clamp) == (1e-3, 100, False)
    assert (paper.mask, paper.lambda1, paper.lambda2) == (0.3, 0.5, 0.5)
    assert (smi.pixel_lr, smi.clamp) == (0.25, True) and FedMitr(TASK, smi).events()[-1] == (300, 0.3)
    assert (ours.pixel_lr, ours.clamp) == (0.1, True) and FedMitr(TASK, ours).events() == ((50, 0.3),)


def test_what_we_added_is_not_in_the_papers_plan_and_alike_for_the_baseline() -> None:
    paper = resolve_settings(FedMitr, "paper")
    assert (paper.scales, paper.start, paper.votes, paper.ensemble, paper.adversarial) == (1, 1.0, 1.0, "logits", 1.0)
    assert (paper.invert, paper.order, paper.student_epochs) == ("clients", "interleaved", 0)
    later = {"scales", "start", "votes", "student_share", "invert", "order", "student_epochs"}
    assert not later & settings_as_json(paper).keys()  # digests of plans that never heard of them stand
    mine, baseline = (resolve_settings(method, "cpu") for method in (FedMitr, DeepInversionVit))
    assert (
        settings_as_json(baseline).items() <= settings_as_json(mine).items()
    )  # the same images a client, steps, teacher and rates
    assert mine.scales > 1 and mine.ensemble == "odds" and FedMitr(TASK, mine).needs_counts()


def test_kd_only_without_dropping_is_the_baseline_to_the_bit() -> None:
    """r = 0 and λ1 = λ2 = 0 is inversion + KD."""
    settings = resolve_settings(DeepInversionVit, "smoke", {"architecture": "vit-p2-w16-d2-h2", "images": 6})
    baseline = DeepInversionVit(TASK, settings).server_phase(uploads(SMOKE), context(settings, "ab"))
    assert torch.equal(weights(released(mask=0.0, lambda1=0.0, lambda2=0.0)), weights(baseline))
    assert not torch.equal(plain(), weights(baseline))


@pytest.mark.parametrize(
    "change",
    [
        {"mask": 0.0, "kd": 0.0, "lambda1": 1.0, "lambda2": 0.0},
        {"lambda1": 0.0},
        {"lambda2": 0.0},
        {"stops": "1:0.3,3:0.5"},
        {"ensemble": "class_count", "labels": "seen"},
        {"ensemble": "odds", "balance": 0.5, "votes": 0.5},
        {"scales": 3},
        {"ensemble": "probabilities", "labels": "counts"},
        {"student_clip": 1.0, "student_cosine": True, "pool_epochs": 1},
        {"student": "vit-p2-w8-d1-h2", "init": "random"},
        {"invert": "ensemble", "ensemble": "odds", "balance": 0.5, "votes": 0.5},
        {"order": "images_first", "student_epochs": 3},
    ],
)
def test_variants_differ_and_stay_finite(change: dict[str, Any]) -> None:
    found = weights(released(**change))
    assert bool(found.isfinite().all()) and not torch.equal(found, plain())


def test_without_the_adversarial_term_the_server_does_not_shape_images() -> None:
    shown: dict[float, list[Any]] = {}
    for rate in (1e-3, 0.5):  # another rate is another server when the second epoch begins
        for alpha in (0.0, 5.0):
            figures: dict[str, Any] = {}
            settings = replace(SMOKE, adversarial=alpha, student_lr=rate)
            released(replace(context(settings, "ab"), show=figures.__setitem__), adversarial=alpha, student_lr=rate)
            shown.setdefault(alpha, []).append(figures["Synthetic images"]["images"])
    assert shown[0.0][0] == shown[0.0][1]
    assert shown[5.0][0] != shown[5.0][1]


def test_part_of_the_way_is_between_the_clients_average_and_where_the_student_ended() -> None:
    both = [upload.payload.tensors for upload in uploads(SMOKE)]
    samples = [float(upload.payload.facts["samples"]) for upload in uploads(SMOKE)]
    start, end = torch.cat([tensor.flatten() for tensor in average(both, samples).values()]), plain()
    assert float((end - start).norm()) > 0
    torch.testing.assert_close(weights(released(student_share=0.25)), 0.75 * start + 0.25 * end)
    for wrong in (
        replace(SMOKE, student_share=1.5),
        replace(SMOKE, student_share=0.0),
        replace(SMOKE, student_share=0.5, init="random"),
    ):
        (problem,) = FedMitr(TASK, wrong).problems(2)
        assert "'student_share'" in problem


def test_unlike_vits_work_together() -> None:
    settings = replace(SMOKE, architecture="a:vit-p2-w8-d1-h2,*:vit-p2-w16-d2-h2", student="vit-p2-w16-d2-h2", init="random")
    assert FedMitr(TASK, settings).problems(2) == []
    release = FedMitr(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert release.shared.facts["architecture"] == "vit-p2-w16-d2-h2"


def test_each_client_is_asked_about_each_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    forward = Vit.forward

    def counted(self: Vit, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        if not torch.is_grad_enabled() and not x.is_meta:  # counting operations asks nobody
            asked.append(len(x))
        return forward(self, x, keep)

    monkeypatch.setattr(Vit, "forward", counted)
    released(server_epochs=3, passes=2)
    noise = 2 * 2  # two images each, to see that no client explodes
    assert sum(asked) - noise == 3 * (2 * 6) * 2 * 2  # epochs x images x clients x (whole, dropped patches)


def test_asking_about_dropped_patches_is_booked() -> None:
    method, ctx = FedMitr(TASK, SMOKE), context(SMOKE, "ab")
    server = PatchServer(method, uploads(SMOKE), ctx, "fedmitr", SMOKE.inversion(method.events()), method.terms())
    with measure() as meter:
        server.ask(torch.zeros(3, *TASK.image), torch.tensor([[0, 5]] * 3))
    member = server.members[0]
    get_or_compute = forward_flops(member, TASK.image) + forward_flops(OnSubset(member, 2), TASK.image)
    assert meter.flops == 2 * 3 * get_or_compute


def test_norms_are_compared_only_where_patches_were_dropped() -> None:
    for change in ({"architecture": "vit-p8-w8-d1-h2", "lambda1": 0.0}, {"mask": 0.0}):  # one patch, which stays; none stopped
        assert "gradient_norms" not in released(**change).shared.facts


def test_a_server_that_dies_between_images_and_student_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the images of the second epoch were kept: they are not made again, and nor is the first epoch's student."""
    ctx = replace(context(SMOKE, "ab"), get_or_compute=PayloadCache(tmp_path).get_or_compute)
    made: list[tuple[str, int]] = []
    dream, study = PatchServer._dream, PatchServer._study

    def counted(what: str, work: Any, dies: bool) -> Any:
        def do(server: PatchServer, epoch: int) -> Any:
            made.append((what, epoch))
            if dies and (what, epoch) == ("student", 1):
                raise KeyboardInterrupt
            return work(server, epoch)

        return do

    for dies in (True, False):
        monkeypatch.setattr(PatchServer, "_dream", counted("images", dream, dies))
        monkeypatch.setattr(PatchServer, "_study", counted("student", study, dies))
        if dies:
            with pytest.raises(KeyboardInterrupt):
                released(ctx)
            assert made == [("images", 0), ("student", 0), ("images", 1), ("student", 1)]
            made.clear()
    assert torch.equal(weights(released(ctx)), plain()) and made == [("student", 1)]


def test_workers_do_not_change_a_bit() -> None:
    alone = released()
    together = released(replace(context(SMOKE, "ab"), map=Workers(2).map))
    assert torch.equal(weights(alone), weights(together)) and alone.shared.facts == together.shared.facts


def test_the_report_gets_its_pictures_and_the_theorem() -> None:
    figures: dict[str, Any] = {}
    release = released(replace(context(SMOKE, "ab"), show=figures.__setitem__))
    assert list(figures) == [
        "Synthetic images",
        "Kept and dropped patches",
        "Loss over server epochs",
        "Labels of the synthetic images",
        "What the synthetic images are taken for",
        "Gradient norms of the student",
    ]
    assert not [view for view in figure_views(figures) if view["problem"]]
    norms = release.shared.facts["gradient_norms"]
    assert norms["images"] == 4 and norms["held"] == (norms["L_Fed"] < norms["L_DI"])
    held = "yes" if norms["held"] else "no"
    assert f"held: {held}" in figures["Gradient norms of the student"]["note"]
    assert len(figures["Loss over server epochs"]["series"]) == 3


def test_samples_are_what_the_student_saw() -> None:
    method = FedMitr(TASK, SMOKE)
    found = method.samples(uploads(SMOKE), context(SMOKE, "ab"))
    assert found.images.shape == (2 * 2 * 6, *TASK.image) and found.images.dtype == torch.uint8


def test_settings_that_cannot_work_are_named() -> None:
    wrong = replace(SMOKE, architecture="cnn-w4", steps=0, mask=1.0, lambda1=-1.0, student_lr=0.0, server_epochs=0, images=0)
    named = {text.split("'")[1] for text in FedMitr(TASK, wrong).problems(3)}
    assert named == {"architecture", "steps", "stops", "mask", "lambda1", "student_lr", "server_epochs", "images"}
    idle = replace(SMOKE, mask=0.0, kd=0.0, lambda1=0.0)
    assert "learn nothing" in FedMitr(TASK, idle).problems(3)[0]
    both = FedMitr(TASK, replace(SMOKE, stops="5", architecture="cnn-w4")).problems(3)
    assert [text.split("'")[1] for text in both] == ["stops", "architecture"]  # all mistakes at once
    (nothing,) = FedMitr(TASK, replace(SMOKE, stops="2:0", lambda1=0.0)).problems(3)
    assert nothing == "setting 'stops': expected step:ratio with 0 < ratio < 1, got '2:0'"
    (early,) = FedMitr(TASK, replace(SMOKE, student_epochs=3)).problems(3)
    assert "order=images_first" in early
    assert "patch 3 does not divide" in FedMitr(TASK, replace(SMOKE, architecture="vit-p3")).problems(3)[0]


# --- the server, part by part ---


def server_of(reported: Sequence[Sequence[int]] = (), **change: Any) -> PatchServer:
    """`reported`: class counts that the clients claim."""
    settings = replace(SMOKE, steps=1, **change)
    method, given = FedMitr(TASK, settings), list(uploads(settings))
    for i, counts in enumerate(reported):
        payload = given[i].payload
        given[i] = replace(given[i], payload=replace(payload, facts={**payload.facts, "class_counts": list(counts)}))
    return PatchServer(method, given, context(settings, "ab"), "fedmitr", settings.inversion(method.events()), method.terms())


def test_images_are_made_of_each_client_for_classes_of_its_own() -> None:
    server = server_of([[5, 0, 0], [0, 0, 5]], labels="counts")
    server.dream(0)
    assert server.pools[0].makers.tolist() == [0] * 6 + [1] * 6 and server.pools[0].labels.tolist() == [0] * 6 + [2] * 6


def test_as_one_all_clients_make_images_for_the_classes_of_all() -> None:
    """As many images as all would make apart, drawn by what all have together; and what is inverted is the teacher E itself."""
    server = server_of([[8, 0, 0], [0, 0, 8]], labels="counts", invert="ensemble", ensemble="odds", balance=0.5)
    server.dream(0)
    (pool,) = server.pools
    assert server.makers == ["all clients"] and pool.makers.tolist() == [0] * 12 and set(pool.labels.tolist()) == {0, 2}
    x = pool.images[:3].float()
    with torch.no_grad():
        together = server.combined(torch.stack([member(x) for member in server.members]))
    torch.testing.assert_close(pool.whole[:3], together, atol=1e-4, rtol=1e-4)


def test_images_first_and_then_a_student_that_sees_all_of_them_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start makes all images, and its rate falls along one cosine over its own epochs."""
    server = server_of(order="images_first", student_epochs=4, server_epochs=2, student_cosine=True, student_lr=0.1)
    seen: list[tuple[int, float]] = []
    study = PatchServer._study

    def watched(self: PatchServer, epoch: int) -> Any:
        done = study(self, epoch)
        seen.append((sum(map(len, self.pools)), round(self.optimizer.param_groups[0]["lr"], 4)))
        return done

    monkeypatch.setattr(PatchServer, "_study", watched)
    dream = PatchServer._dream

    def from_the_start(self: PatchServer, epoch: int) -> Any:
        assert all(torch.equal(value, self.start[name]) for name, value in named(self.student, "model").items())
        return dream(self, epoch)

    monkeypatch.setattr(PatchServer, "_dream", from_the_start)
    server.learn()
    assert [count for count, _ in seen] == [24] * 4
    assert [rate for _, rate in seen] == [round(0.05 * (1 + math.cos(math.pi * e / 4)), 4) for e in range(4)]


def test_a_step_goes_down_the_mean_over_its_batch_however_it_is_cut() -> None:
    server, index = server_of(), torch.arange(5)  # cut into three and two
    server.dream(0)
    parameters = list(server.student.parameters())
    values = relabel_terms(server.student, server.pools[0].take(index, torch.device("cpu")), server.terms)
    gradients = torch.autograd.grad(weighted(values, server.terms), parameters)
    torch.testing.assert_close(server._step(Pools(server.pools), index), values.detach())
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_clients_are_asked_about_whole_images_and_about_what_was_dropped() -> None:
    """E(x) and E(x_l) of Eq. 8: means of the clients' logits, for all patches and for the dropped ones alone."""
    server, x = server_of(ensemble="logits", balance=0.0), torch.randn((4, *TASK.image), generator=torch.Generator())
    drop = torch.tensor([[0, 5, 15], [1, 2, 3], [8, 9, 10], [4, 6, 12]])
    whole, rest = server.ask(x, drop)
    with torch.no_grad():
        expected = [torch.stack([member(x, *part) for member in server.members]).mean(0) for part in ((), (drop,))]
    torch.testing.assert_close(whole, expected[0])
    torch.testing.assert_close(rest, expected[1])
    assert not torch.allclose(whole, rest, atol=1e-3)


def test_the_student_steps_with_momentum_and_decay() -> None:
    """SGD by hand on two batches: v <- 0.9 v + g + decay p, p <- p - rate v."""
    server = server_of(student_momentum=0.9, student_decay=0.1, student_lr=0.05)
    server.dream(0)
    pool, mine = Pools(server.pools), copy.deepcopy(server.student)
    velocity = [torch.zeros_like(p) for p in mine.parameters()]
    for index in (torch.arange(5), torch.arange(5, 12)):
        server._step(pool, index)
        values = relabel_terms(mine, pool.take(index, torch.device("cpu")), server.terms)
        slopes = torch.autograd.grad(weighted(values, server.terms), list(mine.parameters()))
        with torch.no_grad():
            for p, v, slope in zip(mine.parameters(), velocity, slopes, strict=True):
                v.mul_(0.9).add_(slope + 0.1 * p)
                p.sub_(0.05 * v)
    for p, expected in zip(server.student.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-6)


def test_the_students_rate_begins_whole_and_falls_along_a_cosine() -> None:
    server, rates = server_of(student_cosine=True), []
    for epoch in range(2):
        server.dream(epoch)
        server.study(epoch)
        rates.append(server.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([SMOKE.student_lr, SMOKE.student_lr / 2])


def test_every_pass_of_the_student_is_booked_and_old_images_leave() -> None:
    server = server_of(passes=3, pool_epochs=1)
    server.dream(0)
    with measure() as meter:
        server.study(0)
    assert meter.flops == 3 * 12 * study_flops(server.student, 11, 5, server.terms, TASK.image)
    server.dream(1)
    assert len(server.pools) == 1 and len(server.samples().tensors["labels"]) == 12


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"adversarial": 0.0},
        {"mask": 0.0},
        {"lambda2": 0.0},
        {"kd": 0.0, "mask": 0.5},
        {"stops": "1:0.3,3:0.5"},
        {"pool_epochs": 1, "server_epochs": 3, "passes": 2},
        {"architecture": "a:vit-p2-w16-d2-h2,b:vit-p2-w8-d1-h2", "student": "vit-p2-w8-d2-h2", "init": "random"},
        {"invert": "ensemble"},
        {"order": "images_first", "student_epochs": 3, "passes": 2},
        {"order": "images_first", "pool_epochs": 1, "server_epochs": 3},
    ],
)
def test_what_the_server_will_do_is_predicted_to_the_operation(change: dict[str, Any]) -> None:
    settings = replace(SMOKE, probe=0, **change)
    method, ctx = FedMitr(TASK, settings), context(settings, "ab")
    server = PatchServer(method, uploads(settings), ctx, "fedmitr", settings.inversion(method.events()), method.terms())
    with measure() as meter:
        server.learn()
    assert method.server_flops("ab") == pytest.approx(meter.flops, rel=1e-12) and meter.flops > 0


@pytest.mark.parametrize(("preset", "petaflops"), [("paper", 38.7), ("smi", 324.3)])
def test_the_published_work_is_as_the_card_says(preset: str, petaflops: float) -> None:
    """DeiT-Tiny at 224 px, ten clients."""
    task = Task("ten classes", tuple("abcdefghij"), (3, 224, 224))
    method = FedMitr(task, resolve_settings(FedMitr, preset))
    assert method.server_flops([f"client-{i}" for i in range(10)]) / 1e15 == pytest.approx(petaflops, abs=0.1)


def test_pixels_beyond_half_precision_are_not_blamed_on_the_student() -> None:
    with pytest.raises(TrainingError, match="beyond 16-bit floats") as caught:
        released(pixel_lr=2e5, clamp=False)
    assert caught.value.field == "pixel_lr"


def test_each_weight_is_that_of_its_term() -> None:
    terms = FedMitr(TASK, replace(SMOKE, kd=0.1, lambda1=0.2, lambda2=0.3)).terms()
    assert (terms.whole, terms.kept, terms.rest) == (0.1, 0.2, 0.3)
    wrong = FedMitr(TASK, replace(SMOKE, mask=-0.1, kd=-1.0, lambda1=-1.0, lambda2=-1.0, probe=-1)).problems(3)
    assert [text.split("'")[1] for text in wrong] == ["mask", "kd", "lambda1", "lambda2", "probe"]


def test_the_baseline_asks_and_refuses_as_fedmitr_does() -> None:
    smoke, cpu = (resolve_settings(DeepInversionVit, preset) for preset in ("smoke", "cpu"))
    assert DeepInversionVit(TASK, cpu).needs_counts() and not DeepInversionVit(TASK, smoke).needs_counts()
    wrong = replace(smoke, architecture="cnn-w4", student_lr=0.0, images=0)
    found = {text.split("'")[1] for text in DeepInversionVit(TASK, wrong).problems(3)}
    assert found == {"architecture", "student_lr", "images"}
