"""Mistakes that two readings of the papers beside the code found no test for: each is made by hand, and a test must fail.

python -m benchmarks.bench named_mutants         all of them; the record says which test noticed each
python -m benchmarks.named_mutants PART...       those whose names hold one of these parts, no record
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutation import STATE, copied, in_child, prepare

SECONDS = 240.0  # of processor time for the tests of one mutant
_FALCON, _FOL = "methods/falcon/__init__.py", "methods/fol/__init__.py"
_LOSS, _TOKENS = "methods/falcon/distillation.py", "models/token_models.py"
_EQUATIONS, _ALIGNMENT = "tests/methods/falcon/test_falcon_equations.py", "tests/methods/fol/test_alignment.py"
_BICROSS, _EDM = "methods/fedbicross/__init__.py", "methods/federated_factory/diffusion.py"
_BICROSS_TESTS = "tests/methods/fedbicross/test_fedbicross.py"
_EDM_TESTS = "tests/methods/federated_factory/test_diffusion.py"


@dataclass(frozen=True)
class Named:
    """One mistake: what stands in a file below src/osfl, and what is written instead."""

    name: str
    file: str
    before: str
    after: str
    tests: str


NAMED = (
    Named("FALCON: T² dropped", _LOSS, "alpha * temperature**2 * soft", "alpha * soft", _EQUATIONS),
    Named(
        "FALCON: KL reversed",
        _LOSS,
        "functional.kl_div(log_q, teacher,",
        "functional.kl_div(teacher.clamp_min(1e-12).log(), log_q.exp(),",
        _EQUATIONS,
    ),
    Named("FALCON: CE weighs 1, not 1 - α", _LOSS, "(1 - alpha) * hard", "hard", _EQUATIONS),
    Named("FALCON: student not tempered", _LOSS, "log_softmax(logits / temperature,", "log_softmax(logits,", _EQUATIONS),
    Named(
        "FALCON: generator learns rolled labels",
        "methods/falcon/generator.py",
        "model.log_likelihood(x[index], y[index])",
        "model.log_likelihood(x[index], y[index].roll(1))",
        _EQUATIONS,
    ),
    Named("FALCON: variance used as deviation", _TOKENS, "(0.5 * log_variance).exp()", "log_variance.exp()", _EQUATIONS),
    Named(
        "FALCON: ensemble=size made uniform",
        _FALCON,
        '"size": counts.sum(1, keepdim=True).expand_as(counts)',
        '"size": torch.ones_like(counts)',
        _EQUATIONS,
    ),
    Named("FALCON: noise ignored", _FALCON, "(x[index] + drawn[0], drawn[1:])", "(x[index], drawn[1:])", _EQUATIONS),
    Named("FALCON: noise drawn without its deviation", _LOSS, "sequences + std * torch", "sequences + torch", _EQUATIONS),
    Named(
        "FALCON: log variances not clamped",
        _TOKENS,
        "return log_variance.clamp(-LOG_VARIANCE, LOG_VARIANCE)",
        "return log_variance",
        _EQUATIONS,
    ),
    Named("FALCON: gradients not clipped", "methods/falcon/generator.py", "loss, 2.0,", "loss, 0.0,", _EQUATIONS),
    Named("FALCON: dropout not rescaled", _TOKENS, "hidden * kept / (1 - self.dropout)", "hidden * kept", _EQUATIONS),
    Named(
        "FALCON: components never fewer",
        _FALCON,
        "max(1, min(s.components, len(tokens) // 10))",
        "s.components",
        _EQUATIONS,
    ),
    Named(
        "FederatedFactory: no mirrors while EDM learns",
        _EDM,
        "turned(known[picked], self.symmetry, turns)",
        "known[picked]",
        _EDM_TESTS,
    ),
    Named(
        "FederatedFactory: no dropout while EDM learns",
        _EDM,
        "model = Denoiser(self.padded, self.shape, self.settings.dropout,",
        "model = Denoiser(self.padded, self.shape, 0.0,",
        _EDM_TESTS,
    ),
    Named(
        "FederatedFactory: EDM learns in evaluation mode",
        _EDM,
        "net.train().unet.randomize",
        "net.eval().unet.randomize",
        _EDM_TESTS,
    ),
    Named(
        "FedMITR: E(x_l) asked on the whole image",
        "ingredients/distillation/token_relabel.py",
        "again.append(member(x, away.to(x.device)).cpu() if count",
        "again.append(member(x).cpu() if count",
        "tests/methods/test_fedmitr.py",
    ),
    Named(
        "FedMITR: student without momentum",
        "ingredients/distillation/token_relabel.py",
        "momentum=self.settings.student_momentum",
        "momentum=0.0",
        "tests/methods/test_fedmitr.py",
    ),
    Named("FedBiCross: stage 3 without momentum", _BICROSS, "s.personal_lr, momentum=0.9)", "s.personal_lr)", _BICROSS_TESTS),
    Named(
        "FedBiCross: personal_schedule ignored",
        _BICROSS,
        "s.personal_lr * decay(s.personal_schedule, epoch, s.personal_epochs)",
        "s.personal_lr",
        _BICROSS_TESTS,
    ),
    Named(
        "FedBiCross: recorded labels flipped",
        "ingredients/inversion/trajectories.py",
        "Trajectory(images, tuple(t / settings.steps for t in kept), labels)",
        "Trajectory(images, tuple(t / settings.steps for t in kept), labels.flip(0))",
        "tests/ingredients/inversion/test_trajectories.py",
    ),
    Named(
        "FedBiCross: images made for flipped labels",
        "ingredients/inversion/trajectories.py",
        "invert(watched, labels, image,",
        "invert(watched, labels.flip(0), image,",
        "tests/ingredients/inversion/test_trajectories.py",
    ),
    Named(
        "FOL: alignment learns the held-out images",
        "methods/fol/alignment.py",
        "fit(model, shard.train, recipe",
        "fit(model, shard.val, recipe",
        _ALIGNMENT,
    ),
    Named(
        "FOL: no fine-tuning before pruning",
        "methods/fol/alignment.py",
        "    tune(settings.finetune_epochs, None)\n",
        "",
        _ALIGNMENT,
    ),
    Named(
        "FOL: tie-break constant",
        "methods/fol/alignment.py",
        "return float(torch.nn.functional.cosine_similarity(a, b, dim=0))",
        "return 1.0",
        "tests/methods/fol/test_fol.py",
    ),
    Named(
        "FOL: tie-break not looked at", "methods/fol/selection.py", "-c.likeness, ", "", "tests/methods/fol/test_selection.py"
    ),
    Named("FOL: distillation without momentum", _FOL, "momentum=s.momentum", "momentum=0.0", "tests/methods/fol/test_fol.py"),
    Named(
        "FOL: pruned filters not held",
        "methods/fol/alignment.py",
        "lambda _, lr: hold(layers, masks)",
        "None",
        _ALIGNMENT,
    ),
    Named(
        "FOL: batch norm of a ResNet not held",
        "methods/fol/pruning.py",
        "Layer(name, module, behind.get(id(module)))",
        "Layer(name, module, None)",
        _ALIGNMENT,
    ),
)


def written(one: Named, before: str) -> str:
    """The file's text with the mistake in it."""
    if (times := before.count(one.before)) != 1:
        fix = f"Make its `before` in {Path(__file__).name} as long as it needs to be."
        raise SystemExit(f"{one.name}: {one.file} has {one.before!r} {times} times, expected once. {fix}")
    return before.replace(one.before, one.after)


def judged(one: Named, folder: Path) -> str:
    """Which test fails; empty where none does."""
    path = folder / "src" / "osfl" / one.file
    before = path.read_text(encoding="utf-8")
    path.write_text(written(one, before), encoding="utf-8")
    try:
        found = in_child(folder, ["-x", one.tests], SECONDS)
    finally:
        path.write_text(before, encoding="utf-8")
    return str(found["failed"]) if found["code"] != 0 else ""


def results(named: Sequence[Named], say: Callable[[str], None] = print) -> dict[str, str]:
    STATE.mkdir(parents=True, exist_ok=True)
    prepare()
    folder, found = copied(), dict[str, str]()
    for one in named:
        found[one.name] = judged(one, folder)
        say(f"{one.name}: {found[one.name] or 'SURVIVED'}")
    return found


def run() -> dict[str, Any]:
    found = results(NAMED, lambda line: print(line, flush=True))
    return {"mutants": len(found), "killed": sum(map(bool, found.values())), "killed_by": found}


def main(parts: list[str]) -> None:
    picked = [one for one in NAMED if not parts or any(part in one.name for part in parts)]
    print(json.dumps(results(picked, lambda line: print(line, flush=True)), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
