"""The README is true: the demo runs, every command in it works, its example project works as printed, and its tree names every file."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobs.cli import _parser

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PRECOMPUTE = [sys.executable, "-m", "jobs.cli"]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], str]:
    """(environment that points the demo's project at a folder of the test, what the demo printed)."""
    var = tmp_path_factory.mktemp("demo")
    overrides = {"PRECOMPUTE_ROOT": str(var), "PRECOMPUTE_ONLINE": f"lmdb:{var}/online", "PRECOMPUTE_VARS__DATA": f"{var}/data"}
    environment = os.environ | overrides | {"PRECOMPUTE_SERVE__BIND": "127.0.0.1:0"}
    done = run([sys.executable, "-m", "jobs.demo", "-c", "configs/movielens"], environment, timeout_s=600)
    assert done.returncode == 0, done.stderr
    return environment, done.stdout


def run(
    command: Sequence[str], environment: dict[str, str], timeout_s: float = 120, cwd: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)


class Running:
    """A command that runs until SIGTERM; ``first`` is its first line."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.mark.timeout(700)
def test_the_demo_prints_what_it_promises(demo: tuple[dict[str, str], str]) -> None:
    _, printed = demo
    published = re.findall(r"^(\w+): published, snapshot 1, ([\d,]+) of ([\d,]+) rows, [\d,]+ rows/s", printed, re.MULTILINE)
    views = ["item_embedding", "item_labels", "user_vector", "item_vector", "user_recommendations", "doc_embedding"]
    assert [name for name, _, _ in published] == views
    assert [int(rows.replace(",", "")) for _, rows, _ in published[:5]] == [1682, 1682, 943, 1682, 943]
    assert all(written == source for _, written, source in published)
    assert len(re.findall(r"^ ?\d+\. .+ -?\d+\.\d\d$", printed, re.MULTILINE)) == 10
    assert "50: fresh from store" in printed
    assert "9999: computed from fallback" in printed
    assert "8888: missing (unknown_entity)" in printed
    ours, baseline = map(float, re.search(r"as served: (0\.\d+)   most popular: (0\.\d+)", printed).groups())  # type: ignore[union-attr]
    assert ours > 1.2 * baseline > 0


@pytest.mark.timeout(400)
def test_every_command_of_the_readme_works(demo: tuple[dict[str, str], str], redis_url: str, tmp_path: Path) -> None:
    environment, _ = demo
    environment = environment | {"PYTHONPATH": str(REPOSITORY)}
    write_example(tmp_path)
    seen = commands()
    assert len(seen) > 15
    server = Running([*PRECOMPUTE, "-c", "configs/movielens", "serve"], environment)
    try:
        address = server.first.removeprefix("serving on ").strip()
        wait_until_ready(address)
        for line in seen:
            words = shlex.split(line)
            if words[0] == "make":
                done = run(["make", "-n", words[1]], environment)
                assert done.returncode == 0, done.stderr
                assert {"demo": "jobs.demo", "serve": "serve", "test": "pytest"}[words[1]] in done.stdout
            elif words[0] == "curl":
                answer = curl(words, address)
                assert answer, line
                assert all(row["status"] in ("fresh", "missing", "computed") for row in answer.get("rows", [])), line
            elif words[-1] in ("serve", "schedule"):
                running = Running([*PRECOMPUTE, *words[1:]], environment)
                assert running.first, line
                assert running.end() == 0, line
            else:
                given = dict(word.split("=", 1) for word in words if word.startswith("PRECOMPUTE_"))
                if given:
                    given = {"PRECOMPUTE_ONLINE": redis_url}
                words = words[words.index("precompute") + 1 :]
                mine = "mine" in words
                own = {k: v for k, v in environment.items() if not (mine and k.startswith("PRECOMPUTE_"))}
                done = run([*PRECOMPUTE, *words], own | given, cwd=tmp_path if mine else REPOSITORY)
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
                assert done.stdout, line
                assert "Traceback" not in done.stderr
    finally:
        assert server.end() == 0


def test_the_history_of_the_readme_is_there(demo: tuple[dict[str, str], str]) -> None:
    environment, _ = demo
    code = next(block for block in blocks("python") if "get_historical_features" in block)
    code = code.replace('"var/movielens"', repr(environment["PRECOMPUTE_ROOT"]))
    code += "print(items.num_rows, training.column_names, len(past.versions), training['item_vector__vector'].null_count)"
    done = run([sys.executable, "-c", code], environment)
    names = ["item_id", "event_timestamp", "item_vector__vector", "item_vector__computed_at"]
    assert done.stdout.strip() == f"1682 {names} 1 0", done.stderr


def test_the_example_project_gives_the_values_one_expects(tmp_path: Path) -> None:
    write_example(tmp_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECOMPUTE_")} | {"PYTHONPATH": str(REPOSITORY)}
    assert run([*PRECOMPUTE, "-c", "mine", "run", "title_length"], environment, cwd=tmp_path).returncode == 0
    done = run([*PRECOMPUTE, "-c", "mine", "lookup", "title_length", "1", "2", "--json"], environment, cwd=tmp_path)
    lengths = {row["key"]: round(row["features"]["length"], 5) for row in json.loads(done.stdout)["rows"]}
    assert lengths == {"1": 0.4, "2": 1.1}


def test_the_commands_of_the_other_documents_are_commands() -> None:
    """Their views are made up, so they are only parsed."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md")))
    found = re.findall(r"^\$ precompute (.+)$", text, re.MULTILINE)
    assert len(found) > 5
    for line in found:
        assert _parser().parse_args(shlex.split(line)).command == shlex.split(line)[2], line


def test_the_view_in_the_readme_is_the_view_in_the_repository() -> None:
    assert (REPOSITORY / "configs/movielens/views/item_embedding.yaml").read_text() in blocks("yaml")


def test_the_tree_in_the_readme_names_every_file() -> None:
    tree = next(block for block in blocks("text") if "jobs/" in block)
    for room in ("jobs", "precompute", "store"):
        for path in (REPOSITORY / room).rglob("*.py"):
            name = path.stem if path.parent.name not in ("api", "models", "demo") else path.parent.name
            if path.name != "__init__.py":
                assert re.search(rf"\b{name}\b", tree), path


def write_example(folder: Path) -> None:
    """The files of the README's own example, as their first lines name them."""
    for kind in ("yaml", "csv", "python"):
        for block in blocks(kind):
            named = re.match(r"# (mine\S+)\n", block)
            if named:
                path = folder / named[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block[named.end() :])


def wait_until_ready(address: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{address}/readyz", timeout=10) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not get ready")


def curl(words: Sequence[str], address: str) -> dict[str, object]:
    """What the curl command line asks for, asked without curl."""
    url = words[-1].replace("http://127.0.0.1:8080", address)
    body = words[words.index("-d") + 1].encode() if "-d" in words else None
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} if body else {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
