"""Who reaches ``precompute serve``: tokens, TLS, an address for operators, limits from the
configuration; all of them over one server."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.cli import main
from precompute.store.client import Tls
from precompute.store.errors import DeniedError, NoAnswerError
from tests.clients import features_of, opened
from tests.server import (
    OPERATORS,
    Reply,
    Server,
    eventually,
    make_folder,
    read_reply,
    write_numbers,
)
from tests.store.test_access import certificate

ROW, LOOKUP = "/v1/views/numbers/rows/1", "/v1/views/numbers/lookup"


class Guarded(Server):
    """A server that is spoken to over TLS, with a certificate and a token of one's own, or
    without."""

    folder: Path
    identity: str | None = "client"
    token: str | None = None

    def connect(self) -> socket.socket:
        context = ssl.create_default_context(cafile=str(self.folder / "server.pem"))
        if self.identity is not None:
            context.load_cert_chain(
                self.folder / f"{self.identity}.pem", self.folder / f"{self.identity}.key"
            )
        host, _, port = self.url.removeprefix("https://").rpartition(":")
        raw = socket.create_connection((host, int(port)), timeout=20)
        return context.wrap_socket(raw, server_hostname=host)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        if self.token is not None:
            headers = {"authorization": f"Bearer {self.token}"} | headers
        return super().request(method, path, body, **headers)

    def admin(self, path: str, **headers: str) -> Reply:
        """Asked of the admin address."""
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.folder / "admin.sock"))
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        reply = Reply(
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
        connection.close()
        return reply


def made_token(folder: Path, *options: str) -> str:
    """What ``precompute token`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["-c", str(folder), "token", *options]) == 0
    return printed.getvalue().strip()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    for name in ("server", "client", "stranger"):
        certificate(folder, name)
    serve = {
        "tokens": "./tokens",
        "tls": {"cert": "./server.pem", "key": "./server.key", "client_ca": "./client.pem"},
        "admin": "unix:./admin.sock",
        "limits": {"body_bytes": 2000, "headers_bytes": 700, "header_time": "300ms"},
        "cache_mb": 0,
    }
    make_folder(folder, {"numbers": {}}, serve=serve).publish_all()
    token = made_token(folder, "ranker")
    Guarded.folder = folder
    Guarded.token = token
    # by all of its addresses: what strangers could reach is served, since they are shut out
    one = Guarded(folder, "127.0.0.1:0")
    with one:
        yield one


def test_with_a_certificate_and_a_token_every_route_answers(server: Guarded) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    assert server.get(ROW).json["features"]["double"] == 2.0
    assert server.lookup("numbers", [1, 9])[0]["status"] == "fresh"
    assert server.post("/v1/views/numbers/search", {"key": 1}).status == 200
    assert [
        server.get(path).status for path in ("/v1/views", "/readyz", "/openapi.json", "/livez")
    ] == [200] * 4
    assert server.get("/openapi.json").json["security"] == [{"token": ["read"], "certificate": []}]
    for authorization in ("", "Bearer x"):
        server.get(ROW, authorization=authorization).check_problem(401)
        server.admin("/metrics", authorization=authorization).check_problem(401)
        assert server.get("/readyz", authorization=authorization).json == {"status": "ready"}


def test_without_a_certificate_of_the_right_hand_nobody_is_let_in(server: Guarded) -> None:
    for identity in (None, "stranger"):
        server.identity = identity
        try:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                server.get("/livez")
        finally:
            server.identity = "client"
    raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)
    with raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in raw.recv(1000)
    # and one that says nothing at all is sent away
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20
    ) as silent:
        assert silent.recv(1) == b""


def test_what_operators_look_at_is_on_its_own_address_for_admins(server: Guarded) -> None:
    admin = f"Bearer {made_token(server.folder, 'prometheus', '--scope', 'admin')}"
    eventually(lambda: server.admin("/metrics", authorization=admin).status == 200)
    for path in OPERATORS:
        server.get(path, authorization=admin).check_problem(404, "no_such_route")
        server.admin(path, authorization=f"Bearer {server.token}").check_problem(403, "wrong_scope")
        assert server.admin(path, authorization=admin).status == 200
    shown = server.admin("/metrics", authorization=admin).body.decode()
    assert f'precompute_auth_refused_total{{reason="scope"}} {len(OPERATORS)}.0' in shown
    assert 'precompute_process_resident_bytes{process="worker-0"}' in shown
    assert str(server.token) not in shown + server.log.read_text()


def test_tokens_are_exchanged_and_taken_back_without_a_restart(server: Guarded) -> None:
    made = [made_token(server.folder, "rotated") for _ in range(2)]
    for secret in made:
        eventually(
            lambda secret=secret: server.get(ROW, authorization=f"Bearer {secret}").status == 200  # type: ignore[misc]
        )
    made_token(server.folder, "rotated")
    eventually(lambda: server.get(ROW, authorization=f"Bearer {made[0]}").status == 401)
    assert server.get(ROW, authorization=f"Bearer {made[1]}").status == 200
    assert made_token(server.folder, "rotated", "--remove") == "2 removed"
    eventually(lambda: server.get(ROW, authorization=f"Bearer {made[1]}").status == 401)
    assert server.get(ROW).status == 200


def test_a_new_certificate_is_shown_without_a_restart(server: Guarded) -> None:
    with server.connect() as before:
        assert isinstance(before, ssl.SSLSocket)
        old = before.getpeercert(binary_form=True)
        new_cert, new_key = certificate(server.folder, "new")
        os.replace(new_key, server.folder / "server.key")
        os.replace(new_cert, server.folder / "server.pem")

        def shown() -> bytes | None:
            try:
                with server.connect() as connection:
                    assert isinstance(connection, ssl.SSLSocket)
                    return connection.getpeercert(binary_form=True)
            except ssl.SSLError:
                # the old one, which the new file does not know
                return old

        eventually(lambda: shown() != old)
        before.sendall(
            f"GET {ROW} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}\r\n\r\n".encode()
        )
        assert read_reply(before).status == 200


def test_limits_are_those_of_the_configuration(server: Guarded) -> None:
    server.post(LOOKUP, {"keys": ["x" * 2000]}).check_problem(413, "body_too_large")
    server.get(ROW, x="y" * 700).check_problem(431, "headers_too_large")
    admin = f"Bearer {made_token(server.folder, 'counts', '--scope', 'admin')}"
    eventually(lambda: server.admin("/metrics", authorization=admin).status == 200)
    assert [server.get(ROW).status for _ in range(3)] == [200] * 3
    # no row is cached
    counted = server.admin("/metrics", authorization=admin).body.decode()
    assert 'cache="l1",outcome="hit"} 0.0' in counted


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (
            {"access_log": "./none/access.log"},
            "serve.access_log: .*none/access.log cannot be written",
        ),
        ({"tls": {"cert": "./a.pem", "key": "./b.pem"}}, "serve.tls: .*a.pem.* cannot be used"),
        ({"tokens": "./tokens"}, "serve.tokens: .*tokens cannot be read.*precompute token NAME"),
        ({"admin": "0.0.0.0:9090"}, "serve.admin: '0.0.0.0:9090' is reached from other machines"),
        ({"admin": "unix:./views"}, "serve.admin: .* cannot be bound"),
    ],
)
def test_what_cannot_be_served_is_reported_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], serve: dict[str, Any], why: str
) -> None:
    make_folder(tmp_path, {"numbers": {}}, serve={"bind": "unix:./api.sock"} | serve)
    assert main(["-c", str(tmp_path), "serve"]) == 2
    shown = capsys.readouterr()
    assert re.search(why, shown.err)
    assert shown.out == ""
    assert not (tmp_path / "api.sock").exists()


def test_token_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path, {"numbers": {}})
    command = ["-c", str(tmp_path), "token", "ranker"]
    assert main(command) == 2
    assert (
        "serve.tokens: no file is named; write `serve: {tokens: ./tokens}`"
        in capsys.readouterr().err
    )
    make_folder(tmp_path, {"numbers": {}}, serve={"tokens": "./tokens"})
    assert main([*command, "--json", "--scope", "admin"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["scope"], len(shown["token"])) == ("ranker", "admin", 47)
    assert main([*command, "--remove", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "ranker", "removed": 1}
    assert main([*command, "--remove"]) == 1
    assert main(["-c", str(tmp_path), "serve"]) == 2
    assert "has no token" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_the_client_shows_a_certificate_and_a_token(server: Guarded, kind: str) -> None:
    folder, tls = (
        server.folder,
        Tls(
            server.folder / "server.pem", server.folder / "client.pem", server.folder / "client.key"
        ),
    )
    with opened(kind, server.url, token=lambda: server.token or "", tls=tls) as client:
        assert features_of(client.row("numbers", 1))["double"] == 2.0
        assert client.get("numbers", [1, 2, 3])["double"].to_pylist() == [2.0, 4.0, 6.0]
    for token, code in ((None, "no_token"), ("pct_nobodys", "unknown_token")):
        with (
            opened(kind, server.url, token=token, tls=tls) as client,
            pytest.raises(DeniedError) as caught,
        ):
            client.views()
        assert (caught.value.status, caught.value.code) == (401, code)
    with (
        opened(kind, server.url, tls=Tls(folder / "server.pem"), retries=0) as client,
        pytest.raises(NoAnswerError),
    ):
        client.views()


def test_answers_say_what_took_how_long(tmp_path: Path) -> None:
    make_folder(tmp_path, {"numbers": {}}, serve={"server_timing": True}).publish_all()
    write_numbers(tmp_path, [1, 2, 3, 9, 10])
    with Server(tmp_path) as server:

        def stages_of(path: str, body: Any = None) -> list[str]:
            reply = server.request("POST" if body else "GET", path, body)
            assert reply.status == 200
            timing = re.findall(r"(\w+);dur=([0-9.]+)", reply.headers["server-timing"])
            *parts, total = [float(took) for _, took in timing]
            assert total >= sum(parts) - 0.01
            return [stage for stage, _ in timing]

        of_rows = stages_of("/v1/views/numbers/lookup", {"keys": [1, 9, 10, 77]})
        of_search = stages_of("/v1/views/numbers/search", {"inputs": {"x": 2.0}})
        assert stages_of("/v1/views/numbers/rows/2") == ["read", "verify", "encode", "total"]
        assert of_rows == ["read", "verify", "wait", "encode", "total"]
        assert of_search == ["search", "total"]
        assert "server-timing" not in server.get("/livez").headers
        counted = server.get("/metrics").body.decode()
        for stage in ("read", "verify", "wait", "encode"):
            assert f'precompute_stage_seconds_count{{stage="{stage}"}}' in counted
