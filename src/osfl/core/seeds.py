"""Where all randomness comes from: a seed and a few labels, hashed.

Labels say *what* is drawn (client id, stage, step), never a position in a list and never the plan's digest. Then the
order of clients, the number of workers, a resume, or a client that leaves does not change anyone else's numbers.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive(seed: int, *labels: str | int) -> int:
    """A 63-bit seed for these labels; stable across processes, machines and Python versions."""
    text = json.dumps([seed, *labels], separators=(",", ":"), ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_generator(seed: int, *labels: str | int) -> torch.Generator:
    """A CPU generator, whatever the device: the same numbers for users with and without a GPU."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *labels))


def numpy_generator(seed: int, *labels: str | int) -> np.random.Generator:
    import numpy as np

    return np.random.Generator(np.random.PCG64(derive(seed, *labels)))
