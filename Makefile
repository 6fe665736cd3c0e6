# make demo, make test: each makes .venv first where it is not there yet.

PYTHON ?= python3
# Another version or build: make TORCH="torch==2.12.0"
TORCH ?= torch==2.13.0
PACKAGES := core plugins/fsdp2 plugins/inductor

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

.PHONY: help dev check test demo demo-distributed bench clean python compiler

help:
	@echo "make demo   train a small Llama three times (eager, whole-model compile, regions) and compare"
	@echo "make demo-distributed   the same on one process, and under ddp and fsdp2 on two"
	@echo "make test   run every test"
	@echo "make check  lint, formatting, types, and who may import whom"
	@echo "make bench  what 'import torchrig' and 'prepare' cost"
	@echo "make dev    make .venv with every package editable and the tools"
	@echo "make clean  remove .venv, caches and what the demo wrote"

dev: $(READY)

# torch is named in the very command that installs the packages: on its own, pip would take the newest torch for them.
$(READY): requirements-dev.txt Makefile $(addsuffix /pyproject.toml,$(PACKAGES))
	@$(MAKE) --no-print-directory python
	@echo "Making $(VENV) with $$($(PYTHON) --version); the download is a few hundred megabytes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --progress-bar off "$(TORCH)" \
		$(addprefix -e ,$(addprefix ./,$(PACKAGES))) -r requirements-dev.txt \
		| awk '/^ *(Downloading|Processing) .*[.]whl/ { n = split($$2, part, "/"); print "  " part[n]; fflush() } \
		       /^Installing collected/ { print "  installing all of it"; fflush() }'
	@touch $@
	@echo "$(VENV) is ready."

check: dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/mypy --no-warn-return-any --allow-untyped-calls examples benchmarks
	@$(BIN)/lint-imports

test: dev compiler
	@$(BIN)/python -m pytest

demo: dev compiler
	@$(BIN)/python examples/compare.py

demo-distributed: dev compiler
	@$(BIN)/python examples/compare_distributed.py

bench: dev compiler
	@$(BIN)/python benchmarks/import_time.py
	@$(BIN)/python benchmarks/prepare_overhead.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache demo-output
	find . -name __pycache__ -prune -exec rm -rf {} +

python:
	@command -v "$(PYTHON)" > /dev/null \
		|| { echo "There is no $(PYTHON) here. Install Python 3.10 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "torchrig needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) --version)." \
		          "Name another: make PYTHON=python3.12" >&2; exit 1; }

compiler:
	@command -v "$${CXX:-g++}" c++ g++ clang++ > /dev/null \
		|| { echo "There is no C++ compiler here, and Inductor needs one. Install g++ or clang++ (Debian, Ubuntu:" \
		          "apt install g++; macOS: xcode-select --install), or name it: CXX=/path/to/compiler" >&2; exit 1; }
