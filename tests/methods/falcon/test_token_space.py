"""Spaces of tokens: what is put into one comes back, and in the white one nothing is correlated."""

from __future__ import annotations

import pytest
import torch

from osfl.ingredients.statistics.gaussians import shrunk_covariance
from osfl.methods.falcon.generator import fit_generator
from osfl.methods.falcon.token_space import FEW, into_space, out_of_space, standard_space, white_space
from osfl.models.initial import initialize
from osfl.models.token_models import TokenGenerator


def sequences(n: int = 200, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated over dimensions and positions, with class means far from each other."""
    rng = torch.Generator().manual_seed(0)
    mix, means = torch.randn(8, 8, generator=rng), 5 * torch.randn(classes, 8, generator=rng)
    labels = torch.arange(n) % classes
    return (torch.randn(n, 8, generator=rng) @ mix + means[labels]).view(n, 2, 4), labels


@pytest.mark.parametrize("white", [False, True])
def test_what_goes_in_comes_out(white: bool) -> None:
    tokens, labels = sequences()
    space = white_space(tokens, labels, 4) if white else standard_space(tokens)
    assert space.shape == ((4 + 8, 8) if white else (2, 4))
    assert torch.allclose(out_of_space(into_space(tokens, labels, space), labels, space), tokens, atol=1e-4)


def test_white_sequences_have_the_identity_as_covariance_and_no_class_means() -> None:
    tokens, labels = sequences(30000)
    z = into_space(tokens, labels, white_space(tokens, labels, 3)).flatten(1)
    assert torch.allclose(z.T @ z / len(z), torch.eye(8), atol=0.01)
    assert all(float(z[labels == c].mean(0).abs().max()) < 1e-3 for c in range(3))


def test_fewer_sequences_than_dimensions() -> None:
    tokens, labels = sequences(FEW + 3)
    wide = torch.cat([tokens, tokens.square(), tokens.abs()], 2)  # 24 numbers each, and 13 sequences
    space = white_space(wide, labels, 3)
    assert torch.allclose(out_of_space(into_space(wide, labels, space), labels, space), wide, atol=1e-3)


@pytest.mark.parametrize("n", [1, 2, FEW])
def test_of_too_few_sequences_none_is_repeated(n: int) -> None:
    tokens, labels = sequences(n)
    space = white_space(tokens, labels, 3)
    z = torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(out_of_space(z, labels, space), out_of_space(z, labels, standard_space(tokens)), atol=1e-5)
    assert float((out_of_space(z, labels, space) - tokens).abs().mean()) > 0.1


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_shrinkage_is_that_of_ledoit_and_wolf(scale: float) -> None:
    """However small the numbers are."""
    from sklearn.covariance import ledoit_wolf

    off = scale * sequences(12)[0].flatten(1).double()
    off = off - off.mean(0)
    expected, _ = ledoit_wolf(off.numpy(), assume_centered=True)
    assert torch.allclose(shrunk_covariance(off), torch.from_numpy(expected), atol=1e-9 * scale**2)


def fitted(patience: int, epochs: int) -> tuple[float, TokenGenerator]:
    """How likely held-out sequences are after a training that overfits at once."""
    tokens, labels = sequences(24)
    space = white_space(tokens[:12], labels[:12], 3)
    z = into_space(tokens, labels, space)
    model = TokenGenerator(2, 4, 3, width=16, depth=1, heads=2, components=4)
    initialize(model, torch.Generator().manual_seed(1))
    fit_generator(
        model,
        z[:12],
        labels[:12],
        torch.Generator().manual_seed(2),
        epochs=epochs,
        batch_size=4,
        lr=1e-2,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        held_out=(z[12:], labels[12:]),
        patience=patience,
    )
    with torch.no_grad():
        return float(model.log_likelihood(z[12:], labels[12:]).mean()), model


def test_patience_keeps_what_was_best_for_held_out_sequences() -> None:
    last, _ = fitted(0, 30)
    best, kept = fitted(2, 30)
    again, twin = fitted(2, 30)
    assert best > last and best == again
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), twin.parameters(), strict=True))


def test_what_is_kept_is_the_best_of_all_epochs_and_the_start() -> None:
    on_the_way = [fitted(0, epochs)[0] for epochs in range(11)]
    assert fitted(10, 10)[0] == pytest.approx(max(on_the_way)) and on_the_way[-1] < max(on_the_way) - 0.1


@pytest.mark.parametrize(("more", "white"), [(-1, False), (0, True)])
def test_a_covariance_needs_so_many_sequences_beyond_one_of_each_class(more: int, white: bool) -> None:
    """The standard space divides each number alone: its matrix is diagonal."""
    tokens, labels = sequences(3 + FEW + more)
    matrix = white_space(tokens, labels, 3)[3:]
    assert (int((matrix - matrix.diag().diag()).count_nonzero()) > 0) == white
