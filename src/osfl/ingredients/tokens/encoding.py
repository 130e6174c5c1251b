"""Images as token sequences: one token for the whole image, one for each region (FALCON's hierarchical scale encoding).

The image is resized to R x R; the global view is all of it at the encoder's input size W, the regions are windows of W
pixels, row by row, the last ones aligned to the border. Small images (R <= W) have no regions: L = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import RoundError, TrainingError
from osfl.core.method import Context, Method
from osfl.core.types import ADDED, ClientId, Dataset, Facts, Presets, RunMap, Shard, Upload, digest_of
from osfl.ingredients.statistics.one_vs_rest import hidden_few
from osfl.ingredients.tokens.store import TokenStore, book_known, image_digests, noting_costs, store_of
from osfl.models.encoders import Encoder, encoder_digest, encoder_problems, encoder_width, load_encoder
from osfl.models.flops import forward_flops
from osfl.models.inputs import to_images, to_input
from osfl.runtime.meter import spend
from osfl.runtime.precision import current_precision
from osfl.runtime.workers import compute_threads

Pooling = Literal["global", "mean", "concat"]  # several tokens as one vector
BLOCK = 128  # images that are encoded and kept together: what an interruption can cost


@dataclass(frozen=True)
class Encoding:
    """How images become tokens; mixed into Settings. Defaults are FALCON's."""

    encoder: str = "dinov2_base"  # `osfl ls encoders`, or an architecture with a file; `random` needs no weights
    encoder_weights: str = ""  # a safetensors file, or hub:owner/name, where the encoder has none of its own
    encoder_sha256: str = ""  # what that file must hash to, at every site
    resolution: int = 448  # R, the side to which images are resized
    window: int = 224  # W, the side of a view, which is the encoder's input
    stride: int = 224  # S, from one window to the next
    encoder_pixels: Literal["imagenet", "symmetric"] = field(default="imagenet", metadata=ADDED)  # as that file was trained

    def regions(self) -> int:
        """L, the number of windows."""
        return len(window_places(self.resolution, self.window, self.stride)) ** 2

    def width(self, pooling: str = "global") -> int:
        """d, or (1 + L) d where all tokens stand side by side."""
        return encoder_width(self.encoder, self.window) * (1 + self.regions() if pooling == "concat" else 1)


def window_places(resolution: int, window: int, stride: int) -> list[int]:
    """Where windows begin along one side: every `stride` pixels, and one that ends at the border. None if one is all."""
    if resolution <= window:
        return []
    places = list(range(0, resolution - window + 1, stride))
    return places if places[-1] == resolution - window else [*places, resolution - window]


def views(images: torch.Tensor, settings: Encoding) -> torch.Tensor:
    """Images in [-1, 1], (n, 1 or 3, height, width) -> (n, 1 + L, 3, W, W); gray is repeated three times."""
    x = images.expand(-1, 3, -1, -1)
    side, places = settings.window, window_places(settings.resolution, settings.window, settings.stride)
    whole = _resized(x, side)
    if not places:
        return whole.unsqueeze(1)
    large = _resized(x, settings.resolution)
    regions = [large[:, :, top : top + side, left : left + side] for top in places for left in places]
    return torch.stack([whole, *regions], 1)


def _resized(x: torch.Tensor, side: int) -> torch.Tensor:
    if x.shape[-2:] == (side, side):
        return x
    return functional.interpolate(x, (side, side), mode="bilinear", align_corners=False, antialias=True)


def token_problems(settings: Encoding) -> list[str]:
    found = encoder_problems(
        settings.encoder, settings.window, settings.encoder_weights, settings.encoder_sha256, settings.encoder_pixels
    )
    if settings.resolution < 8 or settings.stride < 1:
        found.append(
            f"settings 'resolution' and 'stride': expected at least 8 and 1, got {settings.resolution} and {settings.stride}"
        )
    return found


def encoder_for(settings: Encoding) -> Encoder:
    return load_encoder(
        settings.encoder, settings.window, settings.encoder_weights, settings.encoder_sha256, settings.encoder_pixels
    )


