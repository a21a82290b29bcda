# racerd: `make demo` shows it, `make test` proves it. Everything lives in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The other loaders of safetensors, which nothing else here needs.
LOADERS ?= .venv-loaders

.PHONY: help install dev vllm-env demo test lint format bench bench-gpu bench-loaders torture lock clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python requirements.lock pyproject.toml $(wildcard clients/python/*/pyproject.toml)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		-e . -e ./clients/python/racer -e ./clients/python/racer-vllm
	touch $@

$(LOADERS)/.installed: tools/bench_loaders/requirements.txt clients/python/racer/pyproject.toml
	$(PYTHON) -m venv $(LOADERS)
	$(LOADERS)/bin/python -m pip install --quiet --disable-pip-version-check -r tools/bench_loaders/requirements.txt
	$(LOADERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		-e ./clients/python/racer
	touch $@

$(VENV)/.dev: $(VENV)/.installed requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	touch $@

install: $(VENV)/.installed ## .venv with racerd, racer and the client

dev: $(VENV)/.dev ## install, and what tests and linters need

vllm-env: ## the environment with real vLLM for tests/vllm: 3 GB, outside of this folder
	PYTHON=$(PYTHON) tests/servers/install_vllm.sh

demo: install ## serve a sample model and load it cold, from disk and from memory
	$(BIN)/python -m tools.demo

lint: dev ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: dev ## rewrite to the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: lint ## everything that CI runs
	$(BIN)/pytest

bench: dev ## ratios of this machine, see docs/performance.md
	$(BIN)/python -m tools.bench

bench-gpu: dev ## the same for this machine's GPU, see docs/gpu.md
	$(BIN)/python -m tools.bench_gpu

bench-loaders: dev $(LOADERS)/.installed ## racer beside other loaders: docs/loaders.svg and its table
	$(BIN)/python -m tools.bench_loaders --python $(LOADERS)/bin/python

torture: dev ## the long campaigns of docs/reliability.md
	$(BIN)/python -m tools.torture kills --kills 200
	$(BIN)/python -m tools.torture faults
	$(BIN)/python -m tools.torture clients
	$(BIN)/python -m tools.torture overload

lock: dev ## resolve requirements*.lock anew
	$(BIN)/pip-compile --quiet --strip-extras --generate-hashes --no-emit-index-url --no-emit-find-links --no-header \
		--allow-unsafe --output-file requirements.lock pyproject.toml requirements-build.in
	$(BIN)/pip-compile --quiet --strip-extras --generate-hashes --no-emit-index-url --no-emit-find-links --no-header \
		--allow-unsafe --extra dev --extra gpu --extra servers --output-file requirements-dev.lock pyproject.toml requirements-build.in

clean: ## remove what was built
	rm -rf $(VENV) $(LOADERS) .demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
