# The test suites, included by the Makefile. `make test SUITE='kills moves'` runs test-kills and test-moves.

# The suites of `make test`.
SUITE := rust python triton
# Additional arguments for pytest, for example PYTEST_ARGS='-k handshake'.
PYTEST_ARGS ?=
# Additional flags of cargo for the tests with the address sanitizer, for example --no-run, and for the other Rust
# tests.
ASAN_FLAGS ?=
TEST_RUST_FLAGS ?=

# Test files run in parallel: tests that wait for something leave a core to others. Where tests share no fixture that
# takes long to create, tests of the same file also run in parallel (worksteal).
BESIDE := --numprocesses 2 --dist loadfile
SPREAD := --numprocesses 2 --dist worksteal
PYTEST := $(BIN)/python -m pytest
TEST_BINARY = FOREBAY_TEST_BINARY=$(abspath $(TARGET_DIR)/$(TEST_PROFILE)/forebay)
# Runs the tests of one crate, with a large number of cases.
CARGO_TEST := cargo test --locked --profile $(TEST_PROFILE)

test: $(SUITE:%=test-%) ## run every test that needs no GPU, or the suites of SUITE

test-rust: ## run the Rust tests
	cargo test $(CARGO_FLAGS) $(TEST_RUST_FLAGS)

test-python: test-units e2e ## run the Python tests, the end-to-end tests among them

test-units: build-tests ## run the Python tests without the end-to-end tests
	$(TEST_BINARY) OMP_NUM_THREADS=1 $(PYTEST) $(BESIDE) -m 'not slow' --ignore tests/e2e $(PYTEST_ARGS)

e2e test-e2e: build-tests ## run the end-to-end tests only
	$(TEST_BINARY) $(PYTEST) $(BESIDE) -m 'not slow' tests/e2e $(PYTEST_ARGS)

test-triton: setup-dev ## run the GPU's kernels without a GPU: in Triton's interpreter, and compiled (2 minutes)
	TRITON_INTERPRET=1 $(PYTEST) $(SPREAD) tests/gpu/interpreted $(PYTEST_ARGS)
	$(PYTEST) $(SPREAD) tests/gpu/compiled $(PYTEST_ARGS)

test-gpu: ## run the tests that need an NVIDIA GPU (200 seconds; skipped with the reason elsewhere)
	$(HOST_PYTHON) scripts/gpu.py test $(PYTEST_ARGS)

# The profile that was built last: an older binary may speak a different protocol version.
BUILT = $(wildcard $(foreach profile,serve release $(TEST_PROFILE),$(TARGET_DIR)/$(profile)/forebay))
gpu-pack: setup-dev ## make .gpu, what an offline GPU host lacks: packages, and the binary if `make build` has made one
	$(BIN)/python scripts/gpu.py pack $(if $(BUILT),--binary $(firstword $(shell ls -t $(BUILT))))

test-page: setup-page ## run the tests of the page in a browser (needs chromium; skipped with a line without it)
	$(VENV)/page/bin/python -m pytest --override-ini cache_dir=.pytest_cache/page tests/page $(PYTEST_ARGS)

test-asan: ## run the tests of the CPU kernels under the address sanitizer; needs a nightly Rust toolchain
	RUSTFLAGS='-Zsanitizer=address' cargo +nightly test --locked --profile $(TEST_PROFILE) --package forebay-kernels --lib \
		--target $$(rustc -vV | sed -n 's/^host: //p') --target-dir $(TARGET_DIR)/asan $(ASAN_FLAGS)

