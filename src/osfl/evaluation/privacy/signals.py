"""What an upload or a model says about an image: one number each, larger for images that it learned from.

What a method exposes decides which there are: a classifier has `loss` and `confidence`; generators, tokens and statistics have
`nearness` (to the nearest of what can be read out of them), `span` (to the nearest combination of their directions),
`leverage` (how little of the second moments an image needs) and `row` (distance to the nearest row of second moments).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from osfl.core.method import Context, Method
from osfl.core.types import ClientId, Dataset, Exposed, Payload, Shard, Upload
from osfl.evaluation.privacy.rates import Floats
from osfl.models.folding import freeze
from osfl.models.inputs import to_input

LOSS, CONFIDENCE = "loss", "confidence"
_CHUNK = 256
_RIDGE = 1e-4  # of the mean second moment


def model_signals(model: nn.Module, data: Dataset, device: torch.device) -> dict[str, Floats]:
    """Log-odds of each image's own class, and of the most probable one."""
    network = freeze(model.to(device))
    with torch.inference_mode():
        parts = [network(to_input(chunk, device)).cpu().double() for chunk in torch.split(data.images, _CHUNK)]
    odds = _log_odds(torch.cat(parts))
    own = odds.gather(1, data.labels[:, None])[:, 0]
    return {LOSS: _finite(own), CONFIDENCE: _finite(odds.amax(1))}


def _log_odds(logits: torch.Tensor) -> torch.Tensor:
    """log p / (1 - p) of each class (n, classes), exact also where p is 1 in double precision."""
    classes = logits.shape[1]
    others = logits[:, None].expand(-1, classes, -1).masked_fill(torch.eye(classes, dtype=torch.bool), -torch.inf)
    return logits - others.logsumexp(2)


def _finite(values: torch.Tensor) -> Floats:
    found: Floats = values.nan_to_num(0.0, 100.0, -100.0).clamp(-100.0, 100.0).numpy()
    return found


def upload_signals(method: Method, upload: Upload, data: Dataset, ctx: Context) -> dict[str, Floats]:
    """All signals of one upload, by name; the first one is the main one. Empty: nothing in it depends on single images."""
    model = method.upload_model(upload, ctx)
    found = {} if model is None else model_signals(model, data, ctx.device)
    if method.provides("exposed"):
        found |= exposed_signals(method, upload.client, upload.payload, data, ctx)
    return found


def exposed_signals(method: Method, client: ClientId, payload: Payload, data: Dataset, ctx: Context) -> dict[str, Floats]:
    """Signals from what the egress check attacks, with these images in the place of the site's own."""
    shard = Shard(client, data, data.subset(torch.arange(min(2, len(data)))), digest="")
    found: dict[str, Floats] = {}
    for one in method.exposed(payload, shard, ctx):
        if one.stops != "all":  # rows chosen by who knows the images; `_row` tries them all
            continue
        index = (data.labels == one.label).nonzero().flatten().numpy()
        for name, measure in _MEASURES.items():
            values = measure(one) if len(index) else None
            if values is not None and len(values) == len(index):
                mine = found.setdefault(name, np.full(len(data), np.nan))
                mine[index] = np.fmax(mine[index], _finite(-values.clamp_min(1e-12).log().double()))
    return {name: _filled(values) for name, values in found.items()}


def _filled(values: Floats) -> Floats:
    """Images of classes that the upload says nothing about: as the least of the others, which tells nobody apart."""
    known = values[~np.isnan(values)]
    return np.where(np.isnan(values), known.min() if len(known) else 0.0, values)


def _nearness(one: Exposed) -> torch.Tensor | None:
    """Distance to the nearest candidate."""
    kinds = [rows.float() for rows in one.candidates.values() if len(rows)]
    return torch.cdist(one.train.float(), torch.cat(kinds)).amin(1) if kinds else None


def _span(one: Exposed) -> torch.Tensor | None:
    """What the nearest combination of the directions leaves of the image."""
    if one.directions is None or one.mean is None or not bool(one.directions.any()):
        return None
    off = one.train.float() - one.mean.float()
    basis = torch.linalg.qr(one.directions.float().T).Q
    found: torch.Tensor = (off - off @ basis @ basis.T).norm(dim=1)
    return found


def _leverage(one: Exposed) -> torch.Tensor | None:
    """z^T (G + r I)^-1 z: at most 1 for an image that is in G, unless G rests on many more."""
    if one.moments is None:
        return None
    gram, rows = one.moments().double(), one.train.double()
    gram = gram + _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    found: torch.Tensor = (rows * torch.linalg.solve(gram, rows.T).T).sum(1).clamp_min(0)
    return found


def _row(one: Exposed) -> torch.Tensor | None:
    """Distance to the nearest G_j / sqrt(G_jj): where one image almost alone has feature j, that is its features."""
    if one.moments is None:
        return None
    gram = one.moments().double()
    used = gram.diagonal() > 0
    rows = gram[used] / gram.diagonal()[used].sqrt()[:, None]
    return torch.cdist(one.train.double(), rows).amin(1) if bool(used.any()) else None


_MEASURES: Mapping[str, Callable[[Exposed], torch.Tensor | None]] = {
    "nearness": _nearness,
    "span": _span,
    "leverage": _leverage,
    "row": _row,
}
