"""Answer schema: what a chat's answer must look like, as JSON Schema, held by jsonschema-rs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from precompute.store.errors import ConfigError


class AnswerSchema:
    """The schema of an object, whose properties are features.

    Args:
        schema: with ``type: object`` and ``properties``; ``$ref`` within itself alone.

    Raises:
        ConfigError: it is no such schema, or the extra is not installed.
    """

    def __init__(self, schema: Any) -> None:
        try:
            import jsonschema_rs
        except ImportError as exc:
            raise ConfigError(
                'schema needs jsonschema-rs: pip install "precompute-store[endpoint]"'
            ) from exc
        if (
            not isinstance(schema, Mapping)
            or schema.get("type") != "object"
            or not isinstance(schema.get("properties"), Mapping)
        ):
            raise ConfigError(
                f"schema is {schema!r:.200}: give a JSON Schema of an object, as in schema: {{type:"
                " object, properties: {label: {enum: [a, b]}}, required: [label]}"
            )
        self.properties = tuple(map(str, schema["properties"]))
        try:
            self._validator = jsonschema_rs.validator_for(
                json.loads(json.dumps(schema)), offline=True
            )
        except (ValueError, TypeError) as exc:
            raise ConfigError(
                f"schema is no JSON Schema: {str(exc).partition(chr(10))[0]:.300}"
            ) from exc

    def wrong(self, value: Any) -> str | None:
        """What does not fit of a value, in few words; None where it fits."""
        error = next(self._validator.iter_errors(value), None)
        if error is None:
            return None
        where = ".".join(map(str, error.instance_path))
        return f"{where + ': ' if where else ''}{error.message:.200}"
