# `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Extra arguments for installing PyTorch. A machine without a GPU can avoid the large CUDA packages by
# TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu".
TORCH_ARGS ?=
# Exact versions of what is installed.
CONSTRAINTS ?= constraints.txt
TORCH_VERSION := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
# The oldest Python: not all of the oldest packages can be installed into a newer one.
OLDEST_PYTHON ?= python3.10
# Most tests wait for processes of their own: several at a time, also on two cores.
TEST_WORKERS ?= 3
# Of the slow tests `make test-change` runs one share of three, chosen by the commit: the same one each time it is run.
SHARE ?= $(shell echo $$(( 0x$$(git rev-parse --short=6 HEAD 2>/dev/null || echo 0) % 3 )))
CODE := hf_pipetransformer recipes benchmarks launchers tests
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo

# Several processes on one machine: one thread each, or they fight over the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help demo test test-change test-all test-faults test-oldest style quality docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# $(call install,EXTRA,WHAT IT BRINGS): into the environment, saying what takes the time.
define install
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch $(TORCH_VERSION) into $(VENV): the CUDA build takes some GB (a small one: see TORCH_ARGS) ..."
	@$(BIN)/python -m pip install --quiet torch==$(TORCH_VERSION) $(TORCH_ARGS)
	@echo "Installing hf_pipetransformer with $(2) ..."
	@$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[$(1)]'
	@touch $@
endef

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(call install,dev,all that tests and checks need)

$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS)
	$(call install,demo,datasets and plotly)

# An environment with everything has what the demo needs.
demo: $(if $(wildcard $(STAMP)),,$(DEMO_STAMP)) ## Train a small BERT on the CPU: 4 stages, then 2 x 2, then 4 replicas (2 to 3 minutes)
	@echo "Training a small BERT on four CPU processes. The data is generated, nothing is downloaded."
	@$(BIN)/accelerate launch --config_file accelerate_configs/cpu_4.yaml recipes/run_glue.py recipes/configs/demo.yaml
	@$(BIN)/hf-pipetransformer report outputs/demo

test: $(STAMP) ## Test the features and most promises once (no network, no GPU; five to six minutes on two cores)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal --durations 20

test-change: $(STAMP) ## `make test` and a third of the slow tests, which the commit chooses (25 to 30 minutes on two cores)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m 'not faults' --share $(SHARE)/3 --durations 20

test-all: $(STAMP) ## Run all tests but the injected faults (40 to 60 minutes on two cores)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m 'not faults' --durations 20

test-faults: $(STAMP) ## Break processes and hosts in every phase, fuzz the arguments, run for long (about 20 minutes)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m faults --timeout 1200

test-oldest: ## Run `make test` with the oldest versions that pyproject.toml admits, in .venv-oldest
	$(MAKE) test VENV=.venv-oldest PYTHON=$(OLDEST_PYTHON) CONSTRAINTS=constraints-oldest.txt

style: $(STAMP) ## Format the code and apply the linter's fixes
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

quality: $(STAMP) ## Check format, lint, types and the direction of the imports
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## Build the documentation with the API into build/site; warnings are errors
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean: ## Remove the environment, caches and outputs
	rm -rf $(VENV) .venv-oldest build dist outputs .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
