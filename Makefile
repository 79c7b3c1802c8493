# Everything is made under .venv*/ and var/. Ports and folders: PORT (Airflow; the local cloud takes the next four, the
# two log servers of the worker and the triggerer PORT+5 and PORT+6), VAR.
SHELL := bash
VAR ?= var
PORT ?= 8899
KEEP ?= 1
PYTEST_ARGS ?=
ONLY ?= *
CHAOS_ARGS ?=
export NIGHTSHIFT_VAR := $(VAR)
export NIGHTSHIFT_PORT := $(PORT)
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo up down test chaos lint format lock schema clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /  make \1\t/' | expand -t 18

setup:  ## make .venv with everything in it (the other targets do it when needed)
	@scripts/bootstrap.sh

demo: setup  ## run the rehearsal recipe end to end on the local cloud; KEEP=0 stops everything afterwards
	@.venv/bin/python -m rehearsal demo $(if $(filter 0,$(KEEP)),--no-keep)

up: setup  ## start the local cloud and Airflow without running anything
	@.venv/bin/python -m rehearsal up

down:  ## stop the local cloud and Airflow; leaves no process, port or mount
	@if [ -x .venv/bin/python ]; then .venv/bin/python -m rehearsal down; else echo "Nothing is installed here, so nothing runs."; fi

test: setup  ## run all tests, the real MaxText included (about 15 minutes on two cores)
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

chaos: setup  ## the fault matrix: every fault at every step; ONLY='preempt@*' chooses, CHAOS_ARGS passes more on
	@.venv/bin/python -m chaos run --only '$(ONLY)' $(CHAOS_ARGS)

lint: setup  ## ruff, formatting, types, import rules
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy plugins/nightshift include/localcloud include/rehearsal include/chaos dags
	@.venv/bin/lint-imports --no-logo --cache-dir var/cache/import-linter

format: setup  ## let ruff format and fix what it can
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format .

lock: setup  ## resolve requirements*.txt anew into the lock files
	@.venv/bin/uv pip compile --quiet --upgrade --python .venv/bin/python requirements.txt -o requirements.lock
	@.venv/bin/uv pip compile --quiet --python .venv/bin/python requirements-dev.txt -c requirements.lock -o requirements-dev.lock
	@.venv/bin/uv pip compile --quiet --python .venv/bin/python requirements-image.txt -c requirements.lock -o requirements-image.lock

schema: setup  ## write include/recipes/recipe.schema.json from the recipe's model
	@.venv/bin/python -m nightshift.recipe.schema

clean: down  ## remove var/ and the environments
	@rm -rf $(VAR) .venv .venv-uv
