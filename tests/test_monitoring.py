"""Alert rules and the dashboard: they ask for what is counted, by labels that it has, and the rules
fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import yaml

from precompute.store.doors import METRICS
from precompute.store.http.telemetry.instruments import Kind, every_instrument
from tests import REPOSITORY

ALERTS = REPOSITORY / "configs" / "monitoring" / "alerts.yaml"
DASHBOARD = REPOSITORY / "configs" / "monitoring" / "dashboard.json"
GROUPS: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
PANELS: list[dict[str, Any]] = [
    panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"
]
SUFFIXES = {
    Kind.COUNTER: ("_total",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    Kind.GAUGE: ("",),
    Kind.HIGHEST: ("",),
}
LABELS = {
    instrument.name + suffix: {
        *instrument.labels,
        "instance",
        "job",
        *(("le",) if suffix == "_bucket" else ()),
    }
    for instrument in every_instrument().values()
    for suffix in SUFFIXES[instrument.kind]
}
"""Of every series: those it is counted by, and those that Prometheus adds."""
ABSENT = [f"precompute_{power}_" for power in METRICS.known() if not METRICS.is_here(power)]
"""What the names begin with of what powers would count that are not here."""


def expressions() -> Iterator[tuple[str, str]]:
    every = [(rule["alert"], rule["expr"]) for rule in RULES]
    every += [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
    for title, expression in every:
        if not any(name in expression for name in ABSENT):
            yield title, expression


def test_what_is_queried_is_counted_by_the_labels_it_is_queried_by() -> None:
    for title, expression in expressions():
        used = re.findall(r"\b(precompute_\w+)(?:\{([^}]*)\})?", expression)
        assert used, title
        for name, matchers in used:
            assert name in LABELS, name
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= LABELS[name], matchers
        # what is grouped by is a label of everything in the expression
        for labels in re.findall(r"\bby \(([^)]*)\)", expression):
            for label in labels.split(","):
                assert all(label.strip() in LABELS[name] for name, _ in used), label


def test_every_rule_says_how_bad_it_is_what_it_means_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_every_instrument_is_on_the_dashboard() -> None:
    """What is counted and never shown need not be counted."""
    shown = " ".join(expression for _, expression in expressions())
    assert {name for name in every_instrument() if name not in shown} == set()


def test_panels_do_not_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_the_rules_fire_when_they_should_and_not_otherwise() -> None:
    """By Prometheus's own tool where it is installed; the cases name every rule there is in any
    case."""
    cases = yaml.safe_load((REPOSITORY / "tests" / "alerts_test.yaml").read_text())["tests"]
    fired = [sample["labels"] for sample in cases[-1]["promql_expr_test"][0]["exp_samples"]]
    assert {label[len('{alertname="') : -2] for label in fired} == {rule["alert"] for rule in RULES}
    promtool = shutil.which("promtool")
    if promtool is not None:
        for command in (
            ["check", "rules", str(ALERTS)],
            ["test", "rules", "tests/alerts_test.yaml"],
        ):
            done = subprocess.run(
                [promtool, *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stdout + done.stderr
