"""Mutants of losses, updates and samplers: one place is changed at a time, and a test that runs it must fail.

python -m benchmarks.bench mutation        the sample: two mutants of each file, drawn at random
python -m benchmarks.bench mutation=35     its beginning, as far as 35 minutes go
python -m benchmarks.mutation --seconds=120 [PART...]   others, those whose names hold one of these parts; no record

Which lines and which changes: `benchmarks/mutation_sites.py`. All of them are in one random order, and the sample is the first
`EACH` of each file, so that every file is asked, small ones, too. What is to be shown: of the mutants of the sample that change
what is computed, `AIM` and more are killed by the tests that were there when the mutant was first tried. A survivor gets a test
and is tried again, or stands in `HARMLESS` with its reason; what it was at first stays in the record.

A mutant gets the test files of methods, ingredients and models that import its file, those that stand where it stands first,
until a test fails, on one core; each is a fork of a process that has torch loaded. The test that failed is then run without
the change, and must pass. What takes longer than `LONGEST` counts as alive. Mutants and what became of them are kept in
runs/mutation: a run that ends early goes on there. A killed one is not tried again while its function stays the same; a
survivor is, once any test has changed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import re
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.mutation_sites import TARGETS, Mutant, mutants_of, mutated

ROOT = Path(__file__).parent.parent
STATE = ROOT / "runs" / "mutation"
ROOMS = ("tests/methods", "tests/ingredients", "tests/models", "tests/device")
WITHOUT = ("tests/methods/test_every_method.py",)  # whole runs of every method: minutes for each mutant
SEED = 1
EACH = 2  # mutants of a file
AIM = 0.85
LONGEST = 300.0  # processor seconds of the tests of one mutant
OUT_OF_TIME, NOT_COLLECTED = "out of time", " cannot be collected"  # what is said of a run, and behind a file's name
NONE_COLLECTED = 5  # pytest's exit code of a file whose tests all need data

# Survivors that no test could kill, and why.
_DIGITS = "how many digits a fact has"
_SAME = "another name for the same side of a tensor"
HARMLESS: dict[str, str] = {
    "ingredients/distillation/token_relabel.py::lipschitz: 4 -> 5 (2)": _DIGITS,
    "methods/fedbicross/__init__.py::_entropies: -1 -> 1 (3)": _SAME,
    "methods/federated_factory/mixtures.py::supported_mixture: k - 1 -> k + 1": "what is enough is below k already",
    "methods/federated_factory/mixtures.py::_mixture: mass / n -> mass * n": "the same number is added to all logarithms",
    "methods/falcon/generator.py::fit_generator: model.cpu().eval() -> pass": "the network has neither dropout nor batch norm",
    "methods/fol/bounds.py::printed_risk_bound: -1 -> 1 (4)": _SAME,
    "ingredients/training/local.py::fit: 1 -> 2": "no batch is that large",
    "methods/fol/bounds.py::HeadLoss.optimum: root - 1 -> root + 1": "the same optimum, in more steps",
    "methods/fol/bounds.py::head_descent: distance > 10 * _EXACT -> distance >= 10 * _EXACT": "no distance is that number",
    "methods/falcon/__init__.py::Falcon._wanted: 1 -> 2 (3)": "equal weights of all classes have the same shares",
    "methods/fedbicross/__init__.py::FedBiCross._follow: w > 0 -> w >= 0": "asked in vain: its gradient has the weight zero",
    "ingredients/ensembles/ensemble.py::_shares: 1.0 -> 2.0": "zero over any number is zero",
    "ingredients/statistics/averaging.py::geometric_weights: 0 -> 1": "all members have tensors of the same names",
    "methods/fedprox.py::FedProx.adjust.pull: parameter.detach() -> parameter": "the same numbers",
    "ingredients/generators/synthesis.py::Workshop.grow: 1 -> 2": "without `pool_batches` no image is too many",
    "methods/federated_factory/diffusion.py::Diffusion.fit: step % shown == 0 -> step % shown != 0": "when progress is shown",
}


# --- a process for each mutant -----------------------------------------------------------------------------------------


class Watch:
    """A pytest plugin: the first test that failed."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid}{NOT_COLLECTED}"


