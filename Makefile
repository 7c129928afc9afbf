# Three commands for a newcomer: make demo, make test, make check. `make help` lists the rest.
# Everything lives in .venv, made on first use; a stamp file keeps later runs from installing again.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Two test processes: more helps little on small machines and starves tests that start clusters.
JOBS   ?= 2
# What to test or benchmark, e.g. `make test TESTS=tests/data`, `make bench ONLY=embedding`.
TESTS  ?=
ONLY   ?=

.DEFAULT_GOAL := help
.PHONY: help install test test-nightly check format demo bench docs build clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[dev]"
	touch $@

install: $(STAMP) ## make .venv with the project (editable) and everything needed to work on it

test: $(STAMP) ## run the whole test suite, doctests and the documents' code included
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

# The pure parts, by tens of thousands of orders of events; a quarter of an hour on two cores.
ORDERS := tests/cluster/test_closures.py tests/ps/test_ledger.py tests/ps/test_store.py tests/core/test_partition.py

test-nightly: $(STAMP) ## 50,000 random orders of events for every pure part, not thousands
	$(BIN)/python -m pytest -n $(JOBS) --timeout 7200 --hypothesis-profile=nightly $(ORDERS)

check: $(STAMP) ## ruff, mypy --strict, the architecture test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(STAMP) ## a minute of training on 2 workers and 2 parameter servers, with a live view
	$(BIN)/stratagem demo

bench: $(STAMP) ## side by side with TensorFlow and with the limit (ONLY=row for one row)
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY))

docs: $(STAMP) ## build the HTML documents into site/, links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

build: $(STAMP) ## wheel and sdist into dist/
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --outdir dist .

clean: ## remove what can be made again
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
