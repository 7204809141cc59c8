"""shell: long questions to the store, on a thread with a read-only connection of its own, so that no turn waits.

A question sees one moment of the store, the last commit before it began. Its answer is picked up by a later turn. Knows
no rule and no message.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.database import BUSY_MS

Question = Callable[[sqlite3.Connection], Any]
JOIN_S = 5.0


class Reader:
    """One thread, one connection. The methods belong to the broker's thread."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=BUSY_MS / 1000,
            check_same_thread=False,
        )  # fmt: skip
        self._asked: queue.SimpleQueue[tuple[Any, Question] | None] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.open = 0
        """Questions asked and not picked up."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="reader")
        self._thread.start()

    def ask(self, tag: Any, question: Question) -> None:
        """Have ``question`` answered; ``tag`` comes back with the answer."""
        self.open += 1
        self._asked.put((tag, question))

    def answers(self) -> Iterator[tuple[Any, Any]]:
        """Tags and answers that are there; an answer may be a ``sqlite3.Error``. Never waits."""
        while True:
            try:
                found = self._answered.get_nowait()
            except queue.Empty:
                return
            self.open -= 1
            yield found

    def close(self) -> None:
        """Stop, in the middle of a question too."""
        self._asked.put(None)
        while self._thread.is_alive():
            self._connection.interrupt()  # again and again: a question may begin just after one
            self._thread.join(JOIN_S / 100)
        self._connection.close()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            tag, question = asked
            try:
                answer = self._one_moment(question)
            except sqlite3.Error as error:
                answer = error
            self._answered.put((tag, answer))

    def _one_moment(self, question: Question) -> Any:
        self._connection.execute("BEGIN")
        try:
            return question(self._connection)
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
