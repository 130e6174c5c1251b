"""One-shot federated learning: sites train one image classifier together, and each site speaks exactly once.

    import osfl
    result = osfl.run(osfl.Simulation("fedavg", dataset="digits", clients=5), out="runs/first")
    model, task = osfl.load_model("runs/first")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osfl.protocol import Plan, Task
    from osfl.registry import names as method_names
    from osfl.run import compare, load_model, run
    from osfl.simulation import Simulation

__version__ = "0.1.0"
__all__ = ["Plan", "Simulation", "Task", "compare", "load_model", "method_names", "run"]

_HOMES = {
    "Plan": ("osfl.protocol", "Plan"),
    "Task": ("osfl.protocol", "Task"),
    "Simulation": ("osfl.simulation", "Simulation"),
    "compare": ("osfl.run", "compare"),
    "load_model": ("osfl.run", "load_model"),
    "method_names": ("osfl.registry", "names"),
    "run": ("osfl.run", "run"),
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are used: `osfl --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'osfl' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
