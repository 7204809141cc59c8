"""A folder whose weights are not whole is told by file, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import RefusedError
from worker import model_files

HEADER = json.dumps({"__metadata__": {}, "one": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WHOLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards and their index."""
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in names:
        (tmp_path / name).write_bytes(WHOLE)
    weight_map = {"one": names[0], "two": names[1]}
    (tmp_path / model_files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def second(folder: Path) -> Path:
    return folder / "model-00002-of-00002.safetensors"


def test_whole_folders_pass(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The control: with nothing wrong nothing is said, sharded or in one file; other formats are the loader's."""
    model_files.check(folder)
    one = tmp_path_factory.mktemp("one")
    model_files.check(one)
    (one / model_files.WEIGHTS).write_bytes(WHOLE)
    model_files.check(one)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "00002-of-00002.safetensors is missing: 1 of the 2 weight files"),
        (lambda path: path.write_bytes(WHOLE[:-3]), f"has {len(WHOLE) - 3} bytes, its header promises {len(WHOLE)}"),
        (lambda path: path.write_bytes(WHOLE + b"x"), f"has {len(WHOLE) + 1} bytes"),
        (lambda path: path.write_bytes(b""), "no safetensors file, or cut short: 0 bytes"),
        (lambda path: path.write_bytes(WHOLE[:20]), "cut short: 20 bytes"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"{no}"), "a header that cannot be read"),
        (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"[{}]"), "a header that cannot be read"),
    ],
)
def test_the_file_is_named_and_what_to_do(folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    """In life: a copy was cut off, a disk was full, a clone has no large files."""
    spoil(second(folder))
    with pytest.raises(RefusedError, match="model-00002-of-00002") as refused:
        model_files.check(folder)
    assert words in str(refused.value)
    assert f"copy or download that file into {folder} again" in str(refused.value)


def test_an_index_that_cannot_be_read_is_named(folder: Path) -> None:
    """In life: the index itself was cut off."""
    for text in ("{", "[]", "{}"):
        (folder / model_files.INDEX).write_text(text)
        with pytest.raises(RefusedError, match=f"{model_files.INDEX} cannot be read"):
            model_files.check(folder)


def test_a_pulled_folder_is_pulled_again(folder: Path) -> None:
    """In life: the cache of the default model was damaged."""
    (folder / "haulier.json").write_text("{}")
    second(folder).unlink()
    with pytest.raises(RefusedError, match="haulier model pull again"):
        model_files.check(folder)
