"""shell: runs a batch file through `haulier broker --http` with the official `openai` client, as on the public service.

usage: python docs/examples/openai_client.py QUESTIONS.jsonl OUT.jsonl [http://127.0.0.1:8000/v1]

The key is taken from OPENAI_API_KEY; a broker on loopback without --http-keys takes any. Failed lines go into OUT too,
as `haulier run` without -e does it. Needs: pip install openai
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from openai import OpenAI

ENDED = ("completed", "failed", "expired", "cancelled")


def main(questions: str, out: str, url: str = "http://127.0.0.1:8000/v1") -> int:
    """Upload, create, poll, download; 1 if a line failed or the batch did not complete."""
    began = time.monotonic()
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    file = client.files.create(file=Path(questions), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    print(f"haulier: {batch.id}", file=sys.stderr)
    while batch.status not in ENDED:
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    for error in (batch.errors.data or []) if batch.errors else []:
        print(f"haulier: line {error.line}: {error.code}: {error.message}", file=sys.stderr)
    if batch.status == "failed":
        return 1
    with open(out, "wb") as target:
        for name in (batch.output_file_id, batch.error_file_id):
            if name is not None:
                with client.files.with_streaming_response.content(name) as answer:
                    for piece in answer.iter_bytes():
                        target.write(piece)
    counts, usage = batch.request_counts, batch.usage
    print(
        f"haulier: {counts.completed} lines completed, {counts.failed} failed; {usage.input_tokens} prompt + "
        f"{usage.output_tokens} answer tokens in {time.monotonic() - began:.1f} s -> {out}",
        file=sys.stderr,
    )
    return 0 if batch.status == "completed" and not counts.failed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
