# Every target does its own set-up: on a fresh machine `make demo` or `make test` is all there is to type.
# Needs make and a Python (PYTHON=..., 3.11 or later) with the venv module.

PYTHON ?= python3
PYTEST_ARGS ?=
FUZZ ?= tree
FUZZ_SECONDS ?= 60
SOAK_PROMPTS ?= 200
PROMPT ?= What is the capital of France, and what is it known for?
PROMPT_FILE ?= benchmarks/prompts/edit.txt

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := engines/models/SmolLM2-135M-Instruct.Q4_1.gguf
ENGINE := engines/smollm2-135m
HEADS := heads/smollm2-135m-instruct
TREES := trees/smollm2.json trees/smollm2_lookup.json trees/smollm2_lookup_long.json
BENCH := engines/smollm2-135m.bench
EXPORTER := $(wildcard exporter/*.py exporter/passes/*.py plugins/compact_append_kv/*.py)

.DELETE_ON_ERROR:
.PHONY: help venv model engine demo test soak fuzz lint bench clean

help:
	@echo "make demo    export the demo model and chat with it"
	@echo "make test    run the tests"
	@echo "make soak    run the tests that take many minutes"
	@echo "make fuzz    fuzz a parser: FUZZ=tree, manifest, ...; FUZZ_SECONDS=60"
	@echo "make lint    ruff check, ruff format --check, mypy"
	@echo "make bench   run the benchmarks"
	@echo "make venv | model | engine   the set-up steps of the above, one by one"
	@echo "make clean   remove .venv, the demo engine and all caches (the fetched model stays)"

venv: $(VENV)/.installed

# A changed lock starts a new environment, so that nothing outside the lock stays in it.
$(VENV)/.locked: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: $(PYTHON) is not Python 3.11 or later"; \
	      echo "hint: name one, as in: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --constraint requirements.lock pip
	$(PIP) install --quiet --requirement requirements.lock
	@touch $@

$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	@# Without this, setuptools fills the screen with advice about folder names.
	PYTHONWARNINGS=ignore $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Checks the file's hash every time and downloads only what is missing or damaged.
model: venv
	$(BIN)/python engines/recipes/fetch_smollm2_135m.py

engine: $(ENGINE)/manifest.json

# The manifest appears with the complete bundle only. Exported again when the exporter's code or a tree changes.
$(ENGINE)/manifest.json: $(EXPORTER) $(HEADS)/medusa_lm_head.safetensors $(TREES) | model
	$(BIN)/medusa-export --model $(MODEL) --heads $(HEADS) $(TREES:%=--tree %) --lookup-depth 8 \
	    --top-k 16 --output $(ENGINE) --force

demo: engine
	$(BIN)/medusa-run --engine $(ENGINE) --chat --prompt "$(PROMPT)" --stats --compare
	@echo; echo "Much of an answer may stand in its prompt, here that of $(PROMPT_FILE):"
	$(BIN)/medusa-run --engine $(ENGINE) --chat --prompt-file $(PROMPT_FILE) --stats --compare

test: engine
	$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: engine
	$(BIN)/python -m pytest --soak -m soak --verbose --soak-prompts $(SOAK_PROMPTS) $(PYTEST_ARGS)

# atheris is built for few systems, and only this needs it: it is not in the lock.
fuzz: venv
	$(PIP) install --quiet --no-deps atheris==3.0.0
	$(BIN)/python tests/fuzz/fuzz.py $(FUZZ) -max_total_time=$(FUZZ_SECONDS)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --follow-imports=silent examples

bench: engine
	$(BIN)/medusa-bench --engine $(ENGINE) --tree trees/smollm2_8.json --tree trees/smollm2_64.json --ledger \
	    --against transformers --model $(MODEL) --report $(BENCH).html --json $(BENCH).json
	@for benchmark in benchmarks/bench_*.py; do \
	    echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

clean:
	rm -rf $(VENV) $(ENGINE) build *.egg-info .pytest_cache .mypy_cache .ruff_cache */.ruff_cache .hypothesis
