# Every target works from a bare checkout: it makes .venv and installs what it needs, at the versions of requirements.lock.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS   ?= 2

.PHONY: demo fast test test-slow test-gpu lint bench docs docs-benchmarks docs-check format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train twins with and without a sink for a few minutes, and write a report"
	@echo "make test       lint and the fast tests"
	@echo "make test-slow  the long tests"
	@echo "make test-gpu   the tests for a GPU, six at a time; PART=1/3 runs a third of them"
	@echo "make docs-check numbers in README and docs are those of benchmarks/results"
	@echo "make lint       ruff, mypy, types of the page, docs"
	@echo "make bench      benchmarks that this machine can run"
	@echo "make docs       serve the documentation, on http://127.0.0.1:8000"
	@echo "make docs-benchmarks  pages and pictures from benchmarks/results"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sinkdlm needs Python 3.11 or newer; say make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The lock constrains every install, so that torch stays at the version it names.
$(VENV)/.core: requirements.lock pyproject.toml | $(BIN)/python
	$(PIP) --constraint requirements.lock torch
	$(PIP) --constraint requirements.lock --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --constraint requirements.lock --editable '.[dev,interop,data,eval,viz,track,serve]'
	@touch $@

$(VENV)/.viz: $(VENV)/.core
	$(PIP) --constraint requirements.lock --editable '.[viz]'
	@touch $@

demo: $(VENV)/.viz
	$(BIN)/sinkdlm demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	tests/types/check.sh $(VENV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir $(VENV)/site

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# worksteal: a process keeps to files of its own while it can, and so sets up what their tests share once.
fast: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) --dist worksteal

# Beside each other: type checks use one core.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs 2 lint fast

test-slow: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m slow

test-gpu: $(VENV)/.dev
	$(BIN)/pytest -n 6 --dist worksteal -m gpu $(if $(PART),--part $(PART))

# What no change of code alone can fail: stored results, and the pages that quote them.
docs-check: $(VENV)/.dev
	$(BIN)/pytest benchmarks/check

bench: $(VENV)/.core
	$(BIN)/python -m benchmarks.all

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Pages and pictures that are made from benchmarks/results; make docs-check fails where they are not.
docs-benchmarks: $(VENV)/.dev
	$(BIN)/python -m benchmarks.page

clean:
	rm -rf $(VENV) site runs .pytest_cache .mypy_cache .ruff_cache
