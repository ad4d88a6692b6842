"""The house's plan, held: which room imports which, one seam for each outside library, and nothing
that runs what it reads."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests import REPOSITORY
from tests.slow import SLOW

ROOMS = ("store", "precompute", "jobs")
PLUGINS = "precompute/plugins/"
FOUND = sorted(
    str(path.relative_to(REPOSITORY))
    for folder in (*ROOMS, "demo")
    for path in (REPOSITORY / folder).rglob("*.py")
)
FILES = [file for file in FOUND if not file.startswith(PLUGINS)]
POWERS = [file for file in FOUND if file.startswith(PLUGINS) and "/tests/" not in file]
"""The files of the rooms and the demo; those of the plug-ins, their tests apart."""

SEAMS = {
    "torch": {
        "precompute/models/device.py",
        "precompute/models/exported_program.py",
        "precompute/models/static_embedding.py",
        "precompute/models/text_classifier.py",
        "precompute/models/text_encoder.py",
        "precompute/models/top_k.py",
        "precompute/models/torch_model.py",
        "precompute/models/torch_module.py",
        "precompute/models/two_tower.py",
        "precompute/safetensors_file.py",
        "precompute/techniques/conversion.py",
        "precompute/techniques/encoder.py",
        "precompute/techniques/pytorch.py",
        "precompute/techniques/machine.py",
        "precompute/techniques/onednn.py",
        "precompute/techniques/technique.py",
        "precompute/text/transformer.py",
        "precompute/text/bert.py",
        "precompute/text/sentence_folder.py",
        "precompute/text/unpadded.py",
    },
    # a loaded model is compared with its own library, in a process that ends with the answer
    "sentence_transformers": {
        "precompute/models/static_embedding.py",
        "precompute/models/text_classifier.py",
        "precompute/models/text_encoder.py",
    },
    "model2vec": {"precompute/models/static_embedding.py"},
    "transformers": {
        "precompute/text/config_file.py",
        "precompute/models/text_classifier.py",
        "precompute/text/transformer.py",
        "precompute/text/unpadded.py",
    },
    "tokenizers": {
        "precompute/models/static_embedding.py",
        "precompute/text/tokenizer_file.py",
        "precompute/text/tokens.py",
        "precompute/text/transformer.py",
    },
    "safetensors": {
        "precompute/safetensors_file.py",
        "precompute/techniques/onednn.py",
        "precompute/models/torch_module.py",
        "precompute/models/two_tower.py",
    },
    "duckdb": {
        "precompute/sources/database.py",
        "precompute/sources/session.py",
        "store/disk/sql.py",
        "store/history/versions.py",
    },
    "httpcore2": {"store/client/client.py", "store/client/transport.py"},
    "obstore": {
        "store/disk/bucket.py",
        "store/disk/remote_files.py",
    },
    "fsspec": {"store/disk/remote_files.py"},
    "xxhash": {
        "store/online/kernels.py",
        "store/online/table_file.py",
        "store/vectors/index_files.py",
    },
    "faiss": {"store/vectors/index_files.py"},
    "apscheduler": {"jobs/schedule/scheduler.py"},
    "cronsim": {"jobs/config/schedule.py"},
    "uvicorn": {"store/http/guard/protocol.py", "store/http/guard/server.py"},
    "orjson": {"store/http/encoding/answer_bodies.py"},
    "pybase64": {"store/http/encoding/answer_bodies.py"},
    # the client writes what it asks, and reads what the API answered
    "msgspec": {
        "store/wire/bodies.py",
        "store/client/calls.py",
        "store/disk/record.py",
    },
    "prometheus_client": {"store/http/metrics.py"},
    "pydantic": {
        "jobs/config/announcement.py",
        "jobs/config/gates.py",
        "jobs/config/open_section.py",
        "jobs/config/project.py",
        "jobs/config/schedule.py",
        "jobs/config/section.py",
        "jobs/config/serve.py",
        "jobs/config/view.py",
    },
    "yaml": {"jobs/config/section.py"},
    "rich": {"jobs/run/command_process.py"},
    "httptools": {"store/http/guard/protocol.py"},
}
"""Outside library → the only files that may import it, the demo apart."""

DEMO_DOORS = {
    "precompute.jobs.cli",
    "precompute.jobs.commands.rows",
    "precompute.jobs.commands.run",
    "precompute.jobs.config.project",
    "precompute.jobs.serve.fallback",
    "precompute.jobs.run.command_process",
    "precompute.jobs.run.run_view",
    "precompute.models.two_tower",
    "precompute.techniques.machine",
    "precompute.text.bert",
    "precompute.store.doors",
    "precompute.store.errors",
    "precompute.store.answers.lookup",
    "precompute.store.wire.lookup_options",
    "precompute.store.online.url",
}
"""What the demo does with the house a user can do: the modules it may import."""

DOORS = {"precompute/__init__.py", "precompute/testing.py"}
"""What users import."""

WINGS = {
    "store/disk": set[str](),
    "store/wire": set[str](),
    "store/offline": {"store/disk"},
    "store/online": {"store/disk"},
    "store/vectors": {"store/disk", "store/online"},
    # looks at all that is live, wherever that lies
    "store/account": {"store/disk", "store/offline", "store/online", "store/vectors"},
    "store/answers": {"store/account", "store/disk", "store/online", "store/vectors", "store/wire"},
    # the past is what was answered
    "store/history": {"store/answers", "store/disk", "store/offline"},
    "store/client": {"store/wire"},
    "store/http": {
        "store/account",
        "store/answers",
        "store/disk",
        "store/offline",
        "store/online",
        "store/vectors",
        "store/wire",
    },
    "precompute/engine": set[str](),
    "precompute/text": set[str](),
    # a long text is cut into chunks by its tokens
    "precompute/sources": {"precompute/text"},
    "precompute/models": {"precompute/engine", "precompute/text"},
    # one of them computes a text encoder's transformer by kernels of its own
    "precompute/techniques": {"precompute/engine", "precompute/models", "precompute/text"},
    "precompute/workers": {"precompute/engine", "precompute/techniques"},
    "jobs/config": set[str](),
    "jobs/run": {"jobs/config"},
    "jobs/schedule": {"jobs/config", "jobs/run"},
    "jobs/serve": {"jobs/config", "jobs/run"},
    "jobs/setup": {"jobs/config", "jobs/run"},
    "jobs/ops": {"jobs/config", "jobs/run", "jobs/schedule"},
    "jobs/commands": {
        "jobs/config",
        "jobs/ops",
        "jobs/run",
        "jobs/schedule",
        "jobs/serve",
        "jobs/setup",
    },
}
"""Wing → the other wings of its room that it may import."""

MOST_FLOORS = 8
"""Of a room of the house: how many wings and files stand upon each other."""

LONGEST_FUNCTION, LONGEST_HEAD = 72, 7
"""Lines: beyond, a function is more than one step, and a module's head an essay. There is no limit
on a file or a folder: one noun a file, however long."""

UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {
    "torch.load",
    "torch.hub.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and the line; ``typed`` where only type checkers
    do."""

    module: str
    line: int
    typed: bool = False


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((REPOSITORY / file).read_text(encoding="utf-8"), file)


