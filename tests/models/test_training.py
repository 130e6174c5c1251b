"""Every convolutional family trains at small widths: a stride-2 1x1 convolution once overwrote memory there."""

import subprocess
import sys

import pytest

CODE = """
import torch
from osfl.models.build import build_model
from osfl.core.types import Task
torch.set_num_threads(1)
model = build_model({name!r}, Task("t", ("a", "b", "c"), (1, 16, 16)), torch.Generator().manual_seed(0)).train()
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for step in range(24):
    count = (8, 16, 2, 5)[step % 4]
    x = torch.randn(count, 1, 16, 16).contiguous(memory_format=torch.channels_last)
    loss = torch.nn.functional.cross_entropy(model(x), torch.arange(count) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert torch.isfinite(loss)
"""


@pytest.mark.parametrize("name", ["resnet18-w2", "resnet18-w4", "resnet18-w6", "resnet50-w1", "cnn-w2"])
def test_narrow_networks_train(name: str) -> None:
    """In a process of its own, which a corrupted heap would end."""
    done = subprocess.run([sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
