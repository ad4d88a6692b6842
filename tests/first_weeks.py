"""First weeks: what people do before and beside the week of :mod:`tests.journey`: begin by
``init``, bring their own models, ask endpoints, work in Python, test their service, and grow into
an object store and a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save_file

from precompute.store.doors import COMMANDS, MODELS, NAMES, ROOTS
from tests import REPOSITORY
from tests.documents import blocks
from tests.journey import DOUBLED, Journey, Measured, service, write
from tests.object_store import object_store
from tests.online_rig import rigs
from tests.precompute.test_torch_module import STATE, export
from tests.test_models_documented import MADE, VIEWS, write_texts

ITEMS = "item_id,title,price,year\n" + "".join(
    f"{row},{title},{row * 1.5},{1990 + row}\n"
    for row, title in enumerate(["A ship at sea", "Two gardens", "", "The sea again"] * 3)
)
TEMPLATES = ("embeddings", "scores", "features", "model")

WITH_PANDAS = str(REPOSITORY)
"""The path of processes that have it: those of tests do without, which is quicker, but catboost and
notebooks need it."""


def spent(folder: Path) -> None:
    """All of it, in folders below."""
    if COMMANDS.is_here("init"):
        begin(Measured(folder / "begin"))
    bring_models(Measured(folder / "models"))
    if MODELS.is_here("chat_endpoint"):
        ask_endpoints(Measured(folder / "endpoints"))
    with_shop = Journey(folder / "python", "table:./online")
    if NAMES.is_here("precompute.OpenProject"):
        work_in_python(with_shop)
    try_a_service(with_shop)
    if ROOTS.is_here("s3"):
        with object_store() as store:
            share_a_root(folder, store.root)
    if "redis" in rigs():
        from precompute.plugins.redis.tests.fixtures import redis_binary
        from precompute.plugins.redis.tests.processes import RedisCluster

        (folder / "nodes").mkdir()
        with RedisCluster(redis_binary(), folder / "nodes", replicas=False) as cluster:
            grow_into_a_cluster(Journey(folder / "cluster", cluster.url()))


def begin(newcomer: Measured) -> None:
    """A project of each template, over a sample or a file; mistakes; and shells that complete."""
    do = newcomer.do
    (newcomer.folder / "items.csv").write_text(ITEMS)
    for template in TEMPLATES:
        do("init", template, "--template", template)
        do("-c", template, "run", "--all")
    do("init", "mine", "--from", "items.csv")
    do("init", "mine", ends=2)
    do("init", "other", "--from", "itmes.csv", ends=2)
    if MODELS.is_here("chat_endpoint"):
        do("init", "asked", "--template", "chat_endpoint")
        do("-c", "asked", "validate", ends=1)
    do("-c", "mine", "new", "view", "worth", "--from", "items.csv", "--template", "scores")
    do("-c", "mine", "run", "worth")
    do("-c", "mine", "validate", "--json")
    do("-c", "mine", "doctor", ends=None)  # it looks at the machine, too
    view = newcomer.folder / "mine/views/worth.yaml"
    view.write_text(view.read_text().replace("ttl:", "tll:"))
    do("-c", "mine", "validate", ends=2)
    for shell in ("bash", "zsh", "fish"):
        do("completion", shell)
    do("completion", "bash", "--", "-c", "mine", "run", "")


def bring_models(people: Measured) -> None:
    """The views of docs/models.md, each a project of its own; trees of the other libraries, modules
    of torch, and a semantic cache. Each computes a miss."""
    people.environment["PYTHONPATH"] = WITH_PANDAS
    for name, make in MADE.items():
        project_of(people.folder / name, {name: VIEWS[name]})
        key = make(people.folder / name)
        people.do("-c", name, "run", name)
        people.do("-c", name, "lookup", name, key)
    people.do("-c", "pair_score", "lookup", "pair_score", "99/99", "--fallback", ends=1)
    folder, views = people.folder / "own", dict[str, str]()
    folder.mkdir()
    for kind in ("xgboost", "catboost"):
        save_trees(folder, kind)
        sql = "SELECT i AS id, i + 20.0 AS age FROM range(40) t(i)"
        trees = {"use": kind, "args": {"path": f"./{kind}.json"}}
        views[kind] = view_of(kind, "id", sql, trees)
    save_file(STATE, folder / "ranker.safetensors")
    export(folder / "ranker.pt2")
    sql = "SELECT i AS id, i + 0.5 AS a, 1.0 AS b, i AS c, i % 3 AS genre FROM range(40) t(i)"
    inputs = {"x": ["a", "b", "c"], "genre": "genre"}
    outputs = {"inputs": inputs, "outputs": {"score": "total"}}
    of_class = {"module": "tests.precompute.test_torch_module:Ranker", "weights": "./ranker.safetensors"}  # fmt: skip
    for name, args in (("module", of_class), ("program", {"module": "./ranker.pt2"})):
        views[name] = view_of(name, "id", sql, {"use": "torch_module", "args": args | outputs})
    write_texts(folder / "titles.parquet", "item_id", "text")
    sql = "SELECT item_id, text FROM read_parquet('titles.parquet')"
    near, label = (
        {"use": "static_embedding", "args": {"path": "../title_vector/potion-base-8M"}},
        {
            "use": "text_classifier",
            "args": {"path": "../review_sentiment/sentiment", "label": "mood"},
        },
    )
    vector = {"embedding": {"dtype": "float16", "dim": 256}}
    moods = {"score": {"dtype": "float32", "dim": 3}, "mood": {"dtype": "string"}}
    by_cosine = {"on": "embedding", "metric": "cosine"}
    views["near"] = view_of("near", "item_id", sql, near, features=vector, index=by_cosine)
    cache = {"view": "near", "threshold": 0.9}
    views["mood"] = view_of("mood", "item_id", sql, label, features=moods, semantic_cache=cache)
    project_of(folder, views)
    own = ("-c", "own")
    people.do(*own, "validate")
    people.do(*own, "run", "--all")
    for name in ("xgboost", "catboost", "module", "program"):
        people.do(*own, "lookup", name, "7")
        people.do(*own, "lookup", name, "999", "--fallback", ends=1)
    people.do(*own, "lookup", "mood", "999", "--fallback", ends=1)
    people.do(*own, "thresholds", "mood", "--rows", "30")
    people.do(*own, "profile", "program", "--rows", "16")
    people.do(*own, "search", "near", "--text", "a heist in the snow")


def project_of(folder: Path, views: dict[str, str]) -> None:
    """A project of these view files, and nothing else set."""
    (folder / "views").mkdir(parents=True, exist_ok=True)
    (folder / "project.yaml").write_text("root: ./var/root\nonline: table:./var/online\n")
    for name, text in views.items():
        (folder / "views" / f"{name}.yaml").write_text(text)


def view_of(name: str, key: str, sql: str, model: dict[str, Any], **more: Any) -> str:
    """The file of a view with a score."""
    view = {
        "name": name,
        "entity": [key],
        "source": {"sql": sql},
        "model": model,
        "features": {"score": {"dtype": "float32"}},
        "ttl": "1d",
        "fallback": {"enabled": True, "deadline": "60s"},
        "gates": {"constant": None},  # made-up weights say the same of many rows
    }
    return yaml.safe_dump(view | more)


def save_trees(folder: Path, kind: str) -> None:
    """A model of the ages of ``users.parquet``, in its library's own file."""
    import numpy as np

    ages = np.arange(18.0, 80.0)[:, None]
    old = (ages[:, 0] > 40).astype(int)
    if kind == "xgboost":
        import xgboost

        data = xgboost.DMatrix(ages, old, feature_names=["age"])
        booster = xgboost.train({"objective": "binary:logistic"}, data, 3)
        booster.save_model(folder / "xgboost.json")
    else:
        import catboost

        model = catboost.CatBoostClassifier(iterations=3, allow_writing_files=False, verbose=False)
        model.fit(catboost.Pool(ages, old, feature_names=["age"]))
        model.save_model(str(folder / "catboost.json"), format="json")


