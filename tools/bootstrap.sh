#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Creates .venv and installs what `make demo` and `make test` need, at exactly the versions in constraints.txt.
#
# Safe to call before every command: a stamp in .venv holds a checksum of everything that determines its content, and with a matching
# stamp nothing is started. An interrupted install leaves a marker, and the next call starts from an empty .venv, since pip can regard
# a partly unpacked package as installed.
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
if command -v flock >/dev/null 2>&1; then # of two calls at once the second waits, and then finds the stamp
    exec 9>"$VENV/.zaya-lock"
    flock -n 9 || { say "another set-up of $VENV is running, waiting for it"; flock 9; }
    if fits; then exit 0; fi
fi

empty_venv() { # keeps the lock, which this process holds open
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name .zaya-lock -exec rm -rf {} +
}

unset PYTHONPATH PYTHONHOME # a Megatron checkout on PYTHONPATH would count as installed

works() { # in a moved .venv Python starts, but scripts name the old folder
    "$VENV/bin/python" -I -c "import sys, pip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))" 2>/dev/null &&
        grep -qF "$VENV/bin/" "$VENV/bin/pip"
}
if [ -f "$MARKER" ]; then
    say "the last install was interrupted, starting from an empty $VENV"
    empty_venv
elif [ -e "$VENV/bin/python" ] || [ -L "$VENV/bin/python" ]; then
    works || { say "$VENV is broken, moved or of an unsupported Python, starting from an empty one"; empty_venv; }
fi

rm -f "$STAMP"
: >"$MARKER"
if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV with $PYTHON ($("$PYTHON" --version 2>&1))"
    "$PYTHON" -m venv "$VENV"
fi

say "installing the versions of constraints.txt: a download of about 3 GB, 1 to 5 minutes; with an index of CPU wheels of torch in PIP_EXTRA_INDEX_URL about 0.6 GB"
# No build isolation: the pinned setuptools builds this package and the one requirement that is a source archive (antlr4),
# so the builds are pinned as well. pip and setuptools are therefore installed first.
started=$(date +%s)
elapsed() { echo $(($(date +%s) - started)); }
pip_install() { PYTHONWARNINGS=ignore "$VENV/bin/python" -m pip install --disable-pip-version-check -c "$ROOT/constraints.txt" "$@"; }
progress() { # pip's lines about large downloads, and the last step, with the seconds
    while read -r line; do
        case $line in
            *[0-9][0-9].[0-9]" MB)"* | *" GB)"*) say "$(elapsed) s: $line" ;;
            "Installing collected"*) say "$(elapsed) s: unpacking all packages" ;;
        esac
    done
}
install() { # a terminal shows pip's own bars
    if [ -t 2 ]; then pip_install "$@"; return; fi
    rm -f "$VENV/.zaya-pip"
    mkfifo "$VENV/.zaya-pip" # not a pipeline, which would hide pip's exit status
    progress <"$VENV/.zaya-pip" &
    failed=0
    pip_install "$@" >"$VENV/.zaya-pip" || failed=$?
    wait
    return "$failed"
}
whole() { # pip writes INSTALLER after a package's files, and renames a package that it replaces to ~...
    for info in "$VENV"/lib/python3*/site-packages/*.dist-info; do [ ! -d "$info" ] || [ -f "$info/INSTALLER" ] || return 1; done
    for left in "$VENV"/lib/python3*/site-packages/~*; do [ ! -e "$left" ] || return 1; done
}
trap 'exit 130' INT TERM HUP # with the marker in place
status=0
install --upgrade pip setuptools && install --no-build-isolation -e "$ROOT[cpu,dev,docs]" || status=$?
if [ "$status" != 0 ]; then
    # Without a network nothing has changed; after a full disk the marker stays.
    if whole; then rm -f "$MARKER"; fi
    say "pip failed (exit status $status): remove the cause named above and run the same command again"
    exit "$status"
fi
rm -f "$MARKER"
printf '%s' "$key" >"$STAMP"
say "done in $(elapsed) s"
