"""HTTP against those who must not get in, and against kills: real processes, the official client, and raw sockets."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator

import openai
import pytest

from common import keys as key_files
from common.messages import WorkerInfo
from tests.integration.fleet_kit import DEADLINE_S, Fleet, chat
from tests.integration.http_kit import KEYS, Web, answers, create, jsonl, lines_of, said, upload


@pytest.fixture
def web(fleet: Fleet) -> Iterator[Web]:
    made = Web(fleet)
    yield made
    made.close()


def kept(web: Web) -> list[str]:
    """Every file of the server's that an upload can leave behind."""
    folder = web.fleet.folder / "state" / "http" / "tenants"
    return sorted(path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file())


def form(data: bytes, end: bool = True) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return head + data + (b"\r\n--b--\r\n" if end else b"")


def posted(body: bytes, length: int | None = None) -> bytes:
    return (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + KEYS["alice"].encode()
        + b"\r\nContent-Type: multipart/form-data; boundary=b\r\nConnection: close\r\nContent-Length: "
        + str(len(body) if length is None else length).encode() + b"\r\n\r\n" + body
    )  # fmt: skip


def answered(web: Web, data: bytes) -> tuple[int, dict[str, object]]:
    """Status and body of a request sent as it is."""
    with web.raw() as raw:
        raw.sendall(data)
        found = bytearray()
        while piece := raw.recv(65536):
            found += piece
    head, _, body = bytes(found).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# -- who is let in --------------------------------------------------------------------------------------------------


def test_a_wrong_key_opens_nothing(web: Web) -> None:
    """No key, somebody's key cut short, an empty one. Control: the right one. Keys come and go without a restart."""
    web.broker()
    for key in ("sk-wrong", KEYS["alice"][:-1], KEYS["alice"] + "x", " "):
        with pytest.raises((openai.AuthenticationError, openai.APIConnectionError)) as caught:
            web.client(key=key).files.list()
        if isinstance(caught.value, openai.AuthenticationError):
            assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    assert answered(web, b"GET /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] == 401
    assert web.client().files.list().data == []
    path = web.fleet.folder / "http-keys"
    path.write_text(f"sk-new-0123456789 alice\n{KEYS['bob']} bob\n")
    assert web.client(key="sk-new-0123456789").files.list().data == []
    with pytest.raises(openai.AuthenticationError):
        web.client().files.list()


def test_tenants_see_their_own_alone(web: Web) -> None:
    """Bob gets for alice's ids what he gets for ids that are nobody's. Control: alice gets them."""
    web.broker()
    web.fleet.worker(delay_ms=1)
    alice, bob = web.client("alice"), web.client("bob")
    file = upload(alice, jsonl(3))
    batch = web.ended(alice, create(alice, file).id)
    for asked in (
        lambda who: who.files.retrieve(file),
        lambda who: who.files.content(file),
        lambda who: who.files.content(batch.output_file_id),
        lambda who: who.batches.retrieve(batch.id),
        lambda who: create(who, file),
    ):
        with pytest.raises(openai.NotFoundError):
            asked(bob)
        asked(alice)
    with pytest.raises(openai.NotFoundError):
        bob.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError):
        bob.files.delete(file)
    assert (bob.files.list().data, bob.batches.list().data) == ([], [])
    assert batch.id in [one.id for one in alice.batches.list()]
    assert {file, batch.output_file_id} <= {one.id for one in alice.files.list()}


def test_a_revoked_tenant_is_out(web: Web) -> None:
    """haulier keys revoke ends HTTP's tenant too, whatever the file of bearer keys still says. Control: others."""
    web.broker()
    alice = web.client()
    assert alice.files.list().data == []
    key_files.revoke(web.fleet.keys, "alice")
    with pytest.raises(openai.PermissionDeniedError):
        alice.files.list()
    assert web.client("bob").files.list().data == []


def test_without_keys_no_web_page_is_let_in(fleet: Fleet) -> None:
    """On loopback without keys a browser could be made to send anything. Control: a program of this machine."""
    web = Web(fleet, keys=False)
    web.broker()
    try:
        get = b"GET /v1/files HTTP/1.1\r\nConnection: close\r\n"
        assert answered(web, get + b"Host: 127.0.0.1\r\nOrigin: http://example.org\r\n\r\n")[0] == 403
        assert answered(web, get + b"Host: example.org\r\n\r\n")[0] == 403
        assert answered(web, get + b"Host: 127.0.0.1\r\n\r\n")[0] == 200
        assert web.client(key="anything").files.list().data == []
    finally:
        web.close()


# -- uploads --------------------------------------------------------------------------------------------------------


