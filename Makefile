# Two commands matter: `make demo` and `make test`. Both need nothing but Python 3.11+ as python3
# and a pip that can reach packages; both create and reuse .venv.

PYTHON ?= python3
# The torch that the demo and the tests run on. CPU builds and CUDA builds carry the same version;
# pip takes the one its configured index offers. See README, "Installing".
TORCH ?= torch==2.13.0
# Ranks of the demo; empty means one per core, at least 2.
RANKS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
DEMO := .venv/ready-demo
DEV := .venv/ready-dev

# One thread per process: times are then comparable, and sums have one order.
export OMP_NUM_THREADS ?= 1
# The tools of .venv first: the verbs and torchrun that scripts call by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test test-long lint format clean

help:
	@echo "make demo [RANKS=n]  profile, plan, verify, simulate and train a small GPT-2"
	@echo "make test            everything CI runs: format, lint, types, contracts, tests"
	@echo "make test-long       minutes of soak and fuzzing on top"
	@echo "make lint            only format, lint, types, import contracts"
	@echo "make format          rewrite files in the project's format"
	@echo "make clean           remove .venv, demo-out and caches"

demo: $(DEMO)
	@$(BIN)/python examples/demo.py $(if $(RANKS),--ranks $(RANKS))

test: lint
	@echo "== tests, fast ones first"
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long and not gpu" \
		tests/unit tests/golden tests/property tests/dist

test-long: $(DEV)
	@echo "== long tests: soak, fault tables, fuzzing"
	@$(BIN)/python -m pytest -m "long and not gpu" tests

lint: $(DEV)
	@echo "== format"
	@$(BIN)/ruff format --check .
	@echo "== lint"
	@$(BIN)/ruff check .
	@echo "== types"
	@$(BIN)/mypy
	@echo "== import contracts"
	@$(BIN)/lint-imports

format: $(DEV)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf .venv demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; try make PYTHON=python3.12"; exit 2; }
	@echo "== creating .venv"
	@$(PYTHON) -m venv .venv

# torch first and pinned, so that no other requirement chooses a build of it.
$(DEMO): pyproject.toml | .venv/bin/python
	@echo "== installing $(TORCH)"
	@$(PIP) "$(TORCH)"
	@echo "== installing pipeplan with its planner and the demo's model library"
	@$(PIP) "$(TORCH)" -e ".[plan,run,models]"
	@touch $@

$(DEV): $(DEMO)
	@echo "== installing the tools of development"
	@$(PIP) "$(TORCH)" -e ".[plan,run,models,dev]"
	@touch $@
