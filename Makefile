# Everything runs in .venv, which is made on first use from the tested pins in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup quickstart rlhf bench test test-all lint types format check clean

help:
	@echo "make quickstart   set up, then train the bundled model on arithmetic (a few minutes on a CPU)"
	@echo "make rlhf         set up, then the path from pairs to policies on a CPU: reward model, PPO and GRPO, DPO"
	@echo "make bench        set up, then measure an optimizer step beside TRL's (about ten minutes of one core)"
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

LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

quickstart: setup
	$(LAUNCH) -m trl_algos train recipes/quickstart.yaml

# In this order: the second and the third are rewarded by the model that the first one trains.
RLHF := 1_reward_model 2_ppo 2_grpo dpo
rlhf: setup
	for stage in $(RLHF); do $(LAUNCH) -m trl_algos train recipes/rlhf_arithmetic/$$stage.yaml || exit 1; done

bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step_cost.py

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
