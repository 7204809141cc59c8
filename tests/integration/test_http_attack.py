"""HTTP under bad input, slow and many clients, a broker that stands still, and kills in the middle of a download."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from common import limits
from tests.integration.fleet_kit import DEADLINE_S, Fleet, chat
from tests.integration.http_kit import KEYS, Web, answers, create, jsonl, lines_of, said, upload


@pytest.fixture
def web(fleet: Fleet) -> Iterator[Web]:
    made = Web(fleet)
    yield made
    made.close()


def asked(web: Web, path: str, method: str = "GET", key: str = KEYS["alice"], **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
    return httpx.request(
        method, f"http://{web.address}{path}", headers=headers, timeout=DEADLINE_S, trust_env=False, **more
    )


def as_it_is(web: Web, path: str) -> tuple[int, Any]:
    """Status and body for a path that no client of ours has tidied up."""
    with web.raw() as raw:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {KEYS['alice']}\r\n\r\n"
        raw.sendall(head.encode())
        found = b""
        while piece := raw.recv(65536):
            found += piece
    head_bytes, _, body = found.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), json.loads(body)


# -- bad input ------------------------------------------------------------------------------------------------------


def test_ids_that_are_paths_and_other_nonsense_find_nothing(web: Web) -> None:
    """Traversal, encoded and not, other kinds of ids, other texts: 404 or 405, never a file of the server's."""
    web.broker()
    file = upload(web.client(), jsonl(1))
    for name in (
        "..", ".", "%2e%2e", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e%2f%2e%2e%2fstore_id", f"{file}.data", f"{file}%00",
        file.upper(), "file-", "file-" + "g" * 32, "batch_" + "0" * 32, "%F0%9F%A6%84", "a" * 4000, "file-..%5c..%5c",
        f"../bob/files/{file}", "*", "%25",
    ):  # fmt: skip
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            status, body = as_it_is(web, path)
            assert status in (404, 405), (path, body)
            assert body["error"]["type"] == "invalid_request_error"
    assert asked(web, f"/v1/files/{file}").status_code == 200


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_pages_at_their_edges(web: Web, path: str) -> None:
    """No entry, one, a limit of one, an ``after`` that is the last, or gone, or another's, or of the other kind."""
    web.broker()
    alice = web.client()
    assert asked(web, path).json()["data"] == []
    assert asked(web, path).json()["first_id"] is None
    file = upload(alice, jsonl(1))
    name = file if path == "/v1/files" else create(alice, file).id
    kind = "file-" if path == "/v1/files" else "batch_"
    first = asked(web, f"{path}?limit=1").json()
    assert [one["id"] for one in first["data"]] == [first["first_id"]]
    assert first["has_more"] is False
    assert asked(web, f"{path}?after={name}").json()["data"] == []
    for gone, there in ((kind + "f" * 32, 1), (kind + "0" * 32, 0)):
        assert len(asked(web, f"{path}?after={gone}").json()["data"]) == there
    assert asked(web, f"{path}?after={name}", key=KEYS["bob"]).json()["data"] == []
    other = "batch_" if kind == "file-" else "file-"
    for query in (
        "limit=0", "limit=-1", "limit=1e3", "limit=", "limit=99999999999", "limit=%D9%A1", "limit=1.0", "after=x",
        f"after={other}{'0' * 32}", "order=up", "after=%00", "limit=true",
    ):  # fmt: skip
        if query == "order=up" and path == "/v1/batches":
            continue
        answer = asked(web, f"{path}?{query}")
        assert answer.status_code == 400, (query, answer.text)
        assert answer.json()["error"]["param"] in ("limit", "after", "order")


