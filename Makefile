# Every target sets up what it needs: its own .venv, with the versions in constraints.txt. Needs Python 3.11 to 3.13 and make.
# `make PYTHON=python3.12 test` picks another interpreter; `make JOBS=4 test` another number of test processes.

PYTHON ?= python3
JOBS ?= auto
# Interpreters that `make dist` tries the wheels with.
DIST_PYTHONS ?= $(PYTHON)
# Whose torch sees the GPU: the machine's own interpreter, where a virtual environment holds a CPU build.
GPU_PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
MODELS_READY := $(VENV)/.models-ready
TORCHREC_VENV := .venv-torchrec
TORCHREC_BIN := $(TORCHREC_VENV)/bin
TORCHREC_READY := $(TORCHREC_VENV)/.ready
DEMO_PAGE := out/llama-8b.html

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-long test-torchrec browser lint format check docs dist bench capture-models check-gpu clean

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(READY)  ## predict a training step of Llama 8B on eight H200s, with its page in out
	@mkdir -p $(dir $(DEMO_PAGE))
	$(BIN)/steptime predict examples/configs/llama-8b.toml --platform 8xh200-nvlink --html $(DEMO_PAGE)

# By file: what a file's tests share (a fitted form, a captured step) is made once.
test: $(READY)  ## the tests that guard laws: a few minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --durations=20

test-slow: $(READY)  ## the rest: long fuzzing, refits, whole measured sets, groups of ranks, pages in a browser
	$(BIN)/python -m pytest -n $(JOBS) -m "slow and not long" --durations=20

test-long: $(READY)  ## all cases of lists of which the others run a sample
	$(BIN)/python -m pytest -n $(JOBS) -m long

test-torchrec: $(TORCHREC_READY)  ## plans and estimates with the real TorchRec, in an environment of its own
	STEPTIME_TORCHREC=required $(TORCHREC_BIN)/python -m pytest tests/torchrec

browser:  ## Chromium for the tests of pages, where it can be installed; without it they are skipped
	@scripts/browser.sh

lint: $(READY)  ## format, style, types, layers, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

format: $(READY)  ## put the sources into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test  ## what has to pass before a change goes in

docs: $(READY)  ## the site of the documentation, in out/site; a warning or a broken link is an error
	$(BIN)/python scripts/site/build.py

dist: $(READY)  ## wheels and source archives of both packages, in dist, tried out in an empty environment
	scripts/dist.sh $(BIN)/python
	CONSTRAINTS=$(CURDIR)/constraints.txt scripts/check_dist.sh $(DIST_PYTHONS)

bench: $(BENCH_READY)  ## speed and accuracy beside the rivals, a script each
	@set -e; for script in $(sort $(wildcard benchmarks/[a-z]*.py)); do echo "== $$script"; $(BIN)/python $$script; done

capture-models: $(MODELS_READY)  ## the share of library models and of ordinary training loops that is captured: an hour on two cores
	$(BIN)/python benchmarks/capture/models.py -o out/capture/models.json
	$(BIN)/python benchmarks/capture/loops.py -o out/capture/loops.json

check-gpu: ## everything that measures, small, on a real GPU (GPU_PYTHON has torch with CUDA, numpy, pyarrow)
	PYTHONPATH=src $(GPU_PYTHON) -m steptime_lab.measure check -o out/check-gpu --share-gpu

clean:  ## remove everything made here
	rm -rf $(VENV) $(TORCHREC_VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python $(TORCHREC_BIN)/python: %/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 to 3.13, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit("steptime needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: name another with make PYTHON=..." % v)'
	$(PYTHON) -m venv $* || { rm -rf $*; exit 1; }

# The interpreter is an order-only prerequisite: it is a link whose age says nothing.
$(READY): pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,lab,gpu-kernels]"
	@touch $@

$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,lab,gpu-kernels,bench]"
	@touch $@

$(MODELS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[models]"
	@touch $@

# TorchRec by itself: its wheel asks for fbgemm-gpu, the build for GPUs; what else it imports is in the extra.
$(TORCHREC_READY): pyproject.toml constraints.txt | $(TORCHREC_BIN)/python
	$(TORCHREC_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torchrec]" pytest hypothesis
	$(TORCHREC_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchrec
	@touch $@
