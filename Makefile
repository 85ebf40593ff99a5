# make demo   a minute with psgrad: trains, shows, checks, times
# make test   lint, types, tests, doctests, notebooks, the site
# make docs   builds the site into build/docs, warnings as errors; open build/docs/index.html
# make bench  psgrad beside its peers: tables, figures and pictures in build/bench; ARGS="--quick" for a first look,
#             COMMAND=memory for another of the commands that `python -m benchmarks --help` lists
# make wild   psgrad on models of other packages beside a plain loop; ARGS="peft GCN" for some packages or models
# make peers  both sides of the pages for people who come from other packages, with every one of these (2 GB)
# make clean  removes the environments and every cache
#
# PYTHON=python3.12: another interpreter, for an environment that is yet to be made.
# TORCH=2.15.0: that version of torch, in an environment of its own beside .venv (several GB).

PYTHON ?= python3
COMMAND ?= workloads
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
WILD := .venv-wild$(if $(TORCH),-torch-$(TORCH))
PEERS := .venv-peers$(if $(TORCH),-torch-$(TORCH))
CONSTRAINTS := $(if $(TORCH),build/constraints-torch-$(TORCH).txt,constraints.txt)

# Builds in isolation read these variables, so the build backend is pinned as well.
export PIP_CONSTRAINT := $(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test docs bench wild peers clean

demo: $(VENV)/.demo
	$(BIN)/python -m psgrad

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist worksteal

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W --keep-going -n -j auto -d build/doctrees docs build/docs

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(COMMAND) --json build/bench/$(COMMAND).json --plots build/bench $(ARGS)

wild: $(WILD)/.installed
	OMP_NUM_THREADS=1 $(WILD)/bin/python -m wild $(ARGS)

peers: $(PEERS)/.installed
	PSGRAD_PEERS=all $(PEERS)/bin/python -m pytest tests/test_coming_from.py $(ARGS)

clean:
	rm -rf .venv .venv-peers* .venv-torch-* .venv-wild* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an environment is made once, and again when what it is made from changes.

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

build/constraints-torch-%.txt: constraints.txt
	mkdir -p $(@D)
	sed 's/^torch==.*/torch==$*/' $< > $@

# torch first and pinned: asked for freely, pip may choose a build that brings gigabytes of GPU packages.
$(VENV)/.torch: $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) torch
	touch $@

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) $(VENV)/.torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[demo]"
	touch $@

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) $(VENV)/.torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[docs]"
	touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) $(VENV)/.torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[dev]"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-deps backpack-for-pytorch dattri
	touch $@

$(VENV)/.bench: pyproject.toml $(CONSTRAINTS) $(VENV)/.torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[bench]"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-deps backpack-for-pytorch
	touch $@

# All at once, and where one of them cannot be had, one by one: what is missing is shown so in the table.
$(WILD)/.installed: wild/requirements.txt $(CONSTRAINTS)
	test -x $(WILD)/bin/python || $(PYTHON) -m venv $(WILD)
	$(WILD)/bin/python -m pip install -q -c $(CONSTRAINTS) torch
	$(WILD)/bin/python -m pip install -q --no-deps -r wild/requirements.txt || \
		for package in $$(grep -v '^#' wild/requirements.txt); do \
			$(WILD)/bin/python -m pip install -q --no-deps $$package || echo "not installed: $$package"; done
	touch $@

$(PEERS)/.installed: tests/peers.txt $(CONSTRAINTS)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q -c $(CONSTRAINTS) torch
	$(PEERS)/bin/python -m pip install -q -c $(CONSTRAINTS) -e . hypothesis pytest -r tests/peers.txt
	$(PEERS)/bin/python -m pip install -q -c $(CONSTRAINTS) --no-deps backpack-for-pytorch bergson==2.5.1
	touch $@
