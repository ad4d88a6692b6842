"""Doctor: checks the machine, the installation and a project's stores. Each line says what was
found, what it costs, and what to do."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from precompute.jobs.config.project import Project
from precompute.store.disk.storage import known_identity
from precompute.store.doors import GROUP, KNOWN
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    PrecomputeError,
    nearest_or_all,
)
from precompute.store.online import kernels
from precompute.store.online.url import open_online_store, shown_url, table_folder
from precompute.store.times import parsed_time, shown_time

DISTRIBUTION = "precompute-store"
LEAST_FREE_BYTES, LEAST_FREE_SHARE = 2**29, 0.02
LEAST_INODES = 10_000
LEAST_FILES = 1024
"""Handles: a server has one for each connection, and DuckDB one for each file that it reads."""
MOST_OFF_S = 1.0
"""Difference of two clocks, in s, beyond which it is reported: leases and ages compare times that
different machines wrote down."""


@dataclass(frozen=True, slots=True)
class Line:
    """What was looked at, and found: ``ok``; ``slow``, which works, at a cost; or ``bad``, which
    will fail. ``remedy`` is empty where nothing need be done."""

    check: str
    status: Literal["ok", "slow", "bad"]
    found: str
    remedy: str = ""


def _judged(check: str, bad: bool, found: str, remedy: str) -> Line:
    """Bad, with what to do; or ok."""
    return Line(check, "bad", found, remedy) if bad else Line(check, "ok", found)


def examine(project: Project | ConfigError | None) -> Iterator[Line]:
    """Look at the machine and the installation and, where there is one, at a project's disk, online
    store and clock; or say what is wrong with its configuration."""
    looks: list[Callable[[], Iterator[Line]]] = [
        _python,
        _libraries,
        _packages,
        _extensions,
        _processor,
        _gpu,
        _limits,
    ]
    if isinstance(project, Project):
        looks += [
            lambda: _project(project),
            lambda: _disk(project),
            lambda: _online(project),
            lambda: _clock(project),
        ]
    for look in looks:
        yield from look()
    if isinstance(project, ConfigError):
        yield Line(
            "configuration",
            "bad",
            str(project),
            "mend the file; `precompute validate` checks more of it",
        )


# ---- the installation


def _python() -> Iterator[Line]:
    wanted = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    version = platform.python_version()
    wrong = not all(_meets(version, part) for part in wanted.split(","))
    found = f"precompute-store {metadata.version(DISTRIBUTION)}, Python {version}"
    yield _judged("versions", wrong, found, f"make an environment with a Python that is {wanted}")


def _libraries() -> Iterator[Line]:
    """What the extras ``engine`` and ``cpu`` need, by the distribution's own words."""
    wrong, there = [], []
    for line in metadata.requires(DISTRIBUTION) or ():
        need, _, marker = line.partition(";")
        if "extra" in marker and not re.search(r"extra == ['\"](engine|client)['\"]", marker):
            continue
        name = re.split(r"[^\w.-]", need.strip())[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        there.append(f"{name} {version}")
        bounds = re.findall(r"[<>=!]=?[\d.]+", need)
        if not all(_meets(version, bound) for bound in bounds):
            wrong.append(f"{name} is {version}, and is to be {','.join(bounds)}")
    if util.find_spec("faiss") is None:
        wrong.append("FAISS is not installed, which searches")
    shown = ("torch", "duckdb", "pyarrow", "transformers", "redis")
    named = ", ".join(text for text in there if text.split()[0] in shown)
    found = "; ".join(wrong) or f"{len(there)} of {len(there)} are there: {named}"
    remedy = "pip install 'precompute-store[cpu]', or [gpu]"
    yield _judged("libraries", bool(wrong), found, remedy)


def _packages() -> Iterator[Line]:
    """What other packages bring, and names of theirs that nothing will ever open."""
    doors = {door.replace(" ", "-"): ways for door, ways in KNOWN.items()}
    there, wrong = [], []
    for point in sorted(metadata.entry_points(group=GROUP)):
        door, _, name = point.name.partition(".")
        named = f"{point.name} of {'?' if point.dist is None else point.dist.name}"
        if door not in doors:
            wrong.append(f"{named}: there is no door {door!r}{nearest_or_all(door, doors)}")
        elif name in doors[door]:
            wrong.append(f"{named}: {name!r} is ours, and stays so")
        else:
            there.append(named)
    if there or wrong:
        yield _judged(
            "plug-ins of others",
            bool(wrong),
            "; ".join(wrong or there),
            "have that package name it otherwise (docs/extend.md), or take it out",
        )


def _meets(version: str, bound: str) -> bool:
    """Whether a version is within one bound, such as ``>=3.11``; what is no number in it does not
    count."""
    found = re.fullmatch(r"\s*([<>=!]=?)\s*([\d.]+)\s*", bound)
    if found is None:
        return True
    have, limit = (
        [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]]
        for text in (version, found[2])
    )
    size = max(len(have), len(limit))
    have, limit = have + [0] * (size - len(have)), limit + [0] * (size - len(limit))
    return {
        ">=": have >= limit,
        "<": have < limit,
        "<=": have <= limit,
        ">": have > limit,
        "==": have == limit,
        "!=": have != limit,
    }[found[1]]


