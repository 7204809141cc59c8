"""Waking the session: nothing posted is missed, however it falls."""

from __future__ import annotations

import select
import threading

from worker.inbox import Inbox


def test_what_many_threads_post_arrives_once_and_wakes_the_reader() -> None:
    """Engine, tokenizer and a signal at the same moment; the reader sleeps whenever there is nothing."""
    inbox = Inbox()
    count, threads = 2000, 4

    def post(thread: int) -> None:
        for number in range(count):
            inbox.post((thread, number))

    writers = [threading.Thread(target=post, args=(number,)) for number in range(threads)]
    for writer in writers:
        writer.start()
    got: list[object] = []
    while len(got) < count * threads:
        assert select.select([inbox], [], [], 10)[0], "asleep while something is there"
        got += inbox.drain()
    for writer in writers:
        writer.join()
    assert len(set(got)) == len(got)
    for thread in range(threads):
        assert [number for who, number in got if who == thread] == list(range(count))  # type: ignore[misc]
    assert inbox.drain() == []
    assert not select.select([inbox], [], [], 0)[0]
    inbox.close()
