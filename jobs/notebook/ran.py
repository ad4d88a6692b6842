"""Ran: what a run did, as a program reads it and as a notebook shows it."""

from __future__ import annotations

import html

from precompute.jobs.commands.run import describe_report
from precompute.store.offline.runs import Report


class Ran:
    """A run that did what it was for; ``report`` is all that is known of it.

    Args:
        report: as it was written.
    """

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def status(self) -> str:
        """``published``, ``committed`` (computed, and not published) or ``current`` (nothing to
        do)."""
        return self.report.status

    @property
    def snapshot(self) -> int | None:
        """Number of the snapshot that was made, or that there is."""
        return self.report.snapshot

    @property
    def counts(self) -> dict[str, int]:
        """Rows: ``source`` = ``written`` + ``unchanged`` + ``rejected``; ``removed`` ones
        besides."""
        return dict(self.report.counts)

    def __repr__(self) -> str:
        return "\n".join([describe_report(self.report), *self.report.attention])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"
