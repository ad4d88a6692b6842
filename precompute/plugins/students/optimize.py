"""Optimize: makes students of a view's model from what it published, cheaper models that
approximate it, and judges them on rows they never saw. Nothing goes live by itself."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from precompute.jobs.config.project import Project, read_tuning, write_tuning
from precompute.jobs.run.rows.open_view import OpenView
from precompute.model import KeepingModel, absolute_arguments, starting_from
from precompute.plugins.students.judge import (
    SEED,
    Judge,
    PublishedRows,
    Trial,
    as_published,
    published_rows,
)
from precompute.plugins.students.student import (
    CARD,
    FOLDER,
    MODEL,
    RECORD,
    Student,
    read_student,
    recipes,
    student_bytes,
)
from precompute.plugins.students.training import MAX_ROWS, Lesson, Recipe
from precompute.registry import described
from precompute.store.disk.durable_file import (
    disk_message,
    make_folder,
    replace_durably,
)
from precompute.store.disk.lease import take
from precompute.store.errors import ConfigError, PrecomputeError, SnapshotError
from precompute.store.times import iso
from precompute.techniques.table import REFERENCE, words

log = logging.getLogger(__name__)

LEAST_WITHIN_S = 10.0
"""For making students, at least: in less they learn next to nothing, and stay so."""
LEAST_ROWS = 500
"""Rows that a student is made from, at least."""


def optimize(
    project: Project,
    name: str,
    *,
    by: str | None = None,
    purpose: str | None = None,
    within_s: float = 1200.0,
    announce: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Make students of a view's model, judge them beside it, and add them to its tuning file.

    Args:
        name: of a view that is published.
        by: how, one of :data:`precompute.plugins.students.student.BY`; by default all that fit the
            model.
        purpose: ``batch`` or ``fallback``; by default both.
        within_s: seconds for making all of them; judging and measuring come on top.
        announce: called with what begins, and with progress.

    Returns:
        ``view``, ``snapshot``, ``learned_rows``, ``held_out_rows``, ``file``, ``folder``;
        ``students``: of the teacher and of each student ``name``, ``by``, ``folder``, ``path`` (of
        that, from the project's), ``make_s``, ``rows_per_s``, ``speed`` (times the teacher's),
        ``batch_ms`` and ``miss_ms`` (``p50``, ``p95``, ``p99``), ``memory_bytes``, ``accuracy``
        (figures by feature), ``agreement`` and ``promised``, ``rejected_rows`` (of those held out
        and judged, left out of the figures), ``beyond`` (why it is not within the view's accuracy,
        or null) and ``refused`` (why none was made, or null); ``picked`` and
        ``behind_misses``: the fastest within the view's accuracy, and the one that promises most
        of those that answer a miss in half the teacher's time and promise more than
        :data:`GOOD_ENOUGH`, or null.

    Raises:
        ConfigError: there is nothing to learn from, no such student, or next to no time; the tuning
            file is damaged; see :func:`precompute.plugins.students.judge.published_rows`.
        SnapshotError: nothing is live, or a file cannot be read or written.
        ConflictError: students of this view are being made.
        SourceError, ModelError: as a run would.
    """
    until = time.monotonic() + within_s
    wanted = _wanted(by, purpose, within_s)
    config = project.view(name)
    # found to be damaged before hours of training, not after
    read_tuning(project.folder, name, project.model_as_written(name))
    busy = f"view {name!r}: its students are being made: wait for that `precompute optimize`"
    with (
        as_published(project, name) as (opened, snapshot),
        take(opened.compiled, FOLDER, "optimize", busy=busy),
    ):
        _check_teacher(opened)
        announce(f"reading rows of snapshot {snapshot.number} and their inputs")
        # a tenth of them is held out
        most = MAX_ROWS + MAX_ROWS // 9
        rows = published_rows(project, opened, snapshot, most, LEAST_ROWS)
        judge = Judge(opened, rows, config)
        trials = _trials(Workshop(project, opened, rows, announce), judge, wanted, until)
        judge.measure([trial for trial in trials if trial.line["refused"] is None], announce)
    lines = [trial.line for trial in trials]
    outcome = {
        "snapshot": snapshot.number,
        "learned_rows": rows.learned.num_rows,
        "held_out_rows": rows.held_out.num_rows,
        "at": iso(datetime.now(UTC).replace(microsecond=0)),
        **_picked(lines),
        "students": lines,
    }
    return {"view": name, "file": _write(project, name, outcome), "folder": FOLDER, **outcome}


def _wanted(by: str | None, purpose: str | None, within_s: float) -> list[Recipe]:
    if within_s < LEAST_WITHIN_S:
        raise ConfigError(
            f"--within: {within_s:g} s: students learn next to nothing in less than"
            f" {LEAST_WITHIN_S:g} s, and what was made is not made again"
        )
    wanted = recipes(by, purpose)
    if not wanted:
        ways = dict.fromkeys(recipe.by for recipe in recipes(None, purpose))
        raise ConfigError(
            f"no student is made by {by} for {purpose}: --for {purpose} goes with --by"
            f" {', '.join(ways)}, or without"
        )
    return wanted


