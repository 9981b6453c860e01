# `make serve` runs a server, `make test` checks everything. Both first install what is missing into .venv;
# a second run starts at once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# make install VENV_FLAGS=--system-site-packages uses the torch this machine already has.
VENV_FLAGS ?=

MODEL ?=
PORT  ?= 8000
FLAGS ?=

# The mark of the browser tests that make test-page runs: `browser` (all) or `everyday`.
PAGE_TESTS ?= browser
PAGE_FLAGS ?=

# Libraries choose kernels by CPU, and kernels round differently: these variables select those of an older CPU.
AS_AVX2 := OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2

# The oldest supported Triton: tests compile every kernel with it. Newer ones have accepted the same code.
OLDEST_TRITON := 3.6.0

# Versions that the tests passed with, pinned so that a new release of a client or a linter breaks no test.
# The dependencies of the server have version ranges (pyproject.toml).
VERSIONS := tests/versions.txt

# malloc keeps freed memory: memory returned to the kernel has to be zeroed again.
KEEP_MEMORY := MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=268435456

# Three workers for two cores: many tests wait for child processes. An empty PYTHONDONTWRITEBYTECODE lets
# hundreds of these read compiled modules instead of compiling each one again.
PYTEST := OMP_NUM_THREADS=1 $(KEEP_MEMORY) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install serve test test-slow test-page test-ray page versions

help:
	@echo "make install   make $(VENV) and install Penstock into it"
	@echo "make serve     serve a model on port $(PORT); MODEL=folder PORT=8000 FLAGS='--max-rows 8'"
	@echo "make test      lint, format, types and tests"
	@echo "make test-slow what make test leaves out (hours): soaks, crowds, all variants, real clients"
	@echo "make test-ray  Penstock on a Ray cluster of this machine, in an environment of its own"
	@echo "make test-page the page in a real browser; uses Debian's chromium, or gets Playwright's"
	@echo "make versions  install the newest libraries to test with, and write $(VERSIONS)"
	@echo "make page      build the page that the server sends from web/source; needs Node"

install: $(VENV)/installed

serve: install
	@$(BIN)/penstock serve $(MODEL) --port $(PORT) $(FLAGS)

test: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
# mypy runs beside the tests: its first run takes half a minute of one core.
	@$(BIN)/mypy > $(VENV)/types 2>&1 & types=$$!; \
	  $(PYTEST) --no-loadscope-reorder --durations=25; tests=$$?; \
	  wait $$types; types=$$?; cat $(VENV)/types; exit $$((tests | types))
	$(AS_AVX2) $(PYTEST) -n 2 --dist load -m 'bitwise and not slow' $$(grep -l 'mark\.bitwise' tests/test_*.py)

# In one process: many tests measure the server. SOAK_REQUESTS=100000 STORM_SECONDS=60 shorten the longest.
test-slow: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --durations=25

versions:
	rm -rf $(VENV)
	@echo "# Versions that the tests passed with, except torch. make versions writes the newest." > $(VERSIONS)
	$(MAKE) $(VENV)/installed-test
	$(BIN)/python -m pip freeze --exclude torch --exclude penstock >> $(VERSIONS)
	@touch $(VENV)/installed-test

test-page: $(VENV)/installed-page
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser -m $(PAGE_TESTS) $(PAGE_FLAGS)

page: web/node_modules
	node web/build.mjs

web/node_modules: web/package.json
	cd web && npm install --no-package-lock --no-audit --no-fund
	@touch $@

test-ray: .venv-ray/installed
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest tests/on_ray -m ray

# A separate environment that reads the packages of the first one: Ray has a hundred dependencies.
.venv-ray/installed: pyproject.toml | $(VENV)/installed-test
	$(PYTHON) -m venv .venv-ray
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
	  > $$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/penstock.pth
	pwd >> $$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/penstock.pth
	.venv-ray/bin/python -m pip install -q 'ray[serve]>=2.60'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "error: Penstock needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "  Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

# torch is installed first and pinned: a machine without it gets the tested build, others keep what they have.
$(VENV)/torch: | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install torch==2.13.0
	@touch $@

$(VENV)/installed: pyproject.toml | $(VENV)/torch
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml $(VERSIONS) | $(VENV)/torch
	$(BIN)/python -m pip install -q -c $(VERSIONS) -e '.[test]'
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/oldest triton==$(OLDEST_TRITON)
	@touch $@ $(VENV)/installed

# Uses Debian's chromium-headless-shell or chromium if present; CHROMIUM=path names another one.
$(VENV)/installed-page: pyproject.toml | $(VENV)/installed-test
	$(BIN)/python -m pip install -q -e '.[page]'
	@test -n "$(CHROMIUM)" || for name in chromium-headless-shell chromium google-chrome; do \
	  command -v $$name > /dev/null && exit 0; \
	done || $(BIN)/python -m playwright install --only-shell chromium
	@touch $@
