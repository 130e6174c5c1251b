"""`osfl audit`: run privacy attacks on a finished simulated round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import dataset_in, needs_path, same_plan, simulated
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, output, put_json
from osfl.core.errors import RoundError

if TYPE_CHECKING:
    from osfl.core.result import Result
    from osfl.simulate.simulation import Federation

EXAMPLES = (
    "osfl run --method fedavg --smoke --out runs/fedavg",
    "osfl audit runs/fedavg --shadows 2",
    "osfl audit runs/fedavg --shadows 0 --format json",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished simulated round.")]
Shadows = Annotated[
    int,
    typer.Option("--shadows", metavar="N", min=0, help="Shadow rounds (an even number) to compare with; 0: thresholds only."),
]
Planted = Annotated[int, typer.Option("--canaries", metavar="N", min=0, help="Images planted, to see if the audit finds them.")]
Images = Annotated[int, typer.Option("--images", metavar="N", min=1, help="Members of a client that are asked for, at most.")]
DataPlace = Annotated[
    str,
    typer.Option(
        "--dataset",
        metavar="NAME|PATH",
        show_default=False,
        help="Where the round's images are now; else they are looked for where its command says.",
    ),
]
Minutes = Annotated[
    float,
    typer.Option("--minutes", metavar="M", min=0, help="Repeat the server phase in shadows only if that takes no longer."),
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Training steps of decoders of features.")]
Side = Annotated[int, typer.Option("--side", metavar="PX", min=4, help="Decoded images are compared at this size at most.")]


def audit(
    folder: Folder,
    shadows: Shadows = 4,
    canaries: Planted = 10,
    images: Images = 400,
    minutes: Minutes = 10.0,
    steps: Steps = 1000,
    side: Side = 64,
    workers: options.Workers = None,
    device: options.Device = "cpu",
    dataset: DataPlace = "",
    output_format: options.Format = "text",
) -> None:
    """Attack a finished simulated round as a curious server, other sites and anybody with the released model could.

    Membership inference (thresholds, LiRA, RMIA), reconstruction of images, shares of classes, presence of a site, and planted
    canaries that say whether the audit is able to see. Figures are lower bounds. They go into the round's results.json, report
    and model card; the release is never changed. An interrupted audit goes on when the command is run again.
    """
    from osfl.evaluation.privacy.reconstruction import Effort
    from osfl.runtime.environment import device_named
    from osfl.runtime.machine import Machine
    from osfl.simulate.audit import Attempt
    from osfl.simulate.audit import audit as carry_out

    device_named(device)
    federation = _federation(folder, dataset)
    with progress_display(output_format == "json") as progress:
        result = carry_out(
            folder,
            federation,
            attempt=Attempt(shadows=shadows, canaries=canaries, images=images, minutes=minutes),
            effort=Effort(steps=steps, side=_power(side)),
            machine=Machine(workers=workers, device=device),
            progress=progress,
        )
    found = {key: result[key] for key in ("audit", "reconstruction") if key in result}
    put_json(found) if output_format == "json" else _show(result, folder)


def _power(side: int) -> int:
    """The largest power of two that is not larger: decoders double what they draw."""
    return 1 << (side.bit_length() - 1)


def _federation(folder: Path, dataset: str) -> Federation:
    """The shards that this round was simulated with. The plan keeps the name of the images, the command their place."""
    from osfl.core.plan import plan_from
    from osfl.core.result import read_result
    from osfl.rounds.state import read_json
    from osfl.simulate.simulation import prepare

    path = folder / "plan.json"
    if not (folder / "results.json").exists() or not path.exists():
        raise RoundError(f"{folder} holds no finished round", field="run", fix="Run `osfl run --out DIR` first.")
    plan = plan_from(read_json(path), str(path))
    if not plan.data.get("dataset"):
        raise RoundError(
            f"the plan of {folder} has no [data] table, and an attack needs the images",
            field="data",
            fix="Audit a simulated round: `osfl run --method fedavg --dataset NAME`.",
        )
    place = dataset or dataset_in(read_result(folder)["command"])
    if needs_path(place) and not Path(place).exists():
        raise RoundError(
            f"the images of {folder} were read from {place}, and there is nothing of that name here",
            field="dataset",
            fix="Say where they are now: `osfl audit DIR --dataset PATH`.",
        )
    federation = prepare(simulated(plan, path, place))
    same_plan(plan, federation.plan, path)
    return federation


def _show(result: Result, folder: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from osfl.reports.audit import canary_row, membership_row
    from osfl.reports.tokens import attack_rows

    found = result["audit"]
    titles = ("Who, from what", "Attack", "Area", "Found at 0.1 %", "Found at 1 %")
    table = Table(*titles, box=SIMPLE_HEAD, pad_edge=False)
    for row in (membership_row(row) for row in found["membership"] if row["of"] == "all"):
        table.add_row(row["party"], row["attack"], row["auc"], *row["tpr"])
    output().print(table)
    for one in map(canary_row, found["canaries"]):
        echo(f"Canaries by {one['signal']}: {one['found']} found, false alarms {one['false']}")
    if "reconstruction" in result:
        table = Table("Attacker has", "it draws from", "PSNR, dB", "SSIM", box=SIMPLE_HEAD, pad_edge=False)
        for line in attack_rows(result["reconstruction"]):
            table.add_row(line["attacker"], line["source"], line["psnr"], line["ssim"])
        output().print(table)
    for sentence in found["verdict"]:
        echo(sentence)
    for sentence in found["not_shown"]:
        echo(f"[dim]Not shown: {sentence}[/]")
    echo(f"Report  {folder / 'report' / 'index.html'}")
    whole = folder.parent.parent
    if (whole / "comparison.json").is_file():
        echo(f"[dim]Its page no longer shows the other runs; `osfl report {whole}` adds them again.[/]")
