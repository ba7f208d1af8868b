# make demo   train the door recipe here, with live progress          make test    all checks but the slow ones
# make proofs the slow checks                                          make format  rewrite the code as ruff wants it
# make test-oldest  what touches transformers, with the oldest one supported (constraints-oldest.txt, .venv-oldest)
# Each sets itself up: the first call makes .venv and installs everything at the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST := .venv-oldest
OLDEST_TESTS := tests/unit/sampler tests/unit/learner tests/unit/weights tests/unit/warm_start tests/golden tests/invariants tests/end_to_end
# settings that win over recipes/door/recipe.toml
DEMO ?= run.num_updates=60

# one thread a process: role processes and tests share the cores
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-oldest proofs format clean

demo: $(INSTALLED)
	$(RUN)/headrace run door $(DEMO)

test: $(INSTALLED)
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/python -m pytest -m "not slow and not gpu"

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m "not slow and not gpu" $(OLDEST_TESTS)

proofs: $(INSTALLED)
	$(RUN)/python -m pytest -m "slow and not gpu"

format: $(INSTALLED)
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt torch
	$(RUN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-oldest.txt -e '.[dev]'
	touch $(OLDEST)/.installed

clean:
	rm -rf $(VENV) $(OLDEST) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
