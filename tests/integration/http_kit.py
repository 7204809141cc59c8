"""A real fleet that serves HTTP, and the official ``openai`` client before it: nothing of the client is changed."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import openai
import psutil
from openai.types import Batch

from broker.children import free_endpoint
from common import keys as key_files
from tests.integration.fleet_kit import DEADLINE_S, Fleet, chat

ENDED = ("completed", "failed", "expired", "cancelled")
KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}


class Web:
    """``fleet`` with HTTP. ``keys``: two tenants, alice and bob; without, loopback lets everybody in."""

    def __init__(self, fleet: Fleet, keys: bool = True) -> None:
        self.fleet = fleet
        self._kept, endpoint = free_endpoint()
        self.address = endpoint.removeprefix("tcp://")
        self.arguments = ["--http", self.address]
        if keys:
            path = fleet.folder / "http-keys"
            path.write_text("# key tenant\n" + "".join(f"{key} {name}\n" for name, key in KEYS.items()))
            path.chmod(0o600)
            self.arguments += ["--http-keys", str(path)]
            for name in KEYS:
                key_files.add(fleet.keys, name)
        self._clients: list[openai.OpenAI] = []

    def broker(self, *more: str, **hooks: str) -> subprocess.Popen[bytes]:
        return self.fleet.broker(*self.arguments, *more, **hooks)

    def client(self, tenant: str = "alice", key: str = "", retries: int = 0) -> openai.OpenAI:
        made = openai.OpenAI(
            base_url=f"http://{self.address}/v1", api_key=key or KEYS[tenant], max_retries=retries, timeout=DEADLINE_S
        )
        self._clients.append(made)
        return made

    def server(self) -> psutil.Process:
        """The process that serves HTTP now."""
        found: list[psutil.Process] = []

        def there() -> bool:
            brokers = [psutil.Process(one.pid) for one in self.fleet.processes if one.poll() is None]
            found[:] = [
                child for one in brokers for child in one.children() if "broker.http.main" in child.cmdline()
            ]  # fmt: skip
            return bool(found)

        self.fleet.until(there, "the HTTP server runs")
        return found[0]

    def ended(self, client: openai.OpenAI, name: str) -> Batch:
        self.fleet.until(lambda: client.batches.retrieve(name).status in ENDED, "the batch ends")
        return client.batches.retrieve(name)

    def raw(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), DEADLINE_S)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._kept.close()


def jsonl(lines: int | list[dict[str, Any]]) -> bytes:
    if isinstance(lines, int):
        lines = [chat(number) for number in range(lines)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(client: openai.OpenAI, data: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, io.BytesIO(data)), purpose="batch").id


def create(client: openai.OpenAI, file: str, **more: Any) -> Batch:
    return client.batches.create(
        input_file_id=file, endpoint=more.pop("endpoint", "/v1/chat/completions"), completion_window="24h", **more
    )


def lines_of(client: openai.OpenAI, name: str | None) -> list[dict[str, Any]]:
    if name is None:
        return []
    return [json.loads(line) for line in client.files.content(name).content.splitlines()]


def answers(lines: list[dict[str, Any]]) -> dict[str, str]:
    """custom_id to what was said; each once."""
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert len(found) == len(lines)
    return found


def said(count: int) -> dict[str, str]:
    """What the echo worker says to ``jsonl(count)``."""
    return {f"id-{number}": f"say {number}" for number in range(count)}


def last_line(text: str) -> str:
    """The last line that a run printed, without its seconds and its file."""
    return re.sub(r" in [\d.]+ s -> .*", "", text.strip().splitlines()[-1])


def root() -> Path:
    return Path(__file__).resolve().parents[2]
