"""shell: prints each question of a batch file with its answer. Knows only the two files' form. ``| head`` may end it.

usage: python docs/examples/show.py QUESTIONS.jsonl OUT.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def lines(path: str) -> list[dict]:
    """The JSON objects of one file, in order."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def main(questions: str, answers: str) -> int:
    """Print pairs in the order of the questions; 1 if one has no answer."""
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines(answers)}
    for line in lines(questions):
        print(f"\n{line['custom_id']}: {line['body']['messages'][-1]['content']}")
        print("    " + found.get(line["custom_id"], "(no answer)").strip().replace("\n", "\n    "))
    return 0 if all(line["custom_id"] in found for line in lines(questions)) else 1


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter flushes into the same pipe
        code = 141
    sys.exit(code)