def module_of(file: str) -> str:
    """``precompute.store.answers.lookup`` of ``store/answers/lookup.py``: links in ``precompute``
    lead to the folders beside it."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"precompute.{name}" if file.startswith(("jobs/", "store/")) else name


def room_of(module: str) -> str:
    """``store`` of ``precompute.store.answers.lookup``; the first part of other libraries'
    names."""
    first, _, rest = module.partition(".")
    inner = rest.partition(".")[0]
    return inner if first == "precompute" and inner in ("jobs", "store") else first


MODULES = {module_of(file): file for file in (*FILES, *POWERS)}


def imports(file: str) -> Iterator[Import]:
    """Every import anywhere in the file, inside functions too; ``from a import b`` is a.b where
    that is a module of ours."""
    typed = {
        inner
        for node in ast.walk(tree(file))
        if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, node in typed)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                module = inner if inner in MODULES else node.module
                yield Import(module, node.lineno, node in typed)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute or name, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def calls(file: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(file)) if isinstance(node, ast.Call))


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 30
    assert {
        "precompute.store.answers.lookup",
        "precompute.engine.runner",
        "precompute.jobs.cli",
        "precompute.store.http.app",
    } <= set(MODULES)


def test_imports_run_one_way() -> None:
    for file in FILES:
        check_imports(file)


def check_imports(file: str) -> None:
    room = (
        file.partition("/")[0]
        if file not in DOORS
        else "a door, which hands out what is in any room"
    )
    for found in imports(file):
        target = room_of(found.module)
        where = f"{file}:{found.line} imports {found.module}"
        assert found.module.partition(".")[0] not in ("jobs", "store"), (
            f"{where}: it is installed as precompute.{found.module}"
        )
        assert target not in ("tests", "benchmarks"), where
        assert room == "demo" or target != "demo", where
        if room == "store" and target in ROOMS:
            assert target == "store", f"{where}: the store knows nothing of the other rooms"
        if room == "precompute" and target in ROOMS and target != "precompute":
            assert found.module in (
                "precompute.store.doors",
                "precompute.store.feature_view",
                "precompute.store.errors",
                "precompute.store.disk.durable_file",
                "precompute.store.disk.record",
                "precompute.store.disk.sql",
            ), (
                f"{where}: of the store, models know the view, the doors and the errors; DuckDB reads our files and spills in one way, and files and records are written in one"
            )


def power_of(file: str) -> str:
    """``capacity`` of a file of that power; an empty text for a room's."""
    inner = file.removeprefix(PLUGINS)
    return inner.partition("/")[0] if inner != file and "/" in inner else ""


