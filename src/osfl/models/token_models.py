"""Networks on token sequences (FALCON): a generator that draws sequences of a class, and a classifier that pools them."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from osfl.models.initial import draw_normal
from osfl.runtime.precision import mixed

LOG_VARIANCE = 7.0  # log variances stay within this of zero: the likelihood of few samples is unbounded otherwise


def levels_mask(levels: list[int]) -> torch.Tensor:
    """Which position (row) may look at which (column): those of its own or an earlier level, as booleans (n, n)."""
    level = torch.tensor(levels)
    return level[:, None] >= level[None, :]


def sinusoid(length: int, width: int) -> torch.Tensor:
    """Fixed positions (length, width): sines and cosines of geometric frequencies."""
    half = torch.arange(0, width, 2, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.exp(-math.log(10000.0) * half / width)
    found = torch.zeros(length, width, dtype=torch.float64)
    found[:, 0::2], found[:, 1::2] = angle.sin(), angle.cos()[:, : width // 2]
    return found.float()


class _Layer(nn.Linear):
    """Begins as transformers do: normal weights, zero bias."""

    def initialize(self, rng: torch.Generator | None) -> None:
        draw_normal(self.weight, 0.02, rng)
        if self.bias is not None:
            self.bias.zero_()


class _Block(nn.Module):
    """Pre-norm attention and a feed-forward layer of the same width (ratio 1: what gives the paper's 144.3 MiB)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = _Layer(width, 3 * width), _Layer(width, width)
        self.fc1, self.fc2 = _Layer(width, width), _Layer(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # (batch, positions, width)
        q, k, v = (part.view(*part.shape[:2], self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return y


class TokenGenerator(nn.Module):
    """p(s0, s1..sL | class) as a mixture density at each of 1 + L positions.

    Position 0 sees the class and predicts the global token. In `mar` (the paper's) positions 1..L see the class and copies
    of the global token, and each other, never a region: so the regions are independent given the global token. In `ar` each
    position sees the tokens before it; in `nar` only the class.
    """

    mask: torch.Tensor
    places: torch.Tensor

    def __init__(
        self,
        tokens: int,
        dim: int,
        classes: int,
        *,
        width: int = 0,
        depth: int = 4,
        heads: int = 16,
        components: int = 20,
        order: str = "mar",
    ) -> None:
        super().__init__()
        width = width or dim
        self.tokens, self.dim, self.classes, self.components, self.order = tokens, dim, classes, components, order
        self.embed_class = _Layer(classes, width)
        self.embed_token = nn.Identity() if width == dim else _Layer(dim, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.weights = _Layer(width, components)
        self.means = _Layer(width, components * dim)
        self.variances = _Layer(width, components * dim)
        levels = {"mar": [0] + [1] * (tokens - 1), "ar": list(range(tokens)), "nar": [0] * tokens}[order]
        self.register_buffer("mask", levels_mask(levels), persistent=False)
        self.register_buffer("places", sinusoid(tokens, width), persistent=False)

    def initialize(self, rng: torch.Generator | None) -> None:
        """Its own buffers are computed, and its layers start themselves."""

    @mixed
    def hidden(self, labels: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """What each position knows, (batch, positions, width), of the class and the tokens so far, `known` (batch, k, dim)."""
        first = self.embed_class(F.one_hot(labels, self.classes).to(self.places.dtype)).unsqueeze(1)
        rest = self.tokens - 1
        if self.order == "nar":
            x = first.expand(-1, self.tokens, -1)
        elif self.order == "mar":
            x = torch.cat([first, self.embed_token(known[:, :1]).expand(-1, rest, -1)], 1) if known.shape[1] else first
        else:
            x = torch.cat([first, self.embed_token(known[:, :rest])], 1) if known.shape[1] else first
        count = x.shape[1]
        x = x + self.places[:count]
        for block in self.blocks:
            x = block(x, self.mask[:count, :count])
        found: torch.Tensor = x
        return found

    def log_likelihood(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """log p of each token given what its position knows, (batch, 1 + L)."""
        h = self.hidden(labels, tokens)
        pi = F.log_softmax(self.weights(h), -1)  # (batch, 1 + L, K)
        each = (*h.shape[:2], self.components, self.dim)
        mean, log_variance = self.means(h).view(each), self._clamped(self.variances(h)).view(each)
        distance = ((tokens.unsqueeze(2) - mean).square() * (-log_variance).exp()).sum(-1)
        density = -0.5 * (distance + log_variance.sum(-1) + self.dim * math.log(2 * math.pi))
        found: torch.Tensor = (pi + density).logsumexp(-1)
        return found

    def _clamped(self, log_variance: torch.Tensor) -> torch.Tensor:
        return log_variance.clamp(-LOG_VARIANCE, LOG_VARIANCE)

    @torch.no_grad()
    def sample(self, labels: torch.Tensor, rng: torch.Generator, temperature: float = 1.0) -> torch.Tensor:
        """Sequences (batch, 1 + L, dim). The global token that is returned is the one that the regions were drawn for."""
        none = torch.empty(len(labels), 0, self.dim, device=labels.device)
        if self.order == "nar" or self.tokens == 1:
            return self._drawn(self.hidden(labels, none), rng, temperature)
        found = self._drawn(self.hidden(labels, none)[:, :1], rng, temperature)
        if self.order == "mar":
            regions = self._drawn(self.hidden(labels, found)[:, 1:], rng, temperature)
            return torch.cat([found, regions], 1)
        while found.shape[1] < self.tokens:
            found = torch.cat([found, self._drawn(self.hidden(labels, found)[:, -1:], rng, temperature)], 1)
        return found

    def sampling_flops(self) -> float:
        """Operations of one sequence, a multiply-add being two: positions that pass the blocks, and those that are drawn.

        The head is asked for one component only. (With all K of them at all 2 + L positions, as one first writes it, the
        paper's size takes 0.454 GFLOP.)
        """
        rest = self.tokens - 1
        passes = {"nar": [self.tokens], "mar": [1, *([self.tokens] if rest else [])], "ar": list(range(1, self.tokens + 1))}[
            self.order
        ]
        width, depth = self.weights.in_features, len(self.blocks)
        layers = sum(m.weight.numel() for m in self.blocks.modules() if isinstance(m, nn.Linear))
        trunk = sum(2.0 * n * layers + 4.0 * depth * n * n * width for n in passes)  # and attention: q k^T and its sum of v
        known = {"nar": 0, "mar": min(rest, 1), "ar": sum(n - 1 for n in passes)}[self.order]
        inputs = 2.0 * (self.classes * width * len(passes) + (known * self.dim * width if self.dim != width else 0))
        return trunk + inputs + 2.0 * self.tokens * width * (self.components + 2 * self.dim)

    def _drawn(self, h: torch.Tensor, rng: torch.Generator, temperature: float) -> torch.Tensor:
        """The component first, then only its mean and variance: the head is the largest part of the network."""
        flat = h.flatten(0, 1)
        odds = (self.weights(flat) / temperature).softmax(-1)
        which = torch.multinomial(odds.cpu(), 1, generator=rng).squeeze(1)
        noise = torch.randn((len(flat), self.dim), generator=rng).to(h.device)
        found = torch.empty(len(flat), self.dim, device=h.device)
        counts = torch.bincount(which, minlength=self.components).tolist()  # known here, so that no device is asked
        for k, mine in enumerate(torch.split(which.argsort(stable=True).to(h.device), counts)):
            if counts[k]:
                part = slice(k * self.dim, (k + 1) * self.dim)
                mean = F.linear(flat[mine], self.means.weight[part], self.means.bias[part])
                log_variance = self._clamped(F.linear(flat[mine], self.variances.weight[part], self.variances.bias[part]))
                found[mine] = mean + (0.5 * log_variance).exp() * noise[mine]
        return found.view(h.shape[0], h.shape[1], self.dim)


class _Xavier(nn.Linear):
    def initialize(self, rng: torch.Generator | None) -> None:
        if rng is None:
            self.weight.zero_()
        else:
            bound = math.sqrt(6 / (self.in_features + self.out_features))
            self.weight.uniform_(-bound, bound, generator=rng)


class AttentionPool(nn.Module):
    """One learned query looks at the tokens; a feed-forward layer and a linear head follow. The order of tokens is nothing.

    q (W_k s) = (W_k^T q) s and sum a_i W_v s_i = W_v (sum a_i s_i): the same numbers with two products of one vector an
    image instead of one of each token.
    """

    def __init__(self, dim: int, classes: int, *, hidden: int = 0, dropout: float = 0.3, residual: bool = True) -> None:
        super().__init__()
        hidden = hidden or 4 * dim
        self.dropout, self.residual = dropout, residual
        self.query = nn.Parameter(torch.empty(1, 1, dim))
        self.keys, self.values = _Xavier(dim, dim, bias=False), _Xavier(dim, dim, bias=False)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.head = nn.Linear(dim, classes)

    def initialize(self, rng: torch.Generator | None) -> None:
        draw_normal(self.query, 1 / math.sqrt(self.query.shape[-1]), rng)

    def draw_kept(self, count: int, rng: torch.Generator) -> list[torch.Tensor]:
        """Which hidden units a step on so many sequences does not drop, (count, hidden); nothing where none is dropped."""
        return [torch.rand((count, self.fc1.out_features), generator=rng) >= self.dropout] if self.dropout else []

    @mixed
    def forward(self, tokens: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, tokens, dim) -> logits; hidden units that are not `kept` are dropped."""
        hidden = F.relu(self.fc1(self.pooled(tokens)))
        if kept is not None:
            hidden = hidden * kept / (1 - self.dropout)
        logits: torch.Tensor = self.head(self.fc2(hidden))
        return logits

    def pooled(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, dim): what the query finds among the tokens."""
        query = self.query[0, 0]
        score = tokens @ (self.keys.weight.T @ query) / math.sqrt(len(query))  # (batch, tokens)
        found: torch.Tensor = self.values((score.softmax(-1).unsqueeze(1) @ tokens).squeeze(1))
        return found + query if self.residual else found
