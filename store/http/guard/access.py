"""Access: whether a request may pass, by its host and its token; and the file of tokens, stored as
hashes, read again when it changes.

A line is ``name scope sha256 made_at``. A token is 256 random bits, so a fast hash of it is as good
as a slow one: they cannot all be tried.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from precompute.store.disk.durable_file import locked, replace_durably
from precompute.store.errors import ConfigError
from precompute.store.http.messages import STRANGER, Reply, Scope, problem
from precompute.store.http.routes import Who, every_route
from precompute.store.http.telemetry.instruments import AUTH_REFUSED, Meter
from precompute.store.times import utc_now

log = logging.getLogger(__name__)

SCOPES = ("read", "admin")
"""``read`` opens what services ask, ``admin`` that and what operators look at."""

MOST_OF_A_NAME = 2
"""Valid at once: the one in use, and the one that takes its place."""

_PREFIX = "pct_"
"""Begins every token, so that one that leaks into a repository or a log is found."""

_LINE = re.compile(r"\A([a-z0-9][a-z0-9_.-]{0,62}) (read|admin) ([0-9a-f]{64}) (\S{1,40})\Z")
_NAME = re.compile(r"\A[a-z0-9][a-z0-9_.-]{0,62}\Z")


@dataclass(frozen=True)
class Token:
    """A line of the file: ``digest`` is the SHA-256 of the token itself, which is stored
    nowhere."""

    name: str
    scope: str
    digest: bytes
    made_at: str


def read_tokens(path: Path) -> list[Token]:
    """The file's tokens; lines that are empty or begin with # are left out.

    Raises:
        ConfigError: it cannot be read, or a line is none.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"serve.tokens: {path} cannot be read ({exc}): make a token by `precompute token NAME`"
        ) from exc
    tokens = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.match(line.strip())
        if match is None:
            raise ConfigError(
                f"serve.tokens: {path}:{number}: not `name scope sha256 time`, as `precompute token"
                " NAME` writes it"
            )
        tokens.append(Token(match[1], match[2], bytes.fromhex(match[3]), match[4]))
    return tokens


def make_token(path: Path, name: str, scope: str) -> str:
    """A new token, its hash added to the file; of the same name the one made before stays valid,
    and older ones end.

    Raises:
        ConfigError: no name, or the file cannot be read.
        OSError: it cannot be written.
    """
    if not _NAME.match(name):
        raise ConfigError(
            f"{name!r}: a token's name has lower-case letters, digits, '_', '.' and '-', at most 63"
            " of them"
        )
    assert scope in SCOPES, scope
    secret = _PREFIX + secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        tokens = read_tokens(path) if path.exists() else []
        made = Token(name, scope, _digest(secret.encode()), utc_now())
        before = [token for token in tokens if token.name == name][1 - MOST_OF_A_NAME :]
        _write(path, [*(token for token in tokens if token.name != name or token in before), made])
    return secret


def remove_tokens(path: Path, name: str) -> int:
    """Take a name's tokens out of the file; returns how many it had.

    Raises:
        ConfigError: the file cannot be read.
        OSError: it cannot be written.
    """
    with locked(path.with_name(f".{path.name}.lock")):
        tokens = read_tokens(path)
        retained = [token for token in tokens if token.name != name]
        _write(path, retained)
    return len(tokens) - len(retained)


class Tokens:
    """The tokens of a file, as it is now.

    Args:
        path: the file.

    Raises:
        ConfigError: there is no token, or as :func:`read_tokens`; later, a file that is gone or
            turned bad leaves those of before valid, and is reported in the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = version_of(path)
        self._tokens = read_tokens(path)
        if not self._tokens:
            raise ConfigError(
                f"serve.tokens: {path} has no token: make one by `precompute token NAME`"
            )

    def refresh(self) -> None:
        """Read the file again if it changed."""
        seen = version_of(self._path)
        if seen != self._seen:
            self._seen = seen
            try:
                self._tokens = read_tokens(self._path)
                log.info("%s: %d tokens", self._path, len(self._tokens))
            except ConfigError as exc:
                log.error("%s; the tokens of before stay valid", exc)

    def find(self, secret: bytes) -> Token | None:
        """The token with this secret; every token is compared, in a time that does not depend on
        which."""
        digest, found = _digest(secret), None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found


def version_of(path: Path) -> tuple[int, int, int, int] | None:
    """What changes with a file's content, or with who may read it; None where it cannot be looked
    at."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _write(path: Path, tokens: list[Token]) -> None:
    lines = [
        f"{token.name} {token.scope} {token.digest.hex()} {token.made_at}\n" for token in tokens
    ]
    replace_durably(path, "".join(lines).encode())
    path.chmod(0o640)


