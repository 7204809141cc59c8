"""shell: is the model hub in reach? Asked once, before the loader asks it, which would try for most of a minute.

Knows nothing of models but their names. Must run before transformers is imported for the first time in a process: what
it finds is told to the hub's own library through the environment, which reads it then.
"""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import RefusedError

PROBE_S = 3.0
OFFLINE = "HF_HUB_OFFLINE"
ENDPOINT = "HF_ENDPOINT"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
Connect = Callable[[tuple[str, int], float], socket.socket]


def check(model: str, known: str, connect: Connect = socket.create_connection) -> None:
    """Raise ``RefusedError``, naming --model, unless ``model`` can be had from the hub or from what was fetched before.

    ``known`` lists the names that need no hub. Behind a proxy nothing is asked: only the loader can know.
    """
    what = f"--model takes {known}, a folder, or a hub's ORGANISATION/NAME"
    if _NAME.fullmatch(model) is None:
        raise RefusedError(f"there is no model {model!r}: {what}")
    if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        reason = f"{OFFLINE} is set"
    elif urllib.request.getproxies():
        return
    else:
        hub = urlsplit(os.environ.get(ENDPOINT) or "https://huggingface.co")
        port = hub.port or (80 if hub.scheme == "http" else 443)
        try:
            connect((hub.hostname or "", port), PROBE_S).close()
        except OSError as failure:
            reason = f"{hub.hostname} cannot be reached ({failure})"
        else:
            return
    if not fetched(model):
        raise RefusedError(f"model {model} is not on this machine, and {reason}: {what} that is in reach")
    os.environ[OFFLINE] = "1"


def fetched(model: str) -> bool:
    """Whether the hub's own cache holds some version of ``model``."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    return any((cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"))
