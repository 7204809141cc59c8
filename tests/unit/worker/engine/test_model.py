"""Models: from a folder as saved, from a config without a disk; what cannot be loaded says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import RefusedError, UsageError
from tests.unit.worker.engine import rigs
from worker.engine.model import SHAPES, chosen_dtype, decoder, from_folder, shape_config
from worker.engine.runner import load, open_device
from worker.engine.virtual_device import VirtualDevice


def test_random_weights_are_the_same_each_time() -> None:
    """In life: the reference and the staged run are made apart."""
    one, other = rigs.model().module, rigs.model().module
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert rigs.model().stop_ids == (0,)


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_are_configs_that_transformers_accepts(name: str) -> None:
    """In life: ``haulier bench engine --geometry`` names each of them."""
    assert shape_config(name, 4096).max_position_embeddings >= 4096
    with pytest.raises(UsageError, match="none of"):
        shape_config("other", 4096)


def test_auto_is_float32_on_a_cpu_and_the_stored_type_elsewhere() -> None:
    """Half precision on a CPU is slow and inexact; a flag says otherwise."""
    config = rigs.config()
    config.dtype = torch.float16
    assert chosen_dtype("auto", config, torch.device("cpu")) is torch.float32
    assert chosen_dtype("auto", config, torch.device("cuda")) is torch.float16
    assert chosen_dtype("bfloat16", config, torch.device("cpu")) is torch.bfloat16


def test_a_folder_without_a_tokenizer_or_config_is_refused_in_one_line(tmp_path: Path) -> None:
    """In life: --model names something that is no model."""
    with pytest.raises(RefusedError, match="cannot be loaded"):
        from_folder(tmp_path, VirtualDevice(), "auto", 48)
    with pytest.raises(RefusedError):
        load(rigs.settings(model=str(tmp_path)))


def test_a_device_that_is_not_there_is_refused() -> None:
    """In life: --device cuda:0 on a machine without one."""
    assert open_device("cpu").kind == "virtual"
    if not torch.cuda.is_available():
        with pytest.raises(RefusedError, match="--device cpu works"):
            open_device("cuda:0")


def test_decoding_leaves_special_tokens_out() -> None:
    """The text a stop string is looked for in is the text a reader sees."""

    class Tokenizer:
        def decode(self, ids: list[int], **settings: bool) -> str:
            assert settings == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            return "".join(map(str, ids))

    assert decoder(Tokenizer())((1, 2)) == "12"