def prepare() -> None:
    """Load what every mutant's process would load anew; nothing of ours, which each loads for itself."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import pytest  # noqa: F401
    import torch
    import torch._dynamo  # what the first optimizer would import

    torch.set_num_threads(1)


def in_child(folder: Path, options: Sequence[str], seconds: float) -> dict[str, Any]:
    """pytest in a fork, with the sources of this folder; at most so many seconds of processor time."""
    answer = STATE / "answer.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(folder, options, seconds, answer)
    _, status = os.waitpid(pid, 0)
    if answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
    return {"code": -1, "failed": OUT_OF_TIME if os.WIFSIGNALED(status) else "died"}


def _child(folder: Path, options: Sequence[str], seconds: float, answer: Path) -> None:
    try:
        with (STATE / "last.log").open("w", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        limit = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        for name in [name for name in sys.modules if name.split(".")[0] in ("osfl", "tests")]:
            del sys.modules[name]
        os.chdir(folder)
        sys.path[:0] = [str(folder / "src"), str(folder)]
        os.environ["PYTHONPATH"] = f"{folder / 'src'}:{folder}"
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a second for each mutant
        import pytest

        watch = Watch()
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not data", *options], plugins=[watch])
        answer.write_text(json.dumps({"code": int(code), "failed": watch.failed}), encoding="utf-8")
    finally:
        os._exit(0)


def copied() -> Path:
    """The sources and tests in a folder of their own, where they can be changed."""
    folder = STATE / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "records"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


# --- which tests are asked ---------------------------------------------------------------------------------------------------


def test_files(folder: Path) -> dict[str, str]:
    """The text of each test file, by its name."""
    paths = [path for room in ROOMS for path in sorted((folder / room).rglob("test_*.py"))]
    texts = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in texts.items() if name not in WITHOUT}


def asked(mutant: Mutant, texts: Mapping[str, str]) -> list[str]:
    """The test files that import the mutated file, and all of its method's; where there are none, those that name it. Those
    beside it come first."""
    module = "osfl." + mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    stem, beside = module.rpartition(".")[2], f"tests/{Path(mutant.file).parent}/"
    method = beside if mutant.file.startswith("methods/") and mutant.file.count("/") > 1 else "nothing"
    users = [name for name, text in texts.items() if name.startswith(method) or re.search(rf"\b{re.escape(module)}\b", text)]
    users = users or [name for name, text in texts.items() if re.search(rf"\b{stem}\b", text)]
    own = {name for name in users if name.startswith(beside) and (stem in name or beside.endswith(f"/{stem}/"))}
    return sorted(users, key=lambda name: (name not in own, not name.startswith(beside), len(texts[name]), name))


def _written(path: Path, what: Any) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(what), encoding="utf-8")
    fresh.replace(path)


def digest_of(*folders: str) -> str:
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            total.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return total.hexdigest()[:16]


# --- the run ---------------------------------------------------------------------------------------------------------------


def everything() -> list[Mutant]:
    return [mutant for file, functions in TARGETS.items() for mutant in mutants_of(_text(file), file, functions)]


def _text(file: str) -> str:
    return (ROOT / "src" / "osfl" / file).read_text(encoding="utf-8")


def judged(mutant: Mutant, texts: Mapping[str, str], folder: Path, passed: set[str]) -> dict[str, Any]:
    """Whether a test fails, and which; `passed` are tests that are known to pass without any change."""
    files, path = asked(mutant, texts), folder / "src" / "osfl" / mutant.file
    if not files:
        return {"killed": False, "by": "", "tests": 0}
    before = path.read_text(encoding="utf-8")
    path.write_text(mutated(before, mutant), encoding="utf-8")
    try:
        found = in_child(folder, ["-x", *files], LONGEST)
    finally:
        path.write_text(before, encoding="utf-8")
    killed = found["code"] not in (0, NONE_COLLECTED) and found["failed"] != OUT_OF_TIME
    if killed and found["failed"] not in passed:
        check_passes(found["failed"], folder)
        passed.add(found["failed"])
    return {"killed": killed, "by": found["failed"], "tests": len(files)}


def check_passes(test: str, folder: Path) -> None:
    """A test that fails without a change as well kills nothing."""
    name = test.removesuffix(NOT_COLLECTED)
    found = in_child(folder, [*(["--collect-only"] if name != test else []), name], LONGEST)
    if found["code"] not in (0, NONE_COLLECTED):
        raise SystemExit(f"the tests must pass before anything is changed: {found['failed']}; see {STATE / 'last.log'}")


def _key(mutant: Mutant, folder: Path) -> str:
    """Names a mutant while its function stays the same."""
    text = (folder / "src" / "osfl" / mutant.file).read_text(encoding="utf-8")
    names, node = mutant.function.split("."), ast.parse(text)
    inside: Any = node
    for name in names:
        inside = next(part for part in inside.body if getattr(part, "name", "") == name)
    return hashlib.sha256(f"{mutant.name}\n{ast.unparse(inside)}".encode()).hexdigest()[:16]


def results(
    mutants: Sequence[Mutant], say: Callable[[str], None] = print, seconds: float = math.inf
) -> dict[str, dict[str, Any]]:
    """By name, what became of each mutant, in so much time; known answers are taken from runs/mutation."""
    STATE.mkdir(parents=True, exist_ok=True)
    kept_at, now = STATE / "results.json", digest_of("tests")
    kept: dict[str, dict[str, Any]] = json.loads(kept_at.read_text(encoding="utf-8")) if kept_at.exists() else {}
    prepare()
    folder = copied()
    texts, found, began, passed = test_files(folder), dict[str, dict[str, Any]](), time.monotonic(), set[str]()
    for number, mutant in enumerate(mutants, 1):
        key, start = _key(mutant, folder), time.monotonic()
        if not (key in kept and (kept[key]["killed"] or kept[key]["with"] == now)):
            if start - began > seconds:
                break  # what follows would be no fair sample, known or not
            result = judged(mutant, texts, folder, passed)
            at_first = kept.get(key, {}).get("at_first", result["killed"])
            kept[key] = {**result, "with": now, "at_first": at_first}
            _written(kept_at, kept)
            word = "killed" if kept[key]["killed"] else f"SURVIVED {kept[key]['tests']} files"
            took = f"{number}/{len(mutants)} {time.monotonic() - start:.0f} s"
            say(f"{took} {word}: {mutant.line} {mutant.name} | {kept[key]['by']}")
        found[mutant.name] = kept[key]
    return found


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share."""
    share, spread = hits / count, z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return middle - half, middle + half


