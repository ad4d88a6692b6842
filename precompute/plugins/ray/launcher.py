"""Launcher: starts a run's shard workers as actors of a Ray cluster.

Ray places an actor where there is room, and adds machines where its autoscaler may.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from typing import Any

from precompute.jobs.run.shards.launcher import WorkerExit, WorkerRequest
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.workers.process import end_in_words

REACHED_S = 5.0
"""How long the cluster's address is tried."""
LAST_WORDS_BYTES = 2000
"""Bytes of a worker's stderr that are kept for its last line."""


class RayLauncher:
    """Actors of the cluster that ``RAY_ADDRESS`` names, or else of the one that this machine is a
    node of. Who may connect is the cluster's to say (``RAY_AUTH_MODE=token``).

    An actor starts the command that anyone can start by hand, and dies with it; Ray restarts none
    (``max_restarts`` is 0: while one restarts, each call of it fails at once), since the run starts
    another one.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """

    def __init__(self, *_: object) -> None:
        # read when Ray is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        try:
            import ray
        except ImportError as exc:
            raise ConfigError(
                "engine.on is ray, and Ray is not installed: pip install 'precompute-store[ray]'"
            ) from exc
        self._ray: Any = ray
        self._errors: Any = ray.exceptions
        self._own = not ray.is_initialized()
        if self._own:
            address = os.environ.get("RAY_ADDRESS", "auto")
            try:
                _check_reachable(address)
                ray.init(address=address, log_to_driver=False)
            except (OSError, ValueError, RuntimeError, self._errors.RayError) as exc:
                raise ConfigError(
                    f"engine.on is ray, and no cluster can be reached ({_line(exc)}): start one,"
                    " `ray start --head`, or name it in RAY_ADDRESS; its token is RAY_AUTH_TOKEN"
                ) from exc
        self._actors: dict[Any, tuple[Any, Any]] = {}
        """What a worker's end is known by → its actor, and what is known of its having begun."""

    def start(self, request: WorkerRequest) -> None:
        options: dict[str, Any] = {"num_cpus": request.cpus, "num_gpus": request.gpus}
        if request.memory_mb:
            options["memory"] = request.memory_mb * 2**20
        try:
            actor: Any = self._ray.remote(_RayActor).options(max_restarts=0, **options).remote()
            begun = actor.ping.remote()
            done = actor.run.remote([*request.argv], dict(request.environment), os.getcwd())
        except self._errors.RayError as exc:
            raise PrecomputeError(f"Ray starts no worker: {_line(exc)}") from exc
        self._actors[done] = actor, begun

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        if not self._actors:
            time.sleep(timeout_s)
            return []
        done, _ = self._ray.wait([*self._actors], num_returns=1, timeout=timeout_s)
        return [self._ended(one) for one in done]

    def stop(self, grace_s: float) -> None:
        # one that the cluster has no room for has nothing to end
        begun = [begun for _, begun in self._actors.values()]
        there = set(self._ray.wait(begun, num_returns=len(begun), timeout=0)[0]) if begun else set()
        ending = [done for done, (_, begun) in self._actors.items() if begun in there]
        for done in ending:
            self._actors[done][0].end.remote()
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=grace_s)
        for actor, _ in self._actors.values():
            with contextlib.suppress(self._errors.RayError):
                self._ray.kill(actor)
        self._actors = {}
        if self._own:
            self._ray.shutdown()

    def _ended(self, done: Any) -> WorkerExit:
        actor, _ = self._actors.pop(done)
        try:
            status, words = self._ray.get(done)
            ended = WorkerExit(status, end_in_words(status) + (f": {words}" if words else ""))
        except self._errors.RayActorError as exc:
            ended = WorkerExit(None, f"is gone, with its actor or its node ({_line(exc)})")
        except self._errors.RayError as exc:
            ended = WorkerExit(None, f"was not started: {_line(exc)}")
        with contextlib.suppress(self._errors.RayError):
            self._ray.kill(actor)
        return ended


class _RayActor:
    """Runs a worker's command on a node of the cluster."""

    def __init__(self) -> None:
        self._process: Any = None

    async def run(self, argv: list[str], environment: dict[str, str], folder: str) -> Any:
        """Start the command, and wait for its end: its status, and the last line of its stderr."""
        import asyncio

        process = await asyncio.create_subprocess_exec(
            *argv,
            env=os.environ | environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._process = process
        tail = b""
        assert process.stderr is not None
        while data := await process.stderr.read(65536):
            tail = (tail + data)[-LAST_WORDS_BYTES:]
        lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
        words = lines[-1].strip().removeprefix("precompute: ") if lines else ""
        return await process.wait(), words

    async def ping(self) -> None:
        """It was placed, and answers."""

    async def end(self) -> None:
        """Have the process end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), REACHED_S).close()


def _line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(exc).__name__
