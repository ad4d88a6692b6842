"""Schema: what may stand in the configuration."""

from __future__ import annotations

import argparse
import json

from precompute.jobs.commands.command import DONE, Commands


def add(commands: Commands) -> None:
    """The command ``schema``."""
    commands.add("schema", _schema, "JSON Schemas of project.yaml and views/*.yaml, for editors")


def _schema(arguments: argparse.Namespace) -> int:
    from precompute.jobs.config.project import json_schemas

    print(json.dumps(json_schemas(), indent=None if arguments.json else 2))
    return DONE
