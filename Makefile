# Two commands: `make demo` (fresh machine to a streamed answer) and `make test` (everything CI runs). Both set themselves up.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCKS  := requirements/cpu.lock requirements/dev.lock
READY  := $(VENV)/.ready-$(shell cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-12)
MODEL  ?= examples/train_tiny/checkpoint
PORT   ?= 30000
# Processes that share the tests, each with one server at a time (2 GB); tests/workers.py says who gets what.
WORKERS ?= 2

.PHONY: help setup demo serve test test-ascend lint typecheck unit clean
help:
	@echo "make demo                 install, start a server on a small trained V4.1-Flash, talk to it, print its numbers"
	@echo "make test WORKERS=N       lint, types, all tests (CPU), shared by N processes (default: 2, for two cores)"
	@echo "make unit                 the tests that need no server"
	@echo "make test-ascend          what a machine without an Ascend can check of the Ascend code; environments of its own"
	@echo "make serve MODEL=DIR PORT=N   serve a checkpoint (default: the small trained one)"
	@echo "make setup                only install into $(VENV)"

setup: $(READY)

# pip skips what is already there, so an interrupted run continues where it stopped; the stamp is written last.
$(READY): $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$(PYTHON) is not Python 3.11, for which requirements/ is locked; pass PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about 3 GB to download, a few minutes"
	$(BIN)/python -m pip install --quiet --no-deps $(addprefix -r ,$(LOCKS))
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.ready-*
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py --model-path examples/train_tiny/checkpoint

serve: $(READY)
	$(BIN)/python -m sglang.launch_server --model-impl deepinfer --model-path $(MODEL) --port $(PORT)

lint: $(READY)
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check --quiet .

# mypy does not follow an editable install's path map: give it the package as it is imported.
typecheck: $(READY)
	@mkdir -p .cache/typecheck/deepinfer_plugin
	@ln -sfn $(CURDIR)/model .cache/typecheck/deepinfer_plugin/model
	@ln -sfn $(CURDIR)/kernels .cache/typecheck/deepinfer_plugin/kernels
	@ln -sfn $(CURDIR)/deepinfer_plugin/__init__.py .cache/typecheck/deepinfer_plugin/__init__.py
	MYPYPATH=.cache/typecheck $(BIN)/mypy -p deepinfer_plugin.model -p deepinfer_plugin.kernels

.cache/tile_kernels/.ready: $(READY) tests/fetch_tile_kernels.py
	$(BIN)/python tests/fetch_tile_kernels.py .cache/tile_kernels
	@touch $@

test: lint typecheck .cache/tile_kernels/.ready
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu"

# Not part of `make test`: it builds two environments (2 GB) and lowers and emulates kernels. Goes on where it stopped.
test-ascend: $(READY)
	@mkdir -p .cache/ascend
	$(BIN)/python -m tests.ascend.table --json .cache/ascend/table.json --docs docs/ascend.md

unit: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu and not server"

clean:
	rm -rf .cache build dist *.egg-info
