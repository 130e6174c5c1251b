"""OneSum's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from osfl.core.types import ADDED
from osfl.ingredients.tokens.encoding import Encoding, Pooling
from osfl.ingredients.training.local import Training
from osfl.methods.onesum.features import RandomMap


@dataclass(frozen=True)
class Settings(RandomMap, Encoding, Training):
    encoder: str = "efficientnet_lite0_320"  # of features=encoder; `osfl ls encoders`, or an architecture with a file
    resolution: int = 224
    window: int = 112
    stride: int = 112
    features: Literal["random", "encoder"] = "random"  # random convolutions, or the tokens of `encoder`
    tokens: Pooling = "concat"  # encoder: the whole image's vector, the mean of all views, or all side by side
    bound: float = 0.0  # features are clipped here and rounded to 2^-15 of it; 0: 8 for random, 64 for encoder
    dimensions: int = field(default=0, metadata=ADDED)  # at most so many features, whitened by public images; 0: as they are
    norm: float = field(default=0.125, metadata=ADDED)  # longer features are shortened to it; public images have about 1
    # sums run over mirrored images, too (flip), or over all eight symmetries of a square; answers are for their mean features
    symmetry: Literal["none", "flip", "square"] = "none"  # what an image may look like without being another one
    head: Literal["lda", "ridge", "qda"] = "lda"  # one covariance, regression of one-hot labels (AFL), one covariance a class
    shrinkage: str = "gcv"  # lambda: a number, or by generalized cross-validation
    least: int = 3  # images that a class needs to be in the sums; the sum over one image is that image's features
    # A real upload out of whose sums the features of single images can be read: stop it, or send it all the same
    readable: Literal["stop", "send"] = field(default="stop", metadata=ADDED)
    by_class: bool = False  # send G class by class: a class can be forgotten, and head=qda needs it
    send: Literal["triangle", "smaller"] = "triangle"  # smaller: where images are few, a factor of G (see Privacy in the card)
    prior: Literal["global", "site"] = "global"  # site: each site weighs classes as it has them
    temperature: float = 0.5  # tau, on the scores beside a site's prior: Gaussian scores are too confident
    # auto: the site chooses the share, lambda and tau on its held-out images (features=encoder: no network); 0: no network
    blend: str = "auto"  # beside a site's prior: share of its answers that its own network gives
    architecture: str = "cnn-w16"  # of the site's own network, which never leaves it; how it is trained follows
    epochs: int = 20
    batch_size: int = 64
    lr: float = 0.05
    schedule: Literal["steps", "cosine", "constant"] = "cosine"
    clip: float = 5.0

    def reach(self) -> float:
        """The bound of features."""
        return self.bound or (8.0 if self.features == "random" else 64.0)

    def copies(self) -> int:
        return {"none": 1, "flip": 2, "square": 8}[self.symmetry]

    def vectors(self) -> int:
        """How many an image adds to the sums: with `dimensions` the mean of its copies."""
        return 1 if self.dimensions else self.copies()


def is_shrinkage(text: str) -> bool:
    if text == "gcv":
        return True
    try:
        return 0 <= float(text) < 1e30
    except ValueError:
        return False
