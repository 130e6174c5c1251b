"""Systemd units and container files for the machines of a deployment (`osfl deploy --services`).

Both start what `start.sh` and `run.sh` start. Units expect a machine's folder at /opt/osfl/NAME with an environment in
/opt/osfl/venv; images of a site are read only. An image holds the package and no key: folders are mounted when it runs.
"""

from __future__ import annotations

from pathlib import Path
from string import Template

HOME, IMAGES = "/opt/osfl", "/srv/images"

_UNIT = Template("""\
# systemctl enable --now $name, after: copy this file to /etc/systemd/system, the folder to $home/$machine,
# python3 -m venv $home/venv && $home/venv/bin/pip install '$home/$machine/$package[flower]',
# and a user osfl who owns the folder.
[Unit]
Description=$what
Wants=network-online.target
After=network-online.target

[Service]
User=osfl
WorkingDirectory=$home/$machine
Environment=PATH=$home/venv/bin:/usr/bin:/bin OSFL_CACHE=$home/$machine/cache
ExecStart=$home/$machine/$start
Restart=$restart
RestartSec=15
UMask=0077
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ProtectHome=true
ReadWritePaths=$home/$machine

[Install]
WantedBy=multi-user.target
""")
_CONTAINER = Template("""\
# podman build -t osfl-$machine .      (or docker)
# podman run -d --restart always $run osfl-$machine
# The image holds the package and no key: this folder is mounted, images are read only.
FROM docker.io/library/python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY $package /tmp/
RUN pip install --no-cache-dir '/tmp/$package[flower]'
ENV OSFL_CACHE=/osfl/cache
WORKDIR /osfl
ENTRYPOINT ["/osfl/start.sh"]
$command""")
_IGNORED = "# Nothing of this folder goes into the image but the package.\n*\n!osfl-*.whl\n"


def write_coordinator(folder: Path, fl_round: str, port: int, package: str) -> None:
    units = {"osfl-superlink": ("start.sh", "always"), f"osfl-run-{fl_round}": (f"run.sh {fl_round}", "on-failure")}
    for name, (start, restart) in units.items():
        what = f"OSFL coordinator: {start}"
        _unit(folder, name, machine="coordinator", what=what, start=start, restart=restart, package=package)
    _container(folder, "coordinator", f'-v "$PWD:/osfl" -p {port}:{port} -e OSFL_BIND=0.0.0.0', package, "")


def write_site(folder: Path, client: str, package: str) -> None:
    start = f"start.sh {IMAGES}"
    _unit(folder, f"osfl-{client}", machine=client, what=f"OSFL site {client}", start=start, restart="always", package=package)
    _container(folder, client, f'-v "$PWD:/osfl" -v {IMAGES}:/images:ro', package, 'CMD ["/images"]\n')


def _unit(folder: Path, name: str, **values: str) -> None:
    (folder / f"{name}.service").write_text(_UNIT.substitute(name=name, home=HOME, **values), encoding="utf-8")


def _container(folder: Path, machine: str, run: str, package: str, command: str) -> None:
    text = _CONTAINER.substitute(machine=machine, run=run, package=package, command=command)
    (folder / "Containerfile").write_text(text, encoding="utf-8")
    for name in (".containerignore", ".dockerignore"):
        (folder / name).write_text(_IGNORED, encoding="utf-8")
