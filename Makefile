# `make check` and `make test` need only Python, make and git; they make .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
CORES := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: check test lint types suite bench clean

check: .venv/installed
	$(BIN)/pp-protocol check --reference

test: lint types suite

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy pp_protocol

# Twice: `python -O` turns beartype off, and every promise has to hold there as well.
suite: .venv/installed
	$(BIN)/python -O -m pytest -q $(CORES) -m "not processes"
	$(BIN)/python -m pytest -q $(CORES)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

bench: .venv/installed
	$(BIN)/python -W ignore tests/benchmarks/transport.py
	$(BIN)/python -W ignore tests/benchmarks/boundary.py
	$(BIN)/python -W ignore tests/benchmarks/payload.py
	$(BIN)/python -W ignore tests/benchmarks/fingerprint.py

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
