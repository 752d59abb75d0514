PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test test-all check fix docs clean

demo: $(READY)  ## set everything up, then watch PyramidSD answer beside plain decoding
	$(BIN)/pyramidsd models --fetch smollm2-135m
	$(BIN)/pyramidsd generate "Why is the sky blue? Answer in three sentences." --method psd --compare --max-new-tokens 96

test: $(READY) check  ## what CI runs: checks, and every test that takes less than a minute
	$(BIN)/pyramidsd models --fetch smollm2-135m
	$(BIN)/pytest -m "not slow and not gpu"

test-all: $(READY) check  ## everything, the long tests on the real model included
	$(BIN)/pyramidsd models --fetch smollm2-135m
	$(BIN)/pytest

check: $(READY)  ## format, lint, types, import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site build

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)
