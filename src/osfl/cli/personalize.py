"""`osfl personalize`: verify a release and make the site's model from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import machine_for
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, escape, put_json

EXAMPLES = (
    "osfl new --method fedavg --dataset digits --clients north --samples 150 --smoke --sites sites --force",
    "osfl keys server north --out keys",
    "osfl enroll plan.toml --keys keys --out round",
    "osfl client plan.toml --client north --data sites/north --key keys/north.key --out usb/north.safetensors",
    "osfl receive round usb",
    "osfl server round --key keys/server.key",
    "osfl personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub --out model",
    "osfl predict --run model sites/north",
    "osfl evaluate model --data sites/north --client north --key keys/north.key --out measured",
    "osfl results round measured/summary.json",
)

Release = Annotated[
    Path,
    typer.Option(
        "--release", "-r", metavar="FILE", rich_help_panel=options.SITE, help="The release, as published by the server."
    ),
]
Personal = Annotated[
    Path | None,
    typer.Option(
        "--personal",
        metavar="FILE",
        rich_help_panel=options.SITE,
        show_default=False,
        help="The personal part for this site, where the method makes one.",
    ),
]


def personalize(
    plan: options.Plan,
    name: options.ClientName,
    release: Release,
    server: options.ServerKey,
    personal: Personal = None,
    data: options.Data = None,
    certificates: options.Certificates = None,
    work: options.Work = Path("work"),
    out: options.ModelOut = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    no_cache: options.NoCache = False,
    output_format: options.Format = "text",
) -> None:
    """Verify the release with the server's public key and make this site's model from it. Some methods train once more: --data.

    With --data the model is measured on the site's test part, or on what it held out: evaluation.json, report/, model_card.md.
    A release that was withdrawn is refused where a certificate of forgetting is at hand: --certificates, or beside the release.
    """
    from osfl.cli.evaluate import show_evaluation
    from osfl.core.plan import read_plan
    from osfl.roles.finished_model import describe_at_site
    from osfl.roles.site import take_release
    from osfl.rounds.state import beside, certificates_at
    from osfl.runtime.payloads import load_payload
    from osfl.wire.signing import read_public
    from osfl.wire.withdrawn import withdrawn_by

    round_plan, public = read_plan(plan), read_public(server)
    places = [place for place in (certificates, beside(release)) if place is not None]
    known = [entry for place in places for entry in certificates_at(place, public, round_plan.digest)]
    withdrawn = withdrawn_by(sorted(known, key=lambda entry: int(entry["number"])))
    machine = machine_for(device, precision, memory, threads=threads)
    with progress_display(output_format == "json") as progress:
        model = take_release(
            round_plan,
            name,
            release,
            personal,
            public,
            work,
            data=data,
            machine=machine,
            progress=progress,
            withdrawn=withdrawn,
        )
    folder = placed(model, out)
    command = f"osfl evaluate {folder} --data {data} --client {name}"
    evaluation = describe_at_site(folder, name, data, command, machine)
    kept = load_payload(model)
    digest = str(kept.facts["release"]) if kept else ""
    if output_format == "json":
        facts = {"client": name, "round": round_plan.digest, "release": digest, "model": str(folder / "model.safetensors")}
        put_json({**facts, "card": str(folder / "model_card.md"), "evaluation": evaluation})
        return
    echo(f"Release  {digest}, signed by the server for this round")
    echo(f"Model    {escape(str(folder / 'model.safetensors'))}")
    if evaluation:
        show_evaluation(evaluation, folder)
    else:
        echo("[dim]Not measured: add --data with labeled images, or use `osfl evaluate`.[/]")
        echo(f"Card     {escape(str(folder / 'model_card.md'))}")
    echo(f"Ask it with `osfl predict --run {escape(str(folder))} IMAGE...`.")


def placed(model: Path, out: Path | None) -> Path:
    """The folder where the model can be asked: the site's own, or a copy at `out`."""
    from osfl.deploy.files import carry
    from osfl.rounds.state import check_holds_no_other

    if out is None:
        return model.parent
    check_holds_no_other(out)
    out.mkdir(parents=True, exist_ok=True)
    for file in ("plan.json", "model.safetensors"):
        carry(model.parent / file, out / file)
    return out
