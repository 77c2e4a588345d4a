# Every target sets up what it needs: a virtual environment in .venv, made once and remade when pyproject.toml changes.
# PYTHON chooses the interpreter (3.11 or newer), NRANKS the ranks of `make train`, WORKERS the processes that run tests
# beside each other (one more than cores, as tests also wait), TORCH the version of torch; to test another one beside
# the default: make test TORCH=2.15.0 VENV=.venv-2.15 (5 GB where there is no CPU build of it)

PYTHON ?= python3
NRANKS ?= 4
WORKERS ?= 3
CONFIG ?= train_configs/llama3_debug_cpu.toml
TORCH ?= 2.13.0
BUILD ?= cpu
TITAN ?= 0.2.2
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH_CPU := torch==$(TORCH)+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: help setup train compare pool quick test test-matrix test-all test-titan030 test-cuda-build test-gpu mutations wheel lint format \
	bench-gpu-dry bench-planner headline results docs errors clean

help:
	@echo "make train      train a small Llama on $(NRANKS) ranks of this machine with core attention disaggregated"
	@echo "make compare    train the same model with and without it, in turns, and say how much faster it is (4 minutes)"
	@echo "make pool       train on two ranks that two attention servers join, one of which is killed, and draw it"
	@echo "make quick      a minute: a property of plans, exchanges, a job on two ranks, and every command (tests/quick.txt)"
	@echo "make test       the short tests: one of every kind, six minutes on two cores"
	@echo "make test-matrix   what they leave out, MINUTES=10 of it; test-all: all that runs on CPU, hours; test-gpu: on a GPU"
	@echo "make test-cuda-build   what the CUDA path can show without a GPU, by a CUDA build of torch"
	@echo "make test-titan030   the adapter for torchtitan 0.3.0, with torch 2.15 in an environment of its own"
	@echo "make mutations  plant ten faults and see that the short tests find each"
	@echo "make bench-planner   planners against the lower bound, as a table; PRETRAIN=lengths.json adds workloads"
	@echo "make headline   the figures that README quotes first, simulated anew; COMPARE=compare.json adds make compare's"
	@echo "make results    every computed result of bench/results anew, PRETRAIN=lengths.json"
	@echo "make wheel      dist/*.whl, tried in an environment of its own"
	@echo "make lint       ruff, mypy and the budgets of reading;  make format: apply ruff's formatting"

setup: $(INSTALLED)

# Without an NVIDIA GPU (and BUILD=cuda) take a CPU build of torch: from the configured package index if it has one, else from PyTorch's.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the package into $(VENV), a minute or two ..."
	@if [ $(BUILD) = cuda ] || nvidia-smi >/dev/null 2>&1 || [ "$$(uname)" = Darwin ]; then \
		$(PIP) 'torch==$(TORCH)'; \
	else \
		$(PIP) '$(TORCH_CPU)' 2>/dev/null || \
		$(PIP) '$(TORCH_CPU)' --index-url $(TORCH_CPU_INDEX) --retries 1 --timeout 20 || \
		{ echo "No CPU build of torch within reach; installing the default build."; $(PIP) torch==$(TORCH); }; \
	fi
	$(PIP) -e '.[dev]' 'torchtitan==$(TITAN)'
	@touch $@

# Silence warnings of torch and torchdata that a user cannot act on.
train: export PYTHONWARNINGS := ignore:'set_vital',ignore:Set timeout
train: $(INSTALLED)
	$(BIN)/torchtitan-cad prepare --output outputs/assets
	OMP_NUM_THREADS=1 $(BIN)/python -m torchtitan_cad.launch --standalone --nproc_per_node=$(NRANKS) --local-ranks-filter 0 --role rank --tee 3 \
		-m torchtitan_cad.train --job.config_file $(CONFIG)

# The gain on this machine, one rank a core: rows so long that attention is most of the work, a third of whose tokens are in
# documents as long as a row, the others in short ones. Two of three batches have one long document among two ranks.
SHORT := 3072,3072,3072,3072,3072,3072,3072,3072
compare: $(INSTALLED)
	$(BIN)/torchtitan-cad prepare --output outputs/assets
	$(BIN)/torchtitan-cad compare $(CONFIG) --steps 4 --warmup 1 --rounds 2 --training.seq_len 24576 \
		--training.dataset synthetic --training.dataset_path fixed:24576,$(SHORT),$(SHORT)

