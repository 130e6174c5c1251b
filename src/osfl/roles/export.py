"""A finished model as one file for other programs: ONNX, or a program of torch.export, with labels and preprocessing inside."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from osfl.core.errors import OsflError, TrainingError, UsageError
from osfl.core.types import Json, Kind, Task
from osfl.models.double_precision import in_products
from osfl.models.folding import freeze
from osfl.models.outputs import to_probabilities
from osfl.roles.finished_model import FinishedModel

SUFFIXES = (".onnx", ".pt2")
TOLERANCE = 1e-4  # of a probability: what another order of additions may change
FACTS = "osfl.json"  # inside a .pt2 file; in ONNX each fact is an entry of the metadata
_NEEDS = "pip install 'osfl[onnx]'"


class WithPreprocessing(nn.Module):
    """Pixels as they are in files, uint8 (batch, channels, height, width), to probabilities (batch, classes)."""

    def __init__(self, model: nn.Module, kind: Kind = "multiclass") -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(images.to(torch.float32) / 127.5 - 1.0)
        return to_probabilities(logits, self.kind)


@dataclass(frozen=True)
class Exported:
    path: Path
    facts: dict[str, Json]
    difference: float  # largest, of any probability, between the model and the file


def export_model(model: FinishedModel, path: Path) -> Exported:
    """Write the file, open it again with what will run it, and compare its answers with the model's; a file that answers
    otherwise is not left behind."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path.name} names no format that is known", field="out", fix=f"End it in {' or '.join(SUFFIXES)}.")
    whole = WithPreprocessing(freeze(model.module), model.task.kind).eval()
    facts = facts_of(model)
    partial = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        with _quietly(path.suffix, str(model.about.get("method", "this model"))):
            (_write_onnx if path.suffix == ".onnx" else _write_program)(whole, model.task, facts, partial)
            ask = open_onnx(partial)[0] if path.suffix == ".onnx" else open_program(partial)[0]
        difference = max(_difference(whole, ask, model.task, batch) for batch in (1, 3))
        if not difference <= TOLERANCE:
            raise TrainingError(
                "the exported file answers otherwise than the model",
                field="export",
                expected=f"probabilities within {TOLERANCE:g}",
                got=f"{difference:.3g}",
                fix="Try the other format, .onnx or .pt2.",
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(path, facts, difference)


def facts_of(model: FinishedModel) -> dict[str, Json]:
    """What whoever uses the file has to know."""
    channels, height, width = model.task.image
    return {
        "classes": list(model.task.classes),
        "image": [channels, height, width],
        "input": f"uint8 pixels 0 to 255, (batch, {channels}, {height}, {width}), {'RGB' if channels == 3 else 'gray'}, "
        "resized without keeping the aspect ratio",
        "output": "probabilities, (batch, classes), in the order of `classes`",
        **{key: value for key, value in model.about.items() if key != "path"},
    }


def _noise(task: Task, batch: int) -> torch.Tensor:
    """Each image has a quarter of the contrast of the one before: of a model that is sure of noise, gray shows more."""
    rng = torch.Generator().manual_seed(batch)
    noise = torch.randint(0, 256, (batch, *task.image), generator=rng, dtype=torch.uint8)
    contrast = 0.25 ** torch.arange(batch)[:, None, None, None]
    return (127.5 + (noise - 127.5) * contrast).round().to(torch.uint8)


def _difference(whole: nn.Module, ask: Callable[[torch.Tensor], torch.Tensor], task: Task, batch: int) -> float:
    """On noise, and with another number of images than the file was made with."""
    images = _noise(task, batch)
    with torch.inference_mode():
        return float((whole(images) - ask(images)).abs().max())


@contextmanager
def _quietly(suffix: str, method: str) -> Any:
    """Exporters are talkative, and what they cannot trace is their error: it becomes one sentence."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except OsflError:
        raise
    except Exception as error:  # whatever torch's exporter raises about a network
        why = (str(error).splitlines() or [""])[0]
        raise TrainingError(
            f"{method} cannot be written and opened again as {suffix}: {type(error).__name__}: {why[:200]}",
            field="export",
            fix="Try the other format, .onnx or .pt2; `osfl predict` works in any case.",
        ) from error
    finally:
        logging.disable(level)


def _program(whole: nn.Module, task: Task) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=4096)
    with torch.no_grad():
        whole(_noise(task, 2))  # what a network keeps for later calls must not be made while it is traced
        return torch.export.export(whole, (_noise(task, 2),), dynamic_shapes={"images": {0: batch}})


def _write_program(whole: nn.Module, task: Task, facts: dict[str, Json], path: Path) -> None:
    torch.export.save(_program(whole, task), path, extra_files={FACTS: json.dumps(facts)})


def open_program(path: Path) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Json]]:
    """A `.pt2` file of our own making. Only open files of people you trust: such a file is a program."""
    extra = {FACTS: ""}
    module = torch.export.load(path, extra_files=extra).module()
    return module, json.loads(extra[FACTS])


def _onnx() -> Any:
    try:
        import onnx
        import onnxruntime  # type: ignore[import-untyped, unused-ignore]
        import onnxscript  # noqa: F401
    except ImportError:
        raise UsageError(
            "ONNX files need the extra onnx, which is not installed", field="out", fix=f"{_NEEDS}, or .pt2."
        ) from None
    return onnx, onnxruntime


def _write_onnx(whole: nn.Module, task: Task, facts: dict[str, Json], path: Path) -> None:
    onnx, _ = _onnx()
    program = torch.onnx.export(
        _program(whole, task).run_decompositions(in_products()),
        input_names=["images"],
        output_names=["probabilities"],
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    written = program.model_proto
    onnx.helper.set_model_props(
        written, {f"osfl.{key}": value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    )
    onnx.checker.check_model(written)
    path.write_bytes(written.SerializeToString())


def open_onnx(path: Path) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, str]]:
    _, runtime = _onnx()
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def ask(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return ask, dict(session.get_modelmeta().custom_metadata_map)
