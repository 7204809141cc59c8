"""The broker's process: what it leaves for others to find it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import zmq

from broker.process import _announce
from common.config import BrokerSettings, KeySettings
from common.errors import DiskFullError, RefusedError


@pytest.mark.parametrize(
    ("number", "failure"), [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EROFS, RefusedError)]
)
def test_a_disk_without_room_for_the_endpoint_is_a_full_disk_and_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, failure: type[Exception]
) -> None:
    """D6: the broker then waits for room as it does for its store; anything else is told by name."""

    def refuse(path: Path, text: str) -> int:
        raise OSError(number, "nothing more")

    monkeypatch.setattr(Path, "write_text", refuse)
    settings = BrokerSettings("tcp://127.0.0.1:0", tmp_path, KeySettings(None, insecure=True))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        with pytest.raises(failure, match="nothing more") as caught:
            _announce(settings, socket, 1, 0)
    assert type(caught.value) is failure
