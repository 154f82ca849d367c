# Everything starts from a bare clone: the first target asked for makes .venv, later ones find it ready.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready

# One thread a process: the tests run in two processes, and more threads than cores only slow torch down.
test: export OMP_NUM_THREADS := 1
# What is imported is compiled then, and kept: at installation, 11,000 modules would be, one after another.
test: export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test lint style docs bench clean
run: $(READY)  ## the main job: compare the zoo, write report/compare.html and report/compare.json
	$(BIN)/dsf compare --out report

test: style  ## all checks, on the installed package; types beside the tests, since mypy has use for one core alone
	$(BIN)/mypy -p dsf & types=$$!; \
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 --dist worksteal tests/test_triton_*.py tests/test_steady.py; \
	$(BIN)/pytest -n 2 --dist worksteal; \
	wait $$types

lint: style
	$(BIN)/mypy -p dsf

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)  ## the documentation site, in site/; warnings are errors
	$(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) build dist report site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The constraints apply to every install: an unconstrained torch may be another release, or another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-build-isolation \
	  --editable '.[cli,plots,convert,models,test,dev,docs]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps typeseg  # real weights for the tests
	touch $@
