"""A market of models on one page, and the card of what came out: drawn from market.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osfl.reports.figures import figure_views
from osfl.reports.markdown import code, safe, table
from osfl.reports.rendering import fact_rows, render, write_text
from osfl.reports.words import compact, count, flops, many, seconds, size

Said = Mapping[str, Any]


def write_market_report(said: Said, folder: Path) -> Path:
    """Write `folder/index.html`."""
    server = said["costs"]["server"]
    page = render(
        "market.html", heading=f"{many(len(said['accepted']), 'model')} fused by {said['method']}", lede=_lede(said),
        chips=[("architecture", said["architecture"]), ("classes", count(len(said["task"]["classes"]))),
               ("image", " × ".join(map(str, said["task"]["image"]))), ("preset", said["preset"]), ("seed", str(said["seed"]))],
        accepted=[_row(one) for one in said["accepted"]], refused=said["refused"], figures=figure_views(said["figures"]),
        server=[("Time", seconds(server.get("seconds"))), ("Operations", flops(server.get("flops"))),
                ("Peak memory", size(server.get("peak_bytes")))],
        cautions=said.get("cautions", ()),
        deviations=said["deviations"], settings=fact_rows(said["settings"]), environment=fact_rows(said["environment"]),
        digests=[(key, said[key]) for key in ("plan_digest", "release_digest")], command=said["command"],
        classes=list(said["task"]["classes"]),
    )  # fmt: skip
    return write_text(folder / "index.html", page)


def _lede(said: Said) -> str:
    refused = len(said["refused"])
    left_out = f" {many(refused, 'file')} {'was' if refused == 1 else 'were'} refused." if refused else ""
    own = len(said["models"]) if _personal(said) else 0
    came, good = (f"{count(own)} came out, one for each", "they are") if own else ("one classifier came out", "it is")
    return (
        f"{many(len(said['accepted']), 'checkpoint')}, made by others, went in; {came}. No image was seen "
        f"here, so nothing on this page says how good {good}.{left_out}"
    )


def _personal(said: Said) -> bool:
    """Whether the method gave each of them a model of its own; markets of earlier versions did not say."""
    return "" not in said.get("models", {"": ""})


def _row(one: Mapping[str, Any]) -> dict[str, str]:
    return {
        "client": one["client"], "file": one["file"], "sha256": one["sha256"], "naming": one["naming"],
        "parameters": compact(one["parameters"]), "exact": count(one["parameters"]), "bytes": size(one["bytes"]),
        "head": " × ".join(map(str, one["head"])) or "none", "unused": ", ".join(one["unused"]),
        "pixels": f"{one['pixels']}, {one['pixels_by']}" if "pixels" in one else "", "family": str(one.get("family", "–")),
    }  # fmt: skip


def write_market_card(said: Said, folder: Path) -> Path:
    """Write `folder/model_card.md`."""
    parts = (_model, _use, _made_from, _made_how, _record)
    return write_text(folder / "model_card.md", "\n".join(part(said) for part in parts))


def _model(said: Said) -> str:
    classes, image = said["task"]["classes"], " × ".join(str(side) for side in said["task"]["image"])
    return (
        f"# Model card: {safe(said['method'])} of {many(len(said['accepted']), 'offered model')}\n\n"
        f"- Made with the method {code(said['method'])} of OSFL, preset {code(said['preset'])}, seed {said['seed']}.\n"
        f"- Architecture {code(said['architecture'])}: an image of {image} (channels × height × width) goes in, one of "
        f"{count(len(classes))} classes comes out.\n"
        f"- Classes: {', '.join(safe(name) for name in classes)}.\n"
    )


def _use(said: Said) -> str:
    return (
        "## Intended use and limits\n\n"
        "It was made from models alone. Whoever made it saw no image, so its accuracy is unknown: measure it on images of the "
        "place where it would be used, beside the models that it was made from. It has not been validated for clinical or "
        "other consequential decisions. What the offered models know about their training images, this one may know, too; "
        "their licences bind it.\n"
    ) + "".join(f"\n**Caution.** {safe(caution)}.\n" for caution in said.get("cautions", ()))


def _made_from(said: Said) -> str:
    rows = [
        [safe(one["file"]), one["naming"], _row(one)["pixels"], count(one["parameters"]), code(one["sha256"])]
        for one in said["accepted"]
    ]
    refused = [f"- {safe(one['file'])}: {safe(one['reason'])}\n" for one in said["refused"]]
    text = f"## Made from\n\n{table(['File', 'Naming', 'Pixels', 'Parameters', 'SHA-256'], rows)}"
    return text + (f"\nRefused:\n\n{''.join(refused)}" if refused else "")


def _made_how(said: Said) -> str:
    rows = [[code(key), code(value)] for key, value in fact_rows(said["settings"])]
    found = "".join(f"- {safe(sentence)}\n" for sentence in said["deviations"]) or "None recorded.\n"
    return f"## Training\n\n{table(['Setting', 'Value'], rows)}\n## Deviations from the paper\n\n{found}"


def _record(said: Said) -> str:
    digests = [[key.replace("_", " "), code(said[key])] for key in ("plan_digest", "release_digest")]
    command = said["command"].replace("```", "` ` `")
    return (
        f"## Record\n\nEqual digests mean equal bytes.\n\n{table(['What', 'SHA-256'], digests)}\n"
        f"## How to use it\n\n```sh\nosfl predict --run DIR{' --client NAME' if _personal(said) else ''} image.png\n```\n\n"
        f"`DIR` is the folder that holds this card. How it was made:\n\n```sh\n{command}\n```\n"
    )
