# Every target makes what it needs first: `.venv` in this folder, with the versions of constraints.txt.
#   make demo     train a small language model with two workers on real text (a few minutes, no network once installed)
#   make test     the tests, but those of test-long and test-engines
#   make test-long  further cases; many models and programs under many plans, planted errors, long runs: up to hours
#   make test-engines  real SSH servers, Slurm, Kubernetes, Ray and object stores on this machine, and jobs on them: half an hour
#   make test-compat  programs of Accelerate, DeepSpeed, Horovod and Keras beside the frameworks themselves: minutes
#   make test-tensorflow  TensorFlow's and KerasHub's programs, in an environment of their own (.venv-tensorflow, 2 GB)
#   make test-torch TORCH=2.15.0  unit and world tests on another torch, in an environment of its own (up to 6 GB)
#   make accelerator  the checks that need a GPU, on the one that is here: a table, in ten minutes at most; installs nothing
#   make check    formatter, linter, import contract, the library's types in short, unit tests: under a minute
#   make lint     the same without tests, and the types of everything, in full, and of the library on later Pythons
#   make bench    the measurements of docs/reference/benchmarks.md
#   make docs     the documentation, in docs/_build/html
#   make format   rewrite the sources as the formatter wants them
#   make clean    remove .venv and everything that was built
# PYTHON=/path/to/python chooses the interpreter (3.11 or newer), ARGS="-k name" goes to pytest or to the measurements.
# Most tests wait for processes that they have started, so two files of them run at once, in the order of tests/conftest.py;
# ARGS="-n0" runs one after another.

# The tests start hundreds of interpreters: where compiled files may not be kept, each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
SOURCES := src tests examples benchmarks docs/conf.py docs/screenshots.py
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
    $$python -c '$(NEW_ENOUGH)' 2>/dev/null && command -v $$python && break; done)
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

LATER_PYTHONS := 3.12 3.13 3.14
OWN_TO_LATER := UP,B912,RUF058# rules that ask for what Python 3.11 lacks
PYRIGHT = $(BIN)/pyright --pythonpath $(BIN)/python

define STYLE
@echo "== format"
@$(BIN)/ruff format --check --output-format concise $(SOURCES) > $(VENV)/format.log || { cat $(VENV)/format.log; \
    echo "make format puts this right"; exit 1; }
@echo "== lint"
@$(BIN)/ruff check --quiet $(SOURCES)
@echo "== import contract"
@$(BIN)/lint-imports --no-cache > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }
endef

TENSORFLOW_VENV := .venv-tensorflow
HAS_TORCH := import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None or sys.version_info < (3, 11))
# PYTHON, if it is given; else the first of these with torch: this checkout's own environment, python3, python.
ACCELERATOR_PYTHON = $(if $(filter-out undefined file,$(origin PYTHON)),$(PYTHON),$(or $(shell for python in $(BIN)/python \
    python3 python; do $$python -c '$(HAS_TORCH)' 2>/dev/null && echo $$python && break; done),python3))
TORCH ?= 2.15.0
TORCH_VENV = .venv-torch-$(TORCH)

.PHONY: help demo test test-long test-engines test-compat test-tensorflow test-torch accelerator check lint bench docs format clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.runtime
	@$(BIN)/python examples/gpt.py

test: $(VENV)/.dev
	@bash tests/system_packages.sh
	@echo "== tests"
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: $(VENV)/.long
	@bash tests/system_packages.sh long
	@echo "== long tests"
	@$(BIN)/python -m pytest -n 2 --dist loadfile --further tests/unit/planner tests/world tests/fault tests/docs $(ARGS); \
	further=$$?; \
	$(BIN)/python -m pytest -n 2 --dist loadfile -o faulthandler_timeout=6000 tests/long $(ARGS) && exit $$further

test-engines: $(VENV)/.engines
	@bash tests/system_packages.sh engines
	@echo "== tests on real engines"
	@$(BIN)/python -m pytest -o faulthandler_timeout=3600 -o timeout=600 tests/engines $(ARGS)

test-compat: $(VENV)/.compat
	@echo "== tests beside other frameworks"
	@$(BIN)/python -m pytest -o timeout=600 tests/unit/compat tests/compat --ignore tests/compat/tensorflow $(ARGS)

test-tensorflow: $(TENSORFLOW_VENV)/.made
	@echo "== tests on TensorFlow"
	@$(TENSORFLOW_VENV)/bin/python -m pytest -o timeout=900 -o faulthandler_timeout=1800 tests/compat/tensorflow $(ARGS)

