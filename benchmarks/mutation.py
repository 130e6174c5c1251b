"""Mutants of losses, updates and samplers: one place is changed at a time, and a test that runs it must fail.

python -m benchmarks.bench mutation        the sample: two mutants of each file, drawn at random
python -m benchmarks.mutation --seconds=120 [PART...]   others, those whose names hold one of these parts; no record

Which lines and which changes: `benchmarks/mutation_sites.py`. All of them are in one random order, and the sample is the first
`EACH` of each file, so that every file is asked, small ones, too. What is to be shown: of the mutants of the sample that change
what is computed, `AIM` and more are killed by the tests that were there when the mutant was first tried. A survivor gets a test
and is tried again, or stands in `HARMLESS` with its reason; what it was at first stays in the record.

Each test of methods, ingredients and models runs once with coverage, so that it is known which of them run a line and how long
they take; a test file that has not changed is not measured again. A mutant then gets the tests of its line, the fastest first,
until one fails, on one core; each is a fork of a process that has torch loaded. Mutants and what became of them are kept in
runs/mutation: a run that ends early goes on there. A killed one is not tried again while its function stays the same; a
survivor is, once any test has changed. The tests must pass before anything is changed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.mutation_sites import TARGETS, Mutant, mutants_of, mutated

ROOT = Path(__file__).parent.parent
STATE = ROOT / "runs" / "mutation"
ROOMS = ("tests/methods", "tests/ingredients", "tests/models")
WITHOUT = ("tests/methods/test_every_method.py",)  # whole runs of every method: minutes for each mutant
SEED = 1
EACH = 2  # mutants of a file
AIM = 0.85
ENOUGH = 20.0  # seconds of tests for one mutant, the fastest first
WORTH = 3.0  # times the processor seconds that its tests took unchanged, and no less than `LEAST`
LEAST = 30.0
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


Lines: TypeAlias = dict[str, dict[str, list[str]]]  # file below src/osfl -> line -> tests


@dataclass(frozen=True)
class Suite:
    """Which tests run a line, and how long each takes."""

    lines: Lines
    seconds: dict[str, float]

    def of(self, mutant: Mutant) -> list[str]:
        """The tests of a mutant's line, the fastest first, as many as there is time for."""
        tests = sorted(self.lines.get(mutant.file, {}).get(str(mutant.line), ()), key=lambda test: (self.seconds[test], test))
        chosen, total = list[str](), 0.0
        for test in tests:
            total += self.seconds[test]
            if chosen and total > ENOUGH:
                break
            chosen.append(test)
        return chosen


# --- a process for each mutant -----------------------------------------------------------------------------------------


