# Everything runs in its own virtual environment; `make PYTHON=python3.12 test` picks another interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard *.py compiler/*.py runtime/*.py schedules/*.py schedules/*.yaml) pyproject.toml README.md py.typed

.PHONY: help demo test lint types unit test-slow test-cuda clean

help:
	@echo "make demo       compile GPT-2 for 60 % of its memory, train eagerly and under the plan, compare"
	@echo "make test       lint, types, tests"
	@echo "make test-slow  the full matrix of models, optimizers and budgets"
	@echo "make bench-...  benchmarks: $(BENCHES)"

# The environment: dependencies once, the package whenever a source changed.
$(VENV)/dependencies: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("tensile needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt ".[examples,dev]"
	touch $@

$(VENV)/package: $(VENV)/dependencies $(SOURCES)
	rm -rf build dist tensile.egg-info
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall dist/tensile-*.whl
	touch $@

demo: $(VENV)/package
	$(BIN)/python benchmarks/demo.py

test: lint types unit

lint: $(VENV)/package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads the sources under their import name.
types: $(VENV)/package
	mkdir -p build/types && ln -sfn ../.. build/types/tensile
	cd build/types && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	  -p tensile.compiler -p tensile.runtime -p tensile.schedules -m tensile -m tensile.cli

unit: $(VENV)/package
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

test-slow: $(VENV)/package
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q -m slow

test-cuda: $(VENV)/package
	$(BIN)/python -m pytest -q -m cuda

# Benchmarks: `make bench-identity` runs benchmarks/bench_identity.py, prints a table and stores it.
BENCHES := $(patsubst benchmarks/bench_%.py,bench-%,$(wildcard benchmarks/bench_*.py))
.PHONY: $(BENCHES)
$(BENCHES): bench-%: $(VENV)/package
	$(BIN)/python benchmarks/bench_$*.py

clean:
	rm -rf build dist tensile.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
