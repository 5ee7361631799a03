# Two commands are enough on a fresh machine: `make demo` and `make test`.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test check format clean

$(STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints-dev.txt -e '.[dev,tasks,plots,tensorboard]'
	@touch $(STAMP)

demo: $(STAMP)            ## plan, train and reconcile the arithmetic task (about three minutes)
	$(BIN)/rollbook demo

test: $(STAMP)            ## the tests
	$(BIN)/python -m pytest

check: $(STAMP)           ## formatter, linter, strict types, tests, doctests
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/python -m pytest --doctest-modules src tests

format: $(STAMP)
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench

clean:
	rm -rf $(VENV)
