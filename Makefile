# SPDX-License-Identifier: Apache-2.0
# Every target runs the set-up first (tools/bootstrap.sh); with an unchanged environment that takes a few hundredths of a second.

SHELL := /bin/sh
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
PYTEST_ARGS ?=

# Test files run in parallel, each in one process: many tests wait for ranks to start, and a rank uses one core.
TEST_WORKERS ?= 2
SIDE_BY_SIDE := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Python of the accelerator tests: an environment with your build of torch and megatron-core, not .venv.
# Most of the time the device waits for compilers and for runs to start, so that several files share it.
GPU_PYTHON ?= python3
GPU_WORKERS ?= 6

CORE16_TESTS := tests/model tests/parity tests/optim tests/parallel tests/patches

# The commands of `make demo`. The data step writes nothing if its output exists.
RUN_DIR := runs/demo-$(shell date +%Y%m%d-%H%M%S)
DEMO_DATA = $(BIN)/zaya data prepare --input stdlib --output data/stdlib --train-bpe 2048 --valid-fraction 0.1
DEMO_TRAIN = $(BIN)/zaya train experiment=cpu_demo run_dir=$(RUN_DIR)

# `make check`: what a change of a formula, a key or a message breaks first.
CHECK_TESTS := tests/model tests/optim tests/config tests/cli tests/commands tests/packaging/test_import_rules.py tests/packaging/test_project_text.py

.PHONY: help setup tools demo check test test-all test-core16 test-gpu lab docs lint clean distclean

help: ## Show this
	@echo "ZAYA1 as a Megatron-core plugin. Needs GNU make and Python 3.12 or 3.13, which it finds by itself."
	@echo
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'
	@echo
	@echo "  make test PYTEST_ARGS='-k router -x'     pass options to pytest"
	@echo "  make test TEST_WORKERS=1                 one test file after the other"
	@echo "  make demo RUN_DIR=runs/mine              choose the demo's output folder"
	@echo "  make test ZAYA_PYTHON=/path/to/python    choose the Python of .venv"
	@echo
	@echo "New here: make demo trains a small ZAYA on the CPU. On a ROCm machine do not use make: python3 docker/install.py FOLDER"
	@echo "(docs/mi300x.md) adds Megatron-core and the plugin to the image's environment and does not change its torch."

setup: ## Create .venv and install the versions of constraints.txt (other targets run this first)
	@tools/bootstrap.sh

tools: ## Install the Debian packages that the tests of the HIP kernels need (as root; a download of about 200 MB)
	@tools/apt_packages.sh --install

demo: setup ## Prepare a corpus from the Python standard library, train a small ZAYA on the CPU and draw it as a page
	$(DEMO_DATA)
	$(DEMO_TRAIN)
	@$(BIN)/zaya runs plot $(RUN_DIR)

# With more threads, which spin while they wait, two test processes take three times as long.
check test test-all test-core16 test-gpu: export OMP_NUM_THREADS ?= 1

check: setup ## Run the core of the tests (2 minutes)
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu" $(CHECK_TESTS) $(PYTEST_ARGS)

test: setup ## Run the tests that are neither slow nor need an accelerator (7 minutes on 2 cores); ends with the 20 slowest
	@tools/apt_packages.sh
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu" --durations=20 --durations-min=1 $(PYTEST_ARGS)

test-all: setup ## Run all tests but those that need an accelerator (60 minutes on 2 cores); ends with the 20 slowest
	@tools/apt_packages.sh
	$(PYTEST) $(SIDE_BY_SIDE) -m "not gpu" --durations=20 --durations-min=1 $(PYTEST_ARGS)

test-core16: setup ## Run the tests of the model, parity, optimizers, parallelism and patches on megatron-core 0.16.1
	@tools/core16.sh
	PYTHONPATH=.core16 $(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu" $(CORE16_TESTS) $(PYTEST_ARGS)

test-gpu: ## Run the tests that need an accelerator, with GPU_PYTHON (default: python3); on a new machine `zaya verify` first (docs/mi300x.md)
	@run() { $(GPU_PYTHON) -m pytest "$$@" --durations=20 --durations-min=1 $(PYTEST_ARGS); }; set -x; \
	run -n $(GPU_WORKERS) --dist loadfile --no-loadscope-reorder -m "gpu and not alone"; together=$$?; \
	run -m "gpu and alone"; alone=$$?; \
	case $$together-$$alone in 0-0 | 0-5 | 5-0) ;; *) exit 1 ;; esac # 5: PYTEST_ARGS chose none of them

lab: setup ## Break small supervised runs in 34 ways and check that they recover (25 minutes; 13 faults need root): FAULT=name, HOUR=60 or SOAK=30
	$(BIN)/python -m tests.lab $(if $(FAULT),--fault $(FAULT)) $(if $(HOUR),--hour $(HOUR)) $(if $(SOAK),--soak $(SOAK)) $(LAB_ARGS)

docs: setup ## Build the pages of docs/ as a site with search in build/docs; fails on a link that leads nowhere
	$(BIN)/python -m tools.docs --check
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

lint: setup ## Check the code and its layout with ruff (`.venv/bin/ruff format .` formats it) and public names with ty; fail on an old page or evidence
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/ty check --python .venv
	$(BIN)/python -m tools.docs --check

clean: ## Remove caches and build products; keep .venv, data and runs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Also remove .venv and .core16
	rm -rf .venv .core16