def _extensions() -> Iterator[Line]:
    compiler = "a C compiler" if shutil.which("cc") is None else "the C compiler that is here"
    again = (
        f"install it again with {compiler}: pip install --force-reinstall --no-deps"
        " precompute-store"
    )
    texts = util.find_spec("precompute.text._encoder") is not None
    for what, built, cost in (
        ("lookups", kernels.COMPILED, "a lookup of 100 rows takes 0.6 ms more, in plain Python"),
        (
            "text",
            texts,
            "no bf16-encoder, which computes texts 1.6 times as fast as the best of torch",
        ),
    ):
        check = f"extension for {what}"
        yield (
            Line(check, "ok", "built")
            if built
            else Line(check, "slow", f"not built: {cost}", again)
        )


# ---- the machine


def _processor() -> Iterator[Line]:
    from precompute.engine.resources import allowed

    cores = allowed()
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        found = re.search(
            r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        flags = set(found[1].split()) if found else set()
    names = ["avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"]
    names += ["asimd", "bf16", "i8mm", "sve"]
    have = ", ".join(name for name in names if name in flags)
    have = have or "no vector instructions that are known here"
    if flags and not flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        more = "no bfloat16: precision bf16 is emulated, and slower than fp32"
        yield Line(
            "processor",
            "slow",
            f"{cores} cores; {have}; {more}",
            "leave `precision` at auto: `precompute tune VIEW` measures what is fastest here",
        )
    else:
        yield Line("processor", "ok", f"{cores} cores; {have}")


def _gpu() -> Iterator[Line]:
    if util.find_spec("torch") is None:
        return
    # torch takes a second to import
    from precompute.models.device import gpu_count

    count = gpu_count()
    if count:
        yield Line("GPU", "ok", f"{count} that torch can compute on")
        return
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if driver:
        yield Line(
            "GPU",
            "slow",
            "there is a driver, and torch sees none",
            "install torch for CUDA: pip install 'precompute-store[gpu]'",
        )
    else:
        yield Line("GPU", "ok", "none: models compute on the CPU")


def _limits() -> Iterator[Line]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < LEAST_FILES
    found = f"{soft:,} file handles (at most {hard:,})"
    remedy = f"ulimit -n {LEAST_FILES}, or LimitNOFILE in its systemd unit"
    yield _judged("limits", few, found, remedy)


# ---- a project


def _project(project: Project) -> Iterator[Line]:
    from precompute.engine.resources import available_bytes

    mistakes = [*map(str, project.broken.values()), *project.service_mistakes()]
    for mistake in mistakes:
        yield Line("configuration", "bad", mistake, "mend the file")
    if not mistakes:
        views = ", ".join(project.names)
        yield Line("configuration", "ok", f"{project.folder / 'project.yaml'}, views: {views}")
    memory, wanted = available_bytes(), project.settings.memory_mb * 2**20
    found = f"{_gb(memory)} available, memory_mb is {project.settings.memory_mb:,}"
    remedy = "lower memory_mb, or free some: a run takes so much, and its model"
    yield _judged("memory", wanted > memory, found, remedy)


def _disk(project: Project) -> Iterator[Line]:
    online = table_folder(project.online)
    places = {
        "root": project.root,
        **({} if online is None else {"online": Path(online)}),
        "TMPDIR": Path(tempfile.gettempdir()),
    }
    for name, place in places.items():
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        try:
            left = os.statvfs(there)
            # a file without a name leaves nothing behind
            tempfile.TemporaryFile(dir=there).close()
        except OSError as exc:
            yield Line(
                f"disk ({name})",
                "bad",
                f"{there} cannot be written: {exc.strerror}",
                "give the user who runs this the right to it",
            )
            continue
        free, total = left.f_bavail * left.f_frsize, left.f_blocks * left.f_frsize
        full = free < LEAST_FREE_BYTES or free < LEAST_FREE_SHARE * total
        remedy = "free some: `precompute gc` removes what nothing can reach"
        remedy = "point TMPDIR elsewhere" if name == "TMPDIR" else remedy
        found = f"{_gb(free)} of {_gb(total)} free at {there}"
        yield _judged(f"disk ({name})", full, found, remedy)
        # some file systems count no inodes
        if left.f_files:
            few, found = left.f_favail < LEAST_INODES, f"{left.f_favail:,} free"
            found += f" at {there}" if few else ""
            remedy = "remove small files, or make the file system again with more"
            yield _judged(f"inodes ({name})", few, found, remedy)


def _online(project: Project) -> Iterator[Line]:
    try:
        with contextlib.closing(open_online_store(project.online)) as store:
            for server in store.servers():
                yield Line(server.what, "ok", f"{server.where}: {server.found}")
                if server.ahead_s is not None:
                    yield _clock_line(
                        f"clock of {server.what}", server.ahead_s, f"at {server.where}"
                    )
            for name in project.names:
                store.check_writable(name, known_identity(project.root) or "without a name yet")
            yield Line(
                "online store",
                "ok",
                f"{shown_url(project.online)}: there, with all rights that publishing and reading"
                " need",
            )
    except ConflictError as exc:
        yield Line("online store", "bad", str(exc))
    except PrecomputeError as exc:
        yield Line(
            "online store",
            "bad",
            str(exc),
            "look at `online` in project.yaml; docs/redis.md has the rights that a user needs",
        )


def _clock(project: Project) -> Iterator[Line]:
    now = datetime.now(UTC)
    if now.year < 2024:
        yield Line("clock", "bad", f"it says {shown_time(now)}", "set it: timedatectl set-ntp true")
        return
    there = next(folder for folder in (project.root, *project.root.parents) if folder.exists())
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=there) as file:
        before = time.time()
        file.write(b".")
        file.flush()
        yield _clock_line(
            "clock of the disk", os.fstat(file.fileno()).st_mtime - before, f"where {there} lies"
        )
    # what was written is not from the future
    with contextlib.suppress(PrecomputeError):
        written = [
            report.finished_at
            for name in project.names
            for report in project.offline.view(name).runs.reports(1)
        ]
        latest = max(
            (at for text in written if text and (at := parsed_time(text)) is not None), default=None
        )
        if latest is not None and (latest - now).total_seconds() > MOST_OFF_S:
            yield Line(
                "clock",
                "bad",
                f"it says {shown_time(now)}, and a run ended at {shown_time(latest)}",
                "it was set back: timedatectl set-ntp true",
            )
            return
    yield Line("clock", "ok", shown_time(now))


def _clock_line(check: str, ahead_s: float, where: str) -> Line:
    off = abs(ahead_s) > MOST_OFF_S
    found = (
        f"{abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'} {where}"
        if off
        else f"agrees with the one {where}"
    )
    remedy = "keep both machines' clocks by NTP: leases and ages compare their times"
    return _judged(check, off, found, remedy)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB"
