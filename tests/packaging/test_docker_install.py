# SPDX-License-Identifier: Apache-2.0
"""docker/install.py in environments that are nested as in AMD's images: an outer one with a torch of its own, and small
wheels in a folder in place of a package index. The torch is a stand-in, since what is tested is whose torch is seen,
pinned and kept; venv, pip and site are the real ones.
"""

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SCRIPT, DOCKERFILE, PAGE = "docker/install.py", REPO / "docker" / "Dockerfile", REPO / "docs" / "mi300x.md"
ENVIRONMENT = "/opt/zaya"  # in the page and in the Dockerfile
TORCH, NEW_TORCH = "2.10.0+rocm7.2.4", "2.13.0"
TRITON, NEW_TRITON = "3.6.0+rocm7.2.4", "3.7.1"
# What an image holds of the plugin's requirements, as package metadata; transformers is older than the extra asks for.
PACKAGES = {
    "numpy": "2.5.3",
    "hydra-core": "1.3.7",
    "omegaconf": "2.3.0",
    "packaging": "25.0",
    "PyYAML": "6.0.3",
    "tqdm": "4.67.3",
    "xxhash": "3.6.0",
    "transformers": "5.10.0",
    "tokenizers": "0.22.1",
    "safetensors": "0.6.2",
    "wandb": "0.28.2",
    "tensorboard": "2.20.0",
    "psutil": "7.2.2",
    "einops": "0.8.2",
}


def torch_files(version: str, hip: str | None) -> dict[str, str]:
    return {
        "torch/__init__.py": f"from . import cuda, version\n__version__ = {version!r}\n",
        "torch/version.py": f"hip = {hip!r}\n",
        "torch/cuda.py": "def device_count(): return 8\n",
        "torch/distributed/run.py": "import sys; print(sys.prefix, *sys.argv[1:])\n",
    }


def triton_files(version: str) -> dict[str, str]:
    return {"triton/__init__.py": f"__version__ = {version!r}\n"}


