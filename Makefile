# Each target is sufficient by itself on a machine with Python 3.11 and pip: the environment is made on first use.

PYTHON     ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
DEMO_ARGS  ?=
OFFLOAD    ?= none
TEST_ARGS  ?=
TEST_JOBS  ?= 2
BENCH_ARGS ?=
GPU_ARGS   ?=
VERSIONS_ARGS ?=
RELEASE_ARGS  ?=

VENV      := .venv
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Files of tests go to TEST_JOBS processes in their order: e2e and multi are the long ones. A test starts many more, and
# each would compile the package anew where Python is told to keep no bytecode.
PYTEST    := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

# Runs tests, and `make lint` beside them: tests that wait leave a core to it. What it says comes last.
define beside_lint
@mkdir -p build; $(MAKE) --no-print-directory lint >build/lint.txt 2>&1 & lint=$$!; \
$(1); tests=$$?; wait $$lint; lint=$$?; cat build/lint.txt; exit $$((tests ? tests : lint))
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-versions lint docs bench gpu release clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED)  ## Train a small GPT on real text with ZeRO-3 in bf16 on two processes; OFFLOAD=cpu or nvme
	$(BIN)/zeroaccel launch --num_processes 2 examples/train_gpt.py --offload $(OFFLOAD) --report build/demo $(DEMO_ARGS)

test: $(INSTALLED)  ## Lint, check the types and run the tests, all but a few slow ones
	$(call beside_lint,$(PYTEST) -m "not slow" $(TEST_ARGS))

test-all: $(INSTALLED)  ## The same with the slow ones
	$(call beside_lint,$(PYTEST) $(TEST_ARGS))

test-versions: $(INSTALLED)  ## Run them with the oldest and newest torch and Hugging Face libraries, an environment each
	$(BIN)/python .ci/versions.py $(VERSIONS_ARGS)

lint: $(INSTALLED)  ## Check style, format, types and the English of the pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/prose.py

docs: $(INSTALLED)  ## Build the site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file .mkdocs.yml

bench: $(INSTALLED)  ## Compare step times with other engines on this machine
	$(BIN)/python benchmarks/step_time.py $(BENCH_ARGS)

gpu: $(INSTALLED)  ## Measure on a GPU, beside the predictions of the stream model
	$(BIN)/python benchmarks/gpu $(GPU_ARGS)

release: $(INSTALLED)  ## Build wheel and sdist into dist/, check them, and install each into an empty environment
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python .ci/release.py $(RELEASE_ARGS)

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in first and alone, at the version the tests run on; what depends on it then finds it and fetches no other.
# The stamp is written last, so an installation that broke off is taken up again.
$(INSTALLED): pyproject.toml setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'
	touch $@
