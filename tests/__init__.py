"""Tests, in the rooms of the house; what they share stands at the top."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

# read as OpenMP is loaded, here and in every process that a test starts: threads that wait for each
# other sleep. By default they spin, and beside another test's on the same cores one epoch of the
# demo's training then took 17.6 s of processor time and 48 s, asleep 3.0 and 7
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
