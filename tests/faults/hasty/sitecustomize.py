"""Flower in a hurry. Every Python that has this folder in PYTHONPATH reads it first.

A process that died is missed after two heartbeats: a minute as Flower comes. OSFL_HEARTBEAT says how many seconds one takes
here (10, the least that Flower allows, or more). Nothing else is changed: what is noticed is the same, only sooner.

OSFL_SLOW_START: seconds that the programs of tasks need to start, as on a busy machine.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType


class _Hasty(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "flwr.common.constant":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                module.__dict__["HEARTBEAT_DEFAULT_INTERVAL"] = int(os.environ["OSFL_HEARTBEAT"])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "OSFL_SLOW_START" in os.environ and any(word.endswith(("/flwr-serverapp", "/flwr-clientapp")) for word in sys.orig_argv):
    time.sleep(float(os.environ["OSFL_SLOW_START"]))
if "OSFL_HEARTBEAT" in os.environ:
    sys.meta_path.insert(0, _Hasty())
