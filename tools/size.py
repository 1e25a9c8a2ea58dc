# SPDX-License-Identifier: Apache-2.0
"""Print the size of the code by room: Python statements, and non-blank lines of the kernels.

    python tools/size.py                 this checkout
    python tools/size.py --rev HEAD~10   another commit

A statement is a node of the syntax tree without docstrings, so layout, comments and moving code between packages do not
change the sum. zaya_plugin, hip_ops and patches are counted; kernels are .hip and .h files.
"""

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PACKAGES = ("zaya_plugin", "hip_ops", "patches")
KERNELS = (".hip", ".h")
ROOT = Path(__file__).resolve().parent.parent


def statements(source: str) -> int:
    """Return the number of statements in Python source, without docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(ast.parse(source)))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def room(path: str) -> str:
    """Return the first two folders of a file, three for an operator, or the package for a file directly in it."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[:-1][: 3 if parts[1] == "ops" else 2])


def files_of(revision: str | None) -> Iterator[tuple[str, str]]:
    """Return (path, text) of the Python files and kernels of the packages, in the working tree or at a commit."""
    counted = (".py", *KERNELS)
    if revision is None:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
            cwd=ROOT,
            text=True,
            stdout=-1,
            check=True,
        )
        files = (path for path in listed.stdout.split() if path.endswith(counted) and (ROOT / path).is_file())
        yield from ((path, (ROOT / path).read_text()) for path in files)
        return
    packed = subprocess.run(["git", "archive", revision, *PACKAGES], cwd=ROOT, stdout=-1, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(counted):
                yield member.name, archive.extractfile(member).read().decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rev", help="commit to measure; default: the working tree")
    python, kernels = Counter(), Counter()
    for path, text in files_of(parser.parse_args().rev):
        if path.endswith(".py"):
            python[room(path)] += statements(text)
        elif path.endswith(KERNELS):
            kernels[room(path)] += sum(bool(line.strip()) for line in text.splitlines())
    print(f"{'room':36}{'statements':>12}{'kernel lines':>14}")
    for name in sorted(python.keys() | kernels.keys()):
        print(f"{name:36}{python[name]:12,}{kernels[name]:14,}")
    print(f"{'sum':36}{sum(python.values()):12,}{sum(kernels.values()):14,}")


if __name__ == "__main__":
    main()
