"""shell: the fleet from Python, in a notebook or a script: submit, wait, read answers. The command line without one.

    from broker.api import connect

    fleet = connect("tcp://127.0.0.1:7700", keys="keys")
    answers = {line["custom_id"]: text(line) for line in fleet.submit("questions.jsonl").output()}

Every call asks the broker anew; a broker that is killed and comes back costs a pause. One thread a ``FleetApi``. Raises
what ``broker.client.Client`` raises: ``UnreachableError``, ``RefusedError``, ``UsageError``, each with words that help.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from broker import client as fleet
from broker import client_rules as rules
from common import messages
from common.config import ClientSettings, KeySettings, endpoints, seconds
from common.errors import RefusedError
from common.ids import new_id

POLL_S = 0.5
"""Between two questions while a job runs."""


def connect(
    broker: str = "", keys: str | Path | None = None, insecure: bool = False, timeout_s: float = 30.0
) -> FleetApi:
    """The fleet behind ``broker`` (``tcp://HOST:PORT``, several by commas), by the keys in the folder ``keys``.

    What is left out comes from HAULIER_BROKER and HAULIER_KEYS, as for the command line.
    """
    broker = broker or os.environ.get("HAULIER_BROKER", "")
    folder = keys if keys is not None else os.environ.get("HAULIER_KEYS")
    settings = KeySettings(Path(folder) if folder and not insecure else None, insecure)
    return FleetApi(fleet.Client(ClientSettings(endpoints(broker) if broker else (), settings, timeout_s)))


def chat(custom_id: str, content: str, model: str, **more: Any) -> dict[str, Any]:
    """A line that asks one question; ``more`` goes into its body: ``max_tokens``, ``temperature`` and the like."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def text(line: Mapping[str, Any]) -> str:
    """What an output line answers. Raises ``ValueError`` with the error of a line that failed."""
    body = (line.get("response") or {}).get("body") or {}
    if not body.get("choices"):
        raise ValueError(f"{line.get('custom_id')} has no answer: {line.get('error') or body.get('error')}")
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


class FleetApi:
    """A conversation with one fleet. Close it, or leave its ``with`` block."""

    def __init__(self, client: fleet.Client) -> None:
        self._client = client

    def __enter__(self) -> FleetApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def submit(
        self, lines: str | Path | Iterable[Mapping[str, Any]], name: str = "", *, job_id: str = "",
        lenient: bool = False, priority: int = 0, window: str = "0", model: str = "",
    ) -> Job:  # fmt: skip
        """Submit a JSONL file, or lines as ``chat`` makes them; the job, once the broker has checked its lines.

        Raises ``RefusedError`` that names the first bad lines. The other arguments are those of ``haulier submit``.
        """
        if isinstance(lines, str | Path):
            return self._submit(Path(lines), name, job_id, lenient, priority, window, model)
        with tempfile.TemporaryDirectory(prefix="haulier-") as folder:
            path = Path(folder) / "lines.jsonl"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            return self._submit(path, name, job_id, lenient, priority, window, model)

    def _submit(self, path: Path, name: str, job_id: str, lenient: bool, priority: int, window: str, model: str) -> Job:
        chosen = rules.checked_job(job_id) if job_id else new_id()
        order = fleet.Order(
            chosen, rules.job_name(path.name, name), lenient, priority, seconds(window, "window"), model
        )
        fleet.submit(self._client, fleet.hash_file(path, lambda *_: None), order, lambda *_: None)
        job = Job(self._client, chosen)
        while (info := job.info()).status == "validating":
            self._client.sleep(POLL_S / 10)
        if info.status == "failed":
            bad = [
                rules.problem_text(one) for one, _ in zip(fleet.problems(self._client, chosen), range(5), strict=False)
            ]
            raise RefusedError(f"{rules.sentence(info)}{': ' if bad else ''}{'; '.join(bad)}")
        return job

    def job(self, job_id: str) -> Job:
        """A job that was submitted before, here or elsewhere."""
        return Job(self._client, rules.checked_job(job_id))

    def jobs(self) -> list[messages.JobInfo]:
        """All that this key may see, newest first."""
        return list(fleet.jobs(self._client))

    def workers(self) -> tuple[messages.WorkerInfo, ...]:
        return self._client.ask(messages.AskWorkers(0), messages.Workers).workers


class Job:
    """One job, wherever it stands."""

    def __init__(self, client: fleet.Client, job_id: str) -> None:
        self._client, self.id = client, job_id

    def __repr__(self) -> str:
        return f"<{rules.sentence(self.info())}>"

    def info(self) -> messages.JobInfo:
        """Its status and counts now."""
        return self._client.ask(messages.AskStatus(0, self.id), messages.JobInfo)

    def wait(self) -> messages.JobInfo:
        """Its last status, once it has ended; Ctrl-C leaves it running."""
        *_, last = fleet.follow(self._client, self.id, POLL_S)
        return last

    def output(self) -> Iterator[dict[str, Any]]:
        """Each completed line, as soon as it is there, until the job has ended."""
        return self._lines("output")

    def errors(self) -> Iterator[dict[str, Any]]:
        """Each failed line, likewise."""
        return self._lines("error")

    def _lines(self, which: str) -> Iterator[dict[str, Any]]:
        download, held = fleet.Download(self._client, self.id, which), b""
        while True:
            data = download.pull()
            *whole, held = (held + data).split(b"\n")
            yield from (json.loads(line) for line in whole)
            if not data:
                if download.ended:
                    return
                self._client.sleep(POLL_S)

    def explain(self, custom_id: str = "") -> tuple[str, ...]:
        """What became of it, or of one line of it, in words."""
        return self._client.ask(messages.Explain(0, self.id, custom_id), messages.Explained).told

    def cancel(self) -> messages.JobInfo:
        """Stop it; what is finished stays."""
        return self._client.ask(messages.CancelJob(0, self.id), messages.JobInfo)
