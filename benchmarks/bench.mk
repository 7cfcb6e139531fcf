# Benchmarks, included by the Makefile. `make bench NAME=startup`, or `make bench-startup`, builds what it needs and runs
# it. `python -m benchmarks` lists them; benchmarks/registry.py has their commands.

# Of `make bench`.
NAME := servers
# Which peers bench-setup installs. A benchmark takes those that are installed, and of them only PEERS if it is set.
PEERS ?=
PEERS_OF_SETUP := $(or $(PEERS),vllm vllm-rust sglang llama)
# How often each thing is measured; empty means the benchmark's own number.
ROUNDS ?=
# GSM8K's test.jsonl, for perplexities; empty means the short excerpt in tests/bench.
TEXT ?=
# Concurrent streams, for example STREAMS=64,1024.
STREAMS ?=
# Recorded traffic, of plan-tiers and turns.
TRACE ?=
MOONCAKE ?=
# Processes that compile llama.cpp.
LLAMA_JOBS ?= 2

BENCH_VENVS := benchmarks/.venvs
BENCH_STAMPS := $(BENCH_VENVS)/.stamps
BENCH_PINS := benchmarks/requirements
BENCH_VARIABLES = $(strip $(foreach name,ROUNDS STREAMS TEXT PEERS TRACE MOONCAKE,$(if $($(name)),$(name)='$($(name))')))

bench: bench-$(NAME) ## compare with the installed peers, about 2 hours; or run the benchmark NAME (`python -m benchmarks` lists them)

bench-%: setup
	@needs=$$($(BIN)/python -m benchmarks --needs $*) && $(MAKE) --no-print-directory $$needs
	$(BIN)/python -m benchmarks $* $(BENCH_VARIABLES) $(ARGS)

bench-gpu bench-gpu-peers: ## measure an NVIDIA GPU, and others on it (15 minutes; skipped with the reason elsewhere)
	$(HOST_PYTHON) -m benchmarks $(@:bench-%=%) $(ARGS)

bench-build: PROFILE = release
bench-build: setup $(STAMPS)/model
	@$(MAKE) --no-print-directory build PROFILE=$(PROFILE)
	$(CARGO_BUILD) --package forebay --package forebay-weights --bin forebay --example describe

bench-setup: $(PEERS_OF_SETUP:%=$(BENCH_STAMPS)/%) ## install the peers in PEERS that benchmarks compare with (12 GB, 20 minutes)

$(BENCH_STAMPS)/%: $(BENCH_PINS)/%.txt | $(STAMPS)/uv
	@VENV=$(VENV) LLAMA_JOBS=$(LLAMA_JOBS) sh benchmarks/peers/install.sh $* $(BENCH_VENVS)
	@mkdir -p $(@D) && touch $@
# Its front end in Rust asks for the rest of vLLM.
$(BENCH_STAMPS)/vllm-rust: $(BENCH_STAMPS)/vllm
$(BENCH_STAMPS)/llama: $(BENCH_PINS)/llama-build.txt

BENCH_LOCK = $(UV_LOCK) --custom-compile-command 'make bench-lock' --python-version
bench-lock: $(STAMPS)/uv ## pin benchmarks/requirements/*.in to *.txt again (UPGRADE=1: at the newest versions)
	for name in vllm sglang; do $(BENCH_LOCK) 3.11 --override $(BENCH_PINS)/$$name.overrides \
		$(BENCH_PINS)/$$name.in -o $(BENCH_PINS)/$$name.txt || exit 1; done
	for name in sglang-router llama-build; do $(BENCH_LOCK) 3.10 \
		$(BENCH_PINS)/$$name.in -o $(BENCH_PINS)/$$name.txt || exit 1; done
	for name in llama coder gemma; do $(BENCH_LOCK) 3.10 --no-deps \
		$(BENCH_PINS)/$$name.in -o $(BENCH_PINS)/$$name.txt || exit 1; done
	$(BENCH_LOCK) 3.11 --no-deps $(BENCH_PINS)/vllm-rust.in -o $(BENCH_PINS)/vllm-rust.txt
	$(BENCH_LOCK) 3.11 $(BENCH_PINS)/onnxruntime.in -o $(BENCH_PINS)/onnxruntime.txt
