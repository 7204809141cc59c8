# Everything a newcomer runs. Needs python3 (3.11 or newer, with venv) and make; the rest is fetched into .venv.
#
#   make demo          answer docs/examples/questions.jsonl with a small model on the CPU
#   make test          lint, types and all tests that need no GPU and no Docker engine
#   make test-gpu      the tests that need a CUDA device
#   make mutation      take one guard out at a time, in a copy: some test must fail each time
#   make test-compose  the fleet in containers, with a broker killed in the middle
#   make kill-table    kill a real fleet at every named point and write docs/kill-table.md (some minutes)
#
# torch comes first and pinned: plain `torch` on Linux brings gigabytes of CUDA libraries. Another build, or an index that
# holds builds for the CPU only, is chosen with: make demo TORCH='torch==2.13.0+cpu --extra-index-url URL'

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
MODEL ?= smollm2-135m
QUESTIONS ?= docs/examples/questions.jsonl

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest

.PHONY: demo model test lint test-unit test-gpu mutation test-compose clean
.DELETE_ON_ERROR:

demo: model
	@set -eu; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	$(BIN)/haulier run -i $(QUESTIONS) -o "$$work/out.jsonl" --model $(MODEL) --state "$$work/state"; \
	$(BIN)/python docs/examples/show.py $(QUESTIONS) "$$work/out.jsonl"

model: $(VENV)/.worker
	@$(BIN)/haulier model pull $(MODEL)

test: lint test-unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-unit: $(VENV)/.dev
	$(PYTEST) -m "not gpu and not compose" --cov --cov-branch --cov-report=term:skip-covered

test-gpu: $(VENV)/.dev
	$(PYTEST) -m gpu

mutation: $(VENV)/.dev
	$(BIN)/python -m tests.mutation

test-compose: $(VENV)/.dev
	$(PYTEST) -m compose tests/compose

kill-table: $(VENV)/.dev
	$(BIN)/python -m tests.kill_table

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# -- environment: one stamp for each step, so that nothing is installed twice --------------------------------------
$(VENV)/.base:
	@$(PYTHON) -c 'import sys; sys.exit("haulier needs Python 3.11 or newer; say make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make environments here; on Debian: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.base
	@echo "installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.worker: $(VENV)/.torch pyproject.toml
	@echo "installing haulier and its worker's needs"
	@$(PIP) install -e '.[worker]'
	@touch $@

$(VENV)/.dev: $(VENV)/.worker
	@echo "installing the tools of the tests"
	@$(PIP) install -e '.[worker,dev]'
	@touch $@
