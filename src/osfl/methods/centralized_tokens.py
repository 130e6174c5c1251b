"""Centralized on tokens — one classifier of everybody's features; the upper reference where the encoder is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from osfl.core.method import Context, Method
from osfl.core.types import Exchange, Payload, Release, Shard, Simulated
from osfl.ingredients.tokens.encoding import Encoding, OnTokens, Tokenizer, token_problems
from osfl.ingredients.tokens.training import Classifying, classifying_problems, fit_classifier
from osfl.models.naming import load_named, named


@dataclass(frozen=True)
class Settings(Encoding, Classifying):
    pass


class CentralizedTokens(Method):
    Settings = Settings
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "cpu": {"encoder": "efficientnet_lite0_320", "window": 112, "resolution": 224, "stride": 112, "hidden": 320},
        "smoke": {"encoder": "random", "window": 8, "resolution": 8, "stride": 8, "epochs": 3, "batch_size": 32, "hidden": 32},
    }

    def problems(self, clients: int) -> list[str]:
        return [*token_problems(self.settings), *classifying_problems(self.settings)]

    def simulate(self, shards: Sequence[Shard], ctx: Context) -> Simulated:
        everyone, tokenizer = sorted(shards, key=lambda shard: shard.client), Tokenizer(self.settings)
        tokens = {s.client: tokenizer.tokens(s.train.images, ctx.device, ctx.map) for s in everyone}
        labels = torch.cat([s.train.labels for s in everyone])
        model = fit_classifier(
            self.settings,
            torch.cat(list(tokens.values())),
            labels,
            len(self.task.classes),
            ctx.generator("classifier"),
            ctx.generator("everyone"),
            ctx.device,
            lambda done, total: ctx.progress("classifier", done, total),
        )
        sent = {s.client: [Exchange(Payload({"tokens": tokens[s.client], "labels": s.train.labels}))] for s in everyone}
        return Simulated(Release(Payload(named(model, "classifier"))), up=sent)

    def build(self, payload: Payload) -> nn.Module:
        model = self.settings.classifier(self.settings.width(), len(self.task.classes), None)
        load_named(model, payload.tensors, "classifier")
        return OnTokens(Tokenizer(self.settings), model).eval()
