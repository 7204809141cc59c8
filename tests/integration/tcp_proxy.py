"""A TCP proxy of the tests' own: it delays, throttles, stalls and cuts what passes between a worker and its broker."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Forwards connections to ``target``, from its own ``endpoint``. Settings may change while it runs.

    ``delay_s`` before each piece goes on; ``bytes_a_second`` at most, each way (0: no limit); ``stalled``: nothing
    passes, nobody is told; ``mute_down``: nothing comes back from the target; ``cut_after``: so many bytes up, then
    both sides are closed in the middle of whatever it is.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self.delay_s = 0.0
        self.bytes_a_second = 0
        self.stalled = False
        self.mute_down = False
        self.cut_after = 0
        self.cuts = 0
        self.carried = 0
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                if self._closed:
                    return
                with contextlib.suppress(OSError, UnboundLocalError):
                    client.close()
                continue
            self._sockets += [client, server]
            for source, sink, up in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(source, sink, up), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16 * 1024):
                while self.stalled and not self._closed:
                    time.sleep(0.01)
                if self.mute_down and not up:
                    continue
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self.bytes_a_second:
                    time.sleep(len(data) / self.bytes_a_second)
                if up and self.cut_after and self.carried + len(data) >= self.cut_after:
                    sink.sendall(data[: self.cut_after - self.carried])
                    self.cut_after = 0
                    self.carried = 0
                    self.cuts += 1
                    break
                sink.sendall(data)
                if up:
                    self.carried += len(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Close every connection now."""
        self.cuts += 1
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
        for one in self._sockets:
            one.close()
