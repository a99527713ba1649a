#!/bin/sh
# Sets up the servers that `make bench-functions` compares with, each in a separate environment under FOLDER (default .peers), and a layer with FastAPI,
# httpx and pydantic. A server that cannot be set up is named and left out of the comparison.
#   load_tests/peers/functions_setup.sh [FOLDER] [PYTHON of the project's environment]
set -u
folder=$(mkdir -p "${1:-.peers}" && cd "${1:-.peers}" && pwd)
python=$(command -v "${2:-python3}")
missing=0

fail() { echo "$1 could not be set up: see $2" >&2; missing=1; }

pip_peer() { # NAME MODULE PACKAGES...
    name=$1 module=$2
    shift 2
    [ -x "$folder/$name/bin/python" ] && "$folder/$name/bin/python" -c "import $module" 2>/dev/null && return
    { "$python" -m venv "$folder/$name" && "$folder/$name/bin/pip" install -q --disable-pip-version-check "$@" &&
        "$folder/$name/bin/python" -c "import $module"; } >"$folder/$name.log" 2>&1 || fail "$name" "$folder/$name.log"
}

[ -d "$folder/functions-layer/fastapi" ] ||
    "$python" -m pip install -q --disable-pip-version-check --target "$folder/functions-layer" fastapi httpx pydantic >"$folder/functions-layer.log" 2>&1 ||
    fail "the layer" "$folder/functions-layer.log"
[ -x "$folder/workerd/node_modules/.bin/workerd" ] ||
    { mkdir -p "$folder/workerd" && npm install --silent --no-audit --no-fund --prefix "$folder/workerd" workerd; } >"$folder/workerd.log" 2>&1 ||
    fail workerd "$folder/workerd.log"
pip_peer litserve litserve litserve
pip_peer bentoml bentoml bentoml
pip_peer ray-serve ray.serve "ray[serve]"
exit $missing