# Two ranks and two attention servers of this machine, one of which is killed: docs/images/pool.png, in four minutes.
pool: $(INSTALLED)
	$(BIN)/torchtitan-cad prepare --output outputs/assets
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.servers --picture docs/images/pool.png

quick: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile=quick @tests/quick.txt

test: $(INSTALLED)
	$(PYTEST)

# What the short set leaves out, and drawn tests with as many examples as in test-all. MINUTES: what would begin later is
# skipped.
test-matrix: $(INSTALLED)
	$(PYTEST) -m '(matrix or hypothesis) and not slow and not gpu' --hypothesis-profile=all \
		$(if $(MINUTES),--minutes=$(MINUTES))

# The adapter for torchtitan 0.3.0, in an environment of its own (5 GB where there is no CPU build of its torch); no GPU is
# needed. What runs for long is left out; add MARKS='matrix or not matrix' for all.
MARKS ?= not matrix
test-titan030:
	$(MAKE) TITAN=0.3.0 TORCH=2.15.0 VENV=.venv-titan030 setup
	.venv-titan030/bin/python -m pytest -n $(WORKERS) -m '$(MARKS)' tests/titan030 \
		tests/runtime/test_transport_choice.py::test_groups_may_differ_in_hosts

# Every part of the bench for a machine with a GPU, on CPU stand-ins at toy sizes: six minutes.
bench-gpu-dry: $(INSTALLED)
	timeout 900 $(BIN)/python -m bench.gpu --dry-run

test-all: $(INSTALLED)
	$(PYTEST) -m 'not gpu' --hypothesis-profile=all

# dist/*.whl, and a plan by it in an environment that has nothing but what planning needs.
wheel:
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet --disable-pip-version-check numpy numba "filelock>=3.20.3" tyro
	build/wheel/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	build/wheel/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.whl
	cd build/wheel && bin/torchtitan-cad plan ../../examples/layout.json

mutations: $(INSTALLED)
	$(BIN)/python -m tests.mutations

# What the CUDA path can show without a GPU, with the default build of torch (5 GB): 12 minutes.
CUDA_BUILD_TESTS := $(addprefix tests/runtime/test_,fake_cuda.py kernels_fused.py kernel_choice.py \
	launches.py nvshmem_kernels.py variants.py)
test-cuda-build:
	$(MAKE) BUILD=cuda VENV=.venv-cuda-$(TORCH) bench-gpu-dry
	.venv-cuda-$(TORCH)/bin/python -m pytest -m 'not slow and not gpu' $(CUDA_BUILD_TESTS)

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu

# Balance, bytes and time of all planners for 8 to 4096 ranks: bench/results/planner.json and docs/images/plan.png, in
# about 5 minutes. PRETRAIN names a JSON list of document lengths for the workloads that draw from one.
bench-planner: $(INSTALLED)
	$(BIN)/python -m bench.planner --check $(if $(PRETRAIN),--pretrain $(PRETRAIN))

# Every result that is computed, not measured (bench/freshness.py). Committed ones have PRETRAIN's documents, too.
results: bench-planner headline
	$(BIN)/python -m bench.models
	$(BIN)/python -m bench.paper
	$(BIN)/python -m bench.pipeline $(if $(PRETRAIN),--pretrain $(PRETRAIN))
	$(BIN)/python -m bench.placement $(if $(PRETRAIN),--pretrain $(PRETRAIN))
	$(BIN)/python -m bench.tolerance

# bench/results/headline.json and the tables that README and docs/ take from it, in ten minutes on two cores.
headline: $(INSTALLED)
	$(BIN)/python -m bench.headline $(if $(COMPARE),--compare $(COMPARE))

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.budgets

# tests/golden/errors.txt, the prose of all errors that tests meet.
errors: $(INSTALLED)
	$(BIN)/python -m pytest --write-errors

# The parts of docs/ that repeat the code.
docs: $(INSTALLED)
	$(BIN)/python -m tests.generated_docs
	$(BIN)/python -m bench.headline --only-tables >/dev/null

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) outputs build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
