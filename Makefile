# Development commands. `make` alone lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CUDA   := build/cuda
# Package index for the CUDA build of torch; a PyPI mirror works too.
CUDA_INDEX ?= https://pypi.org/simple

# With two ranks on a small machine, one thread each is fastest: more threads compete for the cores.
export OMP_NUM_THREADS ?= 1
# Otherwise each process of the tests compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env demo check test wide nightly pythons faults nodes pictures docs gpu-rehearsal bench wheel \
  release-check binder-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(READY) ## create .venv with the tested versions (a few minutes the first time)

# compileall uses all cores, pip only one. Its status is ignored: some packages have files that do not compile.
$(READY): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nbdist needs Python 3.11 or newer, but $(PYTHON) is older; use make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> installing nbdist with torch, accelerate, deepspeed, transformers (a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --constraint constraints.txt --editable '.[ranks,deepspeed,test,dev,browser]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

demo: env ## run notebooks/01_first_cell.ipynb and print its output
	@$(BIN)/python notebooks/run.py notebooks/01_first_cell.ipynb

check: env ## run lint, formatting, types and unit tests, and print the package's size; do this before each commit
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile tests/unit
	@$(BIN)/python tests/unit/test_size.py

test: env ## run the tests: unit, real ranks, a notebook, a browser; CI runs this
	@echo "==> tests: unit, real ranks, a notebook, a browser (about 12 minutes on two cores)"
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

wide: env ## run the tests that `make test` skips: all engines, faults and notebooks, fuzzing, JupyterLab
	@$(BIN)/python -m pytest -m "nightly and not alone and not nodes" --numprocesses 2 --dist loadfile
	@$(BIN)/python -m pytest -m "alone and not nodes"

nightly: env ## run everything that runs without a GPU (hours), and print what failed
	@failed=; for part in check test wide pythons nodes docs bench; do \
	  $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

PYTHONS   ?= python3.12 python3.13 python3.14
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# It has a build of torch for CPUs; CPU_INDEX= leaves it out where it cannot be reached.
pythons: ## run the unit tests and ranks under other versions of Python (PYTHONS=...), each in build/
	@failed=; for python in $(PYTHONS); do \
	  $$python -c '' 2>/dev/null || { echo "==> $$python is not installed: skipped"; continue; }; \
	  echo "==> $$python"; folder=build/$$(basename $$python); \
	  { test -e $$folder/bin/python || $$python -m venv $$folder; } && \
	  $$folder/bin/python -m pip install --quiet --disable-pip-version-check \
	    $(if $(CPU_INDEX),--extra-index-url $(CPU_INDEX)) --editable '.[ranks,deepspeed,test]' && \
	  PYTHONWARNINGS=default $$folder/bin/python -m pytest -q tests/unit tests/e2e/test_ranks_in_another_python.py || \
	  failed="$$failed $$python"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

faults: env ## run the tests of every fault in tests/faults/fault_rows.py and print one table
	@$(BIN)/python -m pytest -m "fault and not nodes" --numprocesses 2 --dist loadfile

nodes: env ## test Ray in network namespaces and a local Slurm, as root (apt: slurm-wlm, munge)
	@$(BIN)/python -c 'import ray' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt 'ray[client]'
	@$(BIN)/python -m pytest -m nodes tests/nodes

pictures: env ## take the pictures in docs/images, in JupyterLab in a browser
	@NBDIST_PICTURES=docs/images $(BIN)/python -m pytest -s -m "" tests/browser/test_panel_in_lab.py \
	  tests/browser/test_profile_in_lab.py tests/browser/test_debugger_in_lab.py
	@$(BIN)/python -m tests.browser.pictures session
	@$(BIN)/python -m tests.browser.pictures record

# NO_MKDOCS_2_WARNING: mkdocs-material 9 otherwise prints an advertisement.
docs: env ## build the documentation site in build/site, with the notebooks executed
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "==> open build/site/index.html, or run python -m http.server -d build/site for its search"

gpu-rehearsal: env $(CUDA)/.ready ## test GPU code without a GPU: CUDA build of torch, stubbed NVML
	@NBDIST_CUDA_SITE=$(CURDIR)/$(CUDA) $(BIN)/python -m pytest tests/rehearsal

# The user's pip configuration may prefer a CPU build, so pip ignores it here.
$(CUDA)/.ready: constraints.txt
	@echo "==> installing the CUDA build of torch into $(CUDA) (4.5 GB)"
	@rm -rf $(CUDA)
	@env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(CUDA) \
	  --index-url $(CUDA_INDEX) --constraint constraints.txt torch
	@PYTHONPATH=$(CUDA) $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  { echo "$(CUDA_INDEX) provides a torch without CUDA; use make gpu-rehearsal CUDA_INDEX=URL"; exit 1; }
	@touch $@

bench: env ## compare nbdist with other tools, the planner with measurements; writes build/bench.json
	@$(BIN)/python -c 'import bitsandbytes' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt bitsandbytes
	@$(BIN)/python benchmarks

wheel: env ## build dist/*.whl and list its content
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@$(BIN)/python -m zipfile --list dist/nbdist-*.whl

release-check: env ## build sdist and wheel, check them, run notebook 01 with the installed wheel
	@$(BIN)/python .ci/release_check.py release

binder-check: env ## repeat the steps of binder/ in a new environment and run notebook 01
	@$(BIN)/python .ci/release_check.py binder

clean: ## remove build outputs and .venv
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
