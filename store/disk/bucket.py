"""Bucket: obstore's client of a bucket in an object store, and what its errors mean to an operator.
Credentials, region and endpoint come from the environment."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from precompute.store.errors import ConfigError


def failure(url: str, exc: BaseException) -> str:
    """The message of a failed request to a URL: what failed, and where to look."""
    # a listing has no kind of its own for it
    refused = isinstance(exc, (PermissionDeniedError, UnauthenticatedError))
    if refused or "<Code>AccessDenied</Code>" in str(exc):
        return (
            f"{url}: the object store refuses these credentials ({_first_line(exc)}): look at"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (GCS: GOOGLE_APPLICATION_CREDENTIALS,"
            " Azure: AZURE_STORAGE_…), and at the rights they give on the bucket"
        )
    return (
        f"{url}: the object store gave no answer that can be used ({_first_line(exc)}): look at the"
        " endpoint (AWS_ENDPOINT_URL), the region and the network, and run again"
    )


def open_store(url: str, retry_s: float, request_s: float) -> Any:
    """obstore's client of a bucket and prefix.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``.
        retry_s: how long a request is tried again, whatever the number of tries.
        request_s: how long one may take.

    Raises:
        ConfigError: the URL or the environment cannot be right.
    """
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next(filter(None, map(os.environ.get, names)), "")
    try:
        return from_url(
            url,
            client_options={
                "timeout": f"{request_s:.0f}s",
                "connect_timeout": "5s",
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={
                # time alone ends it
                "max_retries": 1_000_000,
                "retry_timeout": timedelta(seconds=retry_s),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=min(3.0, retry_s / 8)),
                    "base": 2,
                },
            },
        )
    except (BaseError, ValueError) as exc:
        raise ConfigError(f"{url}: {_first_line(exc)}") from exc


def _first_line(exc: BaseException) -> str:
    line = str(exc).strip().partition("\n")[0]
    return re.sub(r", max_retries: \d+, retry_timeout: \w+", "", line)[:300]
