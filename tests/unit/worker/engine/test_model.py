"""Models: from a folder as saved, from a config without a disk; what cannot be loaded says so in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.errors import RefusedError, UsageError
from tests.unit.worker.engine import rigs
from worker.engine.model import DTYPES, SHAPES, LoadedModel, chosen_dtype, decoder, from_folder, shape_config
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


# -- what lies in the folder ---------------------------------------------------------------------------------------


def load_folder(folder: Path, dtype: str = "auto") -> LoadedModel:
    return from_folder(folder, VirtualDevice(), dtype, rigs.CONTEXT)


def test_shards_read_as_one_file(tmp_path: Path) -> None:
    """In life: a large model comes in many files."""
    one, many = rigs.saved(tmp_path / "one"), rigs.saved(tmp_path / "many", shard="20KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    pairs = zip(load_folder(one).module.parameters(), load_folder(many).module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("asked", "got"), [("auto", torch.float32), *DTYPES.items()])
def test_weights_are_the_stored_ones_in_the_type_asked_for(
    tmp_path: Path, stored: torch.dtype, asked: str, got: torch.dtype
) -> None:
    """In life: --dtype on a model stored in half precision: every number is the stored one, converted once."""
    folder = rigs.saved(tmp_path, dtype=stored)
    loaded = load_folder(folder, asked)
    on_disk = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in on_disk.values()} == {stored}
    held = loaded.module.state_dict()
    assert all(torch.equal(held[name], tensor.to(got)) for name, tensor in on_disk.items())
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {got}
    assert (loaded.dtype, loaded.geometry.dtype_bytes) == (got, got.itemsize)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_staged_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    """H4 in the types that a GPU runs."""
    folder = rigs.saved(tmp_path, dtype=DTYPES[dtype])
    reference = rigs.run(load_folder(folder, dtype), rigs.CHURN, residency="full")
    assert reference.steps[0][1].dtype == DTYPES[dtype]
    assert rigs.same(rigs.run(load_folder(folder, dtype), rigs.CHURN), reference)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    """In life: small models store no head of their own; it is no weight that is missing."""
    folder = rigs.saved(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    module = load_folder(folder).module
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_a_shard_that_is_missing_or_cut_short_is_named(tmp_path: Path) -> None:
    """In life: a copy that was interrupted."""
    folder = rigs.saved(tmp_path, shard="20KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(RefusedError, match=rf"--model {folder}: {shard.name} has \d+ bytes, its header promises"):
        load_folder(folder)
    shard.unlink()
    with pytest.raises(RefusedError, match=f"{shard.name} is missing"):
        load_folder(folder)


def test_weights_that_no_file_has_are_not_made_up(tmp_path: Path) -> None:
    """In life: a file of another model. transformers would begin such weights at random, and answer nonsense."""
    folder = rigs.saved(tmp_path)
    held = load_file(folder / "model.safetensors")
    del held["model.norm.weight"], held["model.layers.1.mlp.up_proj.weight"]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RefusedError, match=r"no weights for model.layers.1.mlp.up_proj.weight and 1 more"):
        load_folder(folder)


def test_weights_of_another_shape_are_refused_in_one_line(tmp_path: Path) -> None:
    """In life: config.json of another size of the same model."""
    folder = rigs.saved(tmp_path)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"intermediate_size": 64}))
    words = r"mlp.down_proj.weight in shape \(32, 48\), its config.json says \(32, 64\)"
    with pytest.raises(RefusedError, match=words) as refused:
        load_folder(folder)
    assert len(str(refused.value).splitlines()) == 1


def test_the_text_part_of_a_model_of_text_and_images_is_run(tmp_path: Path) -> None:
    """In life: Qwen3.5 comes with a part for images; the class that continues text leaves it out."""
    text = rigs.config("qwen3_5_text", **rigs.HYBRID)
    images = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    config = transformers.AutoConfig.for_model("qwen3_5", text_config=text.to_dict(), vision_config=images)
    torch.manual_seed(0)
    whole = transformers.Qwen3_5ForConditionalGeneration._from_config(config).eval()
    rigs.saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    whole.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path)
    assert (loaded.geometry.model_type, loaded.geometry.layers) == ("qwen3_5_text", 2)
    scenario = rigs.together(9, 4)
    outcome = rigs.run(loaded, scenario)
    for number in range(2):
        prompt = scenario.prompt(number, rigs.VOCABULARY)
        assert list(outcome.tokens[number]) == rigs.generated(whole, prompt, 5)
