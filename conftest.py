"""Fixtures of all tests, of the core and of the plug-ins beside it."""

from pathlib import Path

PLUGINS = Path(__file__).parent / "precompute" / "plugins"

pytest_plugins = [
    "tests.fixtures",
    "tests.core",
    *(
        f"precompute.plugins.{path.parts[-3]}.tests.fixtures"
        for path in sorted(PLUGINS.glob("*/tests/fixtures.py"))
    ),
]
