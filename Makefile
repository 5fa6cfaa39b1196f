# VENV    folder of the virtual environment; empty: run PYTHON as it is and install nothing
# PYTHON  interpreter that creates VENV, or that runs everything where VENV is empty
# JOBS    processes that run the tests: auto is one per core, or one alone where there is a GPU, which they would share
# ARGS    passed on to the command of train, train-lightning, test and bench
# TORCH   version of torch to run with, or `latest`: VENV is then .venv-TORCH, and constraints.txt holds for the rest
VENV   ?= .venv$(if $(TORCH),-$(TORCH))
PYTHON ?= python3
JOBS   ?= auto

SOURCES := ampkit docs examples tests hatch_build.py
PIP_FLAGS := --quiet --progress-bar off --disable-pip-version-check

ifeq ($(strip $(VENV)),)
PY    := $(PYTHON)
READY :=
PYTEST := $(PY) -m pytest
ifneq ($(TORCH),)
$(error TORCH=$(TORCH) is installed into a virtual environment: give VENV a name, or leave it out)
endif
else
PY    := $(VENV)/bin/python
READY := $(VENV)/.ampkit-installed
# Each process begins with a part of its own, so that a file's fixtures are made in one of them, and takes tests of
# another one when it has done these.
PYTEST := $(PY) -m pytest -n $(JOBS) --dist worksteal
endif

ifeq ($(TORCH),latest)
.PHONY: $(READY)  # ask each time whether there is a newer one
endif

# pytest keeps the asserts that it rewrites, unless this is set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train train-lightning test test-all test-ranks test-seeds check lint types docs screenshots dist numbers bench clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s  %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

train: $(READY)  ## train a ResNet on scanned digits; options in ARGS
	$(PY) examples/train_resnet.py $(ARGS)

train-lightning: $(READY)  ## the same by a Lightning Trainer; options in ARGS
	$(PY) examples/train_resnet_lightning.py $(ARGS)

test: $(READY)  ## run the tests but for the slow ones; TORCH=latest: on the newest torch; without a GPU, skip its tests
	$(if $(TORCH),@$(PY) -c 'import torch; print("torch", torch.__version__)')
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY)  ## run all tests but those of test-ranks and test-seeds
	$(PYTEST) -m "not ranks and not seeds" $(ARGS)

test-ranks: $(READY)  ## run more cases of several processes on the CPU
	$(PYTEST) -m ranks $(ARGS)

test-seeds: $(READY)  ## run more random training set-ups, and more cases of large families
	$(PYTEST) -m seeds $(ARGS)

check: lint types test-all docs  ## lint, types, all tests and docs: what CI runs

lint: $(READY)  ## ruff: rules and format
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)

types: $(READY)  ## mypy --strict
	$(PY) -m mypy --strict ampkit

docs: $(READY)  ## build the pages into docs/_build/html, warnings are errors
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html

screenshots: docs  ## build the pages, show them in a browser, and list what does not fit; needs playwright and Chromium
	$(PY) docs/screenshots.py $(ARGS)

dist: $(READY)  ## build wheel and sdist, check them, and run the README's first loop with the wheel and torch alone
	rm -rf dist
	$(PY) -m build --outdir dist .
	$(PY) -m twine check --strict dist/*
	empty=$$(mktemp -d) && trap 'rm -rf "$$empty"' EXIT && $(PY) -m venv $$empty/venv && \
	$$empty/venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt dist/*.whl && \
	awk '/^```python$$/{on=1; next} /^```$$/{if (on) exit} on' README.md > $$empty/loop.py && cd $$empty && \
	venv/bin/python -I -m ampkit --help && venv/bin/python -I loop.py
	@! grep -n example.org pyproject.toml || echo "not to be uploaded: the address of the repository is a placeholder"

numbers:  ## print how long files and functions are, how much is commented
	@$(PYTHON) tests/support/source_numbers.py

bench: $(READY)  ## time the step: eager, compiled, graphed; options in ARGS
	$(PY) -m ampkit bench $(ARGS)

clean:  ## remove what the other targets wrote, except VENV
	rm -rf docs/_build runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

ifneq ($(READY),)
# With TORCH, pip chooses the torchvision that goes with it.
PINNED := $(if $(TORCH),-v '^torch',.)
TORCHES := $(if $(TORCH),--upgrade torchvision torch$(if $(filter-out latest,$(TORCH)),==$(TORCH)))

$(READY): pyproject.toml constraints.txt
	@echo "Installing ampkit and its development tools into $(VENV): about 3 GB of downloads the first time."
	$(PYTHON) -m venv $(VENV)
	grep $(PINNED) constraints.txt > $(VENV)/constraints.txt
	$(PY) -m pip install $(PIP_FLAGS) -e '.[dev]' $(TORCHES) -c $(VENV)/constraints.txt
	@touch $@
endif
