# Everything here makes its own environment: `make demo` and `make test` need Python alone.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

bin := $(VENV)/bin
python := $(bin)/python
ready := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format bench fuzz test-campaigns test-engine clean

help:  ## show these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

venv: $(ready)  ## make or update the environment

# Done again whenever pyproject.toml changes. The pip that comes with an older Python knows no
# dependency groups, so it is brought up to date first.
$(ready): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("rollout-log needs Python 3.10 or later, and $(PYTHON) is %d.%d: make PYTHON=python3.12 …" % sys.version_info[:2])'
	@test -x $(python) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): some 80 packages of 700 MB, most of them for the tests. It takes a minute or so …"
	@$(python) -m pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(python) -m pip install -qq --disable-pip-version-check --editable . --group dev
	@touch $@

demo: $(ready)  ## record, abort, resume and show a small run; leaves ./demo-log
	@$(python) examples/demo.py $(ARGS)

test: $(ready)  ## run the tests (ARGS="-k sse" for some of them)
	@$(python) -m pytest -q -n auto $(ARGS)

lint: $(ready)  ## ruff and mypy
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/mypy

format: $(ready)  ## let ruff fix and format
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .

bench: $(ready)  ## measure what recording costs
	@if test -f benchmarks/__main__.py; then $(python) -m benchmarks $(ARGS); else echo "bench: there are no benchmarks yet"; fi

# pytest's exit status 5 means that no test was found.
test-campaigns: $(ready)  ## the long randomised tests
	@$(python) -m pytest -q -n auto -m campaign $(ARGS) || { s=$$?; test $$s -eq 5 && echo "test-campaigns: there are no campaigns yet" || exit $$s; }

fuzz: $(ready)  ## fuzz one target with atheris (ARGS="sse -runs=100000")
	@$(python) -m pip install -qq --disable-pip-version-check atheris
	@$(python) tests/campaigns/fuzz.py $(ARGS)

# Builds what the engine needs under .cache/engine first; where that cannot be had, the tests are skipped loudly.
test-engine: $(ready)  ## the tests against a real engine
	@$(python) -m pytest -q -m engine tests/engine $(ARGS)

clean:  ## remove the environment and what tools leave behind
	rm -rf $(VENV) .cache dist demo-log .mypy_cache .ruff_cache .pytest_cache .hypothesis