def test_bodies_that_are_no_batch(web: Web) -> None:
    """Too long, too deep, not JSON, not UTF-8, numbers of a million digits, the wrong type everywhere."""
    web.broker()
    file = upload(web.client(), jsonl(1))
    good = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    bodies: list[tuple[int, bytes]] = [
        (413, b"[" + b" " * limits.HTTP_BODY_MAX_BYTES + b"]"), (400, b"[" * 100_000), (400, b"\xff\xfe{}"), (400, b""),
        (400, b"null"), (400, b'{"input_file_id": ' + b"1" * 900_000 + b"}"), (400, b'{"metadata": NaN}'),
        *(
            (400, json.dumps({**good, name: value}).encode())
            for name in good
            for value in (None, 1, [], {}, True, "", "\ud800", "x" * 100_000, "../..")
        ),
        *(
            (400, json.dumps({**good, "metadata": value}).encode())
            for value in ([], "x", {"a": 1}, {"a": "\udfff"}, {str(n): "" for n in range(17)}, {"a": "x" * 600})
        ),
    ]  # fmt: skip
    for status, body in bodies:
        answer = asked(web, "/v1/batches", "POST", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (status, 404), (body[:80], answer.text)
        assert answer.json()["error"]["message"]
    assert asked(web, "/v1/batches").json()["data"] == []
    assert asked(web, "/v1/batches", "POST", json=good).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v1/files HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" * 50,
        b"GET /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\xd0\xba\r\n\r\n",
        b"GET /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET http://evil.example/v1/files HTTP/1.1\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/files HTTP/1.1\r\n\r\n", b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_request_of_ours_ends_with_its_connection(web: Web, data: bytes) -> None:
    """Refused with a 4xx or cut; the next one is served, and nothing of ours broke."""
    web.broker()
    with web.raw() as raw:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        found = raw.recv(65536)
    assert found == b"" or found.split()[1][:1] == b"4", found[:200]
    assert asked(web, "/v1/files").status_code == 200
    assert "request_failed" not in web.fleet.log("broker")


def test_a_key_that_is_not_ascii_is_refused_at_start(web: Web) -> None:
    """It could not travel in a header. Control: the file of the other tests."""
    (web.fleet.folder / "http-keys").write_text("ключ-0123456789 alice\n", encoding="utf-8")
    process = web.broker()
    assert process.wait(DEADLINE_S) == 4
    assert "line 1: a key of other than ASCII" in web.fleet.log("broker")


# -- slow and many --------------------------------------------------------------------------------------------------


def test_connections_that_say_nothing_keep_nobody_out_for_long(web: Web) -> None:
    """As many as there is room for, a few with half a head. Control: at first others are told to come again."""
    web.broker()
    web.server()
    idle = [web.raw() for _ in range(limits.HTTP_CONNECTIONS_MAX_COUNT + 8)]
    try:
        for one in idle[:50]:
            one.sendall(b"GET /v1/files HTTP/1.1\r\nHost: localh")
        began = time.monotonic()
        web.fleet.until(lambda: _status(web) == 503, "it is full")
        web.fleet.until(lambda: _status(web) == 200, "it has room again")
        assert time.monotonic() - began < 4 * limits.HTTP_HEAD_S
    finally:
        for one in idle:
            one.close()


def _status(web: Web) -> int:
    try:
        return asked(web, "/v1/files").status_code
    except httpx.TransportError:
        return 503


def test_a_client_in_the_middle_of_a_long_answer_or_upload_is_not_idle(web: Web) -> None:
    """Longer than a head may take, between two pieces of an upload. Control: it is whole."""
    web.broker()
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    body = head + b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + jsonl(3) + b"\r\n--b--\r\n"
    with web.raw() as raw:
        raw.sendall(
            f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['alice']}\r\nContent-Type: "
            f"multipart/form-data; boundary=b\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        )
        raw.sendall(body[:40])
        time.sleep(limits.HTTP_HEAD_S + 1)
        raw.sendall(body[40:])
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


# -- a broker that stands still, a disk, kills ------------------------------------------------------------------------


def test_a_broker_that_does_not_answer_is_503(web: Web) -> None:
    """Stopped, not dead: clients are told to come again, the page too, and health says so. Control: it goes on."""
    broker = web.broker()
    alice = web.client()
    batch = create(alice, upload(alice, jsonl(2)))
    web.fleet.until(lambda: alice.batches.retrieve(batch.id).in_progress_at is not None, "the broker has it")
    broker.send_signal(signal.SIGSTOP)
    try:
        for path in ("/v1/models", f"/v1/batches/{batch.id}", "/v1/batches", "/fleet"):
            answer = asked(web, path)
            assert answer.status_code == 503, (path, answer.text)
        assert asked(web, "/v1/models").json()["error"]["code"] == "broker_unreachable"
        assert asked(web, "/healthz").status_code == 503
        assert asked(web, f"/v1/files/{batch.input_file_id}/content").status_code == 200  # no broker is needed for it
    finally:
        broker.send_signal(signal.SIGCONT)
    web.fleet.until(lambda: asked(web, "/v1/models").status_code == 200, "it answers again")
    web.fleet.worker(delay_ms=1)
    assert web.ended(alice, batch.id).status == "completed"


@pytest.mark.parametrize("who", ["server", "broker"])
def test_a_kill_in_the_middle_of_a_download_is_seen_and_the_next_is_whole(web: Web, who: str) -> None:
    """kill -9 of the HTTP process, or of the broker: the length says that bytes are missing."""
    broker = web.broker()
    web.fleet.worker("--ring-mib", "64", "--context-tokens", "2000000", delay_ms=1)
    alice = web.client(retries=8)
    text = "x" * 400_000
    batch = web.ended(alice, create(alice, upload(alice, jsonl([chat(n, text) for n in range(40)]))).id)
    assert batch.output_file_id
    size = alice.files.retrieve(batch.output_file_id).bytes

    def cut() -> int:
        taken = 0
        url = f"http://{web.address}/v1/files/{batch.output_file_id}/content"
        headers = {"authorization": f"Bearer {KEYS['alice']}"}
        with httpx.stream("GET", url, headers=headers, timeout=DEADLINE_S, trust_env=False) as answer:
            for piece in answer.iter_raw(100_000):
                if not taken:
                    web.server().kill() if who == "server" else web.fleet.end(broker)
                taken += len(piece)
        return taken

    with pytest.raises(httpx.TransportError):
        cut()
    if who == "broker":
        web.broker()
    web.fleet.until(lambda: _status(web) == 200, "it serves again")
    whole = alice.files.content(batch.output_file_id).content
    assert len(whole) == size
    assert len(whole.splitlines()) == 40


def test_a_file_deleted_while_its_job_runs_costs_the_job_nothing(web: Web) -> None:
    """The broker has the input. Control: until it has, deleting is refused, or the batch runs all the same."""
    web.broker()
    web.fleet.worker(delay_ms=30)
    alice = web.client()
    file = upload(alice, jsonl(60))
    batch = create(alice, file)
    web.fleet.until(lambda: alice.batches.retrieve(batch.id).status == "in_progress", "the broker has it")
    assert alice.files.delete(file).deleted
    ended = web.ended(alice, batch.id)
    assert (ended.status, answers(lines_of(alice, ended.output_file_id))) == ("completed", said(60))
    with pytest.raises(openai.NotFoundError):
        alice.files.content(file)


def test_a_batch_whose_time_is_over_expires_with_every_line_accounted_for(web: Web) -> None:
    """What was finished is output, what was not an error line of code batch_expired. Control: a longer window."""
    web.broker()
    web.fleet.worker(delay_ms=100)
    alice = web.client()
    long = create(alice, upload(alice, jsonl(4)))
    batch = create(alice, upload(alice, jsonl(2_000)), extra_body={"completion_window": "4s"})
    ended = web.ended(alice, batch.id)
    assert ended.status == "expired"
    assert ended.expired_at is not None
    good, failed = lines_of(alice, ended.output_file_id), lines_of(alice, ended.error_file_id)
    assert good
    assert len(good) + len(failed) == 2_000
    assert {line["error"]["code"] for line in failed} == {"batch_expired"}
    assert len({line["custom_id"] for line in (*good, *failed)}) == 2_000
    with pytest.raises(openai.ConflictError):
        alice.batches.cancel(batch.id)
    assert web.ended(alice, long.id).status == "completed"


def test_a_cancel_at_any_moment_leaves_every_line_accounted_for(web: Web) -> None:
    """Before the broker has it, while it runs, while its files are made, after its end: it ends whole."""
    web.broker()
    web.fleet.worker(delay_ms=5)
    alice = web.client()
    file = upload(alice, jsonl(8))
    states, refused = set(), 0
    for number in range(28):
        batch = create(alice, file)
        time.sleep(0.15 * (number % 14))
        try:
            assert alice.batches.cancel(batch.id).status in ("cancelling", "cancelled", "finalizing", "completed")
        except openai.ConflictError:
            refused += 1
        ended = web.ended(alice, batch.id)
        states.add(ended.status)
        lines = lines_of(alice, ended.output_file_id) + lines_of(alice, ended.error_file_id)
        begun = ended.request_counts is not None and ended.request_counts.total
        assert len(lines) == (8 if begun else 0), ended
        assert len({line["custom_id"] for line in lines}) == len(lines)
    assert states == {"cancelled", "completed"}  # control: both happened
    assert refused


# -- TLS ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make a certificate with")
def test_https(fleet: Fleet) -> None:
    """A certificate and its key: the official client over TLS, plain HTTP gets nothing. Another key is refused."""
    cert, key = (fleet.folder / name for name in ("cert.pem", "key.pem"))
    for where, what in ((key, cert), (fleet.folder / "other-key.pem", fleet.folder / "other-cert.pem")):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
             "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(where), "-out",
             str(what)],
            check=True, capture_output=True,
        )  # fmt: skip
    web = Web(fleet)
    refused = web.broker("--http-cert", str(cert), "--http-key", str(fleet.folder / "other-key.pem"))
    assert refused.wait(DEADLINE_S) == 4
    assert "--http-cert" in fleet.log("broker")
    web.broker("--http-cert", str(cert), "--http-key", str(key))
    assert (fleet.folder / "state" / "http_endpoint").read_text() == f"https://{web.address}\n"
    context = ssl.create_default_context(cafile=str(cert))
    with (
        openai.DefaultHttpxClient(verify=context, trust_env=False) as transport,
        openai.OpenAI(base_url=f"https://{web.address}/v1", api_key=KEYS["alice"], http_client=transport) as alice,
    ):
        assert alice.files.content(upload(alice, jsonl(2))).content == jsonl(2)
        login = f"https://{web.address}/fleet/login"
        answer = transport.post(login, data={"key": KEYS["alice"]}, follow_redirects=False)
        assert answer.headers["set-cookie"].endswith("; Secure")
    with pytest.raises(httpx.TransportError):
        asked(web, "/v1/files")
    web.close()