def shuffled(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The same order every time; a mutant keeps its place before and behind the others when code elsewhere changes."""
    return sorted(mutants, key=lambda mutant: hashlib.sha256(f"{SEED} {mutant.name}".encode()).digest())


def sampled(order: Sequence[Mutant]) -> list[Mutant]:
    """The first of each file, in this order."""
    taken: Counter[str] = Counter()
    found = []
    for mutant in order:
        taken[mutant.file] += 1
        if taken[mutant.file] <= EACH:
            found.append(mutant)
    return found


def summary(mutants: Sequence[Mutant], found: dict[str, dict[str, Any]], everything: Sequence[Mutant]) -> dict[str, Any]:
    """Shares of those that change what is computed; `in_all_lines` weighs each file by how many mutants it has."""
    real = [mutant for mutant in mutants if found[mutant.name]["killed"] or mutant.name not in HARMLESS]
    first = [mutant for mutant in real if found[mutant.name]["at_first"]]
    killed = [mutant for mutant in real if found[mutant.name]["killed"]]
    names = {mutant.name for mutant in first}
    by_file: dict[str, list[bool]] = {}
    for mutant in real:
        by_file.setdefault(mutant.file, []).append(mutant.name in names)
    weights = Counter(mutant.file for mutant in everything if mutant.file in by_file)
    weighed = sum(weights[file] * sum(hits) / len(hits) for file, hits in by_file.items()) / sum(weights.values())
    return {
        "mutants": len(everything),
        "sample": len(mutants),
        "harmless": len(mutants) - len(real),
        "aim": AIM,
        "killed_at_first": {
            "killed": len(first),
            "of": len(real),
            "share": round(len(first) / len(real), 4),
            "interval_95": [round(side, 4) for side in wilson(len(first), len(real))],
            "in_all_lines": round(weighed, 4),
        },
        "killed_now": {"killed": len(killed), "of": len(real), "share": round(len(killed) / len(real), 4)},
        "survivors_at_first": {
            mutant.name: f"killed now by {found[mutant.name]['by']}" if found[mutant.name]["killed"] else "no test tells"
            for mutant in real
            if mutant.name not in names
        },
        "harmless_ones": {mutant.name: HARMLESS[mutant.name] for mutant in mutants if mutant not in real},
        "by_file": {file: f"{sum(hits)} of {len(hits)} at first" for file, hits in sorted(by_file.items())},
    }


def run(minutes: int = 0) -> dict[str, Any]:
    """The sample, or as much of its beginning as there is time for: it is in random order, so any beginning is a fair one."""
    mutants = everything()
    picked = sampled(shuffled(mutants))
    found = results(picked, lambda line: print(line, flush=True), 60.0 * minutes or math.inf)
    tried = [mutant for mutant in picked if mutant.name in found]
    return {**summary(tried, found, mutants), "whole_sample": len(picked)}


def main(arguments: list[str]) -> None:
    seconds = next((float(word.removeprefix("--seconds=")) for word in arguments if word.startswith("--seconds=")), math.inf)
    names = [word for word in arguments if not word.startswith("--")]
    picked = [mutant for mutant in shuffled(everything()) if not names or any(name in mutant.name for name in names)]
    found = results(picked, lambda line: print(line, flush=True), seconds)
    tried = [mutant for mutant in picked if mutant.name in found]
    print(json.dumps(summary(tried, found, picked), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
