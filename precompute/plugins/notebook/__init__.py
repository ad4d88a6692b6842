"""Notebook: a project from Python, a notebook or a script: ``precompute.open``."""
