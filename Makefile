# Two commands matter: `make demo` and `make test`. Both need nothing but Python 3.11+ as python3
# and a pip that can reach packages; both create and reuse .venv.

PYTHON ?= python3
# The torch that the demo and the tests run on. CPU builds and CUDA builds carry the same version;
# pip takes the one its configured index offers. See README, "Installing".
TORCH ?= torch==2.13.0
# Versions of everything else that the demo and the tests install; users' ranges are in pyproject.toml.
# `make constraints` writes the file anew; `make test CONSTRAINTS=` takes the newest of everything.
CONSTRAINTS ?= constraints.txt
# Ranks of the demo; empty means one per core, at least 2.
RANKS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
DEMO := .venv/ready-demo
DEV := .venv/ready-dev
BROWSER := .venv/ready-browser

define AGE
import datetime, re, sys
made = re.search(r"\d{4}-\d\d-\d\d", open(sys.argv[1]).readline())
age = (datetime.date.today() - datetime.date.fromisoformat(made[0])).days
print(f"== versions of {sys.argv[1]}, {age} days old")
endef
export AGE

# One thread per process: times are then comparable, and sums have one order.
export OMP_NUM_THREADS ?= 1
# Compiled files stay: without them each process that a test starts compiles the package for itself,
# and each process that runs tests rewrites all assertions anew.
unexport PYTHONDONTWRITEBYTECODE
# The tools of .venv first: the verbs and torchrun that scripts call by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test tests compiled test-long lint style types format constraints clean

help:
	@echo "make demo [RANKS=n]  profile, plan, verify, simulate and train a small GPT-2"
	@echo "make test            everything CI runs: format, lint, types, contracts, tests"
	@echo "make test-long       minutes of soak and fuzzing on top"
	@echo "make lint            only format, lint, types, import contracts"
	@echo "make format          rewrite files in the project's format"
	@echo "make constraints     write constraints.txt anew with the newest version of everything"
	@echo "make clean           remove .venv, demo-out and caches"

demo: $(DEMO)
	@$(BIN)/python examples/demo.py $(if $(RANKS),--ranks $(RANKS))

# Types and contracts are checked beside the tests, and what numba compiles is compiled beside them,
# once: the files that come first plan nothing (tests/conftest.py).
test: style
	@$(MAKE) --no-print-directory --jobs=3 compiled types tests

compiled: $(DEV)
	@$(BIN)/python -m tests.machine_code > /dev/null

tests: $(DEV) $(BROWSER)
	@echo "== tests, the longest files first"
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not long and not gpu" --durations=40 \
		tests benchmarks/tests

test-long: $(DEV)
	@echo "== long tests: soak, fault tables, fuzzing"
	@$(BIN)/python -m pytest -m "long and not gpu" tests benchmarks/tests

lint: style types

style: $(DEV)
	@echo "== format"
	@$(BIN)/ruff format --check .
	@echo "== lint"
	@$(BIN)/ruff check .

types: $(DEV)
	@echo "== types"
	@$(BIN)/mypy
	@$(BIN)/mypy examples/*.py
	@echo "== import contracts"
	@$(BIN)/lint-imports

format: $(DEV)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# In an environment of its own, so that .venv keeps what it has until the new versions are tried.
constraints:
	@echo "== installing the newest of everything in .venv-newest"
	@rm -rf .venv-newest && $(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/python -m pip --disable-pip-version-check install -qq "$(TORCH)"
	@.venv-newest/bin/python -m pip --disable-pip-version-check install -qq "$(TORCH)" \
		-e ".[plan,run,models,dev]"
	@{ echo "# Made by make constraints on $$(date -u +%F) with $$($(PYTHON) --version)."; \
		.venv-newest/bin/python -m pip list --format=freeze --exclude-editable \
		--exclude torch --exclude pip; } > constraints.txt
	@rm -rf .venv-newest
	@echo "== constraints.txt is new: run make test, then commit it"

clean:
	rm -rf .venv .venv-newest demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; try make PYTHON=python3.12"; exit 2; }
	@echo "== creating .venv"
	@$(PYTHON) -m venv .venv

# torch first and pinned, so that no other requirement chooses a build of it.
$(DEMO): pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	@$(if $(CONSTRAINTS),$(BIN)/python -c "$$AGE" $(CONSTRAINTS),echo "== newest versions of everything")
	@echo "== installing $(TORCH)"
	@$(PIP) "$(TORCH)"
	@echo "== installing pipeplan with its planner and the demo's model library"
	@$(PIP) "$(TORCH)" -e ".[plan,run,models]"
	@touch $@

$(DEV): $(DEMO)
	@echo "== installing the tools of development"
	@$(PIP) "$(TORCH)" -e ".[plan,run,models,dev]"
	@touch $@

# Tests of pages look at them in Chromium; where it is not there and cannot be installed they skip.
$(BROWSER): | .venv/bin/python
	@if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "== installing Chromium"; apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null; fi
	@touch $@
