"""Tests, in the rooms of the house; what they share stands at the top."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
