#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python that the demo and the tests can run on. If there is none, prints what was tried and the command that installs one.
#
# Needs no Python to run. Order: $ZAYA_PYTHON if set; then every place for 3.12, then every place for 3.13, the versions
# that megatron-core 0.19.2 has wheels for. Places: PATH, pyenv, uv, then $ZAYA_PYTHON_PREFIXES (default /usr/local /opt /usr).
set -u

SUPPORTED="3.12 3.13"
ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
PREFIXES=${ZAYA_PYTHON_PREFIXES-/usr/local /opt /usr}
HOME_DIR=${HOME:-/nonexistent}
PYENV=${PYENV_ROOT:-$HOME_DIR/.pyenv}
UV=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME_DIR/.local/share}/uv/python}
tried=""

# A free-threaded build, a 32-bit build and a Debian python3 without python3-venv are recognised only by running them.
PROBE='
import struct, sys, sysconfig
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("has no venv module that works (%s)" % error)
if sys.implementation.name != "cpython": sys.exit("is not CPython")
if sysconfig.get_config_var("Py_GIL_DISABLED"): sys.exit("is a free-threaded build")
if struct.calcsize("P") != 8: sys.exit("is a 32-bit build")
'

note() { tried="$tried  $1
"; }

version_of() { # matches the line, since a pyenv shim without its version prints a long message and exits non-zero
    "$1" --version 2>&1 </dev/null | sed -n 's/^Python \([0-9][0-9.a-z+]*\).*/\1/p' | head -n 1
}

path_candidates() { # names in $PATH, one path a line
    old_ifs=$IFS; IFS=:
    for dir in $PATH; do
        for name in "$@"; do [ -x "${dir:-.}/$name" ] && [ ! -d "${dir:-.}/$name" ] && printf '%s\n' "${dir:-.}/$name"; done
    done
    IFS=$old_ifs
}

candidates() { # $1 = 3.12; unmatched globs fall out at the -x test
    path_candidates "python$1" python3 python
    for found in "$PYENV"/versions/*/bin/python"$1" "$UV"/cpython-"$1"*/bin/python"$1"; do printf '%s\n' "$found"; done
    for prefix in $PREFIXES; do
        for found in "$prefix"/bin/python"$1" "$prefix"/*/bin/python"$1" "$prefix"/*/*/bin/python"$1"; do printf '%s\n' "$found"; done
    done
}

suits() { # $1 = path, $2 = wanted minor version, or empty for any supported one; notes the reason for a refusal
    case $1 in "$ROOT"/.venv/*) return 1 ;; esac # the environment that is about to be created or repaired
    [ -x "$1" ] || return 1
    version=$(version_of "$1")
    case $version in
        "") note "$1: does not start"; return 1 ;;
        "${2:-none}".*) ;;
        *)
            known=""
            for each in $SUPPORTED; do case $version in "$each".*) known=yes ;; esac; done
            [ -n "$known" ] || { note "$1: Python $version"; return 1; }
            [ -z "${2:-}" ] || return 1 # the outer loop tests it for the other version
            ;;
    esac
    if reason=$("$1" -I -c "$PROBE" 2>&1 </dev/null); then return 0; fi
    note "$1: Python $version, but it $(printf '%s' "$reason" | tail -n 1)"
    return 1
}

has() { command -v "$1" >/dev/null 2>&1; }

install_command() { # for this machine: uv or pyenv if present, else a package manager that has a supported version, else uv with its installer
    sudo="sudo "
    [ "$(id -u 2>/dev/null)" != 0 ] || sudo=""
    if has uv; then echo "uv python install 3.12"; return; fi
    if has pyenv; then echo "pyenv install 3.12"; return; fi
    if has brew; then echo "brew install python@3.12"; return; fi
    for each in $SUPPORTED; do
        if has apt-cache && apt-cache show "python$each" >/dev/null 2>&1; then echo "${sudo}apt-get install python$each python$each-venv"; return; fi
        if has dnf && dnf --quiet info "python$each" >/dev/null 2>&1; then echo "${sudo}dnf install python$each"; return; fi
    done
    echo "curl -LsSf https://astral.sh/uv/install.sh | sh && ~/.local/bin/uv python install 3.12"
}

if [ -n "${ZAYA_PYTHON:-}" ]; then
    chosen=$(command -v "$ZAYA_PYTHON" || printf '%s' "$ZAYA_PYTHON")
    if suits "$chosen" ""; then printf '%s\n' "$chosen"; exit 0; fi
    printf 'ZAYA_PYTHON=%s cannot be used; it must be a CPython of one of: %s\n%s' "$ZAYA_PYTHON" "$SUPPORTED" "$tried" >&2
    exit 1
fi

for wanted in $SUPPORTED; do
    # A file of candidates, not a pipe: the loop must run in this shell to keep `tried`.
    list=$(candidates "$wanted")
    old_ifs=$IFS; IFS='
'
    set -f
    for candidate in $list; do
        IFS=$old_ifs
        if suits "$candidate" "$wanted"; then printf '%s\n' "$candidate"; exit 0; fi
        IFS='
'
    done
    set +f
    IFS=$old_ifs
done

{
    echo "No usable Python is installed. This needs CPython 3.12 or 3.13 (64 bit, with the venv module)."
    echo "Looked on PATH, in $PYENV/versions, in $UV and under $PREFIXES. Tried:"
    if [ -n "$tried" ]; then printf '%s' "$tried" | sort -u; else echo "  no python, python3, python3.12 or python3.13"; fi
    echo "Install one with this command, then run make again:"
    echo "  $(install_command)"
    echo "or name an installed one: make test ZAYA_PYTHON=/path/to/python3.12"
} >&2
exit 1