def test_a_power_is_imported_by_no_other_and_by_no_room() -> None:
    """A power imports any room; doors open it by text, so that its folder can be deleted."""
    libraries: dict[str, set[str]] = {}
    for file in (*FILES, *POWERS):
        for found in imports(file):
            where = f"{file}:{found.line} imports {found.module}"
            # what users import is typed; the demo does what a user can do
            power = power_of(MODULES.get(found.module, ""))
            free = file in DOORS or file.startswith("demo/")
            assert free or power in ("", power_of(file)), where
            room = room_of(found.module)
            if room not in (*ROOMS, *sys.stdlib_module_names) and not found.typed:
                assert room not in ("tests", "benchmarks", "demo") or file in FILES, where
                libraries.setdefault(found.module.partition(".")[0], set()).add(power_of(file))
    shared = {library: by for library, by in libraries.items() if len(by) > 1 and "" not in by}
    assert shared == {}, "a library that the rooms do without is one power's"


def wing_of(file: str) -> str:
    """``precompute/engine`` of a file in there; an empty text for a door."""
    return "/".join(file.split("/")[:2]) if file.count("/") > 1 else ""


def test_wings_import_one_way_too() -> None:
    for file in (f for f in FILES if wing_of(f) in WINGS):
        wing = wing_of(file)
        for found in imports(file):
            target = wing_of(MODULES.get(found.module, ""))
            foreign = target.partition("/")[0] == wing.partition("/")[0] and target not in (
                "",
                wing,
            )
            assert not foreign or target in WINGS[wing], (
                f"{file}:{found.line} imports {found.module}"
            )


def test_a_house_is_held_in_ones_head() -> None:
    assert {wing_of(file) for file in FILES if file.startswith(ROOMS)} - {""} == set(WINGS)
    inner = [file for file in FILES if not file.endswith("__init__.py")]
    below: dict[str, set[str]] = {}
    for file in inner:
        own = "/".join(file.split("/")[:2])
        targets = (MODULES.get(found.module, "") for found in imports(file))
        rooms = {"/".join(target.split("/")[:2]) for target in targets if not power_of(target)}
        same = {room for room in rooms if room.partition("/")[0] == own.partition("/")[0]}
        below.setdefault(own, set()).update(same - {own})

    def floor(room: str) -> int:
        return 1 + max(map(floor, below[room]), default=0)

    for room in ROOMS:
        rooms = {name for name in below if name.partition("/")[0] == room}
        assert max(map(floor, rooms)) <= MOST_FLOORS, room


