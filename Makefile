PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.14 python3,$(if $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo ok),$(p))))
BIN := .venv/bin
# Processes that the tests start compile every module anew where bytecode may not be written.
RUN_ENV := env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE -u PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-demo setup-test check lint types imports unit again test demo bench soak clean

setup: setup-test            ## everything a developer needs

setup-demo:
	@$(PYTHON) tools/bootstrap.py sample

setup-test:
	@$(PYTHON) tools/bootstrap.py sample torch ray server report dev

demo: setup-demo             ## the main job on a real model
	@$(RUN_ENV) $(BIN)/python tools/demo.py

lint:
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

check: setup-test lint types imports   ## style, types, who imports whom

unit: setup-test
	$(RUN_ENV) $(BIN)/python -m pytest -m "not soak and not bench"

again: setup-test            ## what failed the last time
	$(RUN_ENV) $(BIN)/python -m pytest -m "not soak and not bench" --last-failed --last-failed-no-failures none

test: check unit             ## all checks and tests

bench: setup-test            ## timing; on an idle machine
	$(RUN_ENV) $(BIN)/python -m pytest -m bench -o faulthandler_timeout=0

soak: setup-test             ## long matrices and soaks
	$(RUN_ENV) $(BIN)/python -m pytest -m soak --timeout 3600 -o faulthandler_timeout=0

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