test-slow: build-tests test-transformers-new ## run the cases of tests that `make test` and `make e2e` leave out
	OMP_NUM_THREADS=1 $(PYTEST) $(BESIDE) -m slow --dist worksteal tests/hand tests/weights $(PYTEST_ARGS)
	FOREBAY_DRAWS=100000 $(PYTEST) tests/hand/test_rust_hand.py -k draws $(PYTEST_ARGS)
	FOREBAY_MUTATIONS=300 $(PYTEST) tests/weights/test_gguf_file.py $(PYTEST_ARGS)
	$(TEST_BINARY) $(PYTEST) $(BESIDE) -m slow tests/e2e tests/bench $(PYTEST_ARGS)
	FOREBAY_SMOLLM2_TEXTS=24 FOREBAY_HANDS_PROMPTS=200 $(TEST_BINARY) $(PYTEST) \
		tests/e2e/test_evaluators.py tests/e2e/test_two_hands.py -k 'smollm2 or alike' $(PYTEST_ARGS)

test-triton-old: setup-dev setup-triton-old ## compile the GPU's kernels with the Triton of PyTorch 2.11 (3 minutes)
	PYTHONPATH=$(VENV)/triton-old $(BIN)/python -c 'import triton; assert triton.__version__ == "3.6.0", triton.__version__'
	PYTHONPATH=$(VENV)/triton-old $(PYTEST) $(SPREAD) tests/gpu/compiled $(PYTEST_ARGS)

NEW := $(VENV)/transformers-new
test-transformers-new: setup-dev setup-transformers-new ## run the models that transformers computes on its newest version (10 minutes)
	PYTHONPATH=$(NEW) $(BIN)/python -c 'import transformers; assert transformers.__file__.startswith("$(abspath $(NEW))")'
	PYTHONPATH=$(NEW) OMP_NUM_THREADS=1 $(PYTEST) $(SPREAD) tests/hand/test_called.py tests/hand/test_called_checks.py $(PYTEST_ARGS)

test-fleet: build-tests ## send a fleet behind a router ten thousand requests at the limits (10 minutes)
	FOREBAY_FLEET_REQUESTS=10000 $(TEST_BINARY) $(PYTEST) tests/e2e/test_fleet.py $(PYTEST_ARGS)

test-kills: build-tests ## kill hands and brains under load twenty times each (10 minutes)
	FOREBAY_KILLS=20 $(TEST_BINARY) $(PYTEST) tests/e2e -k 'deaths or die or killed' $(PYTEST_ARGS)

test-image-sizes: build-tests ## compare a thousand images with transformers' patches, and 2400 JPEGs with Pillow's (5 minutes)
	FOREBAY_IMAGE_SIZES=1000 $(TEST_BINARY) $(PYTEST) tests/vision $(PYTEST_ARGS)

CASES ?= 20000
test-properties: ## test all properties of the Rust crates but the kernels with CASES random cases each (40 minutes)
	PROPTEST_CASES=$(CASES) cargo test $(CARGO_FLAGS) --exclude forebay-kernels --no-fail-fast

test-models: ## simulate 10^5 random histories of models that load, sleep and leave, in virtual time (20 seconds)
	FOREBAY_STORIES=100000 $(CARGO_TEST) -p forebay-fleet --test stories

test-moves: ## simulate 10^5 random histories of queued requests that move between replicas whose hands die (30 minutes)
	FOREBAY_MOVES=100000 $(CARGO_TEST) -p forebay-scheduler --test scheduler wherever_they_move

test-states: ## simulate 10^5 random histories of recurrent states in state pages (10 minutes)
	FOREBAY_STATES=100000 $(CARGO_TEST) -p forebay-scheduler --test scheduler with_recurrent_states

test-fuzz-images: ## damage ten thousand image files of each format and prepare them (2 minutes)
	FOREBAY_FUZZED_IMAGES=10000 $(CARGO_TEST) --package forebay-vision --test images damaged -- --nocapture

test-fuzz-outposts: ## damage a million frames and messages of outposts, for each of the parsers (a minute)
	FOREBAY_FUZZED_MESSAGES=1000000 $(CARGO_TEST) --package forebay-hand --package forebay-outpost --lib fuzz -- --nocapture
