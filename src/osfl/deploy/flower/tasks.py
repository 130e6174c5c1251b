"""Starts the programs of Flower's tasks, and keeps a task claimed for as long as its program lives.

Flower gives a program one heartbeat (30 seconds) from the claim of its task to its own first heartbeat. On a busy machine the
program needs longer to start: its token has expired by then, another program is started, and so on without end. Flower has no
setting for this time. But a SuperLink or SuperNode with `--isolation process` leaves the start of programs to a SuperExec of
one's own: this one. It is Flower's, except that it sends heartbeats for a program that it has started. It has all modules
loaded already, so its first heartbeat leaves at once.

    python -m osfl.deploy.flower.tasks --runtime-api-address 127.0.0.1:8001 --root-certificates tls/ca.crt --parent-pid 123

The options are those of `flower-superexec`; the scripts that `osfl deploy` writes start it.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import threading
from pathlib import Path
from typing import Any, Protocol

SUPEREXEC = "flwr.supercore.superexec.run_superexec"  # Flower's module that asks `get_executor` who starts programs
BEATS = 3  # heartbeats in the time that Flower allows for one


class Spec(Protocol):
    """Flower's description of a program to start (its ExecutionSpec); the part that is read here."""

    task_type: Any
    runtime_api_address: str
    token: str
    insecure: bool
    root_certificates_path: str | None
    runtime_dependency_install: bool
    parent_pid: int | None
    suppress_output: bool


def main() -> None:
    from flwr.supercore.cli import flower_superexec

    keep_claims()
    flower_superexec()


def keep_claims() -> bool:
    """Put our executor in the place of Flower's. False, and a warning, if this version of Flower has none."""
    superexec = importlib.import_module(SUPEREXEC)
    if not hasattr(superexec, "get_executor"):
        print(
            f"[osfl] {SUPEREXEC} has no get_executor: programs have one heartbeat to start, too little on a busy machine",
            flush=True,
        )
        return False
    superexec.get_executor = lambda *_, **__: executor()  # type: ignore[attr-defined]
    return True


def executor() -> Any:
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
    from flwr.supercore.superexec.executor.types import LaunchResult

    class Keeping(SubprocessExecutor):
        """Flower's executor, which also keeps the claim of what it has started."""

        def launch(self, spec: Any) -> LaunchResult:
            quiet = subprocess.DEVNULL if spec.suppress_output else None
            process = subprocess.Popen(command(spec), stdout=quiet, stderr=quiet)
            threading.Thread(target=keep, args=(process, spec), daemon=True).start()
            return LaunchResult.accepted()

    return Keeping()


def command(spec: Spec) -> list[str]:
    """The program of a task, started as Flower's own executor starts it."""
    from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND

    body = [
        TASK_TYPE_TO_COMMAND[spec.task_type],
        TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type],
        spec.runtime_api_address,
        "--token",
        spec.token,
    ]
    if spec.insecure:
        body.append("--insecure")
    elif spec.root_certificates_path is not None:
        body += ["--root-certificates", spec.root_certificates_path]
    if spec.parent_pid is not None:
        body += ["--parent-pid", str(spec.parent_pid)]
    return [*body, "--allow-runtime-dependency-installation"] if spec.runtime_dependency_install else body


def keep(process: subprocess.Popen[bytes], spec: Spec) -> None:
    """Heartbeats for a task until its program has ended. A program that dies is missed as before: nothing is sent for it."""
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL

    with contextlib.closing(runtime(spec)) as client:
        while beat(client):
            try:
                process.wait(HEARTBEAT_DEFAULT_INTERVAL / BEATS)
                return
            except subprocess.TimeoutExpired:
                continue
    process.wait()  # the task is over; its program learns that by itself


def beat(client: Any) -> bool:
    """One heartbeat; False if the task is over."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    try:
        return bool(client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
    except httpx.HTTPStatusError as no:
        return no.response.status_code >= 500
    except httpx.TransportError:  # busy or away: the next one may arrive
        return True


def runtime(spec: Spec) -> Any:
    """A client of the SuperLink or SuperNode with the token of this task."""
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    path = spec.root_certificates_path
    return RuntimeHttpClient.from_server_address(
        server_address=spec.runtime_api_address,
        insecure=spec.insecure,
        root_certificates=None if spec.insecure or path is None else Path(path).read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), RuntimeTokenHttpInterceptor(spec.token)],
    )


if __name__ == "__main__":
    main()
