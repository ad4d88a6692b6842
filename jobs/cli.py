"""Entry: what the command ``precompute`` calls. Where only the client was installed there is no
command line, and that is reported without a traceback."""

from __future__ import annotations

import json
import sys


def main() -> int:
    """As :func:`precompute.jobs.commands.command_line.main`; 2 where what it needs is not
    installed."""
    try:
        from precompute.jobs.commands.command_line import main as command_line

        # what a command needs is imported by it; a user's own module that is missing is a
        # ConfigError
        return command_line()
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "precompute":
            raise
        message = (
            f"{exc.name} is not installed: what is here asks a server (`from precompute import"
            " Client`); the command comes with pip install 'precompute-store[cpu]', or [gpu]"
        )
        if "--json" in sys.argv:
            print(
                json.dumps({"error": {"kind": "ConfigError", "message": message}, "exit_status": 2})
            )
        print(f"precompute: {message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
