# SPDX-License-Identifier: Apache-2.0
"""The environment of an outer launcher: generated, whole or not; a wrong one is refused before a rank starts."""

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import zaya_plugin
from zaya_plugin.config.compose import compose
from zaya_plugin.config.environment import VARIABLES
from zaya_plugin.config.validate import validate
from zaya_plugin.run import surroundings
from zaya_plugin.run.rank_plan import check_environment, make_plan

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "20000"}
STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
NO_NUMBERS = st.one_of(
    st.sampled_from(["", " ", "-1", "1.0", "1e3", "0x1", "nan", "one", "+1", "1 ", "1_0", "²", "９", "null"]),
    st.text(st.characters(blacklist_categories=("Cs", "Nd"), blacklist_characters="\0"), max_size=8),
)
DEMO = compose(["experiment=cpu_demo"])
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def refused(environ, *named):
    with pytest.raises(ValueError) as error:
        check_environment(environ)
    text = str(error.value)
    assert any(text.startswith(f"{name}=") for name in named), text
    assert "Allowed: " in text and "Fix: " in text
    return text


def test_whole_environments_pass():
    for environ in ({}, WHOLE, STEP, {**STEP, **WHOLE}, {**STEP, "WORLD_SIZE": "2"}, {**STEP, "MASTER_ADDR": "a"}):
        check_environment(environ)
    check_environment({"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"})  # the batch script is no task
    check_environment({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"})  # the shell of salloc


@QUICK
@given(st.sets(st.sampled_from(sorted(WHOLE)), min_size=1, max_size=4))
def test_a_part_of_torchruns_variables_is_refused(names):
    assume(names & {"RANK", "WORLD_SIZE", "LOCAL_RANK"})
    environ = {name: WHOLE[name] for name in names}
    text = refused(environ, *names)
    assert all(name in text for name in set(WHOLE) - names), "every missing one is named"


@QUICK
@given(st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK"]), NO_NUMBERS)
def test_what_is_no_number_is_refused(name, text):
    refused({**WHOLE, name: text}, *([name] if text else WHOLE))


@QUICK
@given(st.sampled_from([{}, WHOLE, STEP]), NO_NUMBERS)
def test_a_port_that_is_no_port_is_refused(environ, text):
    refused({**environ, "MASTER_PORT": text}, *(["MASTER_PORT"] if text else ["MASTER_PORT", *WHOLE]))


@QUICK
@given(st.integers(0, 64), st.integers(0, 64), st.integers(0, 64), st.integers(0, 70_000))
@example(0, 0, 0, 20000)
@example(0, 1, 0, 65535)
@example(0, 1, 0, 65536)
def test_numbers_pass_exactly_where_they_fit(rank, world, local, port):
    environ = {**WHOLE, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local), "MASTER_PORT": str(port)}
    if rank < world and local < world and port < 65536:
        check_environment(environ)
        recipe = compose(["experiment=cpu_demo"])
        recipe.stage.micro_batch_size, recipe.stage.global_batch_size = 1, world
        plan = make_plan(recipe, environ)
        assert (plan.rank, plan.world_size) == (rank, world)
    else:
        refused(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


@QUICK
@given(st.integers(-2, 9), st.integers(0, 8), st.integers(-2, 9))
def test_slurms_numbers_pass_exactly_where_they_fit(rank, tasks, local):
    environ = {**STEP, "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(tasks), "SLURM_LOCALID": str(local)}
    if 0 <= rank < tasks and 0 <= local < tasks:
        check_environment(environ)
    else:
        refused(environ, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


@pytest.mark.parametrize("missing", ["SLURM_NTASKS", "SLURM_LOCALID"])
def test_a_part_of_slurms_variables_is_refused(missing):
    assert missing in refused({name: text for name, text in STEP.items() if name != missing}, "SLURM_PROCID")


def test_two_launchers_that_differ_are_refused():
    assert "RANK" in refused({**STEP, "WORLD_SIZE": "4"}, "WORLD_SIZE")


def test_a_master_port_that_is_taken_is_refused_on_rank_0_unless_torchrun_has_it(monkeypatch):
    recipe = compose(["experiment=cpu_demo"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environ = {**WHOLE, "MASTER_PORT": str(taken.getsockname()[1])}
        for name, text in environ.items():
            monkeypatch.setenv(name, text)
        first = make_plan(recipe, {**environ, "RANK": "0", "LOCAL_RANK": "0"})
        with pytest.raises(ValueError, match=f"^MASTER_PORT={environ['MASTER_PORT']}: the port is in use"):
            surroundings.check_machine(recipe, first)
        surroundings.check_machine(recipe, make_plan(recipe, environ))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        surroundings.check_machine(recipe, first)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    surroundings.check_machine(recipe, first)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        pytest.param({**WHOLE, "WORLD_SIZE": "0"}, marks=pytest.mark.slow),
        pytest.param({"SLURM_PROCID": "0"}, marks=pytest.mark.slow),
        pytest.param({"MASTER_PORT": "abc"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("words", [("train", "experiment=cpu_demo"), ("train", "experiment=cpu_demo", "--dry-run")])
def test_the_command_names_the_variable_and_ends_with_2(zaya, variables, words):
    done = zaya(*words, **variables)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert any(f"zaya: {name}=" in done.stderr or f": {name}=" in done.stderr for name in variables)
    assert list(zaya.place.iterdir()) == []


GOOD = {
    "OMP_NUM_THREADS": ("1", "96"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "8", "32"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8", ":4096:2:16:8"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "DETAIL"),
    "HIP_OPS_KERNELS": ("auto", "hip", "auto, router_mlp=compiled", "reference,muon=triton"),
    "HIP_OPS_LIBRARY": ("shipped", "source"),
    "HIP_OPS_ARCH": ("gfx942",),
    "ZAYA_CHECK": ("on", "off"),
    "ZAYA_GRACE_SECONDS": ("inf", "600", "2.5", "1.0"),
}
# A choice of the user that has no wrong value (a folder, a name, a number of the host's), or one that a process of
# this project sets for those that it starts.
ANY_TEXT = {
    *("HIP_OPS_CACHE", "ZAYA_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME", "PATH"),
    *("PYTHONPATH", "ROCM_PATH", "HIP_PATH", "CUDA_HOME", "CUDA_PATH", "PYTORCH_ROCM_ARCH", "COLUMNS", "HF_ENDPOINT"),
    *("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_SILENT", "HYDRA_FULL_ERROR", "TOKENIZERS_PARALLELISM", "ENVIRONMENT"),
    *("ZAYA_RECIPE", "ZAYA_AEGIS_SECRET_FILE", "ZAYA_AEGIS_RUN", "ZAYA_AEGIS_DIR", "ZAYA_RANK_PID", "ZAYA_RUN_LOCKS"),
    *("ZAYA_CHECKS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR"),
    *("PWD", "TMPDIR", "PYTHONUTF8", "WANDB_MODE", "TORCHINDUCTOR_CACHE_DIR", "MPLBACKEND"),
    # `zaya doctor` judges them, and no run reads them
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HSA_NO_SCRATCH_RECLAIM", "PRIMUS_PATCHES"),
    *("GPU_MAX_HW_QUEUES", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
}
OF_A_LAUNCHER = {*WHOLE, "LOCAL_WORLD_SIZE"}  # and SLURM_*: check_environment compares them with each other


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_takes_its_values_and_no_others(name):
    good = GOOD.get(name, ("0", "1"))
    for text in (*good, ""):
        check_environment({name: text})

    @settings(QUICK, max_examples=15)
    @example("nonsense")
    @example("\n")
    @given(NO_NUMBERS)
    def others_are_refused(text):
        assume(text and text not in good)
        assert VARIABLES[name][0] in refused({name: text}, name)
        problem = "(this variable does not accept the value|is set by the launcher)"
        with pytest.raises(ValueError, match="^" + re.escape(f"cluster.environment.{name}={text}: ") + problem):
            validate(replace(DEMO, cluster=replace(DEMO.cluster, environment={name: text})), 2)

    others_are_refused()


def test_every_variable_that_is_read_has_its_values_or_takes_any_text():
    read = re.compile(
        r"""environ(?:\.get|\.pop)?[\[(]\s*"([A-Z][A-Z0-9_]+)"|"([A-Z][A-Z0-9_]+)" (?:not )?in (?:os\.)?environ"""
        r"""|whole_variable\(environ, "([A-Z_]+)"|^[A-Z_, ]+ = "((?:ZAYA|HIP_OPS)_[A-Z_]+)\"""",
        re.MULTILINE,
    )
    home, found = Path(zaya_plugin.__file__).parents[1], {}
    for folder in ("zaya_plugin", "patches", "hip_ops"):
        for path in (home / folder).rglob("*.py"):
            names = {name for match in read.findall(path.read_text()) for name in match if name}
            found |= dict.fromkeys(names, path)
    assert found.keys() >= {"HIP_OPS_KERNELS", "ZAYA_CHECK", "OMP_NUM_THREADS", "RANK"}
    unknown = {name: str(path) for name, path in found.items() if not name.startswith("SLURM")}
    assert unknown.keys() <= VARIABLES.keys() | ANY_TEXT | OF_A_LAUNCHER, unknown


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, None) for text in ("0,1", "3, 1,2", "GPU-1932f937-1d72c,MIG-3/1/0", "0,1,-1")),
        *((text, "shows 0 devices, and nproc=2 ranks need one each") for text in ("", "-1", "-1,0,1")),
        *((text, "shows 1 devices, and nproc=2 ranks need one each") for text in ("0", "GPU-8932f937", "7,-1,3")),
        *(
            (text, "is not a list of devices")
            for text in ("nonsense", "NoDevFiles", "0;1", "0,x", "all", "0.5,1", "1e3,2")
        ),
    ],
)
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_devices_that_a_variable_hides_from_the_ranks_are_missed(monkeypatch, name, text, told):
    recipe = replace(DEMO, nproc=2, cluster=replace(DEMO.cluster, device="cuda", distributed_backend="nccl"))
    monkeypatch.setenv(name, text)
    if told is None:
        surroundings.check_sizes(recipe, make_plan(recipe, {}))
        return
    with pytest.raises(ValueError, match=re.escape(f"{name}={text}: {told}") + ".* Allowed: .* Fix: unset"):
        surroundings.check_sizes(recipe, make_plan(recipe, {}))
    surroundings.check_sizes(DEMO, make_plan(DEMO, {})), "a run on the CPU hides them itself"


def test_a_selection_of_kernels_that_no_rank_reads_is_announced(monkeypatch):
    monkeypatch.setenv("HIP_OPS_KERNELS", "reference")
    (line,) = (line for line in surroundings.unused(DEMO, make_plan(DEMO, {})) if "HIP_OPS_KERNELS" in line)
    assert line.startswith("zaya: HIP_OPS_KERNELS=reference: is not read where there is a recipe")
