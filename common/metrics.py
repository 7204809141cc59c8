"""shell: every metric of haulier, declared in one place, and the port they are read from. Sets none of them itself.

R4 and S3 ask for their figures by name; what is not in ``Metrics`` is not exported. Each process has one ``Metrics``
with a registry of its own, so that two machines in one test never share a number.
"""

from __future__ import annotations

import os
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from common.errors import InvariantError, RefusedError

HOST_VARIABLE = "HAULIER_METRICS_HOST"
STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""From a small model's decode step to the prefill of a long history over a slow link."""
OUTCOMES = ("completed", "failed", "cancelled", "expired")
GONE = ("silence", "unsendable", "fault")
"""How a session may be declared gone while it held work, its worker's own farewell apart."""


class Metrics:
    """All metric families of one process. ``*_total`` families only rise; a restart begins again at 0. Any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._totals: dict[Counter, float] = {}
        self._lock = threading.Lock()
        # ring (R4); the identity taken - returned = live is checked where the books are, and here it can be seen
        self.ring_taken_bytes = self._counter("ring_taken_bytes", "Bytes taken by the producer, padding included")
        self.ring_returned_bytes = self._counter("ring_returned_bytes", "Bytes returned by acknowledgements")
        self.ring_live_bytes = self._gauge("ring_live_bytes", "Bytes taken and not returned, padding included")
        self.ring_padding_live_bytes = self._gauge("ring_padding_live_bytes", "Padding among the live bytes")
        self.ring_tokens_pending = self._gauge("ring_tokens_pending", "Tokens published and not yet consumed")
        self.ring_items_unresolved = self._gauge(
            "ring_items_unresolved", "Requests dispatched here and neither done, failed nor handed back"
        )
        self.ring_stuck = self._counter("ring_stuck", "Times the ring was found full with nothing in it (R6)")
        # sessions (S3)
        self.sessions = self._gauge("sessions", "Live sessions of each worker; more than one is a fault", "worker")
        self.sessions_gone_working = self._counter(
            "sessions_gone_working", "Sessions declared gone while they held work, by reason", "reason"
        )
        self.standby = self._gauge("standby", "1 while this broker waits for another one's end")
        self.active_silent_seconds = self._gauge(
            "active_silent_seconds", "How long the active broker has done no turn, as its standby sees it"
        )
        self.reconnects = self._counter("reconnects", "Logins of this worker after its first")
        self.messages_dropped = self._counter("messages_dropped", "Messages of stale sessions not acted on", "reason")
        self._declare_engine()
        # lines and store
        self.lines = self._counter("lines", "Lines that ended, by outcome", "outcome")
        self.lines_wasted = self._counter("lines_wasted", "Results that came when the line had one already")
        self.lines_waiting = self._gauge("lines_waiting", "Lines not assigned to any session")
        self.outbox_lines = self._gauge("outbox_lines", "Finished results not yet acknowledged by the broker (D1)")
        self.wal_bytes = self._gauge("wal_bytes", "Size of the store's write-ahead log", "store")
        for outcome in OUTCOMES:  # a family with labels shows nothing until one is used: 0 is news, absence is not
            self.lines.labels(outcome=outcome)
        for reason in GONE:
            self.sessions_gone_working.labels(reason=reason)

    def _declare_engine(self) -> None:
        """What the engine measures of itself: H1 to H6, A3, A4, A7, L4, Q4."""
        self.staged_bytes = self._counter("staged_bytes", "History bytes copied host to device over the link")
        self.link_bytes_per_second = self._gauge(
            "link_bytes_per_second", "What the link carries, as it was measured; 0 where it was not"
        )
        self.written_back_bytes = self._counter("written_back_bytes", "Changed rows copied device to host")
        self.step_seconds = Histogram(
            "haulier_step_seconds", "One pass over all layers", buckets=STEP_BUCKETS_S, registry=self.registry
        )
        self.tokens_generated = self._counter("tokens_generated", "Tokens sampled")
        self.contexts = self._gauge("contexts", "Contexts by state", "state")
        self.leases_open = self._gauge("leases_open", "Staged layers not retired (L4)")
        self.events_held = self._gauge("events_held", "Device events in use (Q4)")
        self.retained_hit_bytes = self._counter(
            "retained_hit_bytes", "History bytes that a step found on the device instead of staging them (H3)"
        )
        self.headroom_hit_bytes = self._counter(
            "headroom_hit_bytes", "History bytes that a step found in headroom instead of staging them (H2, H3)"
        )
        self.headroom_bytes = self._gauge("headroom_bytes", "Device memory taken as headroom, by state (H2)", "state")
        self.headroom_pages_moved = self._counter(
            "headroom_pages_moved", "Pages of headroom that changed hands, by cause (H2, A4)", "reason"
        )
        self.decode_seconds = self._counter(
            "decode_seconds", "Seconds of decode steps, as predicted from the rates and as measured (H3)", "which"
        )
        self.device_pages = self._gauge("device_pages", "Pages of retained history, by state", "state")
        self.device_pages_moved = self._counter(
            "device_pages_moved", "Device pages that changed hands, by reason (A3, A4)", "reason"
        )
        self.shared_histories = self._gauge("shared_histories", "Histories held once for several requests (H5)")
        self.sharing = self._gauge("sharing", "Running requests that share a history (H5)")
        self.spared_bytes = self._counter(
            "spared_bytes", "History bytes that steps read once and would need again for each request that shares (H5)"
        )
        self.draft_stages = self._counter("draft_stages", "Decode passes of requests, one each, with --draft-tokens")
        self.draft_tokens = self._counter("draft_tokens", "Drafted tokens, proposed and taken", "which")
        self.admission_waits = self._counter(
            "admission_waits", "Steps planned while the next request waited, by reason (A7)", "reason"
        )

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"haulier_{name}", words, labels, registry=self.registry)

    def _gauge(self, name: str, words: str, *labels: str) -> Gauge:
        return Gauge(f"haulier_{name}", words, labels, registry=self.registry)

    def advance(self, counter: Counter, total: float) -> None:
        """Bring a counter to ``total``, as books kept elsewhere have it. Raises ``InvariantError`` if it would fall.

        ``counter`` is one of this object's, or one labelled child of it; it is then moved by this method only.
        """
        with self._lock:
            former = self._totals.get(counter, 0.0)
            if total < former:
                raise InvariantError(f"a total fell from {former:g} to {total:g}: totals only rise")
            counter.inc(total - former)
            self._totals[counter] = total


class Endpoint:
    """The open port of ``open_endpoint``."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port = int(server.server_port)

    def stop(self) -> None:
        """Close the port and wait for its thread. Not from that thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start(metrics: Metrics, port: int, host: str | None = None) -> Endpoint | None:
    """As ``open_endpoint``, or None for port 0: ``--metrics-port`` left out."""
    return open_endpoint(metrics, port, host) if port else None


def open_endpoint(metrics: Metrics, port: int, host: str | None = None) -> Endpoint:
    """Serve ``metrics`` over HTTP at ``/metrics`` from a thread of its own, until ``Endpoint.stop``.

    Port 0 lets the system choose (see ``Endpoint.port``). ``host`` defaults to HAULIER_METRICS_HOST, else loopback
    only: the figures have no key. Raises ``RefusedError`` when the port cannot be had.
    """
    host = host if host is not None else os.environ.get(HOST_VARIABLE, "127.0.0.1")
    try:
        server, thread = start_http_server(port, addr=host, registry=metrics.registry)
    except (OSError, OverflowError) as failure:
        raise RefusedError(
            f"metrics cannot be served on {host}:{port} ({failure}): choose another --metrics-port"
        ) from failure
    return Endpoint(server, thread)
