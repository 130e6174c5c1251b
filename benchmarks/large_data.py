"""Opening 20,000 JPEG files of 224 pixels: seconds and memory of the first start and of the second.

    python -m benchmarks.bench large_data         20,000 files, each start in a process of its own; writes the record
    python -m benchmarks.bench large_data=8000    fewer
    python -m benchmarks.large_data 2000          fewer, printed only

A hundred images are drawn at 28 pixels and enlarged; each file holds one of them and a comment of its own, so that no two are
equal. `own_mb` is what the process needs for itself (RssAnon of Linux), at most; mapped files are the system's cache, which it
gives back to whoever needs memory. A start opens the folder, cuts a test part, makes a client's shard, and asks for all of its
training images at once, as a method does: the first start copies them, the second maps the copy again. `base_mb`: the same with
twenty files. `within_limit`: no start needed more than `LIMIT_MB` for itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FILES, SIDE, CLASSES, DRAWN = 20_000, 224, 4, 100
LIMIT_MB = 1024  # what docs/datasets.md states


def run(files: int = FILES) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("OSFL_BENCH_TMP")) as place:
        few, many = Path(place) / "few", Path(place) / "many"
        draw(few, 20)
        draw(many, files)
        size = sum(path.stat().st_size for path in many.rglob("*.jpg"))
        cache = str(Path(place) / "cache")
        base, cold, warm = (start(folder, cache) for folder in (few, many, many))
    rows = {"first": cold, "second": warm}
    within = all(row["own_mb"] <= LIMIT_MB for row in rows.values())
    twenty = {"base_mb": base["own_mb"], "base_cpu_seconds": base["cpu_seconds"]}
    facts = {"files": files, "side": SIDE, "file_mb": round(size / 1e6), **twenty}
    return {**facts, "limit_mb": LIMIT_MB, "within_limit": within, "starts": rows}


def draw(folder: Path, files: int) -> None:
    for label in range(CLASSES):
        (folder / f"class-{label}").mkdir(parents=True)
    blobs = [_jpeg(number) for number in range(min(files, DRAWN))]
    for number in range(files):
        blob, comment = blobs[number % len(blobs)], f"{number:05}".encode()
        marked = blob[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + blob[2:]
        (folder / f"class-{number % CLASSES}" / f"{number:05}.jpg").write_bytes(marked)


def _jpeg(number: int) -> bytes:
    small, out = np.random.default_rng(number).integers(0, 256, (28, 28, 3), dtype=np.uint8), BytesIO()
    Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(out, "JPEG", quality=85)
    return out.getvalue()


def start(folder: Path, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.large_data", "--open", str(folder)]
    env = {**os.environ, "OSFL_CACHE": cache, "OMP_NUM_THREADS": "1"}
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
    return found


def opened(folder: Path) -> dict[str, float]:
    from osfl.data import make_shard, open_dataset

    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], _own_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin, cpu = time.perf_counter(), time.process_time()
    source = open_dataset(str(folder), size=SIDE)
    there = time.perf_counter()
    shard = make_shard(source.train, "north", seed=0)
    made = time.perf_counter()
    seen = int(shard.train.images[:, 0, 0, 0].sum())
    ended, spent = time.perf_counter(), time.process_time() - cpu
    done.set()
    watcher.join()
    return {
        "seconds": round(ended - begin, 2),
        "opening_seconds": round(there - begin, 2),
        "shard_seconds": round(made - there, 2),
        "images_seconds": round(ended - made, 2),
        "cpu_seconds": round(spent, 2),
        "own_mb": round(peak[0]),
        "train": len(shard.train),
        "image_mb": round((len(source.train) + len(source.test)) * SIDE**2 * 3 / 1e6),
        "first_pixels": seen,
    }


def _own_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    given = sys.argv[1:]
    print(
        json.dumps(
            opened(Path(given[1])) if given[:1] == ["--open"] else run(int(given[0]) if given else FILES),
            indent=2,
        )
    )
