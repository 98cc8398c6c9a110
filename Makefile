# `make` lists the targets. Everything runs in .venv, which the first target that needs it sets up.

PYTHON ?= python3
SEEDS ?= 5000
BIN := .venv/bin
READY := .venv/.ready
READY_TO_TRAIN := .venv/.ready-to-train
COMMA := ,
FIRST_RUN := runs/first
TYPED := $(wildcard src tests benchmarks examples site_parts)

# Without bytecode every process compiles torch again, which takes longer than loading it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup check format docs test test-all train swarm bench-core wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv and install Atoll with its development tools

# pip unpacks on one core, so three of them install a third of the pinned versions each; the last one finds everything there and
# resolves nothing. No bytecode is compiled: Python does it at the first import, for the few modules that are used. What
# every process of the tests imports is imported meanwhile, or all of them would compile it at once.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile

define install
	@command -v $(PYTHON) >/dev/null || { echo "Atoll needs Python 3.11 or newer, and '$(PYTHON)' was not found. Name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Atoll needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "set-up: creating .venv with $$($(PYTHON) -V)"; $(PYTHON) -m venv .venv; }
	@echo "set-up: installing atoll[$(1)] with the versions of constraints.txt ($(2))"
	@awk '/^# --- $(3)/ { exit } /==/ { print > (".venv/pins." n++ % 3) }' constraints.txt
	@$(PIP) --no-deps -r .venv/pins.0 & first=$$!; $(PIP) --no-deps -r .venv/pins.1 & second=$$!; \
		$(PIP) --no-deps -r .venv/pins.2 && wait $$first && wait $$second
	@$(if $(4),$(BIN)/python -W ignore -c 'import $(4)' & )$(PIP) --no-build-isolation -c constraints.txt -e '.[$(1)]' && wait
	@touch $@
endef

USED_BY_TESTS := torch._dynamo, torch.distributed.checkpoint, transformers.trainer, lightning, datasets, hypothesis

$(READY): pyproject.toml constraints.txt
	$(call install,train$(COMMA)dev,about a minute,end,$(USED_BY_TESTS))

$(READY_TO_TRAIN): pyproject.toml constraints.txt
	$(call install,train$(COMMA)dash,half a minute,development)

check: $(READY) ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports --no-logo

format: $(READY) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## write the generated parts of docs/protocol.md anew, and build the site into site/
	$(BIN)/python -m tests.diagrams --write docs/protocol.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: $(READY) ## set-up, all checks, all tests but those marked long
	$(BIN)/pytest -n 3 --dist worksteal -m 'not long' --hypothesis-profile=quick

test-all: $(READY) ## the same with the long tests; says first which programs are missing
	$(BIN)/python -m tests.programs
	$(BIN)/pytest -n 2 --dist worksteal

train: $(READY_TO_TRAIN) ## the main job: four islands train a small GPT; one is killed and comes back
	@rm -rf $(FIRST_RUN)
	$(BIN)/atoll train --out $(FIRST_RUN)
	@echo
	$(BIN)/atoll check $(FIRST_RUN)

swarm: $(READY) ## hostile worlds by seed; SEEDS=5000 of them
	$(BIN)/atoll swarm --seeds $(SEEDS)

bench-core: $(READY) ## events per second of the core, speed of the simulator
	$(BIN)/python benchmarks/bench_core.py

wheel: $(READY) ## build the wheel, install it into an empty environment, run the simulator there
	@rm -rf dist build/empty
	$(BIN)/python -m build --no-isolation >/dev/null
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt dist/*.whl
	build/empty/bin/atoll simulate --days 1 --protocol-hours 0.1 --seeds 1

clean: ## remove .venv, caches, builds and the first run
	rm -rf .venv build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache $(FIRST_RUN)
	find src tests $(wildcard benchmarks examples site_parts) -name __pycache__ -type d -prune -exec rm -rf {} +
