"""Fixtures of all tests, of the core and of the plug-ins beside it."""

pytest_plugins = ["tests.fixtures"]
