"""OneSum's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from osfl.core.types import ADDED, Task
from osfl.ingredients.tokens.encoding import Encoding, Pooling
from osfl.ingredients.training.local import Training, not_positive, too_low, training_problems
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


def is_blend(text: str) -> bool:
    """Whether a setting says `auto` or a share."""
    try:
        return text == "auto" or 0 <= float(text) <= 1
    except ValueError:
        return False


def has_network(s: Settings) -> bool:
    """Whether sites answer with networks of their own, too."""
    return s.prior == "site" and (s.features == "random" if s.blend == "auto" else float(s.blend) > 0)


def settings_problems(s: Settings, task: Task) -> list[str]:
    """What is wrong with the settings, for the images of the plan; the encoder's are checked where it is used."""
    found = too_low(s, {"filters": 1, "scales": 1, "side": 8, "thumbnail": 0, "least": 1, "bound": 0, "dimensions": 0})
    found += not_positive(s, "temperature", "norm")
    if not 0 <= s.mean_color <= 1:
        found.append(f"setting 'mean_color': expected a share from 0 to 1, got {s.mean_color}")
    if not is_shrinkage(s.shrinkage):
        found.append(f"setting 'shrinkage': expected gcv or a number of at least 0, got {s.shrinkage!r}")
    if s.head == "qda" and not s.by_class:
        found.append("setting 'head': qda needs the second moments of each class; set by_class=true")
    if s.head == "ridge" and s.prior == "site":
        found.append("setting 'prior': the scores of head=ridge are no likelihoods; set prior=global or head=lda")
    if not is_blend(s.blend):
        found.append(f"setting 'blend': expected auto or a number from 0 to 1, got {s.blend!r}")
    elif has_network(s):
        found += training_problems(s, task)
    if s.by_class and s.send == "smaller":
        found.append("setting 'send': by_class=true sends triangles; set send=triangle")
    if s.symmetry == "square" and task.image[1] != task.image[2]:
        found.append(f"setting 'symmetry': square needs images of equal sides, got {task.image[1:]}; set symmetry=flip")
    if task.several:
        wanted = {"head": "lda", "prior": "global", "by_class": False}
        found += [
            f"setting {name!r}: multi-label data, with several classes an image, needs {name}={str(value).lower()}"
            for name, value in wanted.items()
            if getattr(s, name) != value
        ]
    return found
