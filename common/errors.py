"""values: the failures of haulier, one class for each treatment (style habit 6).

A bug of ours raises ``InvariantError`` and stops the process. A peer's fault (``PeerFault``) costs that peer its own
session. The world's failures and the user's mistakes carry the exit code documented for the command line, and say
what was asked, what is there, and which setting to change.
"""

from __future__ import annotations

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk, or a share of it, that takes nothing more."""


class HaulierError(Exception):
    """A failure with one line for its reader and an exit code for the shell."""

    exit_code = 70


class InvariantError(HaulierError):
    """A rule of ours does not hold: a bug. The process stops rather than go on with wrong books."""


class UsageError(HaulierError):
    """The command was asked for in a way that cannot work (exit 2)."""

    exit_code = 2


class UnreachableError(HaulierError):
    """No broker answered, at any endpoint, in the time allowed (exit 3)."""

    exit_code = 3


class RefusedError(HaulierError):
    """Asked for properly and refused: keys, lock, schema, fit, disk, failed validation (exit 4)."""

    exit_code = 4


class DiskFullError(RefusedError):
    """The disk took nothing of what was to be written; it may when there is room again (D6)."""


def disk_failure(error: OSError) -> type[RefusedError]:
    """Whether what the disk did not take is for want of room, which may pass, or for anything else."""
    return DiskFullError if error.errno in DISK_FULL else RefusedError


class CancelledError(HaulierError):
    """The job ended cancelled or expired (exit 5)."""

    exit_code = 5


class NotFinishedError(HaulierError):
    """The job has not ended yet (exit 6)."""

    exit_code = 6


class ReaderGone(HaulierError):
    """The reader of our output went away, as ``head`` does: the shell's own code for it (128 + SIGPIPE)."""

    exit_code = 141


class PeerFault(HaulierError):
    """The other side broke the protocol. Its session is closed with this reason; nobody else pays.

    ``code`` is a short stable word for logs, metrics and tests; the message is for people.
    """

    exit_code = 4

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