# Programs that tests start by name are those of that environment.
test-torch: $(TORCH_VENV)/.made
	@bash tests/system_packages.sh
	@echo "== tests on torch $(TORCH)"
	@PATH="$(abspath $(TORCH_VENV))/bin:$$PATH" $(TORCH_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	    tests/unit tests/world $(ARGS)

# With the Python that has torch, as it is: PYTHON=python3 make accelerator. Nothing is installed, so nothing is fetched.
accelerator:
	@$(ACCELERATOR_PYTHON) benchmarks/accelerator.py $(ARGS)

check: $(VENV)/.dev
	$(STYLE)
	@echo "== the library's types, in short"
	@$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python > $(VENV)/types.log 2>&1 || { cat $(VENV)/types.log; exit 1; }
	@echo "== unit tests"
	@$(BIN)/python -m pytest -q --quick -n 2 --dist loadfile tests/unit $(ARGS)

lint: $(VENV)/.dev
	$(STYLE)
	@echo "== Python $(LATER_PYTHONS)"
	@for version in $(LATER_PYTHONS); do \
	    $(BIN)/ruff check --quiet --target-version py$$(echo $$version | tr -d .) --ignore $(OWN_TO_LATER) $(SOURCES) && \
	    $(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --python-version $$version > $(VENV)/types.log 2>&1 \
	        || { cat $(VENV)/types.log; exit 1; }; done
	@echo "== types"
	@$(PYRIGHT) --threads 2 > $(VENV)/types.log || { cat $(VENV)/types.log; exit 1; }

bench: $(VENV)/.dev
	@for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python $$program $(ARGS) || exit 1; done

docs: $(VENV)/.dev
	@echo "== docs/_build/html/index.html"
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

format: $(VENV)/.dev
	@$(BIN)/ruff check --quiet --fix-only $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) $(TENSORFLOW_VENV) .venv-torch-* build dist docs/_build src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian ships `venv` without the part that puts pip into it, as a package of its own.
$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found: install one" \
	    "(on Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python"; exit 1; } >&2
	@echo "== environment: $(VENV), with $$($(PYTHON) --version) ($(PYTHON))"
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	    echo "== $(PYTHON) cannot make environments: apt-get install $$package"; \
	    if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	        export DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes; \
	        apt-get update -qq && apt-get install -y -qq $$package >/dev/null; \
	    else \
	        echo "That needs root: run 'sudo apt-get install $$package', then this command again." >&2; exit 1; \
	    fi; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch first and alone: what is installed after it finds its pinned build there and does not ask for another one.
$(VENV)/.runtime: $(VENV)/.made pyproject.toml constraints.txt
	@echo "== installing torch (takes a minute or more)"
	@$(PIP_INSTALL) torch==2.13.0 setuptools
	@echo "== installing paceline and what it needs to run"
	@$(PIP_INSTALL) --no-build-isolation -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "== installing what tests, checks and documentation need"
	@$(PIP_INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@

$(VENV)/.long: $(VENV)/.dev
	@echo "== installing the libraries whose models are tried"
	@$(PIP_INSTALL) --no-build-isolation -e ".[long]"
	@touch $@

$(VENV)/.engines: $(VENV)/.dev
	@echo "== installing the engines' and stores' clients, and Ray"
	@$(PIP_INSTALL) --no-build-isolation -e ".[engines]"
	@touch $@

$(VENV)/.compat: $(VENV)/.dev
	@echo "== installing other frameworks, to compare with"
	@$(PIP_INSTALL) --no-build-isolation -e ".[compat]"
	@touch $@

$(TENSORFLOW_VENV)/.made: pyproject.toml constraints.txt
	@echo "== environment: $(TENSORFLOW_VENV), with TensorFlow (2 GB)"
	@$(PYTHON) -m venv --clear $(TENSORFLOW_VENV)
	@$(TENSORFLOW_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch==2.13.0 setuptools
	@$(TENSORFLOW_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation \
	    -e ".[tensorflow]"
	@touch $@

# The pins of everything else hold; pip finds what this torch needs, which may be an older setuptools (torch 2.11).
$(TORCH_VENV)/.made: pyproject.toml constraints.txt
	@echo "== environment: $(TORCH_VENV), with torch $(TORCH)"
	@$(PYTHON) -m venv --clear $(TORCH_VENV)
	@grep -vE '^(torch|torchvision|torchaudio|triton|setuptools|nvidia-.*|cuda-.*)==' constraints.txt > $(TORCH_VENV)/constraints.txt
	@$(TORCH_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt \
	    torch==$(TORCH) "setuptools>=77"
	@$(TORCH_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt \
	    --no-build-isolation -e ".[dev]" torch==$(TORCH)
	@touch $@
