"""`osfl deploy`: everything that the machines of a round over Flower need, in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, escape, put_json

EXAMPLES = (
    "osfl new --method fedavg --classes cat,dog --clients 3 --out pets.toml --force",
    "osfl deploy pets.toml --out deployed --host coordinator.example --port 8000",
)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan that everybody agreed on.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="DIR", parser=options.new_folder, help="Where the machines' folders go.")
]
Host = Annotated[
    str, typer.Option("--host", metavar="NAME|ADDRESS", help="How sites reach the coordinator; the certificate is for it.")
]
Port = Annotated[int, typer.Option("--port", metavar="N", help="The coordinator's port; open it to the sites only.")]
Keys = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        show_default=False,
        help="NAME.pub of every site, made by the sites themselves; perhaps server.key, which is made if missing.",
    ),
]


Wheel = Annotated[
    Path | None,
    typer.Option(
        "--wheel",
        metavar="osfl-*.whl",
        show_default=False,
        help="The package for each machine's folder, as a file. Without it: the package that runs here.",
    ),
]


Authority = Annotated[
    Path | None,
    typer.Option(
        "--authority",
        metavar="DIR",
        show_default=False,
        help="ca.crt and ca.key of a certificate authority of your own; the key stays there. Without it one is made.",
    ),
]
Services = Annotated[bool, typer.Option("--services", help="Write systemd units and container files, too.")]


def deploy(
    plan: PlanFile,
    out: Out,
    host: Host,
    port: Port = 8000,
    keys: Keys = None,
    wheel: Wheel = None,
    authority: Authority = None,
    services: Services = False,
    output_format: options.Format = "text",
) -> None:
    """Write certificates, keys, the Flower app and start scripts for each machine, and say what to do there.

    Called again with another plan it keeps certificates and keys, and adds a round.
    """
    from osfl.core.plan import read_plan
    from osfl.deploy.flower.deployment import deploy as write
    from osfl.deploy.flower.deployment import readme

    deployment = write(read_plan(plan), out, host, port, keys=keys, wheel=wheel, authority=authority, services=services)
    if output_format == "json":
        put_json({"out": str(out), "round": deployment.round, "machines": {k: list(v) for k, v in deployment.machines.items()}})
        return
    echo(escape(readme(deployment)))
    echo(f"All of it is in {escape(str(out))}, with these commands in README.txt. Private keys are readable by you only.")