def ask_endpoints(paying: Measured) -> None:
    """Labels and vectors of an OpenAI-compatible service: run, run again from the cache, and a
    budget that is spent."""
    from precompute.plugins.endpoints.tests import test_run
    from precompute.plugins.endpoints.tests.stand_in import StandIn

    project_of(paying.folder, {})
    paying.environment["STAND_IN_KEY"] = test_run.KEY
    labels = paying.folder / "views/labels.yaml"
    with StandIn() as stand_in:
        labels.write_text(test_run.VIEW.format(url=stand_in.url, rows=120, tokens=10**9))
        sql = "SELECT i AS id, 'number ' || i AS text FROM range(50) t(i)"
        model = {"use": "embedding_endpoint", "args": {"url": stand_in.url, "model": "small"}}
        four = {"embedding": {"dtype": "float32", "dim": 4}}
        (paying.folder / "views/vectors.yaml").write_text(
            view_of("vectors", "id", sql, model, features=four)
        )
        paying.do("validate")
        paying.do("run", "labels")
        paying.do("run", "vectors")
        paying.do("run", "labels", "--full")
        paying.do("lookup", "labels", "7", "--json")
        paying.do("profile", "labels", "--rows", "16")
        labels.write_text(test_run.VIEW.format(url=stand_in.url, rows=400, tokens=100))
        paying.do("run", "labels", ends=1)


