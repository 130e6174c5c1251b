"""Methods on features: what the exact rewrites gain, mixtures beside scikit-learn's, encoders, and memory of 1,000 clients.

    python -m benchmarks.token_speed

Variants are measured in turns on one thread, by processor time, so that ratios hold on a busy machine; equal results are
shown in the same run. "Plain" is the same mathematics the way one writes it first.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn import functional

from benchmarks.measuring import medians
from osfl.core.errors import OsflError
from osfl.core.seeds import torch_generator
from osfl.ingredients.statistics.gaussians import FeatureMixture, Shape, _maximized, _powers, fit_mixture
from osfl.ingredients.statistics.kmeans import kmeans
from osfl.models.encoders import load_encoder
from osfl.models.initial import initialize
from osfl.models.token_models import AttentionPool, TokenGenerator
from osfl.runtime.workers import compute_threads, keep_freed_memory

ROUNDS = 5
DIM, TOKENS, BATCH = 768, 5, 256  # the paper's size
SEQUENCES = 128
TOLERANCE = 0.01  # of features: norm of the error over norm of the features


def run() -> dict[str, object]:
    keep_freed_memory()  # as in every round
    with compute_threads(1), threadpool_limits(1):
        found: dict[str, object] = {
            "attention_pool": _pooling(),
            "sampling": _sampling(),
            "mixtures": _mixtures(),
            "encoders": _encoders(),
        }
    return {**found, "fedcgs_memory": _memory()}


def _turns(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    return medians(variants, ROUNDS, time.process_time)


# --- the exact rewrites ------------------------------------------------------------------------------------------------


class PlainPool(AttentionPool):
    """Keys and values of every token."""

    def pooled(self, tokens: torch.Tensor) -> torch.Tensor:
        keys, values = self.keys(tokens), self.values(tokens)
        score = (self.query @ keys.transpose(1, 2)) / DIM**0.5
        out: torch.Tensor = (score.softmax(-1) @ values).squeeze(1) + self.query[0, 0]
        return out


def _pooling() -> dict[str, object]:
    ours, plain = AttentionPool(DIM, 4), PlainPool(DIM, 4)
    initialize(ours, torch_generator(0, "pool"))
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(BATCH, TOKENS, DIM, generator=torch_generator(0, "tokens"))

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    with torch.no_grad():
        error = float((ours(x) - plain(x)).abs().max() / plain(x).abs().max())
        pooling = _turns({"ours": lambda: ours.pooled(x), "plain": lambda: plain.pooled(x)})
        answer = _turns({"ours": lambda: ours(x), "plain": lambda: plain(x)})
    train = _turns({"ours": lambda: step(ours), "plain": lambda: step(plain)})
    return {
        "batch": BATCH,
        "tokens": TOKENS,
        "dim": DIM,
        "relative_error": error,
        "aim": 2.3,
        "pooling_sequences_per_second": round(BATCH / pooling["ours"]),
        "pooling_speedup": _ratio(pooling),
        "note": "the whole classifier has a feed-forward layer as well, which no rewrite makes cheaper: at most 2.0",
        "forward_sequences_per_second": round(BATCH / answer["ours"]),
        "forward_speedup": _ratio(answer),
        "training_sequences_per_second": round(BATCH / train["ours"]),
        "training_speedup": _ratio(train),
    }


class PlainGenerator(TokenGenerator):
    """Mean and variance of all K components, then one of them."""

    def _drawn(self, h: torch.Tensor, rng: torch.Generator, temperature: float) -> torch.Tensor:
        flat = h.flatten(0, 1)
        each = (len(flat), self.components, self.dim)
        mean, log_variance = self.means(flat).view(each), self._clamped(self.variances(flat)).view(each)
        which = torch.multinomial((self.weights(flat) / temperature).softmax(-1), 1, generator=rng).squeeze(1)
        noise, row = torch.randn((len(flat), self.dim), generator=rng), torch.arange(len(flat))
        drawn: torch.Tensor = mean[row, which] + (0.5 * log_variance[row, which]).exp() * noise
        return drawn.view(h.shape[0], h.shape[1], self.dim)


def _sampling() -> dict[str, object]:
    found: dict[str, object] = {"sequences": SEQUENCES, "tokens": TOKENS, "dim": DIM, "components": 20, "aim": 1.35}
    for order in ("mar", "ar", "nar"):
        ours, plain = (kind(TOKENS, DIM, 4, order=order).eval() for kind in (TokenGenerator, PlainGenerator))
        initialize(ours, torch_generator(0, "generator"))
        plain.load_state_dict(ours.state_dict())
        one, other = (_sequences(model) for model in (ours, plain))
        error = float((one - other).abs().max() / other.abs().max())
        seconds = _turns({"ours": partial(_sequences, ours), "plain": partial(_sequences, plain)})
        found[order] = {
            "relative_error": error,
            "sequences_per_second": round(SEQUENCES / seconds["ours"], 1),
            "speedup": _ratio(seconds),
            "gflop_per_sequence": round(ours.sampling_flops() / 1e9, 4),
        }
    return found


def _sequences(model: TokenGenerator) -> torch.Tensor:
    return model.sample(torch.arange(SEQUENCES) % 4, torch_generator(0, "draw"))


def _ratio(seconds: dict[str, float]) -> float:
    return round(seconds["plain"] / seconds["ours"], 2)


# --- mixtures ----------------------------------------------------------------------------------------------------------


def _mixtures() -> dict[str, object]:
    """FedPFT's EM and scikit-learn's: k-means start and a fixed number of iterations each, in float64."""
    x, k, iterations = _clouds(1000, 320, 5), 5, 50
    found: dict[str, object] = {"samples": 1000, "dimensions": 320, "components": k, "aim": 1.0}
    found |= {
        "diag": _beside_sklearn(x, k, "diag", iterations),
        "spherical": _beside_sklearn(x, k, "spherical", iterations),
        "full": _beside_sklearn(x, k, "full", 10),
    }
    preset = {"samples": 400, "dimensions": 1600, "components": 20, **_beside_sklearn(_clouds(400, 1600, 20), 20, "diag", 50)}
    return {**found, "diag_of_the_cpu_preset": preset, "diag_difference_from_the_same_start": _same_start(x, k, iterations)}


def _clouds(n: int, d: int, k: int) -> torch.Tensor:
    rng = torch_generator(0, "mixture")
    centers = torch.randn(k, d, generator=rng)
    return (centers[torch.randint(k, (n,), generator=rng)] + torch.randn(n, d, generator=rng)).double()


def _beside_sklearn(x: torch.Tensor, k: int, shape: Shape, iterations: int) -> dict[str, object]:
    seconds = _turns(
        {"ours": partial(_ours, x, k, shape, iterations), "plain": partial(_sklearn, x.numpy(), k, shape, iterations)}
    )
    return {
        "iterations": iterations,
        "ours_seconds": round(seconds["ours"], 4),
        "sklearn_seconds": round(seconds["plain"], 4),
        "speedup": _ratio(seconds),
    }


def _ours(x: torch.Tensor, k: int, shape: Shape, iterations: int) -> FeatureMixture:
    return fit_mixture(x, k, shape, torch_generator(0, "em"), tolerance=0, iterations=iterations)


def _sklearn(x: np.ndarray, k: int, shape: str, iterations: int, **start: np.ndarray) -> GaussianMixture:
    model = GaussianMixture(
        k, covariance_type=shape, tol=0, max_iter=iterations, n_init=1, random_state=0, reg_covar=0 if start else 1e-6, **start
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(x)


def _same_start(x: torch.Tensor, k: int, iterations: int) -> float:
    """The largest difference of means after as many steps from one start: the two do the same work."""
    ours = _ours(x, k, "diag", iterations)
    centered = x - x.mean(0)
    labels = torch.tensor(kmeans(centered, k, torch_generator(0, "em"), starts=1))
    weights, means, spread = _maximized(_powers(centered, "diag"), functional.one_hot(labels, k).T.double(), "diag")
    theirs = _sklearn(
        x.numpy(),
        k,
        "diag",
        iterations - 1,
        weights_init=weights.numpy(),
        means_init=(means + x.mean(0)).numpy(),
        precisions_init=(1 / spread).numpy(),
    )
    return float(np.abs(theirs.means_ - ours.means.numpy()).max())


# --- encoders ----------------------------------------------------------------------------------------------------------


def _encoders() -> dict[str, object]:
    found: dict[str, object] = {"tolerance": TOLERANCE, "views_at_once": TOKENS, "used": "fp32: the same bits at every site"}
    for name, side in (("random", 28), ("efficientnet_lite0_320", 112), ("vit_small_saliency", 112)):
        try:
            network = load_encoder(name, side).network
        except OsflError as error:
            found[name] = f"not measured: {error}"
            continue
        found[name] = _encoder(network, side)
    return found


def _usual(network: nn.Module) -> nn.Module:
    """A copy in which our own kinds of linear layers are torch's, which is all that its quantization knows.

    The last `qkv` stays as it is: of it, a transformer here computes only what the class token needs.
    """
    twin = copy.deepcopy(network)
    own = [
        (module, name, child)
        for module in twin.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    last = max((place for place, (_, name, _) in enumerate(own) if name == "qkv"), default=-1)
    for place, (module, name, child) in enumerate(own):
        if place != last:
            plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
            plain.load_state_dict(child.state_dict())
            setattr(module, name, plain)
    return twin


def _encoder(network: nn.Module, side: int) -> dict[str, object]:
    x = 2 * torch.rand(TOKENS, 3, side, side, generator=torch_generator(0, "views")) - 1
    x = x.contiguous(memory_format=torch.channels_last)
    variants: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"fp32": network, "compile": torch.compile(network)}
    if sum(isinstance(module, nn.Linear) for module in network.modules()) > 1:  # a head alone is not in the features
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            variants["int8"] = torch.ao.quantization.quantize_dynamic(_usual(network), {nn.Linear}, torch.qint8)
    with torch.inference_mode():
        exact = network(x)
        errors = {name: float((model(x) - exact).norm() / exact.norm()) for name, model in variants.items()}
        seconds = _turns({name: partial(model, x) for name, model in variants.items()})
    good = {name: seconds[name] for name, error in errors.items() if error <= TOLERANCE}
    return {
        "side": side,
        "fastest_within_tolerance": min(good, key=lambda name: good[name]),
        **{
            name: {
                "views_per_second": round(TOKENS / seconds[name], 1),
                "images_per_second": round(1 / seconds[name], 1),
                "speedup": round(seconds["fp32"] / seconds[name], 2),
                "error": errors[name],
            }
            for name in variants
        },
    }


# --- memory ------------------------------------------------------------------------------------------------------------

_ROUND = """
import json, sys
from pathlib import Path
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation
data, clients, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
result = run(Simulation("fedcgs", data, clients, "iid", "smoke"), out, machine=Machine(workers=1))
costs = result["costs"]
print(json.dumps({"uploads": costs["upload_bytes"], "peak": costs["phases"]["server"]["peak_bytes"],
                  "seconds": costs["server_seconds"]}))
"""


def _memory() -> dict[str, object]:
    """FedCGS with 100 and with 1,000 simulated clients of the same 8,000 images, each in a process of its own."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        rng, data = np.random.default_rng(0), Path(folder) / "noise.npz"
        train, test = (rng.integers(0, 256, (count, 8, 8), dtype=np.uint8) for count in (8000, 200))
        labels = np.arange(8000) % 4
        np.savez(data, train_images=train, train_labels=labels, test_images=test, test_labels=labels[:200])
        peaks = {}
        for clients in (100, 1000):
            command = [sys.executable, "-c", _ROUND, str(data), str(clients), str(Path(folder) / str(clients))]
            cache = {**os.environ, "OSFL_CACHE": str(Path(folder) / "cache")}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=cache)
            reported = json.loads(done.stdout.splitlines()[-1])
            peaks[clients] = reported["peak"]
            found[f"clients_{clients}"] = {
                "uploads_mb": round(reported["uploads"] / 1e6, 1),
                "server_seconds": reported["seconds"],
                "server_peak_mb": round(reported["peak"] / 1e6, 1),
            }
    return {**found, "growth_mb": round((peaks[1000] - peaks[100]) / 1e6, 1)}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
