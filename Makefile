# The two commands are `make demo` and `make test`. Everything is installed into .venv; nothing outside this folder is
# changed.

PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test lint format clean

# The lock file is complete, so dependencies are not resolved: that would bring in torch (see requirements.lock).
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: .venv/installed
	$(BIN)/mindtune run stories260k

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The artifacts are spared.
clean:
	rm -rf .venv .venv-peers .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './artifacts/*' -prune -exec rm -rf {} +
