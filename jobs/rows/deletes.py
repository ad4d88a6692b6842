"""Deletes: which rows of a run's parent, and of the chunks it took over, are no rows of its result."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.diff import find_deletes
from precompute.jobs.process.job import Job
from precompute.jobs.rows.chunks import stored_key
from precompute.jobs.rows.open_view import OpenView
from precompute.jobs.rows.plan import Plan
from precompute.store.offline.snapshot import DELETES_SCHEMA, Part


def write_deletes(job: Job, opened: OpenView, plan: Plan, parts: list[Part]) -> tuple[Part | None, int]:
    """Write ``deletes.parquet``, if there is anything to delete.

    Args:
        job: the run.
        opened: its view; its source holds what was found to be replaced.
        plan: of the run.
        parts: of the run, taken over ones among them; those of which not one row is wanted any more are taken out of the list.

    Returns:
        the file, and how many of its rows are of the chunks taken over.

    Raises:
        SnapshotError: the file system failed.
    """
    if plan.parent is None and not plan.diff.resumed:
        return None, 0
    dead = find_deletes(opened.source)
    if not plan.diff.resumed:
        dead = dead.filter(pc.invert(dead.column("finished")))
    if not dead.num_rows:
        return None, 0
    inherited = [] if plan.parent is None else _relative(job, plan)
    taken_over = [chunk.part for chunk in plan.finished if chunk.part is not None]
    number = np.asarray(dead.column("file")) + np.where(np.asarray(dead.column("finished")), len(inherited), 0)
    counts = np.bincount(number, minlength=len(inherited) + len(taken_over))[len(inherited) :]
    useless = {part.path for part, rows in zip(taken_over, counts.tolist(), strict=True) if rows == part.rows}
    if useless:
        parts[:] = [part for part in parts if part.path not in useless]
        keep = ~np.isin(number, [len(inherited) + i for i, part in enumerate(taken_over) if part.path in useless])
        dead, number = dead.filter(pa.array(keep)), number[keep]
        if not dead.num_rows:
            return None, 0
    paths = pa.array([*inherited, *(part.path for part in taken_over)], pa.string())
    files = pa.DictionaryArray.from_arrays(pa.array(number, pa.int32()), paths)
    keys = {f"key_{name}": stored_key(dead.column(f"key_{name}").combine_chunks()) for name in opened.view.entity}
    columns = [files, dead.column("row"), dead.column("removed"), *keys.values()]
    table = pa.Table.from_arrays(columns, names=[*DELETES_SCHEMA.names, *keys])
    own = int(pc.sum(dead.column("finished")).as_py() or 0)
    return job.store.write_part(job.report.run, "deletes.parquet", table), own


def _relative(job: Job, plan: Plan) -> list[str]:
    """Paths of the parent's parts, as manifests name them."""
    assert plan.parent is not None
    folder = job.store.folder.absolute()
    return [str(path.relative_to(folder)) for path in job.store.part_paths(plan.parent)]
