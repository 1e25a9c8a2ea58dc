# SPDX-License-Identifier: Apache-2.0
# Every target does its own set-up (see tools/bootstrap.sh); after the first time that costs a few hundredths of a second.

SHELL := /bin/sh
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
PYTEST_ARGS ?=

# Test files run side by side, each whole in one process: many tests wait for ranks to start, and one rank keeps one core busy.
TEST_WORKERS ?= 2
SIDE_BY_SIDE := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# The environment of the accelerator tests: one with your build of torch and megatron-core, hence not .venv.
GPU_PYTHON ?= python3

CORE16_TESTS := tests/model tests/parity tests/optim tests/parallel tests/patches

# What `make demo` runs. The data step writes nothing where its output is already there.
RUN_DIR := runs/demo-$(shell date +%Y%m%d-%H%M%S)
DEMO_DATA = $(BIN)/zaya data prepare --input stdlib --output data/stdlib --train-bpe 2048 --valid-fraction 0.1
DEMO_TRAIN = $(BIN)/zaya train experiment=cpu_demo run_dir=$(RUN_DIR)

.PHONY: help setup tools demo test test-all test-core16 test-gpu lint clean distclean

help: ## Show this
	@echo "ZAYA1 as a Megatron-core plugin. Needs GNU make and a Python 3.12 or 3.13 anywhere on this machine; finds it by itself."
	@echo
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'
	@echo
	@echo "  make test PYTEST_ARGS='-k router -x'     pass anything on to pytest"
	@echo "  make test TEST_WORKERS=1                 one test file after the other"
	@echo "  make demo RUN_DIR=runs/mine              choose where the demo writes"
	@echo "  make test ZAYA_PYTHON=/path/to/python    choose the Python that .venv is made with"
	@echo
	@echo "New here: make demo trains a small ZAYA on the CPU. On a ROCm machine do not use make: pip install . adds the plugin to"
	@echo "the environment that is there and leaves its torch and megatron-core alone."

setup: ## Make .venv and install what constraints.txt pins (all others do this first)
	@tools/bootstrap.sh

tools:
	@tools/apt_packages.sh

demo: setup ## Prepare a corpus from the Python standard library and train a small ZAYA on the CPU
	$(DEMO_DATA)
	$(DEMO_TRAIN)

# Two test processes whose threads wait for each other by spinning take three times as long.
test test-all test-core16: export OMP_NUM_THREADS ?= 1

test: setup tools ## Run the tests that are neither slow nor need an accelerator
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: setup tools ## Run all tests but those that need an accelerator
	$(PYTEST) $(SIDE_BY_SIDE) -m "not gpu" $(PYTEST_ARGS)

test-core16: setup ## Run the tests of the model, parity, optimizers, parallelism and patches on megatron-core 0.16.1
	@tools/core16.sh
	PYTHONPATH=.core16 $(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu" $(CORE16_TESTS) $(PYTEST_ARGS)

test-gpu: ## Run the tests that need an accelerator, with GPU_PYTHON (default: python3)
	$(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

lint: setup ## Check the code and its layout with ruff (`.venv/bin/ruff format .` lays it out); list evidence older than the code
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python tools/verification.py --check-age

clean: ## Remove caches and build products; keeps .venv, data and runs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Also remove .venv and .core16
	rm -rf .venv .core16
