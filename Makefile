# Two commands are enough on a fresh machine: `make demo` and `make test`.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev

.PHONY: demo test lint check format clean

$(STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints-dev.txt -e .
	@touch $(STAMP)

$(DEV): $(STAMP)
	$(BIN)/pip install -q -c constraints-dev.txt -e '.[dev,tasks]'
	@touch $(DEV)

demo: $(STAMP)            ## plan, train and reconcile the arithmetic task (about three minutes)
	$(BIN)/rollbook demo

test: $(DEV)              ## the tests, on both cores
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(DEV)              ## formatter, linter, strict types, doctests
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/python -m pytest --doctest-modules --doctest-ignore-import-errors src

check: lint test          ## what CI runs

format: $(DEV)
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench

clean:
	rm -rf $(VENV)
