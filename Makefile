# Everything runs in .venv, which is made on first use from the tested pins in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all lint types format check clean

help:
	@echo "make quickstart   set up, then train the bundled model on arithmetic (a few minutes on a CPU)"
	@echo "make test         set up, then run the tests"
	@echo "make check        lint, types and tests, as CI does"
	@echo "make lint | types | format"

# torch first and from the pins: on its own pip may choose a build with several GB of CUDA libraries.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,tasks]"
	touch .venv/.ready

setup: .venv/.ready

quickstart: setup
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		-m trl_algos train recipes/quickstart.yaml

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
