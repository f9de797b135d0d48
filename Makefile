# `make up` serves the default model on this machine; `make test` is what CI runs. `make help` lists the rest.

SHELL := /bin/bash

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where torch's CPU wheel is, if the sources that pip is configured with do not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PREFILL ?= 2
DECODE ?= 1
# More options for `pdserve up`, e.g. ARGS="--port 9000 --detach".
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
DEBIAN := build/debian
FETCH := apt-get download prometheus
export PATH := $(CURDIR)/$(BIN):$(CURDIR)/$(DEBIAN)/usr/bin:$(PATH)
export HF_HUB_OFFLINE := 1

# A stamp's name holds the digest of what was installed, so that a checkout's file times mean nothing.
digest = $(shell cat $(1) | sha256sum | cut -c1-16)
LOCKED := $(VENV)/.locked-$(call digest,requirements/cpu.lock requirements/torch-cpu.lock)
INSTALLED := $(VENV)/.installed-$(call digest,requirements/cpu.lock requirements/torch-cpu.lock pyproject.toml)
DEVELOP := $(VENV)/.develop-$(call digest,requirements/cpu.lock requirements/torch-cpu.lock requirements/dev.lock)

.PHONY: help up model venv develop test lint test-long lock clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@printf '%s\n' \
	  'make up         install, prepare the default model, serve it with $(PREFILL) prefill + $(DECODE) decode workers' \
	  'make test       lint, then unit, contract and integration tests (real engines)' \
	  'make lint       ruff, mypy, import rules' \
	  'make test-long  the tests too long for every change; writes tests/results/long.txt' \
	  'make model      prepare the default model only' \
	  'make lock       rewrite requirements/*.lock from pyproject.toml (UPGRADE=1 moves to the newest versions)' \
	  'make clean      remove the virtual environment and build files'

up: model
	@pdserve up --prefill $(PREFILL) --decode $(DECODE) $(ARGS)

model: $(INSTALLED)
	@python -m pdserve.models > /dev/null

test: lint $(DEBIAN)/prometheus
	@python -m pytest -m 'not long' $(PYTEST_ARGS)

lint: $(INSTALLED) $(DEVELOP)
	@ruff check .
	@ruff format --check .
	@mypy
	@mypy requirements/lock.py
	@lint-imports

test-long: $(INSTALLED) $(DEVELOP) $(DEBIAN)/prometheus
	@mkdir -p tests/results
	@set -o pipefail; python -m pytest -m long tests $(PYTEST_ARGS) 2>&1 | tee tests/results/long.txt

venv: $(INSTALLED)

develop: $(INSTALLED) $(DEVELOP)

# The environment is made anew when the locks change: what they no longer list must be gone, not merely unlisted.
$(LOCKED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo 'PYTHON: $(PYTHON): give a Python 3.11, which the locks are for (make PYTHON=/path/to/python3.11)' >&2; exit 2; }
	@echo "installing $$(cat requirements/cpu.lock requirements/torch-cpu.lock | grep -c ==) packages into $(VENV) (once; some minutes)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --no-compile --no-deps -r requirements/torch-cpu.lock 2> /dev/null || \
	  $(PIP) install --no-compile --no-deps --index-url $(TORCH_INDEX) -r requirements/torch-cpu.lock
	@$(PIP) install --no-compile --no-deps --require-hashes -r requirements/cpu.lock
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # on all cores, a third faster than pip's; files that no Python 3 can read fail
	@touch $@

$(INSTALLED): $(LOCKED)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-*
	@touch $@

$(DEVELOP): $(LOCKED)
	@$(PIP) install --no-deps --require-hashes -r requirements/dev.lock
	@rm -f $(VENV)/.develop-*
	@touch $@

# Prometheus for the dashboard tests: the system's own, else Debian's package unpacked here, so that no service gets installed.
$(DEBIAN)/prometheus:
	@mkdir -p $(DEBIAN)
	@command -v prometheus > /dev/null || { cd $(DEBIAN) && { $(FETCH) || { apt-get update && $(FETCH); }; } && dpkg --extract prometheus_*.deb . && rm prometheus_*.deb; } \
	  > $(DEBIAN)/log 2>&1 || { echo 'prometheus: not found: install the Debian package, or put the binary on PATH' >&2; exit 2; }
	@touch $@

lock: $(INSTALLED)
	@python requirements/lock.py $(if $(UPGRADE),--upgrade)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
