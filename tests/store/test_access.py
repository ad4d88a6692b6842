"""Who may ask: tokens as they are made, kept, exchanged and taken back; and the check that asks for
them."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import socket
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from precompute.store.errors import ConfigError
from precompute.store.http.guard.access import (
    AccessControl,
    Hosts,
    Tokens,
    make_token,
    read_tokens,
    remove_tokens,
)
from precompute.store.http.guard.connections import Listener, Tls
from precompute.store.http.messages import STRANGER
from precompute.store.http.openapi import openapi_document
from precompute.store.http.telemetry.instruments import AUTH_REFUSED, Meter
from tests.server import OPERATORS

BIND = {"guarded": False, "tls": False}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "secrets" / "tokens"


def touched(path: Path, text: str) -> None:
    """Written again, by a time that tells."""
    path.write_text(text)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))


def test_a_token_opens_and_only_its_hash_is_stored(file: Path) -> None:
    secret = make_token(file, "ranker", "read")
    assert len(secret) == 47
    tokens = Tokens(file)
    nearly = file.with_name("nearly")
    name, scope, digest, at = file.read_text().split()
    nearly.write_text(f"{name} {scope} {digest[:-1]}{'0' if digest[-1] != '0' else '1'} {at}\n")
    assert Tokens(nearly).find(secret.encode()) is None
    nearly.unlink()
    found = tokens.find(secret.encode())
    assert found is not None
    assert (found.name, found.scope) == ("ranker", "read")
    assert found.digest.hex() == hashlib.sha256(secret.encode()).hexdigest()
    assert secret not in file.read_text()
    assert (file.stat().st_mode & 0o777, sorted(p.name for p in file.parent.iterdir())) == (
        0o640,
        [".tokens.lock", "tokens"],
    )
    for other in (
        b"",
        secret.encode()[:-1],
        secret.encode() + b"x",
        secret.upper().encode(),
        found.digest,
        found.digest.hex().encode(),
    ):
        assert tokens.find(other) is None


def test_of_a_name_the_last_two_are_valid_and_of_others_all(file: Path) -> None:
    other = make_token(file, "other", "admin")
    made = [make_token(file, "ranker", "read") for _ in range(4)]
    tokens = Tokens(file)
    assert [tokens.find(secret.encode()) is not None for secret in (other, *made)] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert remove_tokens(file, "ranker") == 2
    assert remove_tokens(file, "ranker") == 0
    assert [token.name for token in read_tokens(file)] == ["other"]


def test_a_file_that_changed_is_taken_up_and_one_that_is_bad_is_not(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_token(file, "a", "read").encode()
    tokens = Tokens(file)
    second = make_token(file, "b", "read").encode()
    assert tokens.find(second) is None
    tokens.refresh()
    assert tokens.find(first) is not None
    assert tokens.find(second) is not None
    good = file.read_text()
    with caplog.at_level(logging.ERROR):
        touched(file, good + "c read nothing now\n")
        for _ in range(3):
            tokens.refresh()
        file.unlink()
        for _ in range(3):
            tokens.refresh()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "tokens:3: not `name scope sha256 time`" in errors[0]
    assert tokens.find(second) is not None
    # once it may be read, it is
    touched(file, good.replace("a read", "z read"))
    with mock.patch.object(Path, "read_text", side_effect=PermissionError("denied")):
        tokens.refresh()
    file.chmod(0o640)
    tokens.refresh()
    assert tokens.find(first).name == "z"  # type: ignore[union-attr]
    # what is empty says that nobody may ask
    touched(file, "# none\n\n")
    tokens.refresh()
    assert tokens.find(first) is tokens.find(second) is None
    touched(file, good)
    tokens.refresh()
    assert tokens.find(first) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("", "has no token"),
        ("# a comment\n", "has no token"),
        ("ranker read abc 2026\n", ":1: not `name"),
        (f"ranker write {'0' * 64} 2026\n", ":1: not `name"),
        (f"\n\nRanker read {'0' * 64} 2026\n", ":3: not `name"),
        ("é", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_what_to_do(
    tmp_path: Path, text: str | None, why: str
) -> None:
    path = tmp_path / "tokens"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"serve.tokens: .*{why}.*precompute token NAME"):
        Tokens(path)


@pytest.mark.parametrize("name", ["", "A", "a b", "a\n", "-a", "a" * 64, "é"])
def test_a_name_is_a_word(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a token's name"):
        make_token(file, name, "read")
    assert not file.exists()


# ---- access control


def asked(
    path: str,
    authorization: bytes | None = None,
    server: tuple[str, int | None] | None = ("127.0.0.1", 80),
) -> dict[str, Any]:
    headers = [(b"host", b"x")] + (
        [(b"authorization", authorization)] if authorization is not None else []
    )
    return {"raw_path": path.encode(), "headers": headers, "server": server}


def basic(secret: str) -> bytes:
    return b"Basic " + base64.b64encode(f"me:{secret}".encode())


ROUTES = [
    *(path.format(view="a", key="1", service="a") for path in openapi_document()["paths"]),
    "/openapi.json",
    "/nothing",
    "//metrics",
]
for _other in ("/metrics", "/livez", "/readyz"):
    ROUTES.remove(_other)


def test_every_route_but_two_needs_a_token_and_operators_another(file: Path) -> None:
    read, admin = make_token(file, "r", "read"), make_token(file, "a", "admin")
    meter = Meter()
    access = AccessControl(meter, Tokens(file))

    def status(path: str, authorization: bytes | None) -> int:
        reply = access(asked(path, authorization))
        return 200 if reply is None else reply.status

    for path in ROUTES:
        assert [status(path, f"Bearer {secret}".encode()) for secret in (read, admin)] == [200, 200]
        assert [status(path, basic(secret)) for secret in (read, admin)] == [200, 200]
        assert status(path, None) == 401
    for path in OPERATORS:
        assert [status(path, f"bearer  {secret}".encode()) for secret in (read, admin)] == [
            403,
            200,
        ]
        assert status(path, None) == 401
    for path in ("/livez", "/readyz"):
        for authorization, stranger in (
            (None, True),
            (b"Bearer x", True),
            (f"Bearer {read}".encode(), False),
        ):
            scope = asked(path, authorization)
            assert (access(scope), scope[STRANGER]) == (None, stranger)
    for wrong in (
        b"",
        b"Bearer",
        b"Bearer ",
        read.encode(),
        b"Bearer x",
        b"Basic !",
        b"Basic " + b"A" * 9,
        b"Digest x",
        b"\xff\xfe",
    ):
        assert status("/v1/views", wrong) == 401, wrong
    reply = access(asked("/v1/views"))
    assert reply is not None
    headers = dict(reply.headers)
    assert headers[b"www-authenticate"].startswith(b"Bearer")
    assert headers[b"cache-control"] == b"no-store"
    assert [
        int(meter.counter(AUTH_REFUSED, why).value) for why in ("none", "unknown", "scope")
    ] == [len(ROUTES) + len(OPERATORS) + 7, 3, len(OPERATORS)]


def test_a_request_that_passed_is_known_by_its_tokens_name(file: Path) -> None:
    scope = asked("/v1/views", f"Bearer {make_token(file, 'ranker', 'read')}".encode())
    assert AccessControl(Meter(), Tokens(file))(scope) is None
    assert scope["token"] == "ranker"


@pytest.mark.parametrize(
    ("admin", "there", "elsewhere"),
    [
        (
            ("127.0.0.1", 9090),
            [("127.0.0.1", 9090)],
            [("127.0.0.1", 80), ("127.0.0.2", 9090), ("/a.sock", None), None],
        ),
        (("0.0.0.0", 9090), [("127.0.0.1", 9090), ("10.1.1.1", 9090)], [("127.0.0.1", 80), None]),
        (("::1", 9090, 0, 0), [("::1", 9090)], [("::1", 80)]),
        (
            "/run/admin.sock",
            [("/run/admin.sock", None)],
            [("/run/api.sock", None), ("127.0.0.1", 80), None],
        ),
    ],
)
def test_what_operators_look_at_is_on_the_admin_address_alone(
    admin: Any, there: list[Any], elsewhere: list[Any]
) -> None:
    access = AccessControl(Meter(), None, admin)
    for path in OPERATORS:
        assert [access(asked(path, None, server)) for server in there] == [None] * len(there)
        replies = [access(asked(path, None, server)) for server in elsewhere]
        assert [reply and reply.status for reply in replies] == [404] * len(elsewhere)
    assert [access(asked("/v1/views", None, server)) for server in (*there, *elsewhere)] == [
        None
    ] * (len(there) + len(elsewhere))


KNOWN = (
    " 127.0.0.1 127.0.0.1:8080 10.1.2.3:80 [::1] [::1]:8080 localhost LocalHost:8080 localhost."
    " features.internal Features.Internal:80"
)
UNKNOWN = (
    "evil.example evil.example:8080 localhost.evil.example 127.0.0.1.evil.example"
    " localhost,evil.example localhost:80@evil.example internal [evil.example] x.features.internal"
    " : :80 ::1 . \xff localhost\x00"
)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        *((host.encode("latin-1"), True) for host in KNOWN.split(" ")),
        *((host.encode("latin-1"), False) for host in UNKNOWN.split(" ")),
    ],
)
def test_a_page_of_another_name_reaches_nothing(host: bytes, allowed: bool) -> None:
    meter = Meter()
    access, scope = AccessControl(meter, hosts=Hosts(["features.internal"])), asked("/v1/views")
    scope["headers"] = [(b"accept", b"*/*"), (b"host", host)]
    reply = access(scope)
    assert (
        (None if reply is None else reply.status),
        meter.counter(AUTH_REFUSED, "host").value,
    ) == ((None, 0) if allowed else (421, 1))
    # also as the second of two
    scope["headers"].insert(0, (b"host", b"localhost"))
    assert (access(scope) is None) == allowed
    # no page reaches a Unix socket; and no browser leaves its host out
    assert access(scope | {"server": ("/run/api.sock", None)}) is None
    assert access(scope | {"headers": []}) is None


# ---- addresses


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:0",
        "[::]:0",
        "10.0.0.1:0",
        "192.0.2.1:80",
        "example.com:80",
        "127.0.0.1.example.com:80",
    ],
)
def test_where_strangers_come_by_nothing_is_served_without_a_guard(
    tmp_path: Path, address: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Listener("serve.bind", address, tmp_path, **BIND)
    assert str(refused.value) == (
        f"serve.bind: {address!r} is reached from other machines, and nothing keeps strangers out: write under `serve` either "
        "`tokens: ./tokens`, with a token made by `precompute token NAME`, or `tls: {cert: …, key: …, client_ca: …}`; "
        "or bind 127.0.0.1 or unix:./api.sock"
    )


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("127.0.0.1:0", "http://127.0.0.1:"),
        ("localhost:0", "http://localhost:"),
        ("127.9.9.9:0", "http://127.9.9.9:"),
    ],
)
def test_what_only_this_machine_reaches_is_served(tmp_path: Path, address: str, shown: str) -> None:
    listener = Listener("serve.bind", address, tmp_path, **BIND)
    assert listener.shown == f"{shown}{listener.socket.getsockname()[1]}"
    listener.close()
    # of a server that was killed the socket's file is left; of one that runs it is its own
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "api.sock"))
    again = Listener("serve.bind", "unix:api.sock", tmp_path, **BIND)
    with pytest.raises(ConfigError, match="is another server running there"):
        Listener("serve.bind", "unix:api.sock", tmp_path, **BIND)
    again.close()
    assert not (tmp_path / "api.sock").exists()
    guarded = Listener("serve.bind", "0.0.0.0:0", tmp_path, guarded=True, tls=True)
    assert guarded.shown.startswith("https://0.0.0.0:")
    guarded.close()


# ---- TLS


def certificate(folder: Path, name: str, days: int = 2) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ]
    command += f"-days {days} -subj /CN={name} -addext subjectAltName=IP:127.0.0.1".split()
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return cert, key


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "two")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(key), "-aes128", "-passout", "pass:secret"]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    for wrong in (other, locked, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"serve\.tls: .*cannot be used"):
            Tls(cert, wrong)
    with pytest.raises(ConfigError, match=r"serve\.tls\.client_ca: .*cannot be read"):
        Tls(cert, key, key)


def test_a_pair_of_which_half_is_there_does_not_come_into_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = certificate(tmp_path, "one")
    tls = Tls(cert, key)
    new_cert, new_key = certificate(tmp_path, "two")
    with caplog.at_level(logging.INFO):
        os.replace(new_cert, cert)
        for _ in range(3):
            tls.refresh()
        os.replace(new_key, key)
        for _ in range(3):
            tls.refresh()
    assert [
        record.levelname
        for record in caplog.records
        if record.name == "precompute.store.http.guard.connections"
    ] == ["ERROR", "INFO"]
