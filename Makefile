# Two commands on a fresh machine:
#   make mnist    train MNIST with horovodrun on four processes
#   make test     run the test suite
# Each sets up what it needs once (.venv, this package, Horovod) and repeats nothing later.
# Needed beforehand: Python 3.10 or later with pip and its C headers, make and g++; what is missing is named.

PYTHON ?= python3
VENV ?= .venv
# Options passed on: make mnist ARGS="--epochs 3 --backend ddp" DATA_DIR=path/to/mnist NP=2
ARGS ?=
DATA_DIR ?=
NP ?= 4
# Options of the Horovod build: make mnist HOROVOD_ARGS="--gpu none --mpi"
HOROVOD_ARGS ?=
PYTEST_ARGS ?=
GPU_ARGS ?=
# make test LONG=1: also the tests that take long; launchers then start all processes
LONG ?=
# Files of tests that run at the same time; 0: all in one process, one after the other.
TEST_JOBS ?= 3

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
REQUIREMENTS := setup.cfg pyproject.toml constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup mnist test image-test gpu-test lint audit docs clean
.DELETE_ON_ERROR:

help:
	@echo "make mnist   train MNIST: horovodrun -np $(NP) python -m hvd_trainer.mnist"
	@echo "             options: ARGS=\"--epochs 3\"  DATA_DIR=folder  NP=2  HOROVOD_ARGS=\"--gpu none\""
	@echo "make test    run the test suite (PYTEST_ARGS=\"-k name\" selects, LONG=1 runs the long ones too)"
	@echo "make gpu-test  prove on this machine's GPUs what can be proved; writes gpu-report.md and gpu-report.xml"
	@echo "             in ten minutes, all of it with GPU_ARGS=\"--minutes 60\"; or pytest's options, such as -x"
	@echo "make image-test  build the Docker image and train in it (root, buildah, debootstrap)"
	@echo "make lint    ruff, mypy, the order of imports, and linters of scripts and forms"
	@echo "make audit   known vulnerabilities of all that is installed (asks a service on the internet)"
	@echo "make docs    build the documentation site into build/site, with every link checked"
	@echo "make setup   only .venv, the package and Horovod"
	@echo "make clean   remove .venv and the caches in this folder (built Horovod wheels stay)"

setup: $(STAMPS)/horovod

# The launcher starts whatever `python` is first on PATH, on every host: let that be ours.
mnist: $(STAMPS)/horovod
	PATH="$(abspath $(BIN)):$$PATH" horovodrun -np $(NP) python -m hvd_trainer.mnist $(if $(DATA_DIR),--data-dir "$(DATA_DIR)") $(ARGS)

test: $(STAMPS)/horovod $(STAMPS)/test
	PATH="$(abspath $(BIN)):$$PATH" python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder \
	    --durations 25 -m "$(if $(LONG),,not long and )not image and not gpu" $(if $(LONG),--cold) $(PYTEST_ARGS)

# Root and 20 GB of disk; needs Debian's packages buildah and debootstrap.
image-test: $(STAMPS)/horovod $(STAMPS)/test
	PATH="$(abspath $(BIN)):$$PATH" python -m pytest -m image --timeout 3600 tests/cluster/test_image.py $(PYTEST_ARGS)

# It builds Horovod itself. Without a GPU it says so and exits with 69.
gpu-test: $(STAMPS)/test
	PATH="$(abspath $(BIN)):$$PATH" python -m pytest -m gpu tests/gpu --junitxml gpu-report.xml $(GPU_ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/shellcheck .ci/run .ci/bare docker/hvd-ssh docker/hvd-mnist
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/gpu-report.yml

# With Horovod, whose findings have answers.
audit: $(STAMPS)/horovod $(STAMPS)/dev
	$(BIN)/python .ci/audit.py

# Material announces its successor at every start, for which mkdocs.yml needs no change.
docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { \
	    echo "make: '$(PYTHON)' was not found. Install Python 3.10 or later:" >&2; \
	    echo "  apt-get install python3 python3-venv python3-dev    (or: make PYTHON=/path/to/python3)" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "make: Python 3.10 or later is needed, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	    echo "  Name another one: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; }
	@command -v g++ >/dev/null || [ -n "$$CXX" ] || { \
	    echo "make: g++ was not found, and Horovod must be compiled. Install it:" >&2; \
	    echo "  apt-get install g++    (or name another compiler: CXX=/path/to/g++ make ...)" >&2; \
	    exit 1; }
	@[ -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || { \
	    echo "make: '$(PYTHON)' has no C headers, and Horovod must be compiled. Install them:" >&2; \
	    echo "  apt-get install python3-dev" >&2; \
	    exit 1; }
# Debian splits ensurepip from Python; where it is missing, the pip of $(PYTHON) fills the .venv.
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	    $(PYTHON) -m venv --without-pip $(VENV) \
	        && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; \
	else false; fi || { \
	    rm -rf $(VENV); \
	    echo "make: '$(PYTHON)' can make no virtual environment. Install what it lacks:" >&2; \
	    echo "  apt-get install python3-venv python3-pip" >&2; \
	    exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/package: $(STAMPS)/venv $(REQUIREMENTS)
	$(INSTALL) -e '.[tensorboard,imdb,migrate,tools]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/package
	$(INSTALL) -e '.[test]'
	@touch $@

# Also Ray and Spark, for whose 1 GB nobody should wait who types `make test`: it skips their tests without them.
$(STAMPS)/dev: $(STAMPS)/package
	$(INSTALL) -e '.[test,clusters,dev,wandb,mlflow]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/package
	$(INSTALL) -e '.[docs]'
	@touch $@

# Rebuilt only when the package's dependencies (torch above all) changed; the tool itself then
# keeps a Horovod that still fits, and takes a cached wheel before it compiles one.
$(STAMPS)/horovod: $(STAMPS)/package
	$(BIN)/python -m hvd_trainer install-horovod $(HOROVOD_ARGS)
	@touch $@
