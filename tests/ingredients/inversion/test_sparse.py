"""Sparse inversion by hand, and what "stopped" means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from osfl.core.errors import TrainingError, UsageError
from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.ingredients.inversion import sparse as sparse_inversion
from osfl.ingredients.inversion.pixels import disagreement, jensen_shannon, total_variation
from osfl.ingredients.inversion.sparse import (
    Joint,
    Move,
    Pyramid,
    Sparse,
    SparseInversion,
    VitPixels,
    all_patches,
    draw_move,
    dropped,
    event_problems,
    events_of,
    invert_sparsely,
    most_attended,
    pixels_of,
    sparse_flops,
    stretching,
    vit_pixel_problems,
)
from osfl.models.build import build_model
from osfl.models.flops import inversion_flops
from osfl.models.folding import freeze
from osfl.models.vit import OnSubset, Vit
from osfl.runtime.meter import measure
from osfl.runtime.workers import compute_threads

IMAGE, PATCH, GRID = (3, 16, 16), 4, (4, 4)
LABELS = torch.tensor([0, 1, 2])
SHORT = SparseInversion(steps=4, lr=0.1, events=((2, 0.3),), clamp=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


def vit(seed: int = 0) -> Vit:
    model = freeze(build_model("vit-p4-w16-d2-h2", Task("t", ("a", "b", "c"), IMAGE), torch_generator(seed, "vit")))
    assert isinstance(model, Vit)
    for parameter in model.parameters():  # first weights are small; larger ones make attention matter
        parameter.mul_(4.0) if parameter.ndim > 1 else None
    return model


def inverted(settings: SparseInversion = SHORT, seed: int = 0, server: Vit | None = None) -> Sparse:
    return invert_sparsely(vit(), LABELS, IMAGE, settings, torch_generator(seed, "x"), server=server)


def outside(keep: torch.Tensor) -> torch.Tensor:
    return (pixels_of(keep, GRID, PATCH) == 0).expand(-1, 3, -1, -1)


# --- events and indices ---


def test_events_by_half_by_schedule_or_none() -> None:
    assert events_of("", 100, 0.3) == ((50, 0.3),)
    assert events_of("", 100, 0.0) == ()
    assert events_of("", 1, 0.3) == ((1, 0.3),)
    assert events_of("50:0.3, 100:0.25", 400, 0.9) == ((50, 0.3), (100, 0.25))
    for wrong in ("50", "50:0", "50:1", "50:nan"):
        with pytest.raises(UsageError, match=rf"'stops': expected step:ratio with 0 < ratio < 1, got '{wrong}'"):
            events_of(wrong, 100, 0.3)


def test_impossible_events_are_named() -> None:
    assert event_problems(((0, 0.3),), 10) == ["setting 'stops': step 0 is not one of 1 to 10"]
    for times in ((5, 5), (7, 5)):
        assert event_problems(tuple((t, 0.3) for t in times), 10) == ["setting 'stops': steps must ascend"]
    assert "'mask'" in event_problems(((5, 1.0),), 10)[0]
    wrong = VitPixels(images=0, steps=0, tv=-1, l2=-1, adversarial=-1, pixel_lr=0.0, scales=0, start=0.0)
    named = {text.split("'")[1] for text in vit_pixel_problems(wrong)}
    assert named == {"images", "steps", "tv", "l2", "adversarial", "pixel_lr", "scales", "start"}


def test_137_of_196_stay_and_the_rest_is_dropped() -> None:
    attention = torch.rand(2, 196, generator=torch_generator(0, "a"))
    keep = most_attended(attention, all_patches(2, 196), 0.3)
    drop = dropped(keep, 196)
    assert keep.shape == (2, 137) and drop.shape == (2, 59)
    assert torch.equal(torch.cat([keep, drop], 1).sort().values, all_patches(2, 196))
    assert (attention.gather(1, keep).min(1).values >= attention.gather(1, drop).max(1).values).all()


def test_a_second_event_takes_its_share_of_what_is_left() -> None:
    keep = most_attended(torch.rand(1, 196), all_patches(1, 196), 0.3)
    again = most_attended(torch.rand(1, 137), keep, 0.3)
    assert again.shape[1] == 95 and set(again[0].tolist()) <= set(keep[0].tolist())
    assert most_attended(torch.rand(1, 2), torch.tensor([[3, 7]]), 0.9).shape[1] == 1  # one stays


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize(("down", "right"), [(0, 0), (1, 0), (-1, 2), (3, -3)])
def test_indices_move_with_the_image(down: int, right: int, mirror: bool) -> None:
    """Each patch has a number of its own; after the move it is found where the moved index says."""
    number = torch.arange(24.0).view(1, 1, 4, 6)
    image = number.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    move, keep = Move(down * PATCH, right * PATCH, mirror), torch.tensor([[0, 5, 11, 17, 23]])
    after = move.pixels(image)[:, :, ::PATCH, ::PATCH].flatten(1)
    assert torch.equal(after.gather(1, move.patches(keep, (4, 6), PATCH)), keep.float())


def test_moves_reach_an_eighth_and_round_to_whole_patches() -> None:
    rng = torch_generator(0, "moves")
    moves = [draw_move(224, 32, rng) for _ in range(300)]
    assert {abs(m.down) <= 28 and abs(m.right) <= 4 for m in moves} == {True}
    small = [draw_move(8, 16, rng) for _ in range(200)]
    assert {m.down for m in small} == {-1, 0, 1} and {m.right for m in small} == {-2, -1, 0, 1, 2}
    assert max(m.down for m in moves) > 20 and {m.mirror for m in moves} == {True, False}
    assert Move(28, -7, True).whole(16) == Move(32, 0, True)


# --- the descent ---


def test_without_events_it_is_dense_inversion() -> None:
    """The same loop as one writes it first, bit for bit."""
    settings, model, server = replace(SHORT, events=(), js=0.7, l2=0.1), vit(), vit(1)
    rng = torch_generator(0, "x")
    x = torch.randn((3, *IMAGE), generator=rng).requires_grad_()
    optimizer = torch.optim.Adam([x], 0.1, betas=(0.5, 0.99), fused=True)
    for _ in range(4):
        seen = draw_move(16, 16, rng).pixels(x)
        logits = model(seen)
        loss = functional.cross_entropy(logits, LABELS) - 0.7 * disagreement(server(seen), logits)
        loss = loss + 1e-4 * (64 * 3 * 224 * 224 / x.numel()) ** 0.5 * total_variation(x) + 0.1 * x.norm()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        x.data.clamp_(-1, 1)
    found = inverted(settings, server=server)
    assert torch.equal(found.images, x) and torch.equal(found.keep, all_patches(3, 16))


def test_stopped_pixels_never_move_again() -> None:
    stopped, later = inverted(replace(SHORT, steps=2)), inverted(replace(SHORT, steps=6))
    assert torch.equal(stopped.keep, later.keep) and later.keep.shape == (3, 11)  # floor(0.7 * 16)
    away = outside(later.keep)
    assert torch.equal(stopped.images[away], later.images[away])
    assert (stopped.images != later.images)[~away].float().mean() > 0.5


def test_stopped_patches_leave_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    embed = Vit.embed

    def counted(self: Vit, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        tokens = embed(self, x, keep)
        if not x.is_meta:  # counting operations is no step
            lengths.append(tokens.shape[1])
        return tokens

    monkeypatch.setattr(Vit, "embed", counted)
    inverted(replace(SHORT, events=((1, 0.3), (3, 0.5))), server=vit(1))
    assert lengths == [17, 17, 12, 12, 12, 12, 6, 6]  # client and server, four steps


def test_the_step_before_an_event_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Move] = []
    loss = sparse_inversion._loss

    def watched(x: torch.Tensor, keep: torch.Tensor, move: Move, *rest: object) -> object:
        moves.append(move)
        return loss(x, keep, move, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sparse_inversion, "_loss", watched)
    inverted(replace(SHORT, steps=12, events=((6, 0.3),)))
    assert moves[5] == Move(0, 0, False) and len({*moves[:5], *moves[6:]}) > 3


# --- several grids ---


def test_coarse_grids_are_stretched_linearly() -> None:
    assert [stretching(28, k).shape[1] for k in range(6)] == [28, 14, 7, 4, 2, 1]
    assert torch.equal(stretching(8, 0), torch.eye(8)) and torch.equal(stretching(8, 3), torch.ones(8, 1))
    assert stretching(4, 1).tolist() == [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]


def test_a_pyramid_moves_as_a_sum_of_grids_would() -> None:
    """The same as keeping every grid and adding them up, by autograd."""
    settings, model = replace(SHORT, scales=3, events=(), augment=False, clamp=False), vit()
    rng = torch_generator(0, "x")
    grids = [(torch.randn((3, 3, side, side), generator=rng) / 3**0.5).requires_grad_() for side in (16, 8, 4)]
    optimizer = torch.optim.Adam(grids, 0.1, betas=(0.5, 0.99), fused=True)

    def image() -> torch.Tensor:
        return torch.stack([functional.interpolate(grid, size=(16, 16), mode="bilinear") for grid in grids]).sum(0)

    for _ in range(4):
        x = image()
        weight = 1e-4 * (64 * 3 * 224 * 224 / x.numel()) ** 0.5
        loss = functional.cross_entropy(model(x), LABELS) + weight * total_variation(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(inverted(settings).images, image().detach(), rtol=1e-4, atol=1e-4)


def test_coarse_grids_make_smooth_images_and_leave_stopped_pixels_alone() -> None:
    many = replace(SHORT, scales=4)
    stopped, later = inverted(replace(many, steps=2)), inverted(replace(many, steps=6))
    away = outside(later.keep)
    assert torch.equal(stopped.keep, later.keep) and torch.equal(stopped.images[away], later.images[away])
    assert (stopped.images != later.images)[~away].float().mean() > 0.5
    assert later.images.abs().max() <= 1
    assert total_variation(later.images) < 0.8 * total_variation(inverted(replace(SHORT, steps=6)).images)


def test_images_start_as_loud_as_asked() -> None:
    def loud(scales: int, start: float) -> float:
        return Pyramid(200, IMAGE, scales, start, torch_generator(0, "x"), torch.device("cpu")).x.std().item()

    assert loud(1, 1.0) == pytest.approx(1.0, abs=0.02) and 0.6 < loud(4, 1.0) < 1.0
    assert loud(4, 0.5) == pytest.approx(loud(4, 1.0) / 2, rel=1e-5)


def test_the_server_matters_only_with_js() -> None:
    alone = replace(SHORT, js=0.0)
    assert torch.equal(inverted(alone, server=vit(1)).images, inverted(alone, server=vit(2)).images)
    assert not torch.equal(inverted(server=vit(1)).images, inverted(server=vit(2)).images)


@pytest.mark.parametrize("divergence", ["public", "textbook"])
def test_the_loss_by_hand(divergence: str) -> None:
    """CE - js JS(server, client) + tv R_TV + l2 ||x||, the TV weight converted from 64 images of 3 x 224 x 224."""
    x, keep = torch.randn((3, *IMAGE), generator=torch_generator(2, "x")), torch.tensor([[0, 3, 9], [1, 2, 15], [4, 5, 6]])
    settings = replace(SHORT, js=0.7, tv=0.2, l2=0.3, divergence=divergence)
    loss, attention = sparse_inversion._loss(x, keep, Move(3, 2, False), vit(), vit(1), LABELS, settings)
    seen, where = x.roll((4, 0), (2, 3)), (keep + 4) % 16  # moved by whole patches: one row down, not to the right
    mine, theirs = vit()(seen, where), vit(1)(seen, where)
    apart = {"public": disagreement, "textbook": jensen_shannon}[divergence](theirs, mine)
    scale = (64 * 3 * 224 * 224 / (3 * 3 * 16 * 16)) ** 0.5
    expected = functional.cross_entropy(mine, LABELS) - 0.7 * apart + 0.2 * scale * total_variation(x) + 0.3 * x.norm()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert torch.allclose(attention, vit().with_attention(seen, where)[1])


def test_the_server_is_asked_to_disagree() -> None:
    settings, server, model = replace(SHORT, steps=30, events=(), augment=False), vit(1), vit()

    def apart(js: float) -> float:
        x = inverted(replace(settings, js=js), server=server).images
        return float(disagreement(server(x), model(x)))

    assert apart(5.0) > apart(0.0)


def test_several_are_inverted_as_one() -> None:
    """The loss is of their combined logits, patches stay by their mean attention, and each pass of each is booked."""
    members = [vit(seed) for seed in (3, 4)]
    joint = Joint(members, lambda logits: 0.8 * logits[0] + 0.2 * logits[1])
    x, keep = torch.randn((3, *IMAGE), generator=torch_generator(2, "x")), torch.tensor([[0, 3, 9], [1, 2, 15], [4, 5, 6]])
    (first, row), (second, other) = (member.with_attention(x, keep) for member in members)
    logits, attention = joint.with_attention(x, keep)
    torch.testing.assert_close(logits, 0.8 * first + 0.2 * second)
    torch.testing.assert_close(attention, (row + other) / 2)
    settings = replace(SHORT, steps=40, js=0.0)
    with measure() as meter:
        found = invert_sparsely(joint, LABELS, IMAGE, settings, torch_generator(0, "x"))
    assert torch.equal(joint.with_attention(found.images, found.keep)[0].argmax(1), LABELS)
    assert meter.flops == 2 * len(LABELS) * sparse_flops(vit(), IMAGE, settings)
    alone = invert_sparsely(Joint([vit()], lambda logits: logits[0]), LABELS, IMAGE, SHORT, torch_generator(0, "x"))
    assert torch.equal(alone.images, inverted().images)  # one is itself


def test_pixels_stay_in_range_and_find_their_class() -> None:
    found = inverted(replace(SHORT, steps=40, events=((20, 0.3),)))
    assert found.images.abs().max() <= 1
    assert torch.equal(vit()(found.images, found.keep).argmax(1), LABELS)
    paper = inverted(replace(SHORT, lr=1e-3, clamp=False))
    noise = torch.randn((3, *IMAGE), generator=torch_generator(0, "x"))
    assert (paper.images - noise).abs().max() < 0.02  # the published rate leaves noise as it is


def test_pixels_that_are_not_finite_are_refused() -> None:
    model = vit()
    model.head.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        invert_sparsely(model, LABELS, IMAGE, SHORT, torch_generator(0, "x"))


def test_work_is_booked_by_the_tokens_that_are_left() -> None:
    model = vit()
    dense, sparse = inversion_flops(model, IMAGE), inversion_flops(OnSubset(model, 11), IMAGE)
    assert sparse < 0.8 * dense
    assert sparse_flops(model, IMAGE, SHORT) == 2 * dense + 2 * sparse


def test_a_server_that_is_not_asked_costs_nothing() -> None:
    for js, networks in ((0.0, 1), (1.0, 2)):
        settings = replace(SHORT, js=js)
        with measure() as meter:
            inverted(settings, server=vit(1))
        assert meter.flops == networks * len(LABELS) * sparse_flops(vit(), IMAGE, settings)
