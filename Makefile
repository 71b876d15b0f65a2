# `make` prints the targets. Each target installs what it needs in .venv.

VENV := .venv
PYTHON ?= $(shell scripts/find-python)
BIN := $(VENV)/bin
# An interpreter with JAX and torch for CUDA. Nothing is installed into it.
GPU_PYTHON ?= python3

CACHED := scripts/cached-python $(VENV)
# `make lint` runs the tests that only read files.
TESTS := tests --ignore tests/lint

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all processors parity lint docs bench targets gpu versions nightly \
	endurance planted foreign wheel clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

# .venv/.<extra> marks that jamp is installed there with that extra.
$(VENV)/.%: pyproject.toml
	@test -x $(BIN)/python || { test -n "$(PYTHON)" && $(PYTHON) -m venv $(VENV); }
	scripts/install $(VENV) $*
	@touch $@

demo: $(VENV)/.examples ## train digits in float16 beside float32, on the CPU
	$(BIN)/python examples/digits.py

test: $(VENV)/.test ## the quick tests, in minutes, without torch
	$(CACHED) -m pytest -n auto -m "not slow" --time-limit $(TESTS)

test-all: $(VENV)/.test ## all tests but the nightly ones
	$(CACHED) -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not nightly" $(TESTS)

# The tests of two programs in files that changed since the commit SINCE, or all.
PAIRS := tests/two_programs.txt
TOUCHED = $(if $(SINCE),$(shell git diff --name-only $(SINCE) -- tests | grep -Ff - $(PAIRS)),@$(PAIRS))

processors: $(VENV)/.test ## what compares two programs, for an older processor; SINCE=COMMIT: what changed
	$(if $(TOUCHED),XLA_FLAGS=--xla_cpu_max_isa=AVX $(CACHED) -m pytest -n auto \
	  -m "not slow" $(TOUCHED),@echo "No file of $(PAIRS) changed.")

parity: $(VENV)/.parity ## train beside live torch and compare; writes parity/report.md
	$(CACHED) -m parity
	$(CACHED) -m pytest -n auto -m "not suite" parity

lint: $(VENV)/.dev $(VENV)/.examples $(VENV)/.parity ## style, types, and tests of files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(CACHED) -m pytest tests/lint
	$(BIN)/pyright

docs: $(VENV)/.docs ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.benchmarks $(VENV)/.test ## benchmarks on the CPU; prints tables
	$(BIN)/python -m benchmarks.train_step
	$(BIN)/python -m benchmarks.loss_scale_overhead
	$(BIN)/python -m benchmarks.logging_overhead
	$(BIN)/python -m benchmarks.eager_overhead
	$(BIN)/python -m benchmarks.compile_time
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.master_weights
	$(BIN)/python -m benchmarks.collectives

.venv-targets/.targets: pyproject.toml
	test -x .venv-targets/bin/python || $(PYTHON) -m venv .venv-targets
	scripts/install .venv-targets targets
	@touch $@

COMPILE := .venv-targets/bin/python -m benchmarks.targets
FIGURES := benchmarks/results/targets

ifdef DRY
targets: .venv-targets/.targets
	JAX_PLATFORMS=cpu $(subst $(VENV),.venv-targets,$(CACHED)) -m pytest \
	  $(if $(filter night,$(DRY)),,-m "not nightly") tests/test_compiled_targets.py
else
targets: .venv-targets/.targets ## compile steps for GPUs and TPUs, for results/targets.md; DRY=1 or DRY=night: small ones
	for target in t4 l4 a100 h100 b200 v5e v6e tpu7x; do \
	  $(COMPILE) --for $$target --json $(FIGURES)-$$target.json || exit 1; done
	for chips in 8 256 4096; do \
	  $(COMPILE) --for v5p --chips $$chips --json $(FIGURES)-v5p-$$chips.json || exit 1; done
	$(COMPILE) --for h100 --chips 8 --json $(FIGURES)-h100-8.json
	.venv-targets/bin/python -m benchmarks.compiled_tables
	.venv-targets/bin/python -m benchmarks.tables
endif

ifdef DRY
gpu: $(VENV)/.parity
	$(CACHED) -m benchmarks.gpu --dry-run --minutes 20
else
gpu: ## tests, parity and benchmarks on a GPU, with GPU_PYTHON; DRY=1: small, on the CPU
	$(GPU_PYTHON) -m benchmarks.gpu
endif

versions: ## every public call and op on the releases of JAX that are promised, or on ONLY some
	$(PYTHON) scripts/versions.py $(ONLY)

nightly: $(VENV)/.parity ## the tests and measurements that CI leaves out
	$(CACHED) -m pytest -n auto -m nightly $(TESTS)
	$(CACHED) -m parity --nightly
	$(CACHED) -m benchmarks.gpu --dry-run --minutes 20

endurance: $(VENV)/.test ## long storms, and a training that is killed again and again
	STORMS=4 $(CACHED) -m pytest -q tests/endurance/test_storms.py
	$(CACHED) -m tests.endurance.kill_and_resume --kills 10

planted: $(VENV)/.test ## plant some forty errors in copies of jamp, and count what the quick tests catch
	$(CACHED) scripts/planted.py $(ROWS)

# Folders of SOURCES are checkouts of the installed releases of jax, flax, equinox, optax.
foreign: $(VENV)/.test ## calls, training loops and, with SOURCES=DIR, tests of other libraries
	test -x .venv-ecosystem/bin/python || $(BIN)/python -m venv .venv-ecosystem
	scripts/install .venv-ecosystem ecosystem,test
	XLA_FLAGS="--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" \
	  scripts/cached-python .venv-ecosystem -m pytest -n auto foreign
	for suite in $(notdir $(wildcard $(SOURCES)/*)); do $(CACHED) -m foreign \
	  --suite $$suite --source $(SOURCES)/$$suite --sample 20 || exit 1; done

wheel: ## build wheel and sdist, and try each alone in clean environments
	scripts/test-wheel

clean: ## remove what the targets made
	rm -rf $(VENV) .venv-* .jax-cache build dist site
