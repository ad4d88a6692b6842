"""Command line: what ``precompute -c configs/<project> COMMAND`` calls: its parser, and its exit
status.

Exit status: 0 done · 1 failed, or something needs attention (status, verify) · 2 bad usage or
configuration · 3 rows were rejected past the threshold or a gate refused: nothing was published.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence

from precompute.jobs.commands import measure, operations, review, rows, run, setup
from precompute.jobs.commands.command import (
    BAD_USAGE,
    FAILED,
    REJECTED,
    BadUsage,
    Commands,
    Parser,
    with_history,
)
from precompute.jobs.run.command_process import (
    avoid_importing_pandas,
    end_signal,
    ends_on_signal,
    log_to_stderr,
    report_error,
    show,
    signal_text,
    stdout_for_json_only,
    unfailing_output,
)
from precompute.store.disk.durable_file import limit_of
from precompute.store.doors import COMMANDS
from precompute.store.errors import (
    ConfigError,
    GateError,
    PrecomputeError,
    RejectedError,
    RequestError,
)

THREADS_END_S = 5.0
"""How long a process waits at its end for threads that a model left behind."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Never a traceback for a user's mistake, nor where
    only the client was installed."""
    status = _main(argv)
    if argv is None:
        _end_without_threads(status)
    return status


def _end_without_threads(status: int) -> None:
    """End the process of its own command some seconds after it is done, where a thread that is no
    daemon goes on: the interpreter would wait for it, and a cron job would never end."""
    left = [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]

    def end() -> None:
        time.sleep(THREADS_END_S)
        report_error(
            f"a thread that the model left goes on ({left[0]}): the command is done, and its"
            " process ends without it (daemon=True would let it end by itself)"
        )
        sys.stdout.flush()
        os._exit(status)

    if left:
        threading.Thread(target=end, name="end", daemon=True).start()


def _main(argv: Sequence[str] | None) -> int:
    with unfailing_output():
        parser = _parser()
        log_to_stderr()
        try:
            arguments = parser.parse_args(argv)
        except BadUsage as exc:
            if "--json" in (sys.argv[1:] if argv is None else argv):
                print(json.dumps(_refusal("BadUsage", exc.message, BAD_USAGE)))
            raise
        except ConfigError as exc:  # of a command that comes in by a door
            arguments = argparse.Namespace(
                json="--json" in (sys.argv[1:] if argv is None else argv)
            )
            return _failed(arguments, exc)
        arguments.own_process = argv is None
        with (
            stdout_for_json_only(arguments.own_process)
            if arguments.json
            else contextlib.nullcontext()
        ):
            return _called(arguments)


def _called(arguments: argparse.Namespace) -> int:
    computes = getattr(arguments, "fallback", False) or getattr(arguments, "text", None) is not None
    try:
        if arguments.own_process and arguments.reads and not computes:
            avoid_importing_pandas()
        with (
            contextlib.nullcontext()
            if arguments.command in operations.SERVICES
            else ends_on_signal()
        ):
            ended: int = arguments.call(arguments)
            sys.stdout.flush()
            return ended
    except BaseException as exc:
        number = end_signal()
        if number is None:
            return _failed(arguments, exc)
        _report(arguments, "Terminated", signal_text(number), 128 + number)
    if arguments.own_process:
        # the process of its own command, which a library's thread must not keep from ending
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)
    return 128 + number


def _failed(arguments: argparse.Namespace, exc: BaseException) -> int:
    """The exit status of a command that raised ``exc``, whose message is reported; what nobody
    foresaw is raised again."""
    if isinstance(exc, KeyboardInterrupt):
        return _report(arguments, "Terminated", "interrupted", 130)
    # of the user's own modules one that is missing is a ConfigError
    if isinstance(exc, ModuleNotFoundError) and (exc.name or "").split(".")[0] != "precompute":
        message = (
            f"{exc.name} is not installed: what is here reads from a server (`from precompute"
            " import Client`); the command comes with pip install 'precompute-store[cpu]', or [gpu]"
        )
        return _report(arguments, "ConfigError", message, BAD_USAGE)
    if not isinstance(exc, PrecomputeError):
        limit = limit_of(exc)
        if limit is None:
            raise exc
        return _report(arguments, type(exc).__name__, f"{exc}: {limit}", FAILED)
    status = REJECTED if isinstance(exc, (RejectedError, GateError)) else FAILED
    if isinstance(exc, ConfigError) or (isinstance(exc, RequestError) and exc.status < 500):
        status = BAD_USAGE
    return _report(arguments, type(exc).__name__, with_history(str(exc)), status)


def _report(arguments: argparse.Namespace, kind: str, message: str, status: int) -> int:
    """Say what ended a command: for people on stderr and, with ``--json``, on stdout unless a
    report stands there already. Returns the exit status."""
    if arguments.json and not getattr(arguments, "reported", False):
        show(json.dumps(_refusal(kind, message, status)))
    report_error(message)
    return status


def _refusal(kind: str, message: str, status: int) -> dict[str, object]:
    return {"error": {"kind": kind, "message": message}, "exit_status": status}


class _Version(argparse.Action):
    """As argparse's own, which would look the version up for every command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        from precompute.store.disk.record import FORMAT

        built = ""
        # the client alone reads no packed rows, and has no numpy
        with contextlib.suppress(ModuleNotFoundError):
            from precompute.store.online import kernels

            if not kernels.COMPILED:
                built = (
                    ", without its C extension: install it with a C compiler, lookups of many keys"
                    " are slower in plain Python"
                )
        print(f"precompute {metadata.version('precompute-store')} (format {FORMAT}){built}")
        parser.exit()


def _parser() -> Parser:
    parser = Parser(
        prog="precompute",
        description=(
            "Run models ahead of time and answer with a key lookup that tells how fresh it is."
        ),
    )
    parser.add_argument(
        "-c",
        "--config",
        default=os.environ.get("PRECOMPUTE_CONFIG"),
        metavar="FOLDER",
        help=(
            "the project's folder, before or after the command (default: $PRECOMPUTE_CONFIG, or"
            " that of the nearest project.yaml, here or above)"
        ),
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = Commands(parser)
    for add in (
        setup.add,
        run.add,
        run.add_backfill,
        run.add_graph,
        operations.add_rollback,
        operations.add_services,
        rows.add,
        review.add,
        rows.add_training,
        review.add_verify,
        operations.add,
        measure.add,
        review.add_status,
        setup.add_schema,
        setup.add_completion,
    ):
        add(commands)
    commands.add_doors(COMMANDS.known())
    return parser


if __name__ == "__main__":
    sys.exit(main())