def tokens_digest(settings: Encoding) -> str:
    """Names everything that tokens depend on besides the images; the same without the encoder's weights at hand."""
    encoder = encoder_digest(settings.encoder, settings.window, settings.encoder_sha256, settings.encoder_pixels)
    return digest_of(["osfl tokens", 1, encoder, [settings.resolution, settings.window, settings.stride]])


class Tokenizer(nn.Module):
    """Images in, tokens (n, 1 + L, d) out, from the store where they are known."""

    def __init__(self, settings: Encoding) -> None:
        super().__init__()
        with compute_threads(1):  # kept tokens serve everybody, so they must not depend on who encodes first
            self.settings, self.encoder = settings, encoder_for(settings)
        self.network, self.digest = self.encoder.network, tokens_digest(settings)

    def __deepcopy__(self, memo: dict[int, object]) -> Tokenizer:
        """Frozen and large: copies of a classifier share it. (FLOPs are counted on a twin without numbers.)"""
        if not any(id(tensor) in memo for tensor in (*self.parameters(), *self.buffers())):
            return self
        twin = Tokenizer.__new__(Tokenizer)
        nn.Module.__init__(twin)
        twin.settings, twin.encoder, twin.digest = self.settings, self.encoder, self.digest
        import copy

        twin.network = copy.deepcopy(self.network, memo)
        return twin

    def train(self, mode: bool = True) -> Tokenizer:
        return super().train(False)  # frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta or torch.compiler.is_compiling():  # no values to look up: operations are counted, or exported
            return self._encoded(x)
        return self.tokens(to_images(x), x.device).to(x.device)

    def tokens(
        self,
        images: torch.Tensor,
        device: torch.device | None = None,
        run_map: RunMap | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> torch.Tensor:
        """uint8 images (n, channels, height, width) -> tokens, on the CPU; what is new is encoded on the device, and kept."""
        device = device or torch.device("cpu")
        how = [part for part in (device.type, current_precision()) if part not in ("cpu", "fp32")]  # another one, other bits
        kept = digest_of([self.digest, *how]) if how else self.digest
        store, digests = store_of(kept), image_digests(images)
        new = store.missing(digests)
        book_known(store, digests)
        for start in range(0, len(new), BLOCK):
            block = new[start : start + BLOCK]
            with compute_threads(1), noting_costs(store, [digests[place] for place in block]):
                self._keep(store, images, digests, block, device, run_map)
            if progress is not None:
                progress(min(start + BLOCK, len(new)), len(new))
        return store.get(digests)

    def _keep(
        self,
        store: TokenStore,
        images: torch.Tensor,
        digests: Sequence[bytes],
        block: Sequence[int],
        device: torch.device,
        run_map: RunMap | None,
    ) -> None:
        self.network.to(device)
        together = 1 if device.type == "cpu" else 32  # one by one an image's bits cannot depend on its neighbors
        parts = [list(block[i : i + together]) for i in range(0, len(block), together)]

        def encode(part: list[int]) -> torch.Tensor:
            with torch.inference_mode():
                return self._encoded(to_input(images[part], device)).float().cpu()

        tokens = torch.cat(list(run_map(encode, parts)) if run_map else [encode(part) for part in parts]).clone()
        if not bool(tokens.isfinite().all()):
            raise TrainingError(
                "the encoder gives features that are not finite",
                field="encoder",
                got=self.encoder.name,
                fix="Its weights are damaged, or made for another preprocessing.",
            )
        spend(forward_flops(self.network, (3, self.settings.window, self.settings.window)) * len(block) * tokens.shape[1])
        store.put([digests[place] for place in block], tokens)

    def _encoded(self, x: torch.Tensor) -> torch.Tensor:
        seen = views(x, self.settings)
        flat: torch.Tensor = self.network(seen.flatten(0, 1).contiguous(memory_format=torch.channels_last))
        return flat.reshape(*seen.shape[:2], -1)


class OnTokens(nn.Module):
    """A classifier of images: the tokenizer, then a head on its tokens."""

    def __init__(self, tokenizer: Tokenizer, head: nn.Module) -> None:
        super().__init__()
        self.tokenizer, self.head = tokenizer, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.tokenizer(x))
        return logits


