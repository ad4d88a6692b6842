"""Verify: what is live, re-read."""

from __future__ import annotations

import argparse
import json

from precompute.jobs.commands.command import DONE, FAILED, Commands, project_of


def add(commands: Commands) -> None:
    """The command ``verify``."""
    commands.add("verify", _verify, "re-read what is live: checksums, counts, online rows, index", view=True)


def _verify(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.verify import verify

    checks = verify(project_of(arguments), arguments.view)
    sound = all(check.ok for check in checks)
    if arguments.json:
        lines = [{"check": check.check, "ok": check.ok, "found": check.found} for check in checks]
        print(json.dumps({"view": arguments.view, "ok": sound, "checks": lines}))
    else:
        for check in checks:
            print(f"{'ok ' if check.ok else 'BAD'}  {check.check}: {check.found}")
    return DONE if sound else FAILED
