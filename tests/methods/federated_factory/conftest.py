"""Small classes, and generators small enough for a test."""

from typing import Literal

import torch

from osfl.core.method import Context
from osfl.core.types import Dataset, Plan, Shard, Task
from osfl.methods.federated_factory.factories import FactorySettings

TASK = Task("toy", ("round", "square"), (1, 8, 8))
TINY = FactorySettings(
    symmetry="none",
    mixture_dims=6,
    mixture_components=3,
    mixture_prior=2.0,
    vae_latent_dim=4,
    vae_width=32,
    vae_steps=300,
    unet="w8-m1.2-b1-s2",
    dropout=0.1,
    edm_images=2000,
    edm_batch=32,
    edm_rampup=200,
    edm_lr_batches=30,
    edm_ema=0.1,
    edm_steps=5,
    least=3,
)
Kind = Literal["mixture", "vae", "edm"]
KINDS: tuple[Kind, ...] = ("mixture", "vae", "edm")


def quiet(done: int, total: int) -> None:
    pass


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int, seed: int = 0) -> torch.Tensor:
    """A bright square on a dark ground, its brightness and the ground's varying."""
    x = torch.randint(20, 60, (n, 1, 1, 1), generator=rng(seed)).expand(n, 1, 8, 8).clone()
    x[:, :, 2:6, 2:6] = torch.randint(150, 230, (n, 1, 1, 1), generator=rng(seed + 1))
    return x.to(torch.uint8)


def shard_of(images: torch.Tensor) -> tuple[Shard, Context]:
    data = Dataset(images, torch.ones(len(images), dtype=torch.long))
    plan = Plan(TASK, "federated_factory", TINY, ("st-mary",))
    return Shard("st-mary", data, data.subset(torch.arange(0)), "x"), Context(plan, torch.device("cpu"))
