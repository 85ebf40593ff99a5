# make demo   a minute with psgrad: trains, shows, checks, times
# make test   lint, types, tests, doctests, notebooks
# make bench  psgrad beside its peers: tables, figures and pictures in build/bench; ARGS="--quick" for a first look
# make clean  removes the environment and every cache

PYTHON ?= python3
BIN := .venv/bin

# Builds in isolation read these variables, so the build backend is pinned as well.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test bench clean

demo: .venv/.demo
	$(BIN)/python -m psgrad

test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

bench: .venv/.bench
	$(BIN)/python -m benchmarks --json build/bench/times.json --plots build/bench $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an environment is made once, and again when what it is made from changes.

$(BIN)/python:
	$(PYTHON) -m venv .venv

# torch first and pinned: asked for freely, pip may choose a build that brings gigabytes of GPU packages.
.venv/.torch: constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt torch
	touch $@

.venv/.demo: pyproject.toml constraints.txt .venv/.torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[demo]"
	touch $@

.venv/.dev: pyproject.toml constraints.txt .venv/.torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

.venv/.bench: pyproject.toml constraints.txt .venv/.torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps backpack-for-pytorch
	touch $@