class Watch:
    """A pytest plugin: what each test took, and the first that failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} cannot be collected"


def prepare() -> None:
    """Load what every mutant's process would load anew; nothing of ours, which each loads for itself."""
    os.environ.update({"OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(STATE / "coverage")})
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
    return {"code": -1, "failed": "out of time" if os.WIFSIGNALED(status) else "died", "seconds": {}}


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
        if not any(option.startswith("--cov") for option in options):
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a second for each mutant
        import pytest

        watch = Watch()
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not data", *options], plugins=[watch])
        answer.write_text(json.dumps({"code": int(code), "failed": watch.failed, "seconds": watch.seconds}), encoding="utf-8")
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


# --- which tests run a line --------------------------------------------------------------------------------------------------


def suite(folder: Path) -> Suite:
    """Which tests run a line. A test file is measured again when it, or a source file that its tests ran, has changed."""
    kept_at, now = STATE / "suite.json", _digests("src", "tests")
    kept: dict[str, Any] = json.loads(kept_at.read_text(encoding="utf-8")) if kept_at.exists() else {}
    names = [str(path.relative_to(ROOT)) for room in ROOMS for path in sorted((ROOT / room).rglob("test_*.py"))]
    names = [name for name in names if name not in WITHOUT]
    stale = [name for name in names if not _still_true(kept.get(name), now)]
    for number, name in enumerate(stale, 1):
        print(f"which lines its tests run: {name} ({number}/{len(stale)})", flush=True)
        found = _measured(folder, name)
        kept[name] = {**found, "ran": {file: now[file] for file in (name, *found["ran"])}}
        _written(kept_at, kept)  # each on its own: a run that ends early goes on there
    parts = [kept[name] for name in names]
    every = {test: took for part in parts for test, took in part["seconds"].items()}
    return Suite(_joined([part["lines"] for part in parts]), every)


def _still_true(measured: dict[str, Any] | None, now: dict[str, str]) -> bool:
    return measured is not None and all(now.get(file) == digest for file, digest in measured["ran"].items())


def _digests(*folders: str) -> dict[str, str]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


def _measured(folder: Path, name: str) -> dict[str, Any]:
    """How long the tests of a file take, which of them run a line, and which source files they ran."""
    (STATE / "coverage").unlink(missing_ok=True)
    found = in_child(folder, [name, "--cov=osfl", "--cov-context=test", "--cov-report="], 1800.0)
    if found["code"] not in (0, NONE_COLLECTED):
        raise SystemExit(f"the tests must pass before anything is changed: {found['failed']}; see {STATE / 'last.log'}")
    seconds = {test: took for test, took in found["seconds"].items() if test.startswith(f"{name}::")}
    return {"seconds": seconds, "lines": _of_tests(_lines(folder), seconds) if seconds else {}, "ran": _ran(folder)}


def _of_tests(lines: Lines, tests: Iterable[str]) -> Lines:
    """What these tests alone run."""
    mine = set(tests)
    found = {file: {line: sorted(mine.intersection(names)) for line, names in by.items()} for file, by in lines.items()}
    return {file: {line: names for line, names in by.items() if names} for file, by in found.items()}


def _joined(parts: Sequence[Lines]) -> Lines:
    found: Lines = {}
    for part in parts:
        for file, by_line in part.items():
            for line, names in by_line.items():
                found.setdefault(file, {}).setdefault(line, []).extend(names)
    return found


def _written(path: Path, what: Any) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(what), encoding="utf-8")
    fresh.replace(path)


def _ran(folder: Path) -> list[str]:
    """The source files of which some line was run, be it while they were imported."""
    files = [Path(file) for file in _coverage().measured_files()]
    return sorted(str(file.relative_to(folder)) for file in files if file.is_relative_to(folder / "src"))


def _coverage() -> Any:
    from coverage import CoverageData

    data = CoverageData(str(STATE / "coverage"))
    data.read()
    return data


def _lines(folder: Path) -> Lines:
    data = _coverage()
    found: Lines = {}
    for file in TARGETS:
        by_line = data.contexts_by_lineno(str(folder / "src" / "osfl" / file))
        tests = {line: sorted({name.rsplit("|", 1)[0] for name in names if name}) for line, names in by_line.items()}
        found[file] = {str(line): names for line, names in tests.items() if names}
        found[file] |= _spread(folder / "src" / "osfl" / file, found[file])
    return found


def _spread(path: Path, by_line: dict[str, list[str]]) -> dict[str, list[str]]:
    """Coverage knows the first line of a statement that has several: the others are run by the same tests."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside = getattr(node, "body", None)
            last = inside[0].lineno - 1 if inside else node.end_lineno or node.lineno
            tests = sorted({test for line in range(node.lineno, last + 1) for test in by_line.get(str(line), ())})
            found |= {str(line): tests for line in range(node.lineno, last + 1) if tests}
    return found


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


def judged(mutant: Mutant, tests: Suite, folder: Path) -> dict[str, Any]:
    """Whether a test fails, and which."""
    chosen = tests.of(mutant)
    if not chosen:
        return {"killed": False, "by": "", "tests": 0}
    path = folder / "src" / "osfl" / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutated(before, mutant), encoding="utf-8")
    try:
        worth = max(LEAST, WORTH * sum(tests.seconds[test] for test in chosen))
        found = in_child(folder, ["-x", *chosen], worth)
    finally:
        path.write_text(before, encoding="utf-8")
    return {"killed": found["code"] != 0, "by": found["failed"], "tests": len(chosen)}


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
    tests, found, began = suite(folder), dict[str, dict[str, Any]](), time.monotonic()
    for number, mutant in enumerate(mutants, 1):
        key, start = _key(mutant, folder), time.monotonic()
        if not (key in kept and (kept[key]["killed"] or kept[key]["with"] == now)):
            if start - began > seconds:
                break  # what follows would be no fair sample, known or not
            result = judged(mutant, tests, folder)
            at_first = kept.get(key, {}).get("at_first", result["killed"])
            kept[key] = {**result, "with": now, "at_first": at_first}
            _written(kept_at, kept)
            word = "killed" if kept[key]["killed"] else f"SURVIVED {kept[key]['tests']} tests"
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


def run() -> dict[str, Any]:
    mutants = everything()
    picked = sampled(shuffled(mutants))
    return summary(picked, results(picked, lambda line: print(line, flush=True)), mutants)


def main(arguments: list[str]) -> None:
    seconds = next((float(word.removeprefix("--seconds=")) for word in arguments if word.startswith("--seconds=")), math.inf)
    names = [word for word in arguments if not word.startswith("--")]
    picked = [mutant for mutant in shuffled(everything()) if not names or any(name in mutant.name for name in names)]
    found = results(picked, lambda line: print(line, flush=True), seconds)
    tried = [mutant for mutant in picked if mutant.name in found]
    print(json.dumps(summary(tried, found, picked), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