def too_long(file: str) -> Iterator[str]:
    """The file's head and its functions, of those that are longer than they may be."""
    if len((ast.get_docstring(tree(file)) or "").splitlines()) > LONGEST_HEAD:
        yield f"{file}:head"
    for node in ast.walk(tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                yield f"{file}:{node.name}"


def test_heads_and_functions_are_short() -> None:
    files = [file for file in (*FILES, *POWERS) if file.startswith(ROOMS)]
    found = {long for file in files for long in too_long(file)}
    assert found == set(), "more than one step"


def test_the_demo_comes_in_by_the_doors() -> None:
    imported = {
        found.module for file in FILES if file.startswith("demo/") for found in imports(file)
    }
    modules = {module for module in imported if room_of(module) in ROOMS}
    assert {m for m in modules if not m.startswith("precompute.plugins.")} == DEMO_DOORS


def test_no_module_imports_itself_by_any_way_round() -> None:
    graph = {
        module: {i.module for i in imports(file)} & set(MODULES) for module, file in MODULES.items()
    }
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' → '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for target in sorted(graph[module]):
                walk(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        walk(module, ())


def test_an_outside_library_is_imported_only_at_its_seam() -> None:
    users: dict[str, set[str]] = {library: set() for library in SEAMS}
    for file in (f for f in FILES if not f.startswith("demo/")):
        for found in imports(file):
            if (library := found.module.partition(".")[0]) in SEAMS:
                users[library].add(file)
    assert users == SEAMS


def test_nothing_that_is_read_is_run() -> None:
    for file in (*FILES, *POWERS):
        check_calls(file)


def check_calls(file: str) -> None:
    for found in imports(file):
        assert found.module.partition(".")[0] not in UNSAFE_MODULES, (
            f"{file}:{found.line}: {found.module}"
        )
    for call in calls(file):
        name, where = dotted(call.func), f"{file}:{call.lineno}: {dotted(call.func)}"
        assert name.removeprefix("builtins.") not in UNSAFE_NAMES, where
        assert name not in UNSAFE_CALLS, where
        for keyword in call.keywords:
            permits = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            assert (
                keyword.arg not in ("allow_pickle", "trust_remote_code", "shell") or not permits
            ), f"{where}({keyword.arg}=True)"
        if name in ("yaml.load", "yaml.load_all"):
            given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "Loader")]
            assert given, where
            assert is_safe_loader(file, dotted(given[0])), where


def is_safe_loader(file: str, name: str) -> bool:
    """Whether a name is YAML's safe loader, or a class of the same file that inherits from it."""
    if name in ("yaml.SafeLoader", "yaml.CSafeLoader"):
        return True
    bases = [
        dotted(b)
        for node in tree(file).body
        if isinstance(node, ast.ClassDef) and node.name == name
        for b in node.bases
    ]
    return bool(bases) and all(is_safe_loader(file, base) for base in bases)


def test_what_the_fast_tests_leave_out_is_there() -> None:
    for name in sorted(SLOW):
        file, _, test = name.partition("::")
        if (power := power_of(file)) and not (REPOSITORY / PLUGINS / power).is_dir():
            continue
        named = test.removesuffix("::runTest")
        source = (REPOSITORY / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def {named}\(|{named} = )", source, re.MULTILINE), (
            f"tests/slow.txt: {name}: no such test"
        )


def test_a_tests_name_is_read_at_a_glance() -> None:
    """A sentence of more than 70 characters is two tests, or says how where it should say what."""
    plugins = (REPOSITORY / PLUGINS).rglob("test_*.py")
    for path in (*(REPOSITORY / "tests").rglob("test_*.py"), *plugins):
        long = [
            name
            for name in re.findall(
                r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
            )
            if len(name) > 70
        ]
        assert not long, f"{path.name}: {long}"
