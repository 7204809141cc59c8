"""A real Chromium without a window, driven over its debugging pipe: opens pages, reads them, types, takes pictures."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.integration.fleet_kit import DEADLINE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")


def installed() -> str | None:
    """The browser's program, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One window. End it with ``close``. One thread."""

    def __init__(self, folder: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        program = installed()
        assert program is not None

        def move() -> None:  # the pipe is descriptors 3 and 4, whatever they were here
            os.setsid()
            held = os.dup(commands), os.dup(answers)
            os.dup2(held[0], 3)
            os.dup2(held[1], 4)

        with (folder / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe",
                 f"--user-data-dir={folder / 'profile'}", "about:blank"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=move, pass_fds=(3, 4), close_fds=True,
            )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._held, self._number, self._session = b"", 0, ""
        self.said: list[str] = []
        """What the browser complained of: refused scripts and styles, errors."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The answer to one command; a refusal fails the test."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            if found.get("method") == "Log.entryAdded":
                entry = found["params"]["entry"]
                self.said.append(f"{entry['text']} {entry.get('url', '')}")

    def _message(self) -> Any:
        until = time.monotonic() + DEADLINE_S
        while b"\0" not in self._held:
            assert time.monotonic() < until, "the browser does not answer"
            if select.select([self._read], [], [], 0.5)[0]:
                data = os.read(self._read, 1 << 20)
                assert data, "the browser ended"
                self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'", "it is loaded")

    def value(self, expression: str) -> Any:
        """What an expression gives there."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def until(self, expression: str, what: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < until, f"not in time: {what}; there is {self.text()!r}"
            time.sleep(0.05)

    def text(self) -> str:
        """What a reader sees."""
        return str(self.value("document.body ? document.body.innerText : ''"))

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )

    def picture(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        os.close(self._read)
        os.close(self._write)
