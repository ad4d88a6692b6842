# Everything here sets itself up: a fresh machine needs Python 3.11 to 3.13 and make, no root and no server.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# on every core, which pip does on one; a few libraries hold files that are no Python of this version
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
CONFIG ?= configs/movielens

.PHONY: help setup demo serve test test-core test-fast test-gpu check docs bench clean

help:
	@echo "make demo       install, compute and publish the demo's views, print what came out"
	@echo "make serve      keep the demo's answers up over HTTP"
	@echo "make test       install and run the tests"
	@echo "make test-core  those of the rooms alone, without any plug-in"
	@echo "make test-fast  the quick ones, in three minutes"
	@echo "make test-gpu   what only a GPU shows, where there is one"
	@echo "make check      lint, format and types"
	@echo "make docs       the documents as a site, in var/site"
	@echo "make bench      the speed claims, as ratios measured side by side"

setup: $(VENV)/.dev

# what the demo needs: no tools, and no plug-in's libraries. recbole holds the MovieLens-100k files; its own dependencies are neither needed nor installed
$(VENV)/.demo: pyproject.toml constraints.txt setup.py store/online/_kernels.c $(wildcard precompute/text/_encoder*.cpp precompute/text/_encoder*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch  # first and alone: a CPU build in pip's reach then satisfies everything after it
	$(PIP) --constraint constraints.txt --editable ".[cpu,demo]"
	$(PIP) --constraint constraints.txt --no-deps recbole==1.2.1
	$(COMPILE)
	@touch $@

# by its name, since it is here: nothing is built again
$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --constraint constraints.txt "precompute-store[cpu,demo,dev]"
	$(COMPILE)
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m demo -c $(CONFIG)

serve: $(VENV)/.demo
	$(BIN)/precompute -c $(CONFIG) serve

# how long each test took is in var/core.xml and var/tests.xml; what is slow by that, `make test-fast` leaves out
EVERY_CPU := -n auto --dist loadfile --no-loadscope-reorder
PYTEST    := $(BIN)/python -m pytest $(EVERY_CPU)

# the core's in a copy that has no plug-ins; with plug-ins what is theirs, or asks which are here
test: test-core
	$(BIN)/python -m compileall -q -j 0 precompute jobs store  # once, and not by each of the tests' processes
	$(PYTEST) --without-passed var/core.xml --durations 25 --durations-min 1 --junitxml var/tests.xml

test-core: setup
	$(BIN)/python -m tests.core var/core
	cd var/core && $(abspath $(BIN))/python -m compileall -q -j 0 precompute jobs store
	cd var/core && PYTHONPATH=$(CURDIR)/var/core $(abspath $(BIN))/python -m pytest $(EVERY_CPU) --ignore tests/doors --durations 25 --durations-min 1 --junitxml $(CURDIR)/var/core.xml

test-fast: setup
	$(PYTEST) -m "not slow"

# one after the other: they share the device
test-gpu: setup
	$(BIN)/python -m pytest -m gpu tests/precompute

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# opened from the disk, with no server; strict: a link that leads nowhere, or a document that the navigation lacks, fails
# not --quiet: that would quiet what --strict counts
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# what the benchmarks compare with
$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --constraint constraints.txt "precompute-store[bench]"
	@touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf var $(VENV) .venv-*