def _check_teacher(opened: OpenView) -> None:
    """Raises:
    ConfigError: nothing is cheaper, or judging costs money.
    """
    if opened.view.definition.model.use == "columns":
        raise ConfigError(
            f"{opened.place('model', 'use')}: SQL alone computes this view, and nothing is cheaper"
        )
    if isinstance(opened.model, KeepingModel):
        raise ConfigError(
            f"{opened.place('model', 'use')}: a service computes this view, and each row that a"
            " student is judged on would be paid for"
        )


def _trials(
    workshop: Workshop, judge: Judge, wanted: Sequence[Recipe], until: float
) -> list[Trial]:
    """The teacher and all students on trial; those that are made share the time."""
    trials = [judge.teacher()]
    refused = [_refusal(workshop, recipe) for recipe in wanted]
    for number, recipe in enumerate(wanted):
        share_s = (until - time.monotonic()) / max(1, refused[number:].count(""))
        trials.append(_tried(workshop, judge, recipe, time.monotonic() + share_s, refused[number]))
    return trials


def _refusal(workshop: Workshop, recipe: Recipe) -> str:
    """Why no student is made by a recipe, in words; an empty text where one is tried."""
    try:
        return recipe.refuses(workshop.lesson(recipe, time.monotonic()))
    except Exception as exc:
        return _why(recipe, exc)


def _tried(workshop: Workshop, judge: Judge, recipe: Recipe, until: float, refused: str) -> Trial:
    """A student on trial; one that cannot be made has the reason in its line, whatever it is: the
    others are made all the same."""
    line = {"name": recipe.name, "by": recipe.by, "folder": None, "path": None, "make_s": None}
    try:
        if not refused:
            folder, student = workshop.student(recipe, until, judge)
            return judge.tried(line, folder, student)
    except SnapshotError:
        raise
    except Exception as exc:
        refused = _why(recipe, exc)
    return Trial(line | {"refused": refused}, workshop.opened.model)


def _why(recipe: Recipe, exc: Exception) -> str:
    """The words of an error of ours; of any other, which is a mistake here, also in the log."""
    if isinstance(exc, PrecomputeError):
        return str(exc)
    log.error("student %s cannot be made", recipe.name, exc_info=exc)
    return described(exc)


class Workshop:
    """Where students of a view's model are made, each in a folder of its own.

    Args:
        project: whose ``students`` they are put into.
        opened: the view, as its live snapshot was computed.
        rows: to learn from.
        announce: called with progress.
    """

    def __init__(
        self,
        project: Project,
        opened: OpenView,
        rows: PublishedRows,
        announce: Callable[[str], None],
    ) -> None:
        self._project, self.opened, self._rows, self._announce = project, opened, rows, announce

    def lesson(self, recipe: Recipe, until: float) -> Lesson:
        """What a student of a recipe learns from."""
        opened, use = self.opened, self.opened.view.definition.model.use
        model = opened.model
        return Lesson(
            opened.view,
            model,
            use,
            {**absolute_arguments(opened.view.definition.model.args, opened.folder)},
            self._rows.learned,
            SEED,
            until,
            self._place(recipe) / "checkpoints",
            self._announce,
        )

    def _place(self, recipe: Recipe) -> Path:
        """Where it is made, and continued after it was stopped."""
        return self.opened.compiled / FOLDER / f"{recipe.name}-{self._rows.data[:12]}"

    def student(self, recipe: Recipe, until: float, judge: Judge) -> tuple[Path, Student]:
        """The folder and record of a student; made, unless it is there.

        Raises:
            ConfigError: its folder is there, and damaged.
            ModelError: it cannot be made.
            SnapshotError: it cannot be written.
        """
        snapshot, name = self._rows.snapshot, self.opened.view.name
        folder = self._project.home / FOLDER / f"{name}-{recipe.name}-{snapshot.number}"
        if folder.exists():
            student = read_student(folder)
            if student.approximates != snapshot.model or student.data != self._rows.data:
                raise ConfigError(
                    f"{folder} is a student of other rows than those that are published and have"
                    f" their inputs still: publish again (`precompute run {name}`) and optimize,"
                    " which makes one of the new snapshot; or remove the folder, unless a view uses"
                    " it"
                )
            self._announce(
                f"{recipe.name}: is there already, made in {student.made_s:,.0f} s, and judged"
                f" again: remove {folder} to make it for longer"
            )
            return folder, student
        self._announce(f"{recipe.name}: making it of {self._rows.learned.num_rows:,} rows")
        started = time.monotonic()
        place = self._place(recipe)
        try:
            make_folder(place / "checkpoints")
            with starting_from(self.opened.folder):
                made = recipe.make(self.lesson(recipe, until), place)
            made_s = made.earlier_s + time.monotonic() - started
            student = judge.student(recipe, made, place, made_s)
            self._put(place, folder, student)
        except OSError as exc:
            raise SnapshotError(disk_message(place, exc, "no student was made")) from exc
        shutil.rmtree(place, ignore_errors=True)
        return folder, student

    def _put(self, place: Path, folder: Path, student: Student) -> None:
        """The model's files and what is known of it, as one folder that is there whole or not at
        all."""
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
        try:
            for file in sorted((place / MODEL).rglob("*")):
                # hidden is what a killed process was writing
                if file.is_file() and not file.name.startswith("."):
                    target = partial / file.relative_to(place)
                    make_folder(target.parent)
                    shutil.copyfile(file, target)
            (partial / CARD).write_text(card(student, folder), encoding="utf-8")
            # last: a model that a loss of power cut short has no longer the record's fingerprint
            replace_durably(partial / RECORD, student_bytes(student))
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


