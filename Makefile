# One way to do each thing. Every target makes the environment first, once, and again when its description changed.

# The interpreter to build the environment from. Empty: the first of python3, python3.13, python3.12, python3.11
# that is new enough.
PYTHON ?=

VENV := .venv
STAMP := $(VENV)/.complete
PIP_FLAGS := --quiet --disable-pip-version-check

export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help env demo test check bench clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## make the environment in .venv, if it is not up to date

$(STAMP): pyproject.toml constraints.txt
	@set -eu; \
	python="$(PYTHON)"; \
	for candidate in $${python:-python3 python3.13 python3.12 python3.11}; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	  python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "unshard needs Python 3.11 or newer: install it, or name it with 'make env PYTHON=/path/to/python3'" >&2; exit 1; fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "$$python can't make virtual environments: install python3-venv" >&2; exit 1; fi; \
	echo "Making $(VENV) with $$("$$python" --version): installing what constraints.txt pins takes a few minutes once."; \
	$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV); \
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev,postgres]'; \
	touch $@

demo: env ## convert a shipped checkpoint through the service and show the result
	@$(VENV)/bin/unshard demo

test: env ## run all tests (ARGS="-k name" to choose)
	$(VENV)/bin/python -m pytest --numprocesses 2 $(ARGS)

check: env ## lint, formatting, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict

bench: env ## measure (ARGS for the benchmark's own options)
	$(VENV)/bin/python -m benchmarks $(ARGS)

clean: ## remove what the other targets leave behind, but not the environment
	rm -rf build dist .demo .bench .artifacts .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find service workers tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove the environment, too
	rm -rf $(VENV)