def test_an_upload_beyond_the_maximum_is_refused_whole(web: Web) -> None:
    """By what it announces, and by what comes when it announces nothing. Control: just the maximum is taken."""
    web.broker("--http-upload-mib", "1")
    alice = web.client()
    for size in (1024**2 + 1, 5 * 1024**2):
        with pytest.raises(openai.APIStatusError) as caught:
            upload(alice, b"x" * size)
        assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
    chunked = posted(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    body = form(b"x" * 2 * 1024**2)
    assert answered(web, chunked + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")[0] == 413
    assert kept(web) == []
    assert alice.files.retrieve(upload(alice, b"x" * 1024**2)).bytes == 1024**2


def test_a_truncated_form_is_no_file(web: Web) -> None:
    """Without its last boundary, and cut off in the middle. Control: the same form, whole."""
    web.broker()
    data = jsonl(3)
    status, body = answered(web, posted(form(data, end=False)))
    assert (status, body["error"]["code"]) == (400, "invalid_multipart")  # type: ignore[index]
    with web.raw() as raw:
        raw.sendall(posted(form(data, end=False), length=10_000))
    web.fleet.until(lambda: kept(web) == [], "nothing of it is left")
    assert web.client().files.list().data == []
    status, body = answered(web, posted(form(data)))
    assert (status, body["bytes"]) == (200, len(data))


def test_a_reader_that_takes_nothing_costs_a_page_and_keeps_nobody_waiting(web: Web) -> None:
    """A download stands still in the middle: the server holds a few pages of it and answers others. Control: all is
    there, many times what the server held.
    """
    web.broker()
    web.fleet.worker("--ring-mib", "64", "--context-tokens", "2000000", delay_ms=1)
    alice = web.client()
    text = "x" * 500_000
    batch = web.ended(alice, create(alice, upload(alice, jsonl([chat(n, text) for n in range(120)]))).id)
    size = alice.files.retrieve(batch.output_file_id or "").bytes
    assert size > 60_000_000
    server = web.server()
    before = server.memory_info().rss
    with web.raw() as raw:
        raw.sendall(
            f"GET /v1/files/{batch.output_file_id}/content HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Authorization: Bearer {KEYS['alice']}\r\n\r\n".encode()
        )
        received = len(raw.recv(1000))
        for _ in range(20):
            assert alice.batches.retrieve(batch.id).status == "completed"
            assert web.client("bob").files.list().data == []
        assert server.memory_info().rss - before < size / 3
        while piece := raw.recv(1 << 20):
            received += len(piece)
    assert received > size


# -- kills ----------------------------------------------------------------------------------------------------------


def test_an_upload_outlives_a_kill_and_half_an_upload_does_not(web: Web) -> None:
    """kill -9 between upload and create: the file is there. One cut in its middle is not, nor are its bytes."""
    broker = web.broker()
    alice = web.client()
    file = upload(alice, jsonl(20))
    with web.raw() as raw:
        raw.sendall(posted(form(jsonl(500), end=False), length=10_000_000))
        incoming = web.fleet.folder / "state" / "http" / "tenants" / "incoming"
        web.fleet.until(lambda: any(incoming.iterdir()), "half an upload is there")
        web.fleet.end(broker)
    web.broker()
    web.fleet.worker(delay_ms=1)
    again = web.client(retries=5)
    assert [one.id for one in again.files.list()] == [file]
    assert list(incoming.iterdir()) == []
    batch = web.ended(again, create(again, file).id)
    assert answers(lines_of(again, batch.output_file_id)) == said(20)


def test_a_batch_outlives_kills_of_its_broker(web: Web) -> None:
    """kill -9 just after create, and in the middle: every line answered once, none run again beyond what was held."""
    count = 120
    broker = web.broker()
    alice = web.client(retries=8)
    batch = create(alice, upload(alice, jsonl(count)))
    web.fleet.end(broker)
    broker = web.broker()
    web.fleet.worker(delay_ms=20)
    web.fleet.until_run(count // 4)
    web.fleet.end(broker)
    web.broker()
    ended = web.ended(alice, batch.id)
    assert (ended.status, answers(lines_of(alice, ended.output_file_id))) == ("completed", said(count))
    assert web.fleet.audit(str(uuid.UUID(batch.id.removeprefix("batch_")))).holds
    assert len(web.fleet.runs()) == count


def test_a_killed_server_is_started_again_by_its_broker(web: Web) -> None:
    """The HTTP process alone is gone: its clients wait a moment, the broker's sessions notice nothing."""
    web.broker()
    web.fleet.worker(delay_ms=1)
    alice = web.client(retries=8)
    file = upload(alice, jsonl(5))
    epochs = [one.epoch for one in _logged_in(web)]
    former = web.server()
    former.send_signal(signal.SIGKILL)
    former.wait(DEADLINE_S)
    batch = web.ended(alice, create(alice, file).id)
    assert answers(lines_of(alice, batch.output_file_id)) == said(5)
    assert web.server().pid != former.pid
    assert [one.epoch for one in _logged_in(web)] == epochs


def test_the_server_goes_with_its_broker(web: Web) -> None:
    """SIGTERM and SIGKILL: nothing of it is left, its address is free. Control: while the broker lives it is there."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        broker = web.broker()
        server = web.server()
        assert server.is_running()
        web.fleet.end(broker, how)
        server.wait(DEADLINE_S)


def _logged_in(web: Web) -> list[WorkerInfo]:
    web.fleet.until(lambda: bool(web.fleet.workers()) and web.fleet.workers()[0].phase == "ready", "a worker is ready")
    return list(web.fleet.workers())
