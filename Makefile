# Each target is one command from a fresh clone. Needs Python 3.11 or newer.

PORT        ?= 8000
HOST        ?= 127.0.0.1
MODEL       ?= examples/tiny-deepseek-v2-fp8
DEVICE      ?= gaudi3
EAGER       ?= --enforce-eager
ARGS        ?=
VENV        ?= .venv
PYTHON      ?= python3
TORCH_INDEX ?=
LOCK        ?=
VLLM_GAUDI  ?=

PY    := $(VENV)/bin/python
NAME  := $(notdir $(patsubst %/,%,$(MODEL)))
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Overlay files outside vllm/fp8_inc lie in folders that upstream has, so each has its
# own link in build/dev; a new one needs an install to get it.
LINKED  := $(shell find vllm -name '*.py' -not -path 'vllm/fp8_inc/*')
SOURCES := pyproject.toml upstream.toml $(wildcard tools/forkbuild/*.py) \
           $(wildcard patches/vllm/*) $(LINKED)
STAMP   := $(VENV)/.installed
HPU     := build/hpu/packages
# One process a core: an engine of a test has one thread. A file's tests stay together
# until one process has none left and takes some of the other's.
PARALLEL := --numprocesses auto --dist worksteal

export VLLM_CPU_KVCACHE_SPACE ?= 1

.DEFAULT_GOAL := help
.PHONY: help install serve test test-hpu nightly fuzz load bench lint lock audit image clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10
	@echo
	@echo 'Variables: PORT HOST MODEL DEVICE=gaudi2|gaudi3 ARGS="more server flags" VENV'
	@echo '  EAGER= (empty: with torch.compile, which needs a C++ compiler and a minute)'
	@echo '  LOCK=a file of make lock, for an install in which every hash is checked'
	@echo '  VLLM_GAUDI=a checkout of vllm-gaudi at the commit in upstream.toml, for test-hpu'
	@echo '  PYTHON, TORCH_INDEX=an index with the CPU build of torch, for machines'
	@echo '  where pip would take the CUDA build of several GB'

# Editable, so that an edit under vllm/ needs no new install, and because pip then
# compiles no bytecode for the 2,400 files of which most are never imported.
$(STAMP): $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
ifeq ($(LOCK),)
	$(PY) -m pip install $(INDEX) --editable '.[test,lint,kv-scales]'
else
	$(PY) -m pip install $(INDEX) --require-hashes --no-deps --requirement $(LOCK)
	$(PY) tools/lock.py --check $(LOCK)
	$(PY) -m pip install --no-deps --no-build-isolation --editable .
endif
	touch $@

install: $(STAMP) ## the virtual environment, with everything below in it

serve: $(STAMP) ## an OpenAI server on MODEL with the fp8_inc cache
	@echo 'Serving $(NAME) at http://$(HOST):$(PORT)/v1 (ready after "startup complete"). Try:'
	@echo
	@echo "curl http://$(HOST):$(PORT)/v1/chat/completions -H 'Content-Type: application/json' -d '{"
	@echo '  "model": "$(NAME)", "temperature": 0, "messages": [{"role": "user", "content":'
	@echo '  "Lena has 23 apples. Lena buys 45 more apples. How many apples does Lena have now?"}]}'"'"
	@echo
	$(PY) -m vllm.entrypoints.openai.api_server --model $(MODEL) \
	  --served-model-name $(NAME) --host $(HOST) --port $(PORT) \
	  --kv-cache-dtype fp8_inc $(EAGER) \
	  --additional-config '{"fp8_inc": {"device": "$(DEVICE)"}}' $(ARGS)

test: $(STAMP) ## all tests but the slow ones
	$(PY) -m pytest -m 'not slow' $(PARALLEL) $(ARGS)

# Not into the virtual environment: see the requirements file.
$(HPU): software_gaudi/requirements.txt $(STAMP)
	$(PY) -m pip install --no-deps --upgrade --target $@ --requirement $<
	touch $@

# No time limit: tests/hpu/worker.py ends a process that has nothing more to say.
test-hpu: $(STAMP) $(HPU) ## the HPU worker, with our patches, on a software Gaudi
	@test -n '$(VLLM_GAUDI)' || { echo 'make test-hpu VLLM_GAUDI=/path/to/vllm-gaudi'; exit 2; }
	$(PY) tools/patches.py check --vllm-gaudi $(VLLM_GAUDI)
	VLLM_GAUDI=$(abspath $(VLLM_GAUDI)) $(PY) -m pytest --timeout 0 tests/hpu $(ARGS)

nightly: $(STAMP) ## all tests
	$(PY) -m pytest $(PARALLEL) $(ARGS)

fuzz: $(STAMP) ## malformed files of every kind, FUZZ_SECONDS (600) for each of five targets
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),600) $(PY) -m pytest tests/fuzz $(ARGS)

load: $(STAMP) ## 64 clients for ten minutes against a server of the embedded model
	$(PY) -m benchmarks.load $(ARGS)

bench: $(STAMP) ## the figures of the README
	$(PY) -m benchmarks $(ARGS)

lint: $(STAMP) ## style, the patches' rules, the patch tables
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tools/patches.py check
	$(PY) tools/patches.py export --check

lock: ## requirements.lock: a hash of every package of make install (SECURITY.md)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) tools/lock.py requirements.lock $(INDEX)

# In an environment of its own: it is to look at ours, not to be in it.
audit: $(STAMP) ## known vulnerabilities of what make install installed (asks the internet)
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install pip-audit==2.10.1
	sed -n 's/^version = "\(.*\)"/vllm==\1/p' upstream.toml > build/audit/upstream.txt
	build/audit/bin/pip-audit --disable-pip --no-deps --requirement build/audit/upstream.txt
	build/audit/bin/pip-audit --path $(wildcard $(VENV)/lib/python*/site-packages)

image: ## the cpu image: built, run locked up, asked a question (Docker or Podman)
	$(PYTHON) tools/image.py $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) $(ARGS)

clean: ## removes what the targets made, edits in build/dev included
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .venv
