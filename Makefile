# `make serve` and `make test` set up everything they need in .venv and are quick when it is there already.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the installed package is made from: when one of these is newer, it is installed (and built) again.
SOURCES := pyproject.toml setup.py $(wildcard shmlimit/table/*.[ch])

.PHONY: serve test coverage lint bench clean

# Not `python -m gunicorn`: that one can't be upgraded with USR2, since its directory then hides Python's own `http`.
serve: $(VENV)/.ready-serve
	exec $(BIN)/gunicorn -c gunicorn_conf.py shmlimit.demo:app

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest $(ARGS)

# Lines and branches of the C helper that the tests reach.
coverage: $(VENV)/.ready-test
	$(BIN)/python -m tests.coverage_c $(ARGS)

lint: $(VENV)/.ready-lint
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

# In an environment of its own: the competitors stay out of .venv. `make bench ARGS=--quick` shows that everything runs.
bench:
	@$(MAKE) --no-print-directory VENV=.venv-bench .venv-bench/.ready-bench
	.venv-bench/bin/python bench $(ARGS)

clean:
	rm -rf $(VENV) .venv-bench build *.egg-info shmlimit/table/*.so

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "shmlimit needs Python 3.10 or newer; $$($(PYTHON) --version) is too old. Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-%: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
