PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2

.PHONY: train test test-fast lint check bench bench-groups clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

train: $(VENV)/ready  ## Train a small GPT on two ranks; run again to go on after an interruption.
	$(BIN)/python examples/prepare_corpus.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node $(RANKS) examples/pretrain_gpt.py --config examples/pretrain_gpt.toml

test: $(VENV)/ready  ## Run every test.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test-fast: $(VENV)/ready  ## Run the tests that start no process.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not processes"

lint: $(VENV)/ready  ## Lint, type-check, and check the import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint test  ## Lint, type-check and test.

$(VENV)/bench: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

bench: $(VENV)/bench  ## Run every benchmark.
	for script in benchmarks/*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done

bench-groups: $(VENV)/bench  ## Compare what process groups cost with init_device_mesh and megatron-core.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/process_groups.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
