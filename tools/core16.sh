#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Unpacks megatron-core 0.16.1, the release with the API that Primus pins, into .core16; other packages remain those of .venv.
#
# First on PYTHONPATH it hides .venv's release. The empty __init__.py makes `megatron` a regular package: as a namespace, which it is in
# both wheels, it would combine this core with the other release's megatron.training.
set -eu

ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
RELEASE=0.16.1
PLACE=$ROOT/.core16
PYTHON=$ROOT/.venv/bin/python

version() { PYTHONPATH=$PLACE "$PYTHON" -W ignore -c 'import megatron.core as c; print(c.__version__)' 2>/dev/null || true; }

if [ ! -f "$PLACE/megatron/__init__.py" ]; then
    rm -rf "$PLACE" "$PLACE.part"
    mkdir -p "$PLACE.part"
    "$PYTHON" -m pip download --quiet --no-deps --dest "$PLACE.part" "megatron-core==$RELEASE"
    (cd "$PLACE.part" && "$PYTHON" -m zipfile -e megatron_core-*.whl . && rm megatron_core-*.whl)
    : >"$PLACE.part/megatron/__init__.py"
    mv "$PLACE.part" "$PLACE"
fi
found=$(version)
if [ "$found" != "$RELEASE" ]; then
    echo "core16: $PLACE holds megatron-core '$found', not $RELEASE; remove the folder and run the command again" >&2
    exit 1
fi