def info(name: str, version: str, requires: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the metadata files of an installed package or a wheel."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Provides-Extra: training"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    return {
        f"{folder}/METADATA": "\n".join(lines) + "\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{folder}/RECORD": "",
        f"{folder}/INSTALLER": "pip\n",
    }


class Image:
    """An environment made like that of an image, an index of wheels, and a checkout that holds the script."""

    def __init__(self, root: Path, triton_name: str = "triton"):
        self.root, self.index, self.checkout = root, root / "index", root / "zaya"
        self.index.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "image"], check=True)
        self.python = root / "image" / "bin" / "python3"
        (self.packages,) = (root / "image" / "lib").glob("python3*/site-packages")
        self.add(torch_files(TORCH, "7.2.53211") | info("torch", TORCH, (f"{triton_name}==3.6.0",)))
        self.add(triton_files(TRITON) | info(triton_name, TRITON))
        for name, version in PACKAGES.items():
            self.add(info(name, version))
        # Of this environment: pip, for tests that do not need the environment's own, and what builds the plugin.
        for path in Path(pytest.__file__).parents[1].iterdir():
            if re.fullmatch(r"_distutils_hack|(pip|setuptools)(-[0-9.]+\.dist-info)?", path.name):
                (self.packages / path.name).symlink_to(path)
        self.offer("torch", NEW_TORCH, torch_files(NEW_TORCH, None))
        self.offer("triton", NEW_TRITON, triton_files(NEW_TRITON))
        self.offer("transformers", "5.23.0", {})

    def add(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.packages / name).parent.mkdir(parents=True, exist_ok=True)
            (self.packages / name).write_text(text)

    def offer(self, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> None:
        """Add a wheel to the index."""
        with zipfile.ZipFile(self.index / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
            for path, text in (files | info(name, version, requires)).items():
                wheel.writestr(path, text)

    def offer_megatron(self, version: str, *requires: str, **files: str) -> None:
        core = {f"megatron/core/{name}": "" for name in ("__init__.py", "package_info.py")}
        self.offer("megatron-core", version, core | files, ("torch>=2.6.0", "numpy", *requires))

    def small_checkout(self) -> None:
        """Put the script into a plugin of one empty module, which pip builds in a second."""
        (self.checkout / "docker").mkdir(parents=True)
        (self.checkout / "zaya_plugin").mkdir()
        (self.checkout / "zaya_plugin" / "__init__.py").touch()
        shutil.copy(REPO / SCRIPT, self.checkout / SCRIPT)
        (self.checkout / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
            '[project]\nname = "zaya_plugin"\nversion = "1"\n[tool.setuptools]\npackages = ["zaya_plugin"]\n'
            '[project.optional-dependencies]\nmegatron = ["megatron-core[training]>=0.19.2,<0.20"]\n'
        )

    def ready_environment(self) -> Path:
        """Return an environment that the script takes as it is, without the seconds that installing pip takes."""
        environment = self.root / "environment"
        subprocess.run([self.python, "-m", "venv", "--without-pip", environment], check=True)
        (environment / "bin" / "pip").touch()
        return environment

    def run(self, *command: object, **environ: str) -> subprocess.CompletedProcess:
        path = f"{self.python.parent}:/usr/bin:/bin"
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PIP_NO_BUILD_ISOLATION": "0"}
        env = {"PATH": path, "HOME": str(self.root), "PIP_DISABLE_PIP_VERSION_CHECK": "1", **pip, **environ}
        return subprocess.run([*map(str, command)], cwd=self.checkout, env=env, capture_output=True, text=True)

    def install(self, environment: Path, *options: str, **environ: str) -> subprocess.CompletedProcess:
        return self.run("python3", SCRIPT, environment, *options, **environ)

    def content(self) -> dict[Path, bytes]:
        files = (path for path in self.packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {file: file.read_bytes() for file in files}


@pytest.fixture
def image(tmp_path) -> Image:
    image = Image(tmp_path)
    image.small_checkout()
    return image


def commands() -> list[str]:
    """Return the lines of the page's block that holds the script."""
    blocks = re.findall(r"^```bash site\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if SCRIPT in block]
    return [line.partition("  #")[0].rstrip() for line in block.splitlines()]


def copied_by_dockerfile(target: Path) -> list[str]:
    """Copy to `target` what the Dockerfile copies, and return its RUN lines."""
    lines = DOCKERFILE.read_text().splitlines()
    for _, *sources, place in (shlex.split(line) for line in lines if line.startswith("COPY ")):
        for source in sources:
            if (REPO / source).is_dir():
                shutil.copytree(REPO / source, target / place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(REPO / source, target / place)
    return [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]


def test_page_readme_and_dockerfile_have_one_command():
    call = f"python3 {SCRIPT} {ENVIRONMENT}"
    assert commands() == [call, f". {ENVIRONMENT}/bin/activate"]
    assert [line for line in DOCKERFILE.read_text().splitlines() if line.startswith("RUN ")] == [f"RUN {call}"]
    assert call in (REPO / "README.md").read_text()
    assert f"ENV VIRTUAL_ENV={ENVIRONMENT} PATH={ENVIRONMENT}/bin:$PATH" in DOCKERFILE.read_text()


def test_commands_of_the_page_with_what_the_dockerfile_copies(tmp_path):
    """The plugin itself is built and installed; torch, Triton and every file of the image stay."""
    image = Image(tmp_path)
    image.offer_megatron("0.19.2")
    image.checkout.mkdir()
    (command,) = copied_by_dockerfile(image.checkout)
    assert command == commands()[0]
    before, environment = image.content(), tmp_path / "opt" / "zaya"
    place = "python -c 'import importlib.util, torch; print(importlib.util.find_spec(\"zaya_plugin.patches\").origin)'"
    asked = [place, f"cd / && {place}", "pip list --format=freeze --path {0}", "torchrun a"]
    packages = environment / "lib" / image.packages.parts[-2] / "site-packages"
    program = "\n".join(commands()).replace(ENVIRONMENT, str(environment)) + "\n" + "\n".join(asked).format(packages)
    done = image.run("sh", "-ec", program)
    assert done.returncode == 0, done.stderr
    assert image.content() == before
    *places, launcher = done.stdout.partition("/bin/activate\n")[2].splitlines()
    assert places[:2] == [f"{image.checkout}/patches/__init__.py"] * 2 and launcher == f"{environment} a"
    names = {line.partition("==")[0].replace("_", "-") for line in places[2:]}
    assert names == {"pip", "zaya-plugin", "megatron-core", "transformers"}
    assert (
        f"install: unchanged: torch {TORCH} (HIP 7.2.53211) of {image.packages}/torch/__init__.py\n"
        f"install: unchanged: triton {TRITON} of {image.packages}/triton/__init__.py\n"
        f"install: done, 8 devices. Next: . {environment}/bin/activate\n"
    ) in done.stdout
    kept = (environment / "keep.txt").read_text().splitlines()
    assert kept == ["numpy==2.5.3", f"torch=={TORCH}", f"triton=={TRITON}"]

    # A later `pip install` in the environment keeps them too.
    later = image.run(environment / "bin" / "pip", "install", f"torch=={NEW_TORCH}")
    assert later.returncode != 0 and f"The user requested (constraint) torch=={TORCH}" in later.stdout + later.stderr


def test_a_plain_nested_environment_does_not_see_the_torch(image):
    """The reason for the script: `--system-site-packages` gives the packages of the base Python."""
    nested = image.root / "nested"
    subprocess.run([image.python, "-m", "venv", "--without-pip", "--system-site-packages", nested], check=True)
    done = image.run(nested / "bin" / "python", "-c", "import torch; print(torch.__file__)")
    assert str(image.packages) not in done.stdout


def test_without_its_path_file_the_script_stops_before_pip(image):
    script = image.checkout / SCRIPT
    text = script.read_text()
    (line,) = [line for line in text.splitlines() if "site.addsitedir(" in line]
    script.write_text(text.replace(line, ""))
    done = image.install(image.ready_environment())
    assert done.returncode == 1 and done.stdout == ""
    assert "bin/python cannot import torch and triton: ModuleNotFoundError: No module named 'torch'\n" in done.stderr


def test_a_release_that_needs_another_torch_is_refused_by_pip(image):
    image.offer_megatron("0.19.3", "torch>=2.11")
    environment = image.ready_environment()
    done = image.install(environment)
    assert done.returncode == 1, done.stdout
    assert f"The user requested (constraint) torch=={TORCH}" in done.stdout + done.stderr
    assert done.stderr.endswith(
        "install: pip failed with status 1; torch and Triton have not changed.\n"
        f"    What it must keep: {environment}/keep.txt\n"
    )


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("triton_name", "requires", "files", "line"),
    [
        (
            "triton",
            (),
            torch_files(NEW_TORCH, None),
            f"torch was {TORCH} (HIP 7.2.53211) of {{0}}/torch/__init__.py, "
            f"now {NEW_TORCH} (HIP None) of {{1}}/torch/__init__.py",
        ),
        (
            "triton-rocm",  # no constraint holds for the other name of the same module
            ("triton",),
            {},
            f"triton was {TRITON} of {{0}}/triton/__init__.py, now {NEW_TRITON} of {{1}}/triton/__init__.py",
        ),
    ],
    ids=["torch within another package", "triton beside triton-rocm"],
)
def test_another_torch_or_triton_ends_the_script(tmp_path, triton_name, requires, files, line):
    image = Image(tmp_path, triton_name)
    image.small_checkout()
    image.offer_megatron("0.19.2", *requires, **files)
    environment = image.ready_environment()
    (packages,) = (environment / "lib").glob("python3*/site-packages")
    for moment in ("after the installation", "before anything is installed"):  # of the first and of a second run
        done = image.install(environment)
        assert done.returncode == 1
        name = line.partition(" ")[0]
        assert f"install: {environment} has another {name} {moment}:\n" in done.stderr
        assert f"    {line.format(image.packages, packages)}\n" in done.stderr


@pytest.mark.slow
def test_it_may_run_again(image):
    image.offer_megatron("0.19.2")
    environment = image.ready_environment()
    for _ in range(2):
        done = image.install(environment)
        assert done.returncode == 0
        assert done.stdout.endswith(f"install: done, 8 devices. Next: . {environment}/bin/activate\n")


def test_what_it_refuses(image):
    """No torch, a torch for CUDA, a torch that pip does not know, its own environment, a folder of something else, a
    Megatron on PYTHONPATH.
    """
    environment = image.ready_environment()

    def refusal(python: Path = image.python, folder: Path = environment, **environ: str) -> str:
        done = image.run(python, SCRIPT, folder, **environ)
        assert done.returncode == 1 and done.stdout == ""
        return done.stderr

    advice = "Run this script with the Python that has the ROCm build of torch (in AMD's images /opt/venv/bin/python3)."
    assert refusal(folder=image.checkout) == (
        f"install: {image.checkout} is no environment of Python {sys.version_info.major}.{sys.version_info.minor}: "
        "remove it, or name another folder.\n"
    )
    assert refusal(environment / "bin" / "python") == (
        f"install: {environment}/bin/python belongs to {environment} itself.\n    {advice}\n"
    )
    primus = image.root / "Primus" / "third_party" / "Megatron-LM"
    (primus / "megatron" / "core").mkdir(parents=True)
    assert refusal(PYTHONPATH=f"/nowhere:{primus}") == (
        f"install: PYTHONPATH=/nowhere:{primus} holds a Megatron, which would be imported instead.\n    unset PYTHONPATH\n"
    )
    (image.packages / f"torch-{TORCH}.dist-info").rename(image.root / "metadata")
    assert "is no installed package, and pip would add another" in refusal()
    image.add(torch_files(NEW_TORCH, None))
    torch = image.packages / "torch" / "__init__.py"
    assert refusal() == f"install: torch is {NEW_TORCH} (HIP None) of {torch}: not built for ROCm.\n    {advice}\n"
    torch.unlink()
    assert "cannot import torch and triton: " in refusal() and advice in refusal()


def test_a_dry_run_prints_and_changes_nothing(image):
    environment = image.root / "not yet"
    done = image.install(environment, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not environment.exists()
    lines = done.stdout.splitlines()
    assert lines[0] == f"{image.python} -m venv '{environment}'"
    assert f"    import site; site.addsitedir('{image.packages}')" in lines and f"    torch=={TORCH}" in lines
    assert lines[-1] == f"'{environment}/bin/python' -m pip install --editable '{image.checkout}[megatron]'"
    assert "--dry-run" in image.run("python3", SCRIPT, "--help").stdout
