"""Options that several verbs share, each explained once. Types only: nothing heavy is imported."""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer
from typer.core import TyperCommand

from osfl.core.errors import UsageError

Answer: TypeAlias = Literal["text", "json"]


def complete_methods(incomplete: str) -> list[tuple[str, str]]:
    from osfl.core.registry import describe, names

    return [(name, describe(name)) for name in names() if name.startswith(incomplete)]


def complete_datasets(incomplete: str) -> list[tuple[str, str]]:
    from osfl.data.catalog import sheets

    return [(name, sheet.title) for name, sheet in sheets().items() if name.startswith(incomplete)]


def complete_partitions(incomplete: str) -> list[str]:
    known = ("iid", "dirichlet:0.1", "dirichlet-client:0.3", "classes:3", "silos", "domains", "by:scanner")
    return [name for name in known if name.startswith(incomplete)]


def own_method(text: str) -> str:
    """The name of a method; of `./mine.py` the name under which its class is known in this process."""
    if not str(text).endswith(".py"):
        return str(text)
    from osfl.core.registry import register_file

    return register_file(Path(text))


WHAT, HOW = "What is simulated", "How it is computed"

Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME|FILE",
        autocompletion=complete_methods,
        parser=lambda text: own_method(text),
        rich_help_panel=WHAT,
        help="The federated learning method, of `osfl ls methods`, or a file of your own, ./mine.py; default onesum.",
    ),
]
Dataset = Annotated[
    str,
    typer.Option(
        "--dataset",
        "-d",
        metavar="NAME|PATH",
        autocompletion=complete_datasets,
        rich_help_panel=WHAT,
        help="A name of `osfl ls datasets`, or a path to .npz, .zip, .csv or a folder; beside a plan, where its dataset is.",
    ),
]
Clients = Annotated[
    int | None,
    typer.Option(
        "--clients",
        "-n",
        metavar="N",
        min=1,
        rich_help_panel=WHAT,
        show_default=False,
        help="How many sites; default 5, or as many as the partition dictates.",
    ),
]
Partition = Annotated[
    str,
    typer.Option(
        "--partition",
        "-p",
        metavar="KIND",
        autocompletion=complete_partitions,
        rich_help_panel=WHAT,
        help="How images are divided among clients; see `osfl ls partitions`.",
    ),
]
Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="cpu|paper|smoke",
        rich_help_panel=WHAT,
        help="Settings by intent: two cores, as published, or a trial of everything. Cards name more.",
    ),
]
Smoke = Annotated[
    bool, typer.Option("--smoke", rich_help_panel=WHAT, help="The same as --preset smoke: everything, in seconds.")
]
Seed = Annotated[
    int, typer.Option("--seed", "-s", metavar="S", rich_help_panel=WHAT, help="All randomness is derived from it.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        rich_help_panel=WHAT,
        show_default=False,
        help="Change one setting of the method, such as epochs=2; repeatable.",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        metavar="N",
        min=1,
        rich_help_panel=WHAT,
        show_default=False,
        help="Use so many training images, class shares kept.",
    ),
]
TestSamples = Annotated[
    int | None,
    typer.Option(
        "--test-samples",
        metavar="N",
        min=1,
        rich_help_panel=WHAT,
        show_default=False,
        help="Evaluate on so many images, class shares kept.",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="NAME[:DIR]",
        rich_help_panel=HOW,
        show_default=False,
        help="Log what is finished to tensorboard, mlflow or wandb (offline), in DIR, default runs/NAME; may be repeated.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        callback=lambda wanted: _no_cache(wanted),
        rich_help_panel=HOW,
        help="Keep nothing that is made of images (decoded pixels, features) on this disk; see `osfl cache`.",
    ),
]
Group = Annotated[
    str,
    typer.Option(
        "--group",
        metavar="COLUMN",
        rich_help_panel=WHAT,
        show_default=False,
        help="Column of a CSV with the patient of an image: a patient is never split between parts or sites.",
    ),
]
Slices = Annotated[
    str,
    typer.Option(
        "--slices",
        metavar="AXIS[:N]",
        rich_help_panel=WHAT,
        show_default=False,
        help="Slices of volumes (NIfTI, DICOM frames) that are images: axial, coronal:5, sagittal:all; default the middle one.",
    ),
]
Window = Annotated[
    str,
    typer.Option(
        "--window",
        metavar="CENTER:WIDTH",
        rich_help_panel=WHAT,
        show_default=False,
        help="Gray values that are shown of DICOM and NIfTI, such as 40:400; default: what the file says.",
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        "--epsilon",
        metavar="E",
        rich_help_panel=HOW,
        show_default=False,
        help="Differential privacy of single images (onesum, fedcgs, methods that upload models): noise for this epsilon.",
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(
        "--delta", metavar="D", rich_help_panel=HOW, show_default=False, help="Its delta, well below one over the images: 1e-5."
    ),
]
Noise = Annotated[
    Literal["site", "share"] | None,
    typer.Option(
        "--noise",
        rich_help_panel=HOW,
        show_default=False,
        help="Each site adds all of it (site, the default: against the server, too) or its share (the server is trusted; "
        "with --secure-sum it need not be).",
    ),
]
Colluders = Annotated[
    int,
    typer.Option(
        "--colluders",
        metavar="N",
        rich_help_panel=HOW,
        show_default=False,
        min=0,
        help="With --noise share: so many sites may tell the server their noise, and epsilon still holds.",
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image-size",
        metavar="PX",
        rich_help_panel=WHAT,
        show_default=False,
        help="Side of the images in pixels; default: the dataset's.",
    ),
]
Channels = Annotated[
    int | None,
    typer.Option(
        "--channels",
        metavar="1|3",
        rich_help_panel=WHAT,
        show_default=False,
        help="1 is gray, 3 is RGB; default: the dataset's.",
    ),
]
EvaluateOn = Annotated[
    Literal["test", "val"],
    typer.Option("--evaluate-on", rich_help_panel=WHAT, help="val: choose settings without touching the test set."),
]
Topology = Annotated[
    str | None,
    typer.Option(
        "--topology",
        metavar="KIND",
        rich_help_panel=WHAT,
        show_default=False,
        help="Which clients exchange with which, for methods without a server: mesh, ring or random:K.",
    ),
]
Encounters = Annotated[
    int,
    typer.Option(
        "--encounters",
        metavar="E",
        min=1,
        rich_help_panel=WHAT,
        show_default=False,
        help="Number of exchanges between neighbors, one after the other.",
    ),
]
Contacts = Annotated[
    Path | None,
    typer.Option(
        "--contacts",
        metavar="contacts.csv",
        rich_help_panel=WHAT,
        show_default=False,
        help="CSV file of contact windows, one a line: a,b,start,seconds,bytes_per_second,encounter.",
    ),
]
SecureSum = Annotated[
    bool,
    typer.Option(
        "--secure-sum",
        rich_help_panel=WHAT,
        help="Mask uploads: the server learns their sum only. For methods whose server only adds; sets limits.share = 1.",
    ),
]
PrivateRandomness = Annotated[
    bool,
    typer.Option(
        "--private-randomness",
        rich_help_panel=WHAT,
        help="Sites draw batch order and the like from a secret of their own, so that nobody else can repeat their training.",
    ),
]
Engine = Annotated[
    Literal["local", "ray"],
    typer.Option(
        "--engine", rich_help_panel=HOW, help="ray: clients on a Ray cluster, RAY_ADDRESS or this machine; the same bits."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="W",
        min=1,
        rich_help_panel=HOW,
        show_default=False,
        help="Clients, or parts of the server's work, at once; default one a core. Never changes a result.",
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        metavar="T",
        min=1,
        rich_help_panel=HOW,
        help="Compute threads of one operation; simulated clients use one. Other values than 1 change the last bits.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="cpu|cuda|mps|auto",
        rich_help_panel=HOW,
        help="Where to compute; clients are spread over several: cuda:0,cuda:1 or cuda:all.",
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="fp32|tf32|bf16|fp16",
        rich_help_panel=HOW,
        help="Floats of the networks: 16 bits take half the memory of a GPU and less time. Changes results slightly.",
    ),
]
Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="20GB",
        rich_help_panel=HOW,
        show_default=False,
        help="What one training may use of the device; batches are cut into parts that fit. Default: all of a GPU.",
    ),
]
Format = Annotated[
    Answer,
    typer.Option("--format", rich_help_panel=HOW, help="json: one JSON value on stdout, also for failures."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="plan.toml",
        rich_help_panel=WHAT,
        show_default=False,
        help="Take method, data, settings and seed from a plan that `osfl new` wrote.",
    ),
]

