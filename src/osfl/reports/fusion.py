"""Report and model card of a fusion of plain checkpoints, from fusion.json only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from osfl.core.types import Json
from osfl.reports.figures import figure_views
from osfl.reports.markdown import code, safe, table
from osfl.reports.rendering import fact_rows, render, write_text
from osfl.reports.text import compact, count, flops, many, seconds, size

Record = Mapping[str, Json]


def write_fusion_report(record: Record, folder: Path) -> Path:
    """Write `folder/index.html`."""
    server = record["costs"]["server"]
    page = render(
        "fusion.html",
        heading=f"{many(len(record['accepted']), 'model')} fused by {record['method']}",
        lede=_lede(record),
        chips=[
            ("architecture", record["architecture"]),
            ("classes", count(len(record["task"]["classes"]))),
            ("image", " × ".join(map(str, record["task"]["image"]))),
            ("preset", record["preset"]),
            ("seed", str(record["seed"])),
        ],
        accepted=[_row(one) for one in record["accepted"]],
        refused=record["refused"],
        figures=figure_views(record["figures"]),
        server=[
            ("Time", seconds(server.get("seconds"))),
            ("Operations", flops(server.get("flops"))),
            ("Peak memory", size(server.get("peak_bytes"))),
        ],
        cautions=record.get("cautions", ()),
        deviations=record["deviations"],
        settings=fact_rows(record["settings"]),
        environment=fact_rows(record["environment"]),
        digests=[(key, record[key]) for key in ("plan_digest", "release_digest")],
        command=record["command"],
        classes=list(record["task"]["classes"]),
    )
    return write_text(folder / "index.html", page)


def _lede(record: Record) -> str:
    refused = len(record["refused"])
    left_out = f" {many(refused, 'file')} {'was' if refused == 1 else 'were'} refused." if refused else ""
    own = len(record["models"]) if _personal(record) else 0
    output, subject = (f"{count(own)} came out, one for each", "they are") if own else ("one classifier came out", "it is")
    return (
        f"{many(len(record['accepted']), 'checkpoint')} that other programs made were fused; {output}. No image was used "
        f"here, so this page does not show how good {subject}.{left_out}"
    )


def _personal(record: Record) -> bool:
    """Whether the method gave each of them a model of its own; not recorded in fusions of earlier versions."""
    return "" not in record.get("models", {"": ""})


def _row(one: Mapping[str, Json]) -> dict[str, str]:
    return {
        "client": one["client"],
        "file": one["file"],
        "sha256": one["sha256"],
        "naming": one["naming"],
        "parameters": compact(one["parameters"]),
        "exact": count(one["parameters"]),
        "bytes": size(one["bytes"]),
        "head": " × ".join(map(str, one["head"])) or "none",
        "unused": ", ".join(one["unused"]),
        "pixels": f"{one['pixels']}, {one['pixels_by']}" if "pixels" in one else "",
        "family": str(one.get("family", "–")),
    }


def write_fusion_card(record: Record, folder: Path) -> Path:
    """Write `folder/model_card.md`."""
    parts = (_model, _use, _made_from, _made_how, _record)
    return write_text(folder / "model_card.md", "\n".join(part(record) for part in parts))


def _model(record: Record) -> str:
    classes, image = record["task"]["classes"], " × ".join(str(side) for side in record["task"]["image"])
    return (
        f"# Model card: {safe(record['method'])} of {many(len(record['accepted']), 'offered model')}\n\n"
        f"- Made with the method {code(record['method'])} of OSFL, preset {code(record['preset'])}, seed {record['seed']}.\n"
        f"- Architecture {code(record['architecture'])}: an image of {image} (channels × height × width) goes in, one of "
        f"{count(len(classes))} classes comes out.\n"
        f"- Classes: {', '.join(safe(name) for name in classes)}.\n"
    )


def _use(record: Record) -> str:
    return (
        "## Intended use and limits\n\n"
        "It was made from models only, without any image, so its accuracy is unknown: measure it on images of the "
        "place where it would be used, beside the models that it was made from. It has not been validated for clinical or "
        "other consequential decisions. What the offered models know about their training images, this one may know, too; "
        "their licenses bind it.\n"
    ) + "".join(f"\n**Caution.** {safe(caution)}.\n" for caution in record.get("cautions", ()))


def _made_from(record: Record) -> str:
    rows = [
        [safe(one["file"]), one["naming"], _row(one)["pixels"], count(one["parameters"]), code(one["sha256"])]
        for one in record["accepted"]
    ]
    refused = [f"- {safe(one['file'])}: {safe(one['reason'])}\n" for one in record["refused"]]
    text = f"## Made from\n\n{table(['File', 'Naming', 'Pixels', 'Parameters', 'SHA-256'], rows)}"
    return text + (f"\nRefused:\n\n{''.join(refused)}" if refused else "")


def _made_how(record: Record) -> str:
    rows = [[code(key), code(value)] for key, value in fact_rows(record["settings"])]
    found = "".join(f"- {safe(sentence)}\n" for sentence in record["deviations"]) or "None recorded.\n"
    return f"## Training\n\n{table(['Setting', 'Value'], rows)}\n## Deviations from the paper\n\n{found}"


def _record(record: Record) -> str:
    digests = [[key.replace("_", " "), code(record[key])] for key in ("plan_digest", "release_digest")]
    command = record["command"].replace("```", "` ` `")
    return (
        f"## Record\n\nEqual digests mean equal bytes.\n\n{table(['What', 'SHA-256'], digests)}\n"
        f"## How to use it\n\n```sh\nosfl predict --run DIR{' --client NAME' if _personal(record) else ''} image.png\n```\n\n"
        f"`DIR` is the folder that holds this card. How it was made:\n\n```sh\n{command}\n```\n"
    )
