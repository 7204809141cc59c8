"""shell: the HTTP server's side of the client's protocol: each thread that asks has connections of its own.

A tenant's requests travel under the tenant's key, so that the broker itself keeps tenants apart, shares by key and
counts what a key's ``revoke`` ends. Without keys everybody is the same client.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from broker.client import Client
from broker.http.faults import BrokerFailure
from common import limits, messages
from common.config import ClientSettings, KeySettings
from common.errors import HaulierError, PeerFault, RefusedError
from common.keys import CLIENTS, exposed, load_client

T = TypeVar("T")


class StoppingError(HaulierError):
    """The server stops: whatever was being asked is asked again by its next run."""

    exit_code = 3


class Fleet:
    """Connections to one broker. Any thread. ``by_tenant``: each tenant has a key in the key folder's ``clients``."""

    def __init__(
        self, broker: str, keys: KeySettings, by_tenant: bool, timeout_s: float = limits.HTTP_ANSWER_S
    ) -> None:
        self._broker, self._keys, self._by_tenant, self._timeout_s = broker, keys, by_tenant, timeout_s
        self._local = threading.local()
        self._made: set[Client] = set()
        """Every thread's, so that they are closed though their threads are gone."""
        self.stopping = threading.Event()

    def tenant(self, tenant: str) -> TenantFleet:
        """The broker as ``tenant`` sees it."""
        return TenantFleet(self, tenant)

    def client(self, tenant: str) -> Client:
        """This thread's connection for a tenant; the ones used longest ago are closed."""
        name = self._name(tenant)
        clients: OrderedDict[str, Client] | None = getattr(self._local, "clients", None)
        if clients is None:
            clients = self._local.clients = OrderedDict()
        if name in clients:
            clients.move_to_end(name)
            return clients[name]
        keys = tenant_keys(self._keys, name)
        made = clients[name] = Client(ClientSettings((self._broker,), keys, self._timeout_s), self._look_up)
        self._made.add(made)
        if len(clients) > limits.HTTP_CLIENTS_A_THREAD_COUNT:
            self._end(clients.popitem(last=False)[1])
        return made

    def forget(self, tenant: str) -> None:
        """Close this thread's connection: the next request reads the tenant's key anew."""
        clients: OrderedDict[str, Client] | None = getattr(self._local, "clients", None)
        found = clients.pop(self._name(tenant), None) if clients is not None else None
        if found is not None:
            self._end(found)

    def close(self) -> None:
        """Close every connection; the threads that used them have ended."""
        for client in list(self._made):
            self._end(client)

    def _end(self, client: Client) -> None:
        client.close()
        self._made.discard(client)

    def _name(self, tenant: str) -> str:
        """Whose key a tenant's requests travel under; empty for nobody in particular."""
        return tenant if self._by_tenant and not self._keys.insecure else ""

    def _look_up(self) -> None:
        if self.stopping.is_set():
            raise StoppingError("the server stops")


class TenantFleet:
    """A ``broker.client.Asker``: every request goes out by the connection of the thread that makes it."""

    def __init__(self, fleet: Fleet, tenant: str) -> None:
        self._fleet, self._tenant = fleet, tenant

    def ask(self, request: Any, answer: type[T]) -> T:
        """Raises ``BrokerFailure`` for a ``Failure``, and what ``Client.answer_to`` raises."""
        try:
            found = self._fleet.client(self._tenant).answer_to(request)
        except HaulierError:
            self._fleet.forget(self._tenant)
            raise
        if isinstance(found, messages.Failure):
            raise BrokerFailure(found.code, found.message, found.exit_code)
        if not isinstance(found, answer):
            raise PeerFault("wrong_answer", f"{type(request).__name__} was answered by {type(found).__name__}")
        return found

    def find(self, request: Any, answer: type[T]) -> T | None:
        """As ``ask``; None when the broker does not have the job that is meant, not yet or no more."""
        try:
            return self.ask(request, answer)
        except BrokerFailure as failure:
            if failure.code != "no_job":
                raise
        return None


def tenant_keys(keys: KeySettings, tenant: str) -> KeySettings:
    """The keys by which ``tenant`` (empty for nobody in particular) asks. Raises ``RefusedError`` naming what to do."""
    if keys.insecure or keys.directory is None:
        return keys
    folder: Path = keys.directory / CLIENTS / tenant if tenant else keys.directory
    if tenant and not folder.is_dir():
        raise RefusedError(f"the tenant {tenant!r} has no key: haulier keys add {tenant} --keys {keys.directory}")
    load_client(folder)
    return KeySettings(folder)


def check_tenants(keys: KeySettings, tenants: tuple[str, ...], say: Callable[[str], None]) -> None:
    """Raise ``RefusedError`` unless every tenant (none: nobody in particular) has keys; ``say`` what is unsafe."""
    for tenant in tenants or ("",):
        found = tenant_keys(keys, tenant)
        if found.directory is not None and (words := exposed(found.directory)):
            say(words)