Metric = Annotated[
    str,
    typer.Option(
        "--metric",
        metavar="NAME",
        show_default=False,
        help="Read this one first: accuracy, balanced_accuracy, auroc or f1; default: by the balance of the test classes.",
    ),
]

SITE, COORDINATOR = "The site", "The round"
Plan = Annotated[Path, typer.Argument(metavar="plan.toml", help="The plan that all agreed on.")]
RoundFolder = Annotated[Path, typer.Argument(metavar="ROUND", help="The round's folder; `osfl enroll` makes one.")]
ServerKey = Annotated[
    Path, typer.Option("--server", metavar="server.pub", rich_help_panel=SITE, help="The server's public key.")
]
ClientName = Annotated[
    str, typer.Option("--client", "-c", metavar="NAME", rich_help_panel=SITE, help="Who this site is in the plan.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        rich_help_panel=SITE,
        show_default=False,
        help="This site's images: a folder or zip of class/*, a .csv or an .npz.",
    ),
]
Certificates = Annotated[
    Path | None,
    typer.Option(
        "--certificates",
        metavar="PATH",
        show_default=False,
        help="Certificates of forgetting (a file, or a folder of copies) that were kept elsewhere.",
    ),
]
Work = Annotated[
    Path,
    typer.Option(
        "--work",
        metavar="DIR",
        parser=lambda text: new_folder(text),
        rich_help_panel=SITE,
        help="Where this site keeps what belongs to the round.",
    ),
]
ModelOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        parser=lambda text: new_folder(text),
        rich_help_panel=SITE,
        show_default=False,
        help="Also put the model there, for `osfl predict --run DIR`.",
    ),
]


