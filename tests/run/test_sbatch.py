# SPDX-License-Identifier: Apache-2.0
"""The batch script of `zaya export slurm`: bash runs it in these tests, with a fake srun that prints its arguments."""

import os
import stat
import subprocess

import pytest

from zaya_plugin import cli
from zaya_plugin.commands.export import slurm as parser

SRUN = """#!/bin/sh
echo "hca=$NCCL_IB_HCA net=$NCCL_NET_PLUGIN tc=${NCCL_IB_TC-unset} msccl=$RCCL_MSCCL_ENABLE \
threads=${OMP_NUM_THREADS-unset} $*"
"""


def run(text: str, folder) -> list[str]:
    srun = folder / "srun"
    srun.write_text(SRUN)
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_script_starts_one_task_a_device_with_the_clusters_environment(tmp_path, capsys):
    words = ["experiment=zaya1_base", "cluster=mi300x_128x8", "data.path=a b", f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["export", "slurm", *words, "--", "--partition=mi300x", "--time=2-00:00:00"]) == 0
    assert (tmp_path / "run").is_dir(), "SLURM opens the output file in it before the script runs"
    text = capsys.readouterr().out
    for line in ("--nodes=128", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=TERM@600", "--partition=mi300x"):
        assert f"\n#SBATCH {line}\n" in text
    assert run(text, tmp_path) == [
        "hca==ionic_0,ionic_1,ionic_2,ionic_3,ionic_4,ionic_5,ionic_6,ionic_7 net=none tc=unset msccl=0 "
        f"threads=unset --kill-on-bad-exit=1 --cpu-bind=map_ldom:0,0,0,0,1,1,1,1 zaya train {' '.join(words)} resume=auto"
    ]


def test_a_run_dir_that_this_machine_cannot_create_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["export", "slurm", "experiment=cpu_demo", f"run_dir={tmp_path}/file/run"]) == 0
    shown = capsys.readouterr()
    assert f"run_dir={tmp_path}/file/run: cannot be created on this machine (Not a directory)" in shown.err
    assert shown.out.startswith("#!/bin/bash\n")


def test_a_curriculum_is_one_step_a_stage(tmp_path, capsys):
    cli.main(
        [
            "export",
            "slurm",
            "--curriculum",
            "experiment=cpu_demo",
            "cluster.gpus_per_node=2",
            f"run_dir={tmp_path / 'run'}",
        ]
    )
    lines = run(capsys.readouterr().out, tmp_path)
    assert [line.split("--only ")[1].split()[0] for line in lines] == ["demo_1", "demo_2", "demo_3"]
    assert all("--cpu-bind" not in line and "zaya curriculum" in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["experiment=cpu_demo", "cluster.gpus_per_node=2", "cluster.numa_nodes=[0]"],
            "one for each of cluster.gpus_per_node=2",
        ),
        (
            ["experiment=cpu_demo", "cluster.gpus_per_node=2", "--", "partition"],
            "cluster.sbatch=partition: must begin with -. Allowed: options of sbatch",
        ),
        (["experiment=zaya1_base_131k", "cluster=mi300x_8", "data.path=x", "cluster.num_nodes=3"], "is not a multiple"),
        (["cpu_demo"], "cpu_demo: is not key=value.* Fix: experiment=cpu_demo"),
        (["--submitit", "experiment=cpu_demo", "cluster.gpus_per_node=2"], "the package submitit is not installed"),
    ],
)
def test_mistakes_are_named(argv, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parser().run(parser().read(argv))
