"""How the tests share a machine.

One compute thread a test process: several of them run at once, and OpenMP barriers suffer from company. Tests that mostly
wait for other programs come first, so that nobody waits for them in the end.
"""

import pytest
import torch

torch.set_num_threads(1)

WAITING = {"test_flower.py", "test_flower_deployment.py", "test_namespaces.py", "test_hospitals_airgapped.py"}
WAITING |= {"test_ray.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in WAITING)  # stable: the others keep their order