WORTHWHILE = 1.05
"""Times the teacher's rate: less is noise."""
QUICKER = 2.0
"""Times that a student must answer a miss faster than its teacher, to stand behind misses."""
GOOD_ENOUGH = 0.5
"""What it must promise besides: an answer that is more wrong than right is worth less than none."""


def _picked(lines: list[dict[str, Any]]) -> dict[str, str | None]:
    """The fastest student within the view's accuracy, and the one for misses."""
    made = [line for line in lines[1:] if line["refused"] is None]
    within = [line for line in made if not line["beyond"] and line["speed"] >= WORTHWHILE]
    most_ms = lines[0]["miss_ms"]["p50"] / QUICKER

    def promises(line: Mapping[str, Any]) -> float:
        return min(map(float, line["promised"].values()))

    quick = [line for line in made if line["miss_ms"]["p50"] <= most_ms]
    good = [line for line in quick if promises(line) > GOOD_ENOUGH]
    best = max(within, key=lambda line: float(line["speed"]), default=None)
    behind = max(good, key=promises, default=None)
    return {
        "picked": None if best is None else best["name"],
        "behind_misses": None if behind is None else behind["name"],
    }


def _write(project: Project, name: str, outcome: dict[str, Any]) -> str:
    """Write the outcome into the view's tuning file, beside what ``tune`` measured; a student that
    is not among them stays with what was measured of it before."""
    model = project.model_as_written(name)
    tuning = read_tuning(project.folder, name, model)
    if tuning is None:
        precision, backend = words(REFERENCE)
        tuning = {"picked": REFERENCE, "precision": precision, "backend": backend, "measured": []}
    kept, models = dict(outcome), outcome["students"]
    del kept["students"]
    before, now = tuning.get("optimized", {}), {line["name"] for line in models}
    if before.get("snapshot") == outcome["snapshot"]:
        models = models + [one for one in before.get("models", [])[1:] if one["name"] not in now]
    optimized = kept | {"models": models}
    return str(write_tuning(project.folder, name, model, {**tuning, "optimized": optimized}))


def card(student: Student, folder: Path) -> str:
    """What people read of a student: what it is, how well it agrees, and how it is used."""
    path = f"{FOLDER}/{folder.name}"
    lines = [
        f"# {folder.name}",
        "",
        f"A student of view `{student.view}`, made by `precompute optimize` ({student.by}). It"
        f" approximates the model with fingerprint `{student.approximates[:12]}`, as of snapshot"
        f" {student.snapshot}. Its own fingerprint is `{student.fingerprint[:12]}`.",
        "",
        f"It learned from {student.learned_rows:,} rows in {student.made_s:,.0f} s, and was judged"
        f" on others: {student.held_out_rows:,} were held out. Seed {student.seed}."
        + f" It rejected {student.rejected_rows:,} of them."
        * bool(student.rejected_rows),
        "",
        "| feature | figure | held-out rows | promised of others |",
        "|---|---|---|---|",
    ]
    for name, one in student.agreement.items():
        lines.append(f"| {name} | {one.figure} | {one.value:.4f} | {one.promised:.4f} |")
    for name, figures in student.figures.items():
        lines += [f"| {name} | {figure} | {value:.4f} | |" for figure, value in figures.items()]
    args = ", ".join(
        f"{key}: {json.dumps(f'./{path}/{value[2:]}' if str(value)[:2] == './' else value)}"
        for key, value in student.args.items()
    )
    how = ""
    if student.technique is not None:
        precision, backend = words(student.technique)
        how = f", precision: {precision}, backend: {backend}"
    return "\n".join(
        [
            *lines,
            "",
            "Behind misses alone:",
            "",
            "```yaml",
            f"fallback: {{enabled: true, model: {path}}}",
            "```",
            "",
            "As the view's model, which computes all rows again, under the view's gates:",
            "",
            "```yaml",
            f"model: {{use: {student.use}, args: {{{args}}}{how}}}",
            "```",
            "",
        ]
    )
