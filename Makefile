# `make demo` and `make test` set up what they need; Python 3.11 or later is all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test lint format types bench protos wheel docs clean

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 12

$(READY): requirements/dev.txt requirements/torchrec.txt requirements/frameworks.txt requirements/services-constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps -r requirements/torchrec.txt -r requirements/frameworks.txt
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --editable .
	$(BIN)/evenkeel warm-up
	touch $(READY)

setup: $(READY)  ## Make the environment in .venv

demo: $(READY)  ## Train on four ranks against a real balancer, balancing off and on
	$(BIN)/evenkeel warm-up  # nothing to do unless kernels have changed since the set-up
	$(BIN)/python -m examples.demo $(ARGS)

test: $(READY)  ## Run the tests
	$(BIN)/python -m pytest -q -n 3 $(ARGS)  # in lanes: tests/lanes.py

lint: $(READY)  ## Check style, types, the direction of imports, generated files, links and figures
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	scripts/check_generated.sh
	$(BIN)/python -m scripts.check_links
	$(BIN)/python -m scripts.check_figures

format: $(READY)  ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## Run the benchmarks that need no GPU, short versions
	scripts/run_benchmarks.sh --quick

protos:  ## Generate the stubs of evenkeel/protocol
	scripts/generate_protos.sh

wheel: $(READY)  ## Build the wheel into dist/
	$(BIN)/python -m build --quiet --wheel

DOCS := .venv-docs
docs: $(DOCS)/.ready  ## Build the documentation into out/site
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

$(DOCS)/.ready: requirements/docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install -qq --disable-pip-version-check -r requirements/docs.txt
	touch $@

clean:  ## Remove everything that make made
	rm -rf $(VENV) $(DOCS) .venv-protos .venv-audit .venv-ray build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: up down test-compose
SECRETS := $(or $(EVENKEEL_SECRETS),deploy/secrets)
up: $(SECRETS)/grafana_password  ## Start balancer, planner, Prometheus and Grafana in containers (or SERVICES=…)
	docker compose up --build --detach --wait --wait-timeout 600 $(SERVICES)

down:  ## Stop them; their data stays (docker compose down --volumes removes it)
	docker compose down

$(SECRETS)/grafana_password:
	mkdir -p -m 700 $(@D)
	$(PYTHON) -c 'import secrets; print(secrets.token_urlsafe(18))' > $@

.PHONY: audit
audit:  ## Write and check the images' bills of materials, and look for known vulnerabilities
	scripts/audit.sh

test-compose: $(READY)  ## Test the images, the stack, the alerts and the dashboards; needs Docker and promtool
	scripts/test_compose.sh $(ARGS)
