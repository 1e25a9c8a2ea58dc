# SPDX-License-Identifier: Apache-2.0
"""Which Megatron this is: the one that an import finds, whatever pip knows of."""

import subprocess
import sys
from pathlib import Path

import megatron.core
from packaging.version import Version

from zaya_plugin import compat

PROGRAM = "from zaya_plugin import compat; import sys; print(compat.core_version(), compat.has_training(), compat.zaya_train_fits(), 'torch' in sys.modules)"


def package(folder: Path, major: int, minor: int, patch: int, pre: str, training: bool) -> Path:
    """A Megatron of which nothing but its version and its outline is there."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = {pre!r}\nVERSION = (MAJOR, MINOR)\n"
    )
    if training:
        (folder / "megatron" / "training").mkdir()
        (folder / "megatron" / "training" / "__init__.py").write_text("")
    return folder


def ask(*path: Path) -> list[str]:
    search = ":".join(str(each) for each in (*path, Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={"PYTHONPATH": search}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_version_is_that_of_the_package():
    # In a git repository Megatron adds the commit that it finds there, whosever that is.
    assert str(compat.core_version()) == Version(megatron.core.__version__).public
    assert compat.at_least("0.16") and not compat.at_least("99")


def test_a_checkout_hides_the_wheel_behind_it(tmp_path):
    assert ask(package(tmp_path / "a", 0, 16, 0, "rc0", training=True)) == ["0.16.0rc0", "True", "False", "False"]
    assert ask(package(tmp_path / "b", 0, 19, 0, "", training=True)) == ["0.19.0", "True", "True", "False"]


def test_training_of_another_installation_does_not_count(tmp_path):
    core, other = (
        package(tmp_path / "a", 0, 16, 1, "", training=False),
        package(tmp_path / "b", 0, 19, 2, "", training=True),
    )
    assert ask(core, other)[:2] == ["0.16.1", "False"]
    assert ask(other, core)[:2] == ["0.19.2", "True"]


def test_checkpoints_of_later_releases_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "core_version", lambda: Version("0.16.0rc0"))
    assert not compat.can_read(tmp_path)
    (tmp_path / "common.pt").touch()
    assert compat.can_read(tmp_path)
    monkeypatch.setattr(compat, "core_version", lambda: Version("0.19.2"))
    (tmp_path / "common.pt").unlink()
    assert compat.can_read(tmp_path)
