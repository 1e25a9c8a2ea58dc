# SPDX-License-Identifier: Apache-2.0
"""Install zaya_plugin and megatron-core for the ROCm build of torch that this Python has: `python3 docker/install.py
/opt/zaya`.

AMD's images hold torch and Triton in a virtual environment. One that is made from it, also with
`--system-site-packages`, does not see them, and pip then downloads torch for CUDA. This script makes an environment
that sees the packages of the Python that runs it, pins the builds that pip must not replace, installs, and ends with
status 1 if torch or Triton has changed. It changes nothing outside of the environment, and may be run again.

It needs the standard library alone, and is the one description of the installation: docs/mi300x.md and
docker/Dockerfile call it.
"""

import argparse
import json
import os
import re
import shlex
import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

REPO = Path(__file__).resolve().parents[1]
PYTHONS = ("3.12", "3.13")  # megatron-core 0.19.2 has wheels for them
IMAGE_PYTHON = "the Python that has the ROCm build of torch (in AMD's images /opt/venv/bin/python3)"
# torch, Triton under the names of its ROCm builds, and what was compiled for the same ROCm, or against numpy.
PINNED = re.compile(
    r"torch(vision|audio)?|(pytorch-)?triton(-rocm)?|numpy|apex|flash-attn|(amd-)?aiter"
    r"|transformer-engine(-.*)?|amd-torch.*|rocm(-.*)?"
)
STATE = """
import json, torch, triton
print(json.dumps({
    "torch": f"{torch.__version__} (HIP {torch.version.hip}) of {torch.__file__}",
    "triton": f"{triton.__version__} of {triton.__file__}",
    "hip": torch.version.hip,
    "devices": torch.cuda.device_count(),
}))
"""
TORCHRUN = """\
#!/bin/sh
# The image's torchrun starts the image's Python, which does not see this environment.
exec {python} -m torch.distributed.run "$@"
"""


def stop(*lines: str) -> NoReturn:
    """End with status 1 and a message."""
    sys.exit("install: " + "\n    ".join(lines))


def state(python: str, advice: str) -> dict:
    """Return torch and Triton as `python` imports them; stop with `advice` if it cannot."""
    done = subprocess.run([python, "-P", "-c", STATE], capture_output=True, text=True)  # -P: not of the current folder
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or ["killed"])[-1]
        stop(f"{python} cannot import torch and triton: {error}", advice)
    return json.loads(done.stdout.splitlines()[-1])


def check_unchanged(before: dict, after: dict, environment: Path, moment: str) -> None:
    """Stop if the environment imports another torch or Triton than the Python that runs this script."""
    names = [name for name in ("torch", "triton") if before[name] != after[name]]
    if names:
        stop(
            f"{environment} has another {' and '.join(names)} {moment}:",
            *(f"{name} was {before[name]}, now {after[name]}" for name in names),
            "Do not use this environment; remove it. The Python that ran this script has its torch and Triton as before.",
        )


def pins() -> list[str]:
    """Return a pip constraint for each package of this Python that matches PINNED."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():  # in the order of sys.path: the first is imported
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        versions.setdefault(name, distribution.version)
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if PINNED.fullmatch(name)]


def package_folders() -> list[str]:
    """Return the folders in which this Python has its packages."""
    folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    return [folder for folder in folders if os.path.isdir(folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="folder of the environment; it is created if it does not exist")
    parser.add_argument("--dry-run", action="store_true", help="check torch and print the commands and files, no more")
    arguments = parser.parse_args()

    environment = Path(os.path.abspath(arguments.environment))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / f"python{version}" / "site-packages"
    if version not in PYTHONS:
        supported = " and ".join(PYTHONS)
        stop(f"{sys.executable} is Python {version}; megatron-core has wheels for {supported}.", "Take such an image.")
    if environment.exists() and environment.samefile(sys.prefix):
        stop(f"{sys.executable} belongs to {environment} itself.", f"Run this script with {IMAGE_PYTHON}.")
    empty = environment.is_dir() and not any(environment.iterdir())
    if environment.exists() and not empty and not packages.exists():
        stop(f"{environment} is no environment of Python {version}: remove it, or name another folder.")
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and (Path(folder) / "megatron" / "core").exists():
            stop(
                f"PYTHONPATH={os.environ['PYTHONPATH']} holds a Megatron, which would be imported instead.",
                "unset PYTHONPATH",
            )
    before = state(sys.executable, f"Run this script with {IMAGE_PYTHON}.")
    if before["hip"] is None:
        stop(f"torch is {before['torch']}: not built for ROCm.", f"Run this script with {IMAGE_PYTHON}.")
    pinned = pins()
    if not any(line.startswith("torch==") for line in pinned):
        stop(f"torch {before['torch']} is no installed package, and pip would add another: install it as a wheel.")

    python, keep = str(environment / "bin" / "python"), environment / "keep.txt"
    files = {
        # Not the folders alone, which would leave out the .pth files in them.
        packages / "image.pth": [f"import site; site.addsitedir({folder!r})" for folder in package_folders()],
        keep: pinned,
        environment / "pip.conf": ["[install]", f"constraint = {keep.as_uri()}"],  # also for a later `pip install`
    }
    make = [sys.executable, "-m", "venv", str(environment)]
    # Editable: a copy would not be imported by what is started in the checkout, whose folder zaya_plugin/ has no patches/.
    install = [python, "-m", "pip", "install", "--editable", f"{REPO}[megatron]"]
    if arguments.dry_run:
        print(
            shlex.join(make),
            *(f"{file}:\n    " + "\n    ".join(files[file]) for file in files),
            shlex.join(install),
            sep="\n",
        )
        return

    if not (environment / "bin" / "pip").exists() and subprocess.run(make).returncode != 0:
        stop(f"{shlex.join(make)} failed.", f"If it names ensurepip: apt-get install python{version}-venv")
    for file, lines in files.items():
        file.write_text("\n".join(lines) + "\n")
    torchrun = environment / "bin" / "torchrun"
    torchrun.write_text(TORCHRUN.format(python=shlex.quote(python)))
    torchrun.chmod(0o755)
    unseen = f"The environment must see the packages of {sys.executable}: remove {environment}."
    check_unchanged(before, state(python, unseen), environment, "before anything is installed")
    status = subprocess.run(install).returncode
    after = state(python, unseen)
    check_unchanged(before, after, environment, "after the installation")
    if status != 0:
        stop(f"pip failed with status {status}; torch and Triton have not changed.", f"What it must keep: {keep}")
    print(f"install: unchanged: torch {after['torch']}")
    print(f"install: unchanged: triton {after['triton']}")
    print(f"install: done, {after['devices']} devices. Next: . {shlex.quote(str(environment))}/bin/activate")


if __name__ == "__main__":
    main()
