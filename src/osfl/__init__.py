"""One-shot federated learning: sites train one image classifier together, and each site uploads exactly once.

import osfl
result = osfl.run("onesum", dataset="digits", clients=5, out="runs/first")
result.accuracy, result.to_frame(), result.model()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from osfl.core.version import __version__

if TYPE_CHECKING:
    from osfl.core.method import Method
    from osfl.core.registry import names as method_names
    from osfl.core.types import Plan, Task
    from osfl.rounds.finished import load_model
    from osfl.simulate.api import Comparison, Result, compare, from_torch, register_model, run
    from osfl.simulate.simulation import Simulation

__all__ = [
    "Comparison",
    "Method",
    "Plan",
    "Result",
    "Simulation",
    "Task",
    "__version__",
    "compare",
    "from_torch",
    "load_model",
    "method_names",
    "register_model",
    "run",
]

_HOMES = {
    "Comparison": ("osfl.simulate.api", "Comparison"),
    "Method": ("osfl.core.method", "Method"),
    "Plan": ("osfl.core.types", "Plan"),
    "Result": ("osfl.simulate.api", "Result"),
    "Task": ("osfl.core.types", "Task"),
    "Simulation": ("osfl.simulate.simulation", "Simulation"),
    "compare": ("osfl.simulate.api", "compare"),
    "from_torch": ("osfl.simulate.api", "from_torch"),
    "load_model": ("osfl.rounds.finished", "load_model"),
    "method_names": ("osfl.core.registry", "names"),
    "register_model": ("osfl.simulate.api", "register_model"),
    "run": ("osfl.simulate.api", "run"),
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are used: `osfl --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'osfl' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
