# Each target works by itself on a machine with Python 3.11 and pip: the first use creates the environment.

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
# Tests and stages of the GPU campaign start many processes; with PYTHONDONTWRITEBYTECODE each would compile the package.
PYTHON_OF_MANY := PYTHONDONTWRITEBYTECODE= $(BIN)/python
# TEST_JOBS processes run the files of tests in their order, kernels first: e2e and multi are the long ones.
PYTEST    := $(PYTHON_OF_MANY) -m pytest --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

# Runs tests and, beside them, `make lint`, which uses cores while tests wait. Prints the output of lint last.
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

test: $(INSTALLED)  ## Lint, check the types and run all tests except slow ones
	$(call beside_lint,$(PYTEST) -m "not slow" $(TEST_ARGS))

test-all: $(INSTALLED)  ## Lint, check the types and run all tests
	$(call beside_lint,$(PYTEST) $(TEST_ARGS))

test-versions: $(INSTALLED)  ## Run the tests with the oldest and newest torch and Hugging Face libraries
	$(BIN)/python .ci/versions.py $(VERSIONS_ARGS)

lint: $(INSTALLED)  ## Check style, format, types and the English of pages, docstrings and messages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/prose.py

docs: $(INSTALLED)  ## Build the site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file .mkdocs.yml

bench: $(INSTALLED)  ## Compare step times with other engines on this machine
	$(BIN)/python benchmarks/step_time.py $(BENCH_ARGS)

gpu: $(INSTALLED)  ## Measure on a GPU in two calls, beside the predictions of the stream model
	$(PYTHON_OF_MANY) benchmarks/gpu $(GPU_ARGS)

release: $(INSTALLED)  ## Build wheel and sdist into dist/, check them, and install each into an empty environment
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python .ci/release.py $(RELEASE_ARGS)

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Prints ",cuda12" or ",cuda13", the extra with CuPy for the CUDA of torch, where torch sees a device.
CUDA_EXTRA := 'import torch; cuda = torch.version.cuda if torch.cuda.is_available() else None; print(f",cuda{cuda.split(chr(46))[0]}" if cuda else "")'

# Installs torch first and alone, at the version of the tests, so that other packages keep it. Writes the stamp last, so
# that the next run continues an interrupted installation.
$(INSTALLED): pyproject.toml setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[hf,dev$$($(BIN)/python -c $(CUDA_EXTRA))]"
	touch $@
