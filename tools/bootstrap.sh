#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes .venv and installs into it, at exactly the versions in constraints.txt, what `make demo` and `make test` need.
#
# Safe to call before every command: a stamp in .venv holds a checksum of everything that decides its content, and where the stamp
# fits nothing is started. An install that was cut off leaves a marker, and the next call starts from an empty .venv: pip can take
# a package for installed of which only a part was unpacked.
set -eu

ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
VENV=$ROOT/.venv
STAMP=$VENV/.zaya-installed
MARKER=$VENV/.zaya-installing
say() { printf 'set-up: %s\n' "$*" >&2; }

# The folder is part of the key: an editable install and the scripts of a venv hold absolute paths.
key=$(cd "$ROOT" && { printf '%s\n' "$ROOT"; cat constraints.txt setup.py pyproject.toml tools/bootstrap.sh tools/find_python.sh; } | cksum)

fits() { [ -f "$STAMP" ] && [ ! -f "$MARKER" ] && [ -x "$VENV/bin/python" ] && [ -x "$VENV/bin/zaya" ] && [ "$(cat "$STAMP")" = "$key" ]; }

if fits; then exit 0; fi

PYTHON=$("$ROOT/tools/find_python.sh")
mkdir -p "$VENV"
if command -v flock >/dev/null 2>&1; then # two calls at once: the second waits and then finds the work done
    exec 9>"$VENV/.zaya-lock"
    flock -n 9 || { say "another set-up of $VENV is running, waiting for it"; flock 9; }
    if fits; then exit 0; fi
fi

empty_venv() { # all but the lock, which this process holds open
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name .zaya-lock -exec rm -rf {} +
}

unset PYTHONPATH PYTHONHOME # a Megatron checkout on PYTHONPATH would count as installed

works() { # a moved .venv has a Python that starts, and scripts that still name the old folder
    "$VENV/bin/python" -I -c "import sys, pip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))" 2>/dev/null &&
        grep -qF "$VENV/bin/" "$VENV/bin/pip"
}
if [ -f "$MARKER" ]; then
    say "the last install was cut off, starting anew"
    empty_venv
elif [ -e "$VENV/bin/python" ] || [ -L "$VENV/bin/python" ]; then
    works || { say "$VENV is broken, moved or of an unsupported Python, starting anew"; empty_venv; }
fi

rm -f "$STAMP"
: >"$MARKER"
if [ ! -x "$VENV/bin/python" ]; then
    say "making $VENV with $PYTHON ($("$PYTHON" --version 2>&1))"
    "$PYTHON" -m venv "$VENV"
fi

say "installing what constraints.txt pins; from nothing this is about 5 GB and some minutes"
# No build isolation: the pinned setuptools builds this package and the one requirement that is a source archive (antlr4),
# so that the builds are pinned as well. pip and setuptools therefore come first.
quiet=--quiet
if [ -t 2 ]; then quiet=""; fi
install() { PYTHONWARNINGS=ignore "$VENV/bin/python" -m pip install $quiet --disable-pip-version-check -c "$ROOT/constraints.txt" "$@"; }
whole() { # pip writes INSTALLER after a package's files, and renames to ~ what it is about to replace
    for info in "$VENV"/lib/python3*/site-packages/*.dist-info; do [ ! -d "$info" ] || [ -f "$info/INSTALLER" ] || return 1; done
    for left in "$VENV"/lib/python3*/site-packages/~*; do [ ! -e "$left" ] || return 1; done
}
trap 'exit 130' INT TERM HUP # with the marker in place
status=0
install --upgrade pip setuptools && install --no-build-isolation -e "$ROOT[cpu,dev]" || status=$?
if [ "$status" != 0 ]; then
    # Mostly no network, and then nothing has changed; a full disk is another matter.
    if whole; then rm -f "$MARKER"; fi
    say "pip failed (exit status $status); once the cause that it names above is gone, run the same command again"
    exit "$status"
fi
rm -f "$MARKER"
printf '%s' "$key" >"$STAMP"
say "done"