class TokenMethod(Method):
    """Base of methods that compute uploads from features of a frozen encoder; encoding is the same for all of them."""

    PRESETS: ClassVar[Presets]

    def problems(self, clients: int) -> list[str]:
        return token_problems(self.settings)

    def architectures(self) -> Sequence[str]:
        return ("",)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.settings)

    def encoded(self, data: Dataset, shard: Shard, ctx: Context) -> torch.Tensor:
        """Tokens of a client's images, (n, 1 + L, d)."""
        try:
            return self.tokenizer().tokens(
                data.images, ctx.device, ctx.map, lambda done, total: ctx.progress(f"{shard.client} encodes", done, total)
            )
        except TrainingError as error:
            error.client = shard.client
            raise

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        """Tokens of any images, (n, 1 + L, d)."""
        return self.tokenizer().tokens(images, ctx.device, ctx.map)

    def facts(self, shard: Shard) -> dict[str, Any]:
        """What goes with every upload: the encoder's identity, and how many images of each class stand behind it."""
        counts = shard.train.class_counts(len(self.task.classes)).tolist()
        return {"encoder": self.tokenizer().digest, "class_counts": counts, "samples": len(shard.train)}

    def features_of(self, shard: Shard, ctx: Context) -> Callable[[int | None], tuple[torch.Tensor, torch.Tensor]]:
        """Rows of features of one class, None: of all: of the site's training images, and of those that it held out."""
        parts = [(self.encode(part.images, ctx).flatten(1) if len(part) else None, part) for part in (shard.train, shard.val)]

        def of_class(label: int | None) -> tuple[torch.Tensor, torch.Tensor]:
            width = next(rows.shape[1] for rows, _ in parts if rows is not None)
            train, held_out = (
                torch.zeros(0, width) if rows is None else rows if label is None else rows[part.shows(label)]
                for rows, part in parts
            )
            return train, held_out

        return of_class


def with_enough(shard: Shard, least: int, counts: torch.Tensor | None = None) -> Shard:
    """The shard without classes that have fewer than `least` training images: a sum over few shows each of them. `counts`:
    how many there are of each class, where not every image counts."""
    if shard.train.labels.ndim == 2:
        enough, most = len(shard.train) >= least, len(shard.train)
        kept, held_out = Dataset(shard.train.images, hidden_few(shard.train.labels, least)), shard.val
    else:
        if counts is None:
            counts = shard.train.class_counts(int(torch.cat([shard.train.labels, shard.val.labels]).max()) + 1)
        kept, held_out = (part.subset(counts[part.labels] >= least) for part in (shard.train, shard.val))
        enough, most = len(kept) > 0, int(counts.max())
    if not enough:
        raise TrainingError(
            "no class has enough images to be sent",
            client=shard.client,
            field="least",
            expected=f"a class of at least {least} images",
            got=most,
            fix="Add images, or leave this site out of the round.",
        )
    return replace(shard, train=kept, val=held_out)


def same_encoder(uploads: Sequence[Upload], settings: Encoding) -> None:
    """Vectors of another encoder than the plan's mean something else; the client that has them is named."""
    same_encoders({upload.client: upload.payload.facts for upload in uploads}, settings)


def same_encoders(facts: Mapping[ClientId, Facts], settings: Encoding) -> None:
    """The same for what was noted while uploads went by one after the other."""
    expected = tokens_digest(settings)
    for client, sent in facts.items():
        if sent.get("encoder") != expected:
            raise RoundError(
                "this upload was made with another encoder or geometry than the plan's",
                client=client,
                field="facts.encoder",
                expected=expected,
                got=str(sent.get("encoder", "nothing")),
                fix="The site needs the encoder file whose sha256 is in the plan, and this version of osfl.",
            )


def pooled(tokens: torch.Tensor, how: str) -> torch.Tensor:
    """(n, 1 + L, d) -> one vector an image."""
    if how == "concat":
        return tokens.flatten(1)
    return tokens[:, 0] if how == "global" else tokens.mean(1)


class Pooled(nn.Module):
    """A head that wants one vector an image."""

    def __init__(self, head: nn.Module, how: str) -> None:
        super().__init__()
        self.head, self.how = head, how

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(pooled(tokens, self.how))
        return y
