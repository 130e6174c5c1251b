"""Seeds come from labels, the same everywhere."""

import torch

from osfl.core.seeds import derive, numpy_generator, torch_generator


def test_a_pinned_value_for_all_times() -> None:
    """If this changes, every result in every record changes."""
    assert derive(0, "local", "client-01") == 7886206964855104625


def test_labels_and_seed_both_matter() -> None:
    values = {derive(0, "a"), derive(1, "a"), derive(0, "b"), derive(0, "a", "b"), derive(0, "a", 1), derive(0, "a", "1")}
    assert len(values) == 6


def test_labels_do_not_run_together() -> None:
    assert derive(0, "ab", "c") != derive(0, "a", "bc")


def test_generators_repeat() -> None:
    assert torch.equal(torch.rand(3, generator=torch_generator(0, "x")), torch.rand(3, generator=torch_generator(0, "x")))
    assert (numpy_generator(0, "x").random(3) == numpy_generator(0, "x").random(3)).all()
