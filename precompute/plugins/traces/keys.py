"""Keys: where spans go, and of how many requests: ``serve.tracing`` of ``project.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import Field, field_validator

from precompute.jobs.config.open_section import Keys
from precompute.jobs.config.section import Section
from precompute.store.errors import ConfigError
from precompute.store.feature_view import FeatureView


class TracingConfig(Section):
    """OpenTelemetry; needs the extra ``[otel]``."""

    endpoint: str
    """a collector's OTLP over HTTP, such as http://127.0.0.1:4318"""
    sample: float = Field(default=0.01, ge=0, le=1)
    """share of the requests that are traced, of those whose caller did not decide"""

    @field_validator("endpoint")
    @classmethod
    def _url(cls, endpoint: str) -> str:
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError("write a URL, such as http://127.0.0.1:4318")
        return endpoint


class TracesKeys(Keys):
    """What is traced."""

    tracing: TracingConfig | None = None
    """traces for OpenTelemetry; none: no spans"""

    def preflight(self, view: FeatureView | None) -> None:
        if view is None and self.tracing is not None and find_spec("opentelemetry") is None:
            raise ConfigError(
                "serve.tracing: OpenTelemetry is not installed: pip install"
                " 'precompute-store[otel]'"
            )

    def spec(self) -> Mapping[str, Any]:
        return {} if self.tracing is None else {"serve.tracing": self.tracing.model_dump()}
