# Everything a checkout needs: Python 3.10 or newer, a C++ compiler and make. cmake and ninja come as wheels if missing.
#   make demo    serve SmolLM2 with four characters on 127.0.0.1:8080
#   make test    run all tests
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LLAMA := $(shell sed -n 's/^ *"\(llama-cpp-python==[^"]*\)",$$/\1/p' pyproject.toml)
PEER := $(shell sed -n 's/^peers = \["\([^"]*\)"\]$$/\1/p' pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help install demo serve test lint bench clean

help:
	@echo "make demo              serve SmolLM2 with four characters on 127.0.0.1:8080"
	@echo "make serve ARGS=...    serve your own model: ARGS='--model FILE --adapter NAME=PATH'"
	@echo "make test              run all tests (minutes; ARGS=tests/unit: seconds)"
	@echo "make lint              style, types and the direction of imports"
	@echo "make bench             measure the product, beside llama-server where it is installed (ARGS=--quick)"
	@echo "make install           only install into $(VENV); the targets above do it by themselves"
	@echo "make clean             remove $(VENV) and everything that was built"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml $(wildcard native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or newer is needed, $(PYTHON) is " + sys.version)'
	@test -x $(BIN)/python || { echo "==> making $(VENV) (seconds; a minute on a busy machine)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> upgrading pip"
	@$(PIP) install --quiet --upgrade pip
	@echo "==> $(LLAMA): building llama.cpp, unless pip has the wheel already (5 to 15 minutes, once)"
	@$(PIP) install --progress-bar off '$(LLAMA)'
	@echo "==> building the native module, then installing loraproxy with what the demo, the tests and the benchmark need (1 to 5 minutes)"
	@$(PIP) install --progress-bar off --editable '.[demo,bench,dev]'
	@echo "==> a ready-built llama-server for tests/peers, where there is one for this machine (seconds)"
	@$(PIP) install --quiet --progress-bar off --only-binary :all: '$(PEER)' 2> /dev/null || echo "    none: tests/peers will be skipped"
	@touch $@

demo: install
	$(BIN)/loraproxy demo $(ARGS)

serve: install
	$(BIN)/loraproxy serve $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/loraproxy bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info loraproxy/_native*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find loraproxy tests -name __pycache__ -type d -prune -exec rm -rf {} +
