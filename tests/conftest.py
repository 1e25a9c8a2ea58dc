# SPDX-License-Identifier: Apache-2.0
"""The surroundings of every test, and fixtures that every test may use."""

import copy
import functools
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Runs of whole processes take minutes a file: begun first, they do not hold up the end, when the other test process has
# nothing left. A test of `plan` compiles an extension of Megatron, for which tests of `model` would wait on both.
LONG = (
    "demo",
    "distributed",
    "faults",
    "gfx942",
    "patches",
    "training",
    "plan",
    "parallel",
    "machines",
    "run",
    "hosts",
    "bench",
)


ROOT = Path(__file__).resolve().parent.parent

# The check of every start (zaya_plugin.run.megatron_check) takes seconds for each recipe, and most tests start another
# one, whose ranks validate the same. tests/run/test_megatron_check.py and tests/hosts/test_argument_check.py make it.
os.environ["ZAYA_CHECK"] = "off"


def pytest_configure() -> None:
    """Give this process, and what it starts, surroundings that do not depend on the user's: an empty home and working
    directory, and the default reactions to signals, which a background job or nohup changes.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers have what their parent has
        home = tempfile.mkdtemp(prefix="zaya-tests-")
        os.environ["ZAYA_TESTS_HOME"] = os.environ["HOME"] = home
        for name in [*os.environ]:
            if name.startswith(("XDG_", "WANDB_", "SLURM_", "HYDRA_", "ZAYA_GRACE", "ZAYA_TRACEBACK")):
                del os.environ[name]
        # Assertions of 640 files are rewritten in 6 s, once for all sessions if the result may be kept; and each `zaya`
        # that a test starts would compile its modules.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        # What is compiled from the same source is the same in every session.
        os.environ["XDG_CACHE_HOME"] = str(ROOT / ".pytest_cache" / "compiled")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("TERM", "HUP", "QUIT", "USR1", "USR2", "XCPU", "CHLD"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pytest_collectstart() -> None:
    gc.disable()  # while tests are imported it finds nothing, and takes two fifths of the time
    if module := sys.modules.get("zaya_plugin.config.compose"):
        compose_once(module)


@functools.cache
def compose_once(module: types.ModuleType) -> None:
    """Let Hydra, which takes 0.1 s a composition, compose the same words once a process. `compose` makes a new recipe
    of its result each time. Words that name a folder of recipes or a path to expand are always composed. Of other words
    it reads each file of the package once, which halves their time.
    """
    from hydra._internal.config_repository import ConfigRepository
    from omegaconf import base

    compositions: dict[tuple[str, ...], object] = {}
    hydras, read = module._composed, ConfigRepository.load_config
    files: dict[str, bytes] = {}

    def composed(overrides: list[str]):
        words = (*overrides,)
        if any("searchpath" in word or "~" in word for word in words):
            return hydras(overrides)
        if words not in compositions:
            compositions[words] = hydras(overrides)
        return compositions[words]

    def load_config(repository, config_path: str):
        if any(source.scheme() == "file" for source in repository.sources):  # a folder of the user
            return read(repository, config_path)
        if config_path not in files:
            files[config_path] = pickle.dumps(read(repository, config_path))
        return pickle.loads(files[config_path])  # Hydra changes what it gets

    module._composed, ConfigRepository.load_config = composed, load_config
    # Of its copy Hydra replaces the list of sources alone.
    ConfigRepository.__deepcopy__ = lambda repository, _: copy.copy(repository)
    base.parse = functools.cache(base.parse)  # the trees of interpolations, which are read only


def pytest_collection_finish() -> None:
    """Leave torch, Megatron and thousands of tests out of every later garbage collection, which took a fifth of the
    time of tests that allocate much.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest then collects garbage five times, in 2 s


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["ZAYA_TESTS_HOME"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {folder: number for number, folder in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("/")[2].partition("/")[0], len(rank)))
    # Hypothesis would parse each module that is imported, in 1.4 s, and so draw other values in other orders of the tests.
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        providers._get_local_constants = providers.Constants
    seen: Counter = Counter()
    for item in items:
        if (mark := item.get_closest_marker("first_cases")) and not item.get_closest_marker("slow"):
            test = (item.path, item.originalname)
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def working_directory(tmp_path_factory) -> Iterator[Path]:
    """An empty one, not the checkout with its data/ and runs/. Not before collection: pytest resolves relative arguments."""
    folder = tmp_path_factory.mktemp("cwd")
    os.chdir(folder)
    yield folder
    os.chdir(ROOT)


@pytest.fixture(autouse=True)
def seeded(working_directory) -> Iterator[None]:
    """The same random numbers in every run and in every order of the tests; importing torch is left to those that need it."""
    if torch := sys.modules.get("torch"):
        # torch.manual_seed keeps a formatted stack for each kind of device that is not there.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(1234)
    yield
    assert os.listdir(working_directory) == [], "the test wrote into the working directory"


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """Gives the function of tests/tool.py."""
    from tests.tool import require_tool

    return require_tool


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared data set of real text: some 600 kB of the standard library, a BPE of 512 entries."""
    from tests.running import zaya

    output = tmp_path_factory.mktemp("corpus") / "stdlib"
    done = zaya(
        "data",
        "prepare",
        "--output",
        str(output),
        "--max-bytes",
        "600K",
        "--valid-fraction",
        "0.2",
        "--train-bpe",
        "512",
        "--workers",
        "1",
    )
    assert done.returncode == 0, done.stdout
    return output
