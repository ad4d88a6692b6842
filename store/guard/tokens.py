"""Tokens: who may ask, and what; stored as hashes in a file of lines, taken up without a restart
when it changes.

A line is ``name scope sha256 made_at``. A token is 256 random bits, so a fast hash of it is as good
as a slow one: nobody tries them all.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from precompute.store.clock import utc_now
from precompute.store.disk.durable_file import locked, replace_durably
from precompute.store.errors import ConfigError

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
        self._seen = self._stat()
        self._tokens = read_tokens(path)
        if not self._tokens:
            raise ConfigError(
                f"serve.tokens: {path} has no token: make one by `precompute token NAME`"
            )

    def look(self) -> None:
        """Read the file again if it changed."""
        seen = self._stat()
        if seen != self._seen:
            self._seen = seen
            try:
                self._tokens = read_tokens(self._path)
                log.info("%s: %d tokens", self._path, len(self._tokens))
            except ConfigError as exc:
                log.error("%s; the tokens of before stay valid", exc)

    def find(self, secret: bytes) -> Token | None:
        """Whose it is; every token is compared, in a time that tells nothing."""
        digest, found = _digest(secret), None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _write(path: Path, tokens: list[Token]) -> None:
    lines = [
        f"{token.name} {token.scope} {token.digest.hex()} {token.made_at}\n" for token in tokens
    ]
    replace_durably(path, "".join(lines).encode())
    path.chmod(0o640)
