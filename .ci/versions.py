"""What can be said of other versions of Python without torch: every file compiles there without a warning, and what needs no
package that is not there can be imported. Part of `make lint`; a version that is not on this machine is skipped, and named.

    python .ci/versions.py              each version of OTHERS that is on PATH or among pyenv's
    python3.13 .ci/versions.py here     this interpreter, with the packages that it has
"""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
OTHERS = ("3.12", "3.13")


def here() -> str:
    """Stops at the first file or module that fails for another reason than a package that is missing."""
    warnings.simplefilter("error")  # an escape that is no escape, a module that will be gone
    files = sorted(SOURCE.rglob("*.py"))
    for path in files:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    sys.path.insert(0, str(SOURCE))
    warnings.simplefilter("default")
    imported, missing = 0, set()
    for path in files:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        try:
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
            imported += 1
        except ModuleNotFoundError as error:
            name = (error.name or "").split(".")[0]
            if name in ("", "osfl") or name in sys.stdlib_module_names:
                raise
            missing.add(name)
    wanting = f"; the others need {', '.join(sorted(missing))}" if missing else ""
    return f"{len(files)} files compile without a warning, {imported} modules import{wanting}"


def found(version: str) -> str | None:
    """An interpreter of this version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    several = sorted(pyenv.glob(f"{version}.*/bin/python"))
    candidates = (str(several[-1]) if several else "", shutil.which(f"python{version}") or "")
    for candidate in filter(None, candidates):
        ask = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() == version:
            return candidate
    return None


def main() -> None:
    for version in OTHERS:
        python = found(version)
        if python is None:
            print(f"Python {version}: not on this machine, skipped")
            continue
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
            environment.pop("PYTHONPATH", None)
            done = subprocess.run([python, __file__, "here"], capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            sys.exit(f"Python {version} failed:\n{done.stdout}{done.stderr}")
        print(f"Python {version}: {done.stdout.strip()}")


if __name__ == "__main__":
    print(here()) if sys.argv[1:] == ["here"] else main()
