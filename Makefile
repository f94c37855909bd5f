PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo serve load bench bench-peers kernel-audit gpu-check tables test test-all lint clean

setup: .venv/.ready

.venv/.ready: pyproject.toml client/pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f"kvloom needs Python 3.11 to 3.13, $(PYTHON) is {v[0]}.{v[1]}; call make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c .ci/constraints.txt -e ./client -e '.[dev,load]'
	@touch $@

demo: setup
	$(BIN)/kvloom generate --serve --temperature 0 "What is the capital of France, and what is it known for?"

serve: setup
	$(BIN)/kvloom serve

load: setup
	$(BIN)/python load/run.py run --name load

bench: setup
	$(BIN)/python load/benchmark.py run

bench-peers: setup
	$(BIN)/python load/benchmark.py peers

kernel-audit: setup
	$(BIN)/python load/kernel_audit.py

gpu-check: setup
	$(BIN)/python load/gpu_check.py

tables: setup
	$(BIN)/python -m kvloom.serving.tables

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint
	$(BIN)/python -m pytest -m "not full"

test-all: setup lint
	$(BIN)/python -m pytest

clean:
	rm -rf .venv build client/build client/*.egg-info backend_src/*.egg-info
