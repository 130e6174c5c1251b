"""Three sites, one message each, from Python:  python examples/quickstart.py

Runs OneSum on the embedded digits, looks at the scores, and uses the finished model.
"""

import tempfile
from pathlib import Path

import torch

import osfl


def main(out: Path) -> float:
    result = osfl.run("onesum", out, dataset="digits", clients=3, partition="dirichlet:0.5", preset="smoke")
    sent = result.upload_bytes / 1e3
    print(f"accuracy on everybody's images: {result.accuracy:.1%}, after one message a site, {sent:.0f} kB in all")
    print(f"worst site on its own images:   {result.scores['clients']['own']['worst']:.1%}")

    model, task = osfl.load_model(out)
    image = torch.zeros(1, *task.image)  # inputs are floats in [-1, 1]: x / 127.5 - 1
    print(f"a gray square is taken for a {task.classes[int(model(image).argmax())]}")
    print(f"report: {result.report}")
    return result.accuracy


if __name__ == "__main__":
    main(Path(tempfile.mkdtemp()) / "quickstart")
