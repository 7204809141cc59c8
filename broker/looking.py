"""shell: what ``haulier top`` and the page of HTTP show: three questions to the broker. Decides nothing itself."""

from __future__ import annotations

import itertools

from broker import client as fleet
from broker.client_rules import ENDED
from broker.top import ENDED_SHOWN_COUNT, Seen
from common import messages


def look(client: fleet.Asker) -> Seen:
    """What there is to see now: all open jobs, and of the newest ones a few that have ended."""
    found = list(fleet.jobs(client, open_only=True))
    newest = client.ask(messages.AskJobs(0, 0), messages.Jobs).jobs
    ended = itertools.islice((job for job in newest if job.status in ENDED), ENDED_SHOWN_COUNT)
    workers = client.ask(messages.AskWorkers(0), messages.Workers).workers
    return Seen((*found, *ended), workers)
