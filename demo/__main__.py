"""The demo: real users, items and documents, pre-computed, published and looked up. ``make demo``
runs it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from demo.data import write_docstrings, write_movielens
from demo.evaluate import evaluate
from precompute.jobs import cli
from precompute.jobs.commands.rows import describe_row
from precompute.jobs.commands.run import describe_report
from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import progress_for
from precompute.jobs.run.run_view import run_view
from precompute.jobs.serve.fallback import ViewFallback
from precompute.models.two_tower import train_two_tower
from precompute.store.answers.lookup import Lookup
from precompute.store.doors import COMMANDS
from precompute.store.errors import PrecomputeError
from precompute.store.online.url import open_online_store
from precompute.store.wire.lookup_options import LookupOptions
from precompute.techniques.machine import has_bf16
from precompute.text.bert import kernel

VIEWS = (
    "item_embedding",
    "item_labels",
    "user_vector",
    "item_vector",
    "user_recommendations",
    "doc_embedding",
)
TUNED_ROWS = 128
USER = 42
SENTENCE = "read a file line by line"
NEW_ITEM = {"9999": {"text": "The Imaginary Heist (2026), comedy, crime"}}


def main() -> int:
    """Run the demo and print its transcript; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo")
    parser.add_argument("-c", "--config", default="configs/movielens")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="a miniature: N users and items (at least 50), a third as many documents, one epoch",
    )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="the first N documents instead of all: most of its time is theirs",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="passes of the training over the ratings instead of 20: most of the rest",
    )
    arguments = parser.parse_args()
    if arguments.limit is not None and arguments.limit < 50:
        parser.error(f"--limit: {arguments.limit}: at least 50, of which the demo shows one")
    documents = arguments.documents
    if documents is None and arguments.limit is not None:
        documents = arguments.limit // 3
    epochs = arguments.epochs or (20 if arguments.limit is None else 1)
    started = time.monotonic()
    try:
        project = Project(arguments.config)
        data = (project.folder / project.settings.vars["data"]).resolve()
        prepare(data, arguments.limit, documents, epochs)
        if COMMANDS.is_here("tune"):
            heading("Precision: speed against accuracy, on the documents themselves")
            project = tuned(project)
        heading("The views, one after the other")
        for name in VIEWS:
            print(describe_report(run_view(project, name, progress_for(quiet=True))), flush=True)
        ask(project, data, trained=arguments.limit is None)
    except PrecomputeError as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    print(
        f"\nAll of it took {time.monotonic() - started:.0f} s. `make serve` keeps the answers up at"
        f" http://{project.settings.serve.bind}/"
    )
    return 0


def tuned(project: Project) -> Project:
    """The project, its documents computed in the fastest precision that keeps their neighbours: by
    ``precompute tune``, with those candidates that compile nothing."""
    only = [
        "fp32-onednn",
        *(["bf16-onednn"] if has_bf16() else []),
        *(["bf16-encoder"] if has_bf16() and kernel() else []),
    ]
    named = [word for name in only for word in ("--only", name)]
    command = ["tune", "doc_embedding", "--rows", str(TUNED_ROWS), *named]
    if cli.main(["-c", str(project.folder), *command]):
        raise PrecomputeError("the documents' precision could not be picked")
    return Project(project.folder)


