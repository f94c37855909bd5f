PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup setup-dev demo serve load bench bench-peers kernel-audit gpu-check tables test test-more test-all lint clean

# setup installs the server, setup-dev also the tools for tests, reports and lint
setup: .venv/.ready
setup-dev: .venv/.ready-dev

PINS := pyproject.toml client/pyproject.toml .ci/constraints.txt

.venv/.ready: $(PINS)
	@$(PYTHON) .ci/setup.py "1.4 GB" tritonserver
	@touch $@

.venv/.ready-dev: $(PINS)
	@$(PYTHON) .ci/setup.py "2.3 GB" tritonserver,dev,load
	@touch .venv/.ready $@

demo: setup
	$(BIN)/kvloom generate --serve --temperature 0 "What is the capital of France, and what is it known for?"

serve: setup
	$(BIN)/kvloom serve

load: setup-dev
	$(BIN)/python load/run.py run --name load

bench: setup-dev
	$(BIN)/python load/benchmark.py run

bench-peers: setup-dev
	$(BIN)/python load/benchmark.py peers

kernel-audit: setup-dev
	$(BIN)/python load/kernel_audit.py

gpu-check: setup-dev
	$(BIN)/python load/gpu_check.py

tables: setup
	$(BIN)/python -m kvloom.serving.tables

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tiers of tests are described in tests/README.md. The tests of a file run in one process, so that they share their
# servers. There is one process more than cores, because the start and stop of servers leave cores idle.
PARALLEL := -n $(shell echo $$(($$(nproc) + 1))) --maxprocesses 5 --dist loadfile --no-loadscope-reorder

# First tier: every department, less than 10 minutes on 2 cores
test: setup-dev lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not alone and not full"

# Second tier: long tests, then tests that need the whole machine. Both tiers take less than 40 minutes
test-more: setup-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not alone and not full"
	$(BIN)/python -m pytest -m "alone and not full"

# Both tiers, and the full-length forms
test-all: setup-dev lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not alone"
	$(BIN)/python -m pytest -m alone

clean:
	rm -rf .venv build client/build client/*.egg-info backend_src/*.egg-info