# ---- Access control: whether a request may pass, checked before its route is looked for: the hot
# ones' too. Hosts are the names that a server without tokens and TLS goes by.


_REMEMBERED = 256


class Hosts:
    """The hosts of a server without tokens or a certificate: any address, ``localhost``, and
    the names that are given.

    An address is the page's own or no page's: what a browser takes for one origin with a page
    cannot be made to lead elsewhere but by its name.

    Args:
        names: without ports, lower-case.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(names) | {"localhost"}
        self.allow = lru_cache(_REMEMBERED)(self._allow)
        """Whether a Host header's value is one of them, whatever its port; none, which no browser
        sends, is."""

    def _allow(self, value: bytes) -> bool:
        text = value.decode("latin-1").lower()
        name, _, port = text[1:].partition("]") if text.startswith("[") else text.partition(":")
        if not port.removeprefix(":").isdigit() and port not in ("", ":"):
            return False
        return not text or name.removesuffix(".") in self._names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_ANY = ("0.0.0.0", "::")  # noqa: S104  # compared with, not bound
_CHALLENGE = [
    (b"www-authenticate", b'Bearer realm="precompute", Basic realm="precompute"'),
    (b"cache-control", b"no-store"),
]
"""Basic, with the token as the password, is how a browser is made to send one."""

_NOT_HERE = problem(
    421,
    "wrong_host",
    "this server is not known by that name: ask for its address, or have the name added to its"
    " serve.hosts",
)


class AccessControl:
    """Called with every request's scope; the refusal, or None where it may pass.

    Args:
        meter: counts refusals.
        tokens: those that are let in; None: everyone who reaches an address.
        admin: the admin socket's own name: host and port, or a path; None: there is none.
        hosts: the names that it may be addressed by over TCP; None: by any.

    Raises:
        ConfigError: a route of another package cannot be used.
    """

    def __init__(
        self,
        meter: Meter,
        tokens: Tokens | None = None,
        admin: Any = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._meter, self._tokens, self._hosts = meter, tokens, hosts
        routes = every_route()
        self._operators, self._open = routes.paths(Who.OPERATORS), routes.paths(Who.ANYONE)
        self._admin = (
            (admin, None) if isinstance(admin, str) else None if admin is None else tuple(admin[:2])
        )

    def __call__(self, scope: Scope) -> Reply | None:
        """Raises nothing."""
        path = scope["raw_path"]
        if self._hosts is not None and not self._is_meant(scope, self._hosts):
            return self._refused("host", _NOT_HERE)
        if self._admin is not None and path in self._operators and not self._is_admin(scope):
            return problem(404, "no_such_route", "there is no such route here")
        if self._tokens is None:
            return None
        secret = _secret(scope)
        if path in self._open:
            scope[STRANGER] = secret is None or self._tokens.find(secret) is None
            return None
        if secret is None:
            return self._refused(
                "none",
                problem(401, "no_token", "send a token: Authorization: Bearer …", _CHALLENGE),
            )
        token = self._tokens.find(secret)
        if token is None:
            return self._refused(
                "unknown", problem(401, "unknown_token", "no such token is valid", _CHALLENGE)
            )
        if path in self._operators and token.scope != "admin":
            return self._refused(
                "scope",
                problem(403, "wrong_scope", "this takes a token of scope admin", _CHALLENGE[1:]),
            )
        scope["token"] = token.name
        return None

    def _is_meant(self, scope: Scope, hosts: Hosts) -> bool:
        server = scope["server"]
        # a Unix socket, which no browser reaches
        if server is not None and server[1] is None:
            return True
        # no generator: 0.9 µs of a request in place of 1.4
        for name, value in scope["headers"]:
            if name == b"host" and not hosts.allow(value):
                return False
        return True

    def _is_admin(self, scope: Scope) -> bool:
        server = scope["server"]
        assert self._admin is not None
        return server == self._admin or (
            self._admin[0] in _ANY and server is not None and server[1] == self._admin[1]
        )

    def _refused(self, why: str, reply: Reply) -> Reply:
        self._meter.counter(AUTH_REFUSED, why).add()
        return reply


def _secret(scope: Scope) -> bytes | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"authorization":
            kind, _, rest = value.partition(b" ")
            kind = kind.lower()
            if kind == b"bearer":
                return rest.strip()
            if kind == b"basic":
                try:
                    return base64.b64decode(rest, validate=True).partition(b":")[2]
                except binascii.Error:
                    return None
            return None
    return None
