# Start with `make demo`, `make check test` or `make bench`; `make help` lists every target.
# All targets share one virtual environment, .venv. Stamp files record what is installed in it,
# so that the demo installs only what the demo needs and later runs install nothing.

PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
RUNTIME := $(VENV)/.installed-runtime
DEV     := $(VENV)/.installed-dev
# Two test processes: more of them slow down the tests that start clusters.
JOBS    ?= 2
# A part of the tests or benchmarks: `make test TESTS=tests/data`, `make bench ONLY=embedding`.
TESTS   ?=
ONLY    ?=

.DEFAULT_GOAL := help
.PHONY: help install test test-fast test-slow test-soak check format demo bench bench-all docs docs-serve build clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

$(BIN)/python:
	@echo "Creating the virtual environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt src/stratagem/_ps/row_kernels.c | $(BIN)/python
	@echo "Installing Stratagem, PyTorch and matplotlib into $(VENV) (about 1 GB, once; minutes on a slow line) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --editable ".[demo]"
	@touch $@
	@echo "Installed. The command is $(BIN)/stratagem; 'source $(BIN)/activate' puts it on your PATH."

$(DEV): $(RUNTIME)
	@echo "Installing the development tools into $(VENV) (about 0.9 GB, once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[dev]"
	@touch $@

install: $(DEV) ## create .venv with the package (editable) and all development tools

demo: $(RUNTIME) ## train for a minute on 2 workers and 2 parameter servers, with a live view
	@$(BIN)/stratagem demo

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test: $(DEV) ## run the fast and process tests, doctests and documentation examples (7 minutes on two cores)
	$(PYTEST) -m "not slow and not soak" $(TESTS)

test-fast: $(DEV) ## run only the tests that start no process (2 minutes)
	$(PYTEST) -m fast $(TESTS)

test-slow: $(DEV) ## run the process tests that take seconds each: kills, silence, long matrices (7 minutes)
	$(PYTEST) -m "slow and not soak" $(TESTS)

# PROFILE=bounded tries fewer random cases; .ci/run uses it.
PROFILE ?= soak
test-soak: $(DEV) ## run the long tests: fuzzing, memory, many random orders of events
	$(PYTEST) -m "soak or scaled" --hypothesis-profile=$(PROFILE) --timeout 7200 $(TESTS)

check: $(DEV) ## run ruff, mypy --strict and the architecture test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(DEV) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) ## compare with TensorFlow and with the machine's limit (half an hour; ONLY=row for one row)
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY))

# Hosts in namespaces need root; without it that part says so and the rest has been done.
bench-all: $(DEV) ## measure everything in README and docs: the table, curves, PyTorch peers, staleness, hosts (an hour)
	$(BIN)/python -m benchmarks --all
	$(BIN)/python -m benchmarks.bench_tables
	$(BIN)/python -m benchmarks.staleness
	$(BIN)/python -m benchmarks.namespaces

docs: $(DEV) ## build the HTML documentation into site/ and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Built: open site/index.html, or run 'make docs-serve' to read it with search."

docs-serve: docs ## build the documentation and serve it on http://127.0.0.1:8000, with search
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

build: $(DEV) ## build wheel and sdist into dist/
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --outdir dist .

clean: ## remove everything that can be made again
	rm -rf $(VENV) build dist site demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