# --- which options were given, and where to write ---------------------------------------------------------------------


_RUNNING: ContextVar[Any] = ContextVar("the context of the running verb", default=None)


class Verb(TyperCommand):
    """A verb that keeps its context while it runs. Typer has no function that returns it; click has one, but newer versions of
    typer no longer depend on click."""

    def invoke(self, ctx: Any) -> Any:
        token = _RUNNING.set(ctx)
        try:
            return super().invoke(ctx)
        finally:
            _RUNNING.reset(token)


def _no_cache(wanted: bool) -> bool:
    if wanted:
        from osfl.runtime.cache import without_cache

        without_cache()
    return wanted


def given_options() -> list[Any]:
    """The parameters given on the command line of the running verb, without those filled in by default."""
    context = _RUNNING.get()
    given = context.command.params if context else []
    return [one for one in given if getattr(context.get_parameter_source(str(one.name)), "name", None) == "COMMANDLINE"]


def beside_plan(dataset: str, plan: str) -> str:
    """Where the plan's dataset is, if `--dataset` says so; other options would contradict the plan."""
    refuse_beside_plan(plan, "dataset")
    return dataset if any(one.name == "dataset" for one in given_options()) else ""


def refuse_beside_plan(plan: str, *allowed: str) -> None:
    """Refuse options beside a plan that already defines what is simulated: they would be ignored."""
    named = [
        one.opts[0]
        for one in given_options()
        if one.param_type_name == "option"
        and getattr(one, "rich_help_panel", None) == WHAT
        and one.name not in (None, "plan", *allowed)
    ]
    if named:
        raise UsageError(
            f"{plan} already defines what is simulated; {', '.join(named)} would contradict it",
            field="plan",
            fix="Leave that out, or change the plan.",
        )


def new_folder(text: str | Path) -> Path:
    """The value of `--out DIR`: a folder, or a place where one can be made."""
    path = new_place(text, "a folder, such as runs/first")
    if path.is_file():
        raise typer.BadParameter(f"{path} is a file, and results need a folder of their own.")
    return path


def new_file(text: str | Path, example: str = "plan.toml") -> Path:
    """The value of `--out FILE`."""
    path = new_place(text, f"a file, such as {example}")
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name the file in it, such as {path / example}.")
    return path


def new_place(text: str | Path, expected: str = "a file, such as north.safetensors") -> Path:
    """A place where something can be written; what is there already is the verb's to judge."""
    if not str(text).strip():
        raise typer.BadParameter(f"it is empty; expected {expected}.")
    path = Path(text)
    above = next((parent for parent in path.parents if os.path.lexists(parent)), None)
    if above is not None and not above.is_dir():
        raise typer.BadParameter(f"{path} cannot be made, because {above} is not a folder.")
    return path


def examples(commands: tuple[str, ...]) -> str:
    """The end of a help page: commands that work as they stand."""
    return "\n\n".join(["[bold]Commands that work as they stand:[/]", *(f"[cyan]$ {command}[/]" for command in commands)])
