# SPDX-License-Identifier: Apache-2.0
"""The environment of an outer launcher: generated, whole or not; a wrong one is refused before a rank starts."""

import socket

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from zaya_plugin.config.compose import compose
from zaya_plugin.run import before_start
from zaya_plugin.run.rank_plan import check_environment, make_plan

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "20000"}
STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
NO_NUMBERS = st.one_of(
    st.sampled_from(["", " ", "-1", "1.0", "1e3", "0x1", "nan", "one", "+1", "1 ", "1_0", "²", "９", "null"]),
    st.text(st.characters(blacklist_categories=("Cs", "Nd"), blacklist_characters="\0"), max_size=8),
)
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
        plan = make_plan(compose(["experiment=cpu_demo"]), environ)
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
            before_start.check_machine(recipe, first)
        before_start.check_machine(recipe, make_plan(recipe, environ))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        before_start.check_machine(recipe, first)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    before_start.check_machine(recipe, first)


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


@pytest.mark.parametrize(
    ("name", "text"), [("ZAYA_GRACE_SECONDS", "x"), ("ZAYA_GRACE_SECONDS", "nan"), ("ZAYA_GRACE_SECONDS", "-1")]
)
def test_seconds_to_save_are_a_number(name, text):
    with pytest.raises(ValueError, match=f"^{name}={text}: is set in the environment and is no number of seconds"):
        check_environment({name: text})
    for good in ("inf", "600", "2.5", ""):
        check_environment({name: good})
