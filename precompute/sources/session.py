"""Session: what a project's ``sources.setup`` opens in a source's DuckDB before its settings are
locked: extensions, secrets, and databases that are read and never written. What stands for
``${NAME}`` comes from the environment, and is in no message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import duckdb

from precompute.store.disk.sql import without_data
from precompute.store.errors import ConfigError, PrecomputeError, SourceError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TEXT = re.compile(r"'[^']*'")
_BEGINS = re.compile(
    r"\s*(LOAD|ATTACH|SET|CREATE\s+(OR\s+REPLACE\s+)?(TEMP(ORARY)?\s+)?SECRET)\s", re.IGNORECASE
)
"""How a statement of a setup begins: none of them computes, or writes."""

_READ_ONLY = (
    "a source's database is read and never written: attach it READ_ONLY, as in ATTACH '…' AS shop"
    " (TYPE postgres, READ_ONLY)"
)


@dataclass(frozen=True, slots=True)
class Setup:
    """Statements as they stand in ``project.yaml``, and the project's folder, absolute, where
    ``'./…'`` in them starts from."""

    statements: Sequence[str] = ()
    folder: Path | None = None

    def secrets(self) -> dict[str, str]:
        """What the environment has for the variables that the statements name, as it is and as it
        stands inside a text of SQL, the longest first → ``${NAME}``; and each word of one outside a
        text, which DuckDB quotes by itself. What is of up to three characters is no secret, and
        stands in any sentence."""
        names = {name for one in self.statements for name in _VARIABLE.findall(one)}
        values = [(os.environ.get(name, ""), f"${{{name}}}") for name in sorted(names)]
        forms = [(form, name) for value, name in values for form in (value, _inside_text(value))]
        bare = {name for one in self.statements for name in _VARIABLE.findall(_TEXT.sub("", one))}
        forms += [
            (form, f"${{{name}}}")
            for name in sorted(bare)
            for word in re.findall(r"\w+", os.environ.get(name, ""))
            for form in (word, word.lower())
        ]
        forms.sort(key=lambda form: -len(form[0]))
        return {form: name for form, name in forms if len(form) > 3}

    def run(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Run the statements.

        Raises:
            ConfigError: one cannot be, or does more than make something readable; it begins with
                ``sources.setup``.
            SourceError: what is attached cannot be reached.
        """
        for number, written in enumerate(self.statements):
            where = f"sources.setup[{number}]"
            statement = self._filled(written, where)
            _check(statement, written, where)
            try:
                connection.execute(_of_package(statement))
            except duckdb.Error as exc:
                shown = hiding(exc, self.secrets())
                raise _refused(statement, where, shown) from shown
            writable = connection.execute(
                "SELECT database_name FROM duckdb_databases() WHERE NOT internal AND NOT readonly"
                " AND database_name <> current_database()"
            ).fetchall()
            if writable:
                raise ConfigError(f"{where}: {_READ_ONLY}")

    def _filled(self, written: str, where: str) -> str:

        def value(match: re.Match[str]) -> str:
            if match[1] not in os.environ:
                raise ConfigError(
                    f"{where}: the environment has no {match[1]}: export {match[1]}=…; secrets and"
                    " names of hosts are put in from there alone"
                )
            return _inside_text(os.environ[match[1]])

        start = "" if self.folder is None else f"{_inside_text(str(self.folder))}/"
        absolute = re.sub(r"'(?=\.\.?/)", lambda _: f"'{start}", written)
        return _VARIABLE.sub(value, absolute)


def hiding(exc: duckdb.Error, secrets: Mapping[str, str]) -> duckdb.Error:
    """The error with the names of variables in place of their values: the same one where it has
    none."""
    text = str(exc)
    for secret, name in secrets.items():
        text = text.replace(secret, name)
    return exc if text == str(exc) else type(exc)(text)


def _inside_text(value: str) -> str:
    return value.replace("'", "''")


def _check(statement: str, written: str, where: str) -> None:
    try:
        kinds = [one.type for one in without_data().extract_statements(statement)]
    except (duckdb.Error, UnicodeEncodeError):
        raise _invalid(written, where) from None
    begins = _BEGINS.match(statement)
    # before it makes a file that is not there
    if begins and begins[1].upper() == "ATTACH" and "READ_ONLY" not in statement.upper():
        raise ConfigError(f"{where}: {_READ_ONLY}")
    if len(kinds) == 1 and begins:
        return
    if re.match(r"\s*(FORCE\s+)?INSTALL\s", statement, re.IGNORECASE):
        raise ConfigError(
            f"{where}: a run fetches nothing from the network: pip install"
            " 'precompute-store[postgres]' or [lakes], or install the extension once in a shell of"
            " DuckDB, and write LOAD here"
        )
    raise ConfigError(
        f"{where}: a setup is of single LOAD, CREATE SECRET, ATTACH and SET statements: what is"
        " read of it stands in the SQL of the views"
    )


def _invalid(written: str, where: str) -> ConfigError:
    """The error of a statement that does not parse, by how it is written: of the filled one DuckDB
    would quote a part of a variable that stands outside a text."""
    try:
        # a name alone may be a word of SQL's own
        without_data().extract_statements(_VARIABLE.sub(r"\1_", written))
    except (duckdb.Error, UnicodeEncodeError) as exc:
        return ConfigError(f"{where}: not valid SQL: {first_line(exc)}")
    return ConfigError(
        f"{where}: not valid SQL with its variables put in: write each inside a text, as in"
        " '${NAME}'"
    )


def _of_package(statement: str) -> str:
    """``LOAD name`` from a pip package of DuckDB's extensions, where one of this version is
    installed."""
    named = re.fullmatch(r"\s*LOAD\s+'?(\w+)'?\s*;?\s*", statement, re.IGNORECASE)
    spec = None if named is None else find_spec(f"duckdb_extension_{named[1].lower()}")
    if named is None or spec is None or not spec.submodule_search_locations:
        return statement
    name = named[1].lower()
    for folder in spec.submodule_search_locations:
        file = Path(folder, "extensions", f"v{duckdb.__version__}", f"{name}.duckdb_extension")
        if file.is_file():
            return f"LOAD '{_inside_text(str(file))}'"
    return statement


def _refused(statement: str, where: str, exc: duckdb.Error) -> PrecomputeError:
    text, version = first_line(exc), duckdb.__version__
    if statement.lstrip()[:4].upper() == "LOAD":
        return ConfigError(
            f"{where}: {text}: it is not installed for DuckDB {version}: pip install"
            " 'precompute-store[postgres]', or [lakes] for Delta and Iceberg, which bring DuckDB"
            f" 1.5.5 and its extensions; or INSTALL it once in a shell of DuckDB {version}"
        )
    away = isinstance(exc, (duckdb.IOException, duckdb.ConnectionException))
    return (SourceError if away else ConfigError)(f"{where}: {text}")


def first_line(exc: Exception) -> str:
    """DuckDB's message without the drawing under it."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return (
        " ".join(line for line in lines[:3] if not line.startswith(("LINE", "^")))[:300]
        or type(exc).__name__
    )
