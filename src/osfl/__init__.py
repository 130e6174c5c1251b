"""One-shot federated learning: sites train one image classifier together, and each site uploads exactly once.

import osfl
result = osfl.run(osfl.Simulation("fedavg", dataset="digits", clients=5), out="runs/first")
model, task = osfl.load_model("runs/first")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from osfl.core.version import __version__

if TYPE_CHECKING:
    from osfl.core.registry import names as method_names
    from osfl.core.types import Plan, Task
    from osfl.rounds.finished import load_model
    from osfl.simulate.compare import compare
    from osfl.simulate.run import run
    from osfl.simulate.simulation import Simulation

__all__ = ["Plan", "Simulation", "Task", "__version__", "compare", "load_model", "method_names", "run"]

_HOMES = {
    "Plan": ("osfl.core.types", "Plan"),
    "Task": ("osfl.core.types", "Task"),
    "Simulation": ("osfl.simulate.simulation", "Simulation"),
    "compare": ("osfl.simulate.compare", "compare"),
    "load_model": ("osfl.rounds.finished", "load_model"),
    "method_names": ("osfl.core.registry", "names"),
    "run": ("osfl.simulate.run", "run"),
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are used: `osfl --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'osfl' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