NOTEBOOK = """
import datetime
import pandas as pd
import precompute as pc

with pc.open(".") as project:
    print(project, project._repr_html_()[:20], project.views)
    for view in ("numbers", "texts"):
        print(project.run(view, progress=False))
    frame = pd.DataFrame({"id": range(50), "x": [i / 2 for i in range(50)]})
    print(project.run("framed", frame=frame))
    print(project.run("framed", frame=frame.assign(x=frame["x"] + (frame["id"] < 3)), accept=["rows"]))
    rows = project.lookup("numbers", [1, 2, 9999])
    print(rows, rows._repr_html_()[:20], len(rows), rows[0], rows["age_s"], [row["key"] for row in rows])
    print(rows.to_pandas(), rows.to_polars(), rows.to_arrow(), rows.to_pylist())
    print(project.lookup("numbers", 7777, inputs={7777: {"x": 4.0}}, fallback=True))
    print(project.search("texts", text="a heist at sea", k=3))
    print(project.search("numbers", key=3, k=2, filter={"double": {"gt": 4}}))
    print(project.history("numbers"), project.history("numbers", 3))
    now = datetime.datetime.now(datetime.UTC)
    print(project.history("numbers", at=now))
    seen = pd.DataFrame({"id": [1, 2], "event_timestamp": [now, now]})
    print(project.get_historical_features(seen, ["numbers"]))
    print(project.get_historical_features(seen, service="both"))
    print(project.service("both", {"id": [1, 7000]}, fallback=True))
    print(project.status())
    for wrong in (lambda: project.run("numers"), lambda: project.lookup("numbers", 1.5)):
        try:
            wrong()
        except pc.PrecomputeError as exc:
            print(exc)
"""

STAND_INS = """
import precompute as pc
from precompute.testing import StandIn

with StandIn() as stand_in, stand_in.client() as client:
    vectors = {i: {"embedding": [float(i), 1.0]} for i in range(1, 9)}
    stand_in.view("near", vectors, features={"embedding": {"dtype": "float32", "dim": 2}}, index={"on": "embedding"})
    stand_in.view("scores", {1: {"score": 0.5}}, model=lambda key, inputs: {"score": inputs["x"]}, inputs={"x": "double"}, ttl_s=60, stale_for_s=60)
    stand_in.service(pc.Service("both", ("id",), (pc.ServicePart("scores", ("score",)),)))
    print(client.search("near", key=3, k=2), client.search("near", vector=[1.0, 1.0], k=2))
    print(client.rows("scores", [1, 2], inputs={"2": {"x": 4.0}}), client.get("scores", [1, 3]))
    print(client.service("both", {"id": [1, 2]}))
    stand_in.put("scores", 3, {"score": 0.25}, age_s=30)
    stand_in.damage("scores", 1)
    stand_in.remove("near", 3)
    stand_in.advance(90)
    print(client.rows("scores", [1, 3]), stand_in.requests[-1])
    stand_in.fail(pc.OverloadedError("later"), times=1)
    stand_in.delay(0.01, times=1)
    print(client.rows("scores", [3]))
    stand_in.heal()
"""  # fmt: skip


def work_in_python(journey: Journey) -> None:
    """A notebook's cells, over a project whose views read SQL and a frame."""
    framed = {"name": "framed", "entity": ["id"], "source": {"frame": ["id", "x"]}}
    framed |= {"model": {"use": "tests.models:Doubler"}, "features": DOUBLED, "ttl": "1d"}
    (journey.folder / "views/framed.yaml").write_text(yaml.safe_dump(framed))
    journey.environment["PYTHONPATH"] = WITH_PANDAS
    journey.script("my_notebook", NOTEBOOK)


def try_a_service(journey: Journey) -> None:
    """The tests of docs/python.md's service, as they stand, and the rest of the stand-in."""
    for text in blocks("docs/python.md", "python"):
        if named := re.match(r"# (shop/\w+\.py)\n", text):
            path = journey.folder / named[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    journey.do("-q", "-p", "no:cacheprovider", "shop", module="pytest")
    if NAMES.is_here("precompute.testing.StandIn"):
        journey.script("stand_ins", STAND_INS)


def share_a_root(folder: Path, root: str) -> None:
    """A host that runs and publishes to an object store, and a replica that follows."""
    runs = Journey(folder / "runs", "table:./online", root=root)
    runs.do("run", "numbers")
    runs.do("backfill", "days", "--from", "2026-01-01", "--to", "2026-01-03", "--max-active", "1")
    write(runs.folder, changed=3)
    runs.do("run", "numbers")
    replica = Journey(folder / "replica", "table:./online", root=root)
    replica.do("validate", "numbers")
    replica.do("lookup", "numbers", "1", ends=None)
    with replica.serving() as url:
        replica.ask(url, "rows")
    runs.do("rollback", "numbers")
    runs.do("status", ends=None)
    runs.do("gc")
    runs.do("verify", "numbers")
    runs.do("doctor", ends=None)
    runs.do("drop", "days", "--yes")


def grow_into_a_cluster(journey: Journey) -> None:
    """What Redis holds on three masters."""
    journey.do("run", "numbers")
    write(journey.folder, changed=3)
    journey.do("run", "numbers")
    journey.do("run", "numbers", "--full")
    journey.do("run", "texts")
    journey.do("lookup", "numbers", "1", "2", "3")
    journey.do("doctor", ends=None)
    service(journey)
    journey.do("rollback", "numbers")
    journey.do("verify", "numbers")
    journey.do("drop", "texts", "--yes")
