"""shell: runs each mutation in a copy of the tree, never in place: ``python -m tests.mutation [WORD...] [--jobs N]``.

Words choose by rule, file or description. Prints a Markdown table; exits 1 if a mutation survives its tests, or if its
text stands in the code not exactly once: then the list is stale.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
COPIED = ("common", "ring", "broker", "worker", "tests", "docs", "pyproject.toml", "README.md")
LIMIT_S = 600
SEEDS = "8"
"""Of each edge: without a wait the clocks name the race under every schedule."""


def copy_tree(target: Path) -> None:
    """What the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)


def try_one(tree: Path, mutation: Mutation) -> str:
    """Which test failed, or why the mutation is no good; the tree is as before."""
    path = tree / mutation.path
    original = path.read_text(encoding="utf-8")
    if (found := original.count(mutation.text)) != 1:
        return f"STALE: its text is there {found} times"
    path.write_text(original.replace(mutation.text, mutation.instead), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *mutation.files]
        environment = {**os.environ, "HAULIER_SEEDS": SEEDS, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ran = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"SURVIVED: its tests did not end within {LIMIT_S} s"
        if ran.returncode == 0:
            return "SURVIVED"
        failed = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+\.py(?:::\S+)?)", ran.stdout, re.MULTILINE)
        return failed[1] if failed and ran.returncode == 1 else f"BROKEN: {ran.stdout[-300:]} {ran.stderr[-300:]}"
    finally:
        path.write_text(original, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("words", nargs="*", help="only mutations whose rule, file or description has one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(arguments)
    chosen = [
        one
        for one in MUTATIONS
        if not asked.words or any(word in f"{one.rule} {one.path} {one.what}" for word in asked.words)
    ]
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, ThreadPoolExecutor(asked.jobs) as threads:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.jobs):
            copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))

        def job(mutation: Mutation) -> str:
            tree = trees.get()
            try:
                return try_one(tree, mutation)
            finally:
                trees.put(tree)

        print("| rule | without | in | fails |\n| --- | --- | --- | --- |")
        bad = 0
        for mutation, outcome in zip(chosen, threads.map(job, chosen), strict=True):
            bad += outcome.split(":")[0] in ("STALE", "SURVIVED", "BROKEN")
            print(f"| {mutation.rule} | {mutation.what} | `{mutation.path}` | `{outcome}` |", flush=True)
    print(f"\n{len(chosen) - bad} of {len(chosen)} mutations found")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
