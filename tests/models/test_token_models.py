"""FALCON's networks: what each position may see, the likelihood, the sampler, and the sizes that the paper prints."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.nn.attention import SDPBackend, sdpa_kernel

from osfl.core.seeds import torch_generator
from osfl.models.flops import _Counter
from osfl.models.initial import initialize
from osfl.models.token_models import AttentionPool, TokenGenerator, levels_mask, sinusoid


def generator(order: str = "mar", tokens: int = 5, components: int = 3, dim: int = 6) -> TokenGenerator:
    model = TokenGenerator(tokens, dim, 4, width=8, depth=2, heads=2, components=components, order=order)
    initialize(model, torch_generator(0, "start"))
    with torch.no_grad():
        for layer in (model.weights, model.means, model.variances):
            layer.weight.mul_(20)  # far from the start, where all components are alike
    return model.eval()


def size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes_are_those_of_the_paper() -> None:
    with torch.device("meta"):
        whole, head = TokenGenerator(5, 768, 4), AttentionPool(768, 4)
    assert size(whole) == 37_829_396 and size(head) == 5_905_924
    assert round(4 * size(whole) / 2**20, 1) == 144.3 and round(4 * size(head) / 2**20, 1) == 22.5
    assert 4 * size(whole) // (5 * 768 * 4) == 9_851  # so many sequences are smaller than the generator
    assert 2 * size(whole) * (2 + 4) == pytest.approx(0.454e9, rel=1e-3)


def test_mask_is_the_rule_of_levels() -> None:
    levels = [0, 1, 1, 2, 2, 2]
    mask = levels_mask(levels)
    for i, mine in enumerate(levels):
        for j, other in enumerate(levels):
            assert bool(mask[i, j]) == (other <= mine)


def test_the_first_position_sees_the_class_alone() -> None:
    model, labels = generator(), torch.tensor([1, 2])
    tokens = torch.randn(2, 5, 6, generator=torch_generator(0, "tokens"))
    base = model.hidden(labels, tokens)
    moved = tokens.clone()
    moved[:, 0] += 1
    after = model.hidden(labels, moved)
    assert torch.equal(base[:, 0], after[:, 0]) and not torch.allclose(base[:, 1:], after[:, 1:])
    other = model.hidden(torch.tensor([3, 0]), tokens)
    assert not any(torch.allclose(base[:, i], other[:, i]) for i in range(5))


def test_true_regions_are_never_inputs() -> None:
    """The likelihood's gradient to a region's token comes through its target alone, never through the transformer."""
    model, labels = generator(), torch.tensor([1])
    tokens = torch.randn(1, 5, 6, generator=torch_generator(0, "tokens"))
    moved = tokens.clone()
    moved[:, 3] += 1
    assert torch.equal(model.hidden(labels, tokens), model.hidden(labels, moved))
    strict = generator("ar")
    before, after = strict.hidden(labels, tokens), strict.hidden(labels, moved)
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.equal(before[:, 4], after[:, 4])
    alone = generator("nar")
    assert torch.equal(alone.hidden(labels, tokens), alone.hidden(labels, moved))


@pytest.mark.parametrize("components", [1, 3])
def test_likelihood_is_that_of_torch(components: int) -> None:
    model = generator(components=components).double()
    labels = torch.tensor([0, 3, 1])
    tokens = torch.randn(3, 5, 6, generator=torch_generator(1, "tokens"), dtype=torch.float64)
    hidden = model.hidden(labels, tokens)
    mean = model.means(hidden).view(3, 5, components, 6)
    deviation = (0.5 * model.variances(hidden).clamp(-7, 7)).exp().view(3, 5, components, 6)
    mixture = MixtureSameFamily(Categorical(logits=model.weights(hidden)), Independent(Normal(mean, deviation), 1))
    assert torch.allclose(model.log_likelihood(tokens, labels), mixture.log_prob(tokens), atol=1e-9)
    if components == 1:
        closed = Normal(mean[:, :, 0], deviation[:, :, 0]).log_prob(tokens).sum(-1)
        assert torch.allclose(model.log_likelihood(tokens, labels), closed, atol=1e-9)


def test_the_order_of_components_is_nothing() -> None:
    model, labels = generator(), torch.tensor([2])
    tokens = torch.randn(1, 5, 6, generator=torch_generator(2, "tokens"))
    before = model.log_likelihood(tokens, labels)
    with torch.no_grad():
        for layer in (model.weights, model.means, model.variances):
            width = layer.out_features // 3
            for tensor in (layer.weight, layer.bias):
                tensor.copy_(tensor.view(3, width, -1).flip(0).reshape(tensor.shape))
    assert torch.allclose(before, model.log_likelihood(tokens, labels), atol=1e-5)


class _Toy(TokenGenerator):
    """p(s0) = N(0, 1) and p(s1 | s0) = N(0.9 s0, 1 - 0.81), exactly: hidden states carry what was seen."""

    def __init__(self) -> None:
        super().__init__(2, 1, 2, width=2, depth=1, heads=1, components=1)

    def hidden(self, labels: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        first = torch.zeros(len(labels), 1, 2)
        first[..., 1] = 0.0
        if not known.shape[1]:
            return first
        return torch.cat([first, torch.cat([0.9 * known[:, :1], torch.full((len(labels), 1, 1), math.log(0.19))], -1)], 1)


def test_the_global_token_is_the_one_that_regions_were_drawn_for() -> None:
    model = _Toy()
    with torch.no_grad():
        for layer, row in ((model.means, [1.0, 0.0]), (model.variances, [0.0, 1.0])):
            layer.weight.copy_(torch.tensor([row]))
            layer.bias.zero_()
        model.weights.weight.zero_()
        model.weights.bias.zero_()
    drawn = model.sample(torch.zeros(4000, dtype=torch.long), torch_generator(0, "draw")).squeeze(-1)
    assert float(torch.corrcoef(drawn.T)[0, 1]) > 0.87  # exactly 0.9; a resampled global token would give 0
    assert float(drawn[:, 0].std()) == pytest.approx(1, abs=0.05)


def test_components_are_drawn_as_often_as_they_weigh() -> None:
    model = generator()
    labels = torch.full((3000,), 1)
    with torch.no_grad():
        odds = model.weights(model.hidden(labels[:1], torch.empty(1, 0, 6))[:, 0]).softmax(-1)[0]
        model.means.weight.zero_()
        model.means.bias.copy_(torch.arange(3.0).repeat_interleave(6) * 1000)
    first = model.sample(labels, torch_generator(3, "draw"))[:, 0, 0]
    found = torch.bincount((first / 1000).round().long().clamp(0, 2), minlength=3) / 3000
    assert torch.allclose(found, odds, atol=0.03)
    sharp = model.sample(labels, torch_generator(3, "draw"), temperature=1e-3)[:, 0, 0]
    assert int((sharp / 1000).round().long().unique().numel()) == 1


@pytest.mark.parametrize("order", ["mar", "ar", "nar"])
def test_samples_have_the_shape_of_sequences(order: str) -> None:
    for tokens in (1, 5):
        drawn = generator(order, tokens).sample(torch.tensor([0, 1, 2]), torch_generator(0, order))
        assert drawn.shape == (3, tokens, 6) and bool(drawn.isfinite().all())


def pool(residual: bool = True) -> AttentionPool:
    model = AttentionPool(6, 3, residual=residual)
    initialize(model, torch_generator(0, "pool"))
    return model.eval()


def test_classifier_does_not_mind_the_order_of_tokens() -> None:
    model, tokens = pool(), torch.randn(4, 5, 6, generator=torch_generator(0, "tokens"))
    assert torch.allclose(model(tokens), model(tokens[:, [3, 1, 4, 0, 2]]), atol=1e-6)


def test_classifier_is_attention_written_out() -> None:
    model, tokens = pool(), torch.randn(4, 5, 6, generator=torch_generator(1, "tokens"))
    keys, values, query = model.keys(tokens), model.values(tokens), model.query
    weights = (query @ keys.transpose(1, 2) / math.sqrt(6)).softmax(-1)
    pooled = (weights @ values + query).squeeze(1)
    assert torch.allclose(model(tokens), model.head(model.fc2(model.fc1(pooled).relu())), atol=1e-6)


def test_a_single_token_is_not_pooled() -> None:
    model, token = pool(residual=False), torch.randn(4, 1, 6, generator=torch_generator(2, "tokens"))
    assert torch.allclose(model(token), model.head(model.fc2(model.fc1(model.values(token[:, 0])).relu())), atol=1e-6)


def test_dropout_is_drawn_from_the_given_numbers() -> None:
    model, tokens = pool(), torch.randn(4, 5, 6, generator=torch_generator(3, "tokens"))
    first, again, other = (model(tokens, *model.draw_kept(4, torch_generator(seed, "drop"))) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("order", ["mar", "ar", "nar"])
@pytest.mark.parametrize(("tokens", "width"), [(5, 16), (5, 8), (1, 16)])
def test_operations_of_sampling_are_those_that_torch_counts(order: str, tokens: int, width: int) -> None:
    model = TokenGenerator(tokens, 8, 3, width=width, depth=2, heads=2, components=4, order=order)
    initialize(model, torch_generator(0, "model"))
    count = 64
    with sdpa_kernel(SDPBackend.MATH), _Counter() as counter:  # fused attention would not be counted
        model.sample(torch.arange(count) % 3, torch_generator(0, "draw"))
    assert counter.total == pytest.approx(model.sampling_flops() * count, rel=1e-9)


def test_positions_are_sines_and_cosines_of_falling_frequencies() -> None:
    """Width 4: sin p, cos p, sin p/100, cos p/100; an odd width lacks the last cosine."""
    found = sinusoid(3, 4)
    for p in range(3):
        expected = [math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)]
        assert found[p].tolist() == pytest.approx(expected, abs=1e-6)
    assert sinusoid(3, 3)[2].tolist() == pytest.approx([math.sin(2), math.cos(2), math.sin(2 * 10000 ** (-2 / 3))], abs=1e-6)
