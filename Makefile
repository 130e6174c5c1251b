# Two commands need nothing but Python 3.11+, pip and make:  make demo   make test
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
# one more than there are cores: some tests mostly wait for programs that they started
PROCESSES = $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')

.PHONY: demo test test-python docs wheel-check setup lint bench lock audit-deps clean
.DEFAULT_GOAL := demo

demo: $(READY)          ## the problem that one-shot methods solve, on embedded data, in two minutes
	$(BIN)/osfl demo --out runs/demo

test: $(READY) lint     ## what CI runs, with wheel-check
	$(BIN)/python -m pytest -q -n $(PROCESSES) --dist worksteal --cov=osfl --cov-report=json:.coverage.json
	$(BIN)/python -m tests.coverage_floors .coverage.json

lint: $(READY)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.13 src/osfl
	$(BIN)/python .ci/versions.py

docs: $(DOCS_READY)     ## the documentation as a site, in site/; a broken link stops it (with --quiet it would not)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

wheel-check:            ## what a user gets: the wheel in an empty environment, without constraints
	PYTHON=$(PYTHON) .ci/wheel

test-python:            ## all tests with another version: `make test-python PYTHON=python3.13`
	.ci/pythons $(PYTHON)

bench: $(READY)         ## the long evidence; writes benchmarks/records/
	$(BIN)/python -m benchmarks.bench

lock: $(READY)          ## requirements.lock: the pins of constraints.txt, and what each file must hash to
	.ci/lock $(BIN)

audit-deps: $(READY)    ## known vulnerabilities of what we test with; needs an index that answers such questions
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet 'pip-audit>=2.7,<3'
	$(VENV)/audit/bin/pip-audit --strict --disable-pip --requirement requirements.lock

setup: $(READY)

# Installed again whenever the requirements change; a half-finished install leaves no stamp behind.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,flower,ray,diffusion,medical,onnx,pandas,tensorboard,mlflow,wandb]'
	touch $(READY)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_READY)

clean:
	rm -rf $(VENV) runs site
