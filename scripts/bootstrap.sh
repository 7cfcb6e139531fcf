#!/bin/sh
# Creates the virtual environment, with nothing but the pinned installer.
# usage: PYTHON=... bootstrap.sh VENV BOOTSTRAP_REQUIREMENTS
set -eu
venv=$1
requirements=$2

fail() {
    echo "error: $*" >&2
    exit 1
}

# True for an interpreter that the lock files cover and that can create a virtual environment with pip.
fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 15))' >/dev/null 2>&1
}

# Checked now, rather than after some gigabytes of downloads.
command -v cargo >/dev/null || fail "no cargo on PATH: install a Rust toolchain, 1.89 or newer (https://rustup.rs)"
rust=$(rustc --version | cut -d ' ' -f 2)
minor=$(echo "$rust" | cut -d . -f 2)
[ "$minor" -ge 89 ] || fail "Rust $rust is too old: 1.89 or newer is needed (rustup update stable)"
command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
    fail "no C compiler on PATH: install gcc or clang"

if ! fits "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.14 python3.11 python3.10 python3.15}; do
        if fits "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        fail "no Python from 3.10 to 3.15 with venv and ensurepip among:" \
            "${PYTHON:-python3 and python3.10 to python3.15}" \
            "(some systems package them apart, as python3-venv; PYTHON=/path/to/python names another)"
    fi
    echo "==> Making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
echo "==> Installing uv, the package installer: about 25 MB to download the first time"
"$venv/bin/python" -m pip install --disable-pip-version-check --require-hashes -r "$requirements"
