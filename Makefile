# Everything a person types in this repository. `make` alone lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CUDA   := build/cuda
# Where CUDA's build of torch comes from; a mirror of PyPI does too.
CUDA_INDEX ?= https://pypi.org/simple

# Two ranks on a small machine: one thread each is faster than two that fight for the cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help env demo test long check faults nodes chaos notebooks browser pictures gpu-rehearsal bench wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(READY) ## make .venv with the tested versions (minutes the first time, then at once)

$(READY): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nbdist needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "==> making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> installing nbdist with torch, accelerate, deepspeed, transformers (a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[test,dev,browser]'
	@touch $@

demo: env ## run notebooks/01_first_cell.ipynb from start to finish and show its output
	@$(BIN)/python notebooks/run.py notebooks/01_first_cell.ipynb

test: env ## the tests: unit, real ranks, notebooks, browser
	@echo "==> tests: unit, real ranks, notebooks, browser (half an hour on two cores)"
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not chaos and not alone and not long"
	@$(BIN)/python -m pytest -m "alone and not long"

long: env ## the tests that `make test` leaves out, as every engine in place of two; half an hour
	@$(BIN)/python -m pytest -m long

check: env ## lint, formatting, types and unit tests: before each commit
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/unit

faults: env ## every fault of tests/faults/rows.py that has a test, as one table
	@$(BIN)/python -m pytest -m "fault and not chaos" --numprocesses 2 --dist loadfile

nodes: env ## Ray in network namespaces and a Slurm of its own, as root (apt: slurm-wlm, munge)
	@$(BIN)/python -c 'import ray' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt 'ray[client]'
	@$(BIN)/python -m pytest -m nodes tests/nodes

chaos: env ## random faults, a thousand cells, 10,000 inputs for each parser (NBDIST_CHAOS_SEED, _FAULTS)
	@$(BIN)/python -m pytest -m chaos tests/faults tests/hostile

notebooks: env ## execute the notebooks as the tests do
	@$(BIN)/python -m pytest tests/notebooks

browser: env ## the panel in JupyterLab and Notebook 7 in chromium, alone
	@$(BIN)/python -m pytest -s tests/browser

pictures: env ## the same, which takes the pictures of docs/images
	@NBDIST_PICTURES=docs/images $(BIN)/python -m pytest -s tests/browser/test_panel_in_lab.py \
	  tests/browser/test_profile_in_lab.py

gpu-rehearsal: env $(CUDA)/.ready ## the paths of GPUs without one: CUDA's build of torch, NVML pretended
	@NBDIST_CUDA_SITE=$(CURDIR)/$(CUDA) $(BIN)/python -m pytest tests/rehearsal

# The user's own indexes and links may prefer a CPU build, so pip takes none of them.
$(CUDA)/.ready: constraints.txt
	@echo "==> installing CUDA's build of torch into $(CUDA) (4.5 GB)"
	@rm -rf $(CUDA)
	@env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(CUDA) \
	  --index-url $(CUDA_INDEX) --constraint constraints.txt torch
	@PYTHONPATH=$(CUDA) $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  { echo "$(CUDA_INDEX) has given a torch without CUDA: make gpu-rehearsal CUDA_INDEX=URL"; exit 1; }
	@touch $@

bench: env ## nbdist beside its rivals, the planner beside measurements; writes build/bench.json
	@$(BIN)/python tests/bench

wheel: env ## build dist/*.whl and list what is in it
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@$(BIN)/python -m zipfile --list dist/nbdist-*.whl

clean: ## remove what was built (.venv too)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