def prepare(
    data: Path, limit: int | None = None, documents: int | None = None, epochs: int = 20
) -> None:
    """Write the input files, with a limit of so many users and items, and train the two-tower."""
    heading("Input")
    started = time.monotonic()
    counts = write_movielens(data, limit)
    documents = write_docstrings(data, documents)
    print(
        f"MovieLens-100k: {counts['users']:,} users, {counts['items']:,} items,"
        f" {counts['ratings']:,} ratings to train on and {counts['held_out']:,} held out (each"
        f" user's latest); standard library: {documents:,} docstrings;"
        f" {time.monotonic() - started:.1f} s"
    )
    started = time.monotonic()
    with duckdb.connect() as connection:
        read = f"FROM read_parquet('{data}/{{}}.parquet')"
        users = connection.sql(
            f"SELECT user_id, age // 5 AS age_group, gender, occupation {read.format('users')}"
            " ORDER BY user_id"
        ).to_arrow_table()
        items = connection.sql(
            f"SELECT item_id, genres, year // 5 AS lustrum {read.format('items')} ORDER BY item_id"
        ).to_arrow_table()
        ratings = connection.sql(
            f"SELECT user_id, item_id {read.format('ratings')}"
        ).to_arrow_table()
    losses: list[float] = []
    train_two_tower(
        data / "two_tower.safetensors",
        users,
        items,
        pairs(users, items, ratings),
        {"user_id": False, "age_group": False, "gender": False, "occupation": False},
        {"item_id": False, "genres": True, "lustrum": False},
        epochs=epochs,
        progress=lambda _, loss: losses.append(loss),
    )
    print(
        f"two-tower: {len(losses)} epochs, loss {losses[0]:.3f} → {losses[-1]:.3f};"
        f" {time.monotonic() - started:.1f} s"
    )


def pairs(users: pa.Table, items: pa.Table, ratings: pa.Table) -> npt.NDArray[np.int64]:
    """[n, 2] row numbers of each rating's user and item."""
    return np.stack(
        [
            np.asarray(pc.index_in(ratings["user_id"], users["user_id"].combine_chunks())),
            np.asarray(pc.index_in(ratings["item_id"], items["item_id"].combine_chunks())),
        ],
        axis=1,
    ).astype(np.int64)


def ask(project: Project, data: Path, trained: bool = True) -> None:
    """Look things up and print the answers; a two-tower that was trained must beat the most popular
    items."""
    items = pq.read_table(data / "items.parquet")
    titles = {
        i: f"{t} ({y})" if y else t
        for i, t, y in zip(
            *(items[c].to_pylist() for c in ("item_id", "title", "year")), strict=True
        )
    }
    fallback = ViewFallback(project.offline, project.home)
    lookup = Lookup(open_online_store(project.online), project.root, fallback)
    try:
        heading(f"Ten recommendations for user {USER}")
        row = lookup.row("user_recommendations", USER)
        for rank, (item, score) in enumerate(
            zip(row["features"]["items"][:10], row["features"]["scores"], strict=False), 1
        ):
            print(f"{rank:>2}. {titles[item]:<45} {score:6.2f}")
        heading(f"Documents nearest to {SENTENCE!r}")
        answer = lookup.search("doc_embedding", inputs={"text": SENTENCE}, k=5, deadline_ms=60_000)
        for neighbour in answer["rows"]:
            print(f"{neighbour['score']:.3f}  {neighbour['key']}")
        heading("A lookup, with its freshness")
        print(describe_row(lookup.row("item_embedding", 50)))
        row = lookup.row("item_labels", 50)
        best = sorted(row["features"].items(), key=lambda pair: -pair[1])[:4]
        print(f"{titles[50]}: " + ", ".join(f"{label} {score:.2f}" for label, score in best))
        heading("A fallback: an item that was never in the source, its inputs in the request")
        computed = lookup.begin(
            "item_embedding", list(NEW_ITEM), LookupOptions(inputs=NEW_ITEM, deadline_ms=60_000)
        )
        computed.wait()
        print(describe_row(computed.rows()[0]))
        print(describe_row(lookup.row("item_embedding", 8888)))
        heading("Hit rate@10, leave-one-out over all items")
        ours, baseline = evaluate(lookup, data)
        print(
            f"two-tower, as served: {ours:.4f}   most popular: {baseline:.4f}   →"
            f" {ours / baseline:.2f} times the baseline"
        )
        if trained and ours <= baseline:
            raise PrecomputeError(
                "the two-tower does not beat the most popular items: something is wrong with"
                " training or serving"
            )
    finally:
        fallback.close()
        lookup.close()


def heading(text: str) -> None:
    """An underlined line."""
    print(f"\n{text}\n{'─' * len(text)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
