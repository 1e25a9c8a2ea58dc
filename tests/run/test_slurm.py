# SPDX-License-Identifier: Apache-2.0
"""Variables that srun sets, and Slurm's notation of host lists."""

import pytest

from zaya_plugin.run.rank_plan import port, slurm_variables, tasks_on_node

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "11",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "mi300-[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}


@pytest.mark.parametrize("node_list", ["a[1", "a]1", "[", ",b"])
def test_without_a_node_list_rank_0_has_no_address(node_list):
    with pytest.raises(ValueError, match="^SLURM_JOB_NODELIST=.*must be a node list"):
        slurm_variables({**TASK, "SLURM_JOB_NODELIST": node_list})


def test_variables_of_a_task():
    assert slurm_variables(TASK) == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "mi300-007",
        "MASTER_PORT": "24711",
    }


def test_the_port_is_the_users_where_there_is_one():
    assert slurm_variables(TASK, master_port=29500)["MASTER_PORT"] == "29500"
    assert slurm_variables({**TASK, "MASTER_PORT": "1234", "MASTER_ADDR": "head"})["MASTER_PORT"] == "1234"
    assert all(20000 <= port(str(job)) < 30000 for job in (0, 9999, 10000, 123456789))


def test_outside_a_step_there_are_none():
    assert slurm_variables({}) is None
    assert slurm_variables({**TASK, "SLURM_NTASKS": "1"}) is None
    shell = {**TASK, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}  # inside of salloc
    assert slurm_variables({**shell, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) is None
    assert slurm_variables({**TASK, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "16"}) == slurm_variables(TASK)
    batch_script = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"}
    assert slurm_variables(batch_script) is None
    assert slurm_variables({**batch_script, "SLURM_STEP_ID": "0"}) is not None


def test_without_hosts_the_address_must_be_given():
    hostless = {name: value for name, value in TASK.items() if name != "SLURM_JOB_NODELIST"}
    with pytest.raises(ValueError, match="Fix: export MASTER_ADDR="):
        slurm_variables(hostless)
    assert slurm_variables({**hostless, "MASTER_ADDR": "head"})["MASTER_ADDR"] == "head"


@pytest.mark.parametrize(
    ("text", "node", "tasks"), [("8(x2),4", 0, 8), ("8(x2),4", 1, 8), ("8(x2),4", 2, 4), ("8", 1, None), ("x", 0, None)]
)
def test_tasks_on_this_node(text, node, tasks):
    assert tasks_on_node({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}) == tasks
