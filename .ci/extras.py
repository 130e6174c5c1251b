"""Every extra of the installed package: what it brings can be imported, or one message says what to install.

`--names` prints the names of those that can be installed here, as pip wants them in brackets; with `--installed` they have to be there.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from osfl.core.errors import OsflError
from osfl.data.medical import read_dicom
from osfl.deploy.flower.grid import require_flower
from osfl.models.latent_prior import load_prior, pipeline_digest
from osfl.models.pretrained import from_hub
from osfl.models.timm_models import build_timm
from osfl.roles.export import open_onnx
from osfl.simulate.api import Comparison
from osfl.simulate.ray import require_ray
from osfl.simulate.tracking.tracker import open_logs

TOOLS = {"dev", "docs"}  # of those who work on the package
# timm brings torchvision, and the index has no build of it for a CPU build of torch: here only the message is checked
NOT_HERE = {"timm"}


def pipeline() -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "unet").mkdir()
        load_prior(folder, pipeline_digest(Path(folder)), 3, ["a cat"], 1.0, torch.device("cpu"))


# extra -> (what it brings, what needs it)
FEATURES: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
    "flower": (("flwr", "httpx", "uvicorn", "osfl.deploy.flower.app"), require_flower),
    "ray": (("ray",), require_ray),
    "diffusion": (("diffusers", "transformers", "huggingface_hub"), pipeline),
    "hub": (("huggingface_hub",), lambda: from_hub("owner/name", "pretrained")),
    "onnx": (("onnx", "onnxruntime", "onnxscript"), lambda: open_onnx(Path("none.onnx"))),
    "pandas": (("pandas",), lambda: Comparison({"methods": {}}, Path()).to_frame()),
    "timm": (("timm",), lambda: build_timm("resnet18", 2, (3, 32, 32))),
    "tensorboard": (("tensorboard", "osfl.simulate.tracking.to_tensorboard"), lambda: open_logs("tensorboard")),
    "mlflow": (("mlflow", "sqlalchemy", "alembic", "osfl.simulate.tracking.to_mlflow"), lambda: open_logs("mlflow")),
    "wandb": (("wandb", "osfl.simulate.tracking.to_wandb"), lambda: open_logs("wandb")),
    "medical": (("pydicom", "gdcm", "nibabel"), lambda: read_dicom(b"")),
}


def check(extra: str) -> str:
    modules, feature = FEATURES[extra]
    if find_spec(modules[0]) is not None:
        for module in modules:
            import_module(module)
        return "works"
    if "--installed" in sys.argv and extra not in NOT_HERE:
        sys.exit(f"{extra}: it is not installed")
    try:
        feature()
    except OsflError as error:
        if f"'osfl[{extra}]'" in str(error):
            return "a message names it"
        sys.exit(f"{extra}: the message does not name the extra: {error}")
    sys.exit(f"{extra}: it is not installed, and nothing said so")


declared = set(metadata("osfl").get_all("Provides-Extra") or ()) - TOOLS
if unknown := declared ^ FEATURES.keys():
    sys.exit(f"extras without a check here, or the other way round: {', '.join(sorted(unknown))}")
if "--names" in sys.argv:
    print(",".join(sorted(declared - NOT_HERE)))
    sys.exit()
for name in sorted(declared):
    print(f"{name}: {check(name)}")
print(f"all {len(declared)} extras")
