"""A real worker whose device fails in the middle of a step: it leaves its session with the finding, and another worker
answers its lines (L6, S2)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common import messages
from common.ids import new_id
from tests.integration.test_worker_process import DEADLINE_S, Fleet

LINES, TOKENS, WORDS = 6, 6, 64
FAILING = """
import sys
from worker.engine.device import DeviceError
from worker.engine.virtual_device import VirtualDevice

real, histories = VirtualDevice.copy, 0

def copy(self, queue, dst, src, label=""):
    global histories
    histories += label.startswith("history")
    if histories > 10:
        raise DeviceError("unspecified launch failure")
    real(self, queue, dst, src, label)

def synchronise(self, queue):
    raise DeviceError("the copy engine does not answer")

VirtualDevice.copy = copy
if sys.argv[1] == "unproved":
    VirtualDevice.synchronise = synchronise
from common.cli import main
sys.exit(main(["worker", *sys.argv[2:]]))
"""
"""A worker process whose driver refuses a history copy, and, if told so, never proves that the device is done."""


def model_folder(folder: Path) -> Path:
    """A random llama of two layers with a tokenizer of words, as transformers saves them."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    context: zmq.Context[Any] = zmq.Context()
    made = Fleet(tmp_path, context)
    yield made
    made.close()
    context.destroy(0)


def submit(fleet: Fleet, model: Path) -> str:
    """Prompts of unequal lengths, given as token ids."""
    entries = [
        {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions",
         "body": {"model": str(model), "prompt": list(range(1, 4 + number)), "max_tokens": TOKENS, "temperature": 0}}
        for number in range(LINES)
    ]  # fmt: skip
    data = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
    job, sha = new_id(), hashlib.sha256(data).hexdigest()
    fleet.ask(messages.Submit(1, job, "test", len(data), sha, False, 0, 0, str(model)), messages.Need)
    fleet.ask(messages.Chunk(2, job, 0, data), messages.Need)
    fleet.ask(messages.Seal(3, job), messages.JobInfo)
    return job


def spawn(fleet: Fleet, name: str, model: Path, *how: str) -> subprocess.Popen[bytes]:
    """A worker process; ``how`` is what comes before its flags."""
    arguments = [
        "--model", str(model), "--broker", fleet.endpoint, "--state", str(fleet.folder / "workers"),
        "--keys", str(fleet.keys), "--concurrency", "4", "--context-tokens", "64", "--host-pool-gib", "0.01",
        "--retain", "off", "--page-tokens", "4", "--ring-mib", "1",
    ]  # fmt: skip
    environment = {**os.environ, "HAULIER_LOG": "json", "OMP_NUM_THREADS": "1"}
    with (fleet.folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, *how, *arguments], stderr=log, env=environment)
    fleet.processes.append(process)
    return process


@pytest.mark.parametrize("proof", ["proved", "unproved"])
def test_a_failing_device_costs_its_worker_and_no_line(fleet: Fleet, proof: str) -> None:
    """L6, in life: a copy fails under load. The process ends with 70 and the reason; its session is closed, nothing
    half computed was answered, and a sound worker answers every line once."""
    model = model_folder(fleet.folder / "model")
    fleet.broker()
    failing = spawn(fleet, "failing", model, "-c", FAILING, proof)
    job = submit(fleet, model)
    assert failing.wait(2 * DEADLINE_S) == 70
    said = fleet.log("failing")
    assert "unspecified launch failure" in said
    ended = [json.loads(line) for line in said.splitlines() if '"engine_ended"' in line]
    assert [one["leases_retained"] > 0 for one in ended] == [proof == "unproved"]
    assert ("all is retained" in said) == (proof == "unproved")
    assert fleet.status(job).completed == 0
    spawn(fleet, "sound", model, "-m", "worker")
    fleet.until(lambda: fleet.status(job).status == "completed", "the job ends", 2 * DEADLINE_S)
    page = fleet.ask(messages.Fetch(5, job, "output", 0), messages.Lines)
    answers = sorted(json.loads(line)["custom_id"] for line in page.lines)
    assert answers == [f"id-{number}" for number in range(LINES)]
    assert fleet.status(job).wasted == 0
