# `make` sets everything up and runs the workflow; `make test` sets everything up and runs every test.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready

.PHONY: run test lint setup clean

run: setup
	$(VENV)/bin/snakemake --cores 1

test: lint
	$(VENV)/bin/python -m pytest --numprocesses=2 --dist=loadfile

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/snakefmt --check Snakefile workflow/rules
	$(VENV)/bin/snakemake --lint

setup: $(READY)

$(READY): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, not " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@touch $@

clean:
	rm -rf $(VENV)
