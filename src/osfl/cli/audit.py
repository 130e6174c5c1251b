"""`osfl audit`: run a reconstruction attack on the uploads of a finished simulated round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import same_plan, simulated
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, output, put_json
from osfl.core.errors import RoundError

if TYPE_CHECKING:
    from osfl.core.result import Result
    from osfl.simulate.simulation import Federation

EXAMPLES = (
    "osfl run --method falcon --smoke --out runs/tokens",
    "osfl audit runs/tokens --steps 20",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished round of falcon or fedpft.")]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Training steps of each attacker; more find more.")]
Side = Annotated[int, typer.Option("--side", metavar="PX", min=4, help="Images are compared at this size, or their own.")]


def audit(
    folder: Folder,
    steps: Steps = 1000,
    side: Side = 64,
    workers: options.Workers = None,
    device: options.Device = "cpu",
    output_format: options.Format = "text",
) -> None:
    """Train decoders from features to images and apply them to the features that clients uploaded.

    One attacker has the clients' validation images, the other the training images themselves. Results go into the round's
    results.json, report and model card. It never changes the release.
    """
    from osfl.evaluation.privacy.reconstruction import Effort
    from osfl.runtime.environment import device_named
    from osfl.runtime.machine import Machine
    from osfl.simulate.audit import audit as carry_out

    device_named(device)
    federation = _federation(folder)
    with progress_display(output_format == "json") as progress:
        result = carry_out(
            folder,
            federation,
            effort=Effort(steps=steps, side=_power(side)),
            machine=Machine(workers=workers, device=device),
            progress=progress,
        )
    put_json(result["reconstruction"]) if output_format == "json" else _show(result, folder)


def _power(side: int) -> int:
    """The largest power of two that is not larger: decoders double what they draw."""
    return 1 << (side.bit_length() - 1)


def _federation(folder: Path) -> Federation:
    """The shards that this round was simulated with."""
    from osfl.core.plan import plan_from
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
            fix="Audit a simulated round: `osfl run --method falcon --dataset NAME`.",
        )
    federation = prepare(simulated(plan, path))
    same_plan(plan, federation.plan, path)
    return federation


def _show(result: Result, folder: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from osfl.reports.tokens import attack_rows

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("Attacker has", "it draws from", "PSNR, dB", "SSIM"):
        table.add_column(title, justify="right" if title in ("PSNR, dB", "SSIM") else "left")
    for row in attack_rows(result["reconstruction"]):
        table.add_row(row["attacker"], row["source"], row["psnr"], row["ssim"])
    output().print(table)
    echo("[dim]Higher is more alike. What these attackers find is a lower bound of what can be found.[/]")
    echo(f"Report  {folder / 'report' / 'index.html'}")
    whole = folder.parent.parent
    if (whole / "comparison.json").is_file():
        echo(f"[dim]Its page no longer shows the other runs; `osfl report {whole}` adds them again.[/]")
