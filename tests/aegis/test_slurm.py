# SPDX-License-Identifier: Apache-2.0
"""What is asked of SLURM, with programs that write down their words; `make lab` asks a real one."""

from zaya_plugin.aegis import slurm

RECORD = """#!/bin/sh
printf '%s\\036' "$(basename "$0")" "$@" >> {log}
printf '\\n' >> {log}
{body}
"""


def programs(tmp_path, monkeypatch, **bodies):
    """Stand-ins for programs of SLURM."""
    for name, body in bodies.items():
        (tmp_path / name).write_text(RECORD.format(log=tmp_path / "log", body=body))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def asked(tmp_path):
    text = (tmp_path / "log").read_text()
    return [line.split("\036") for line in text.split("\036\n") if line]


def test_a_requeue_excludes_the_lost_node_and_leaves_a_job_that_sets_the_start(tmp_path, monkeypatch):
    programs(tmp_path, monkeypatch, scontrol="exit 0", sbatch="exit 0")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "lab; true")
    monkeypatch.delenv("SLURM_JOB_ACCOUNT", raising=False)
    monkeypatch.delenv("SLURM_JOB_QOS", raising=False)
    assert slurm.requeue("7", ["n3", "n2"]) == (True, "")
    first, second, third = asked(tmp_path)
    assert first == ["scontrol", "requeue", "7"]
    assert second == ["scontrol", "update", "JobId=7", "ExcNodeList=n2,n3"]
    assert third[:-3] == [*slurm.HELPER] and third[-3:-1] == ["--partition=lab; true", "--exclude=n2,n3"]
    assert third[-1] == f"--wrap={slurm.START_NOW} 7"


def test_the_job_waits_for_the_end_of_the_last_process_and_then_sets_the_start(tmp_path, monkeypatch):
    body = f"n=$(cat {tmp_path}/count 2>/dev/null || echo 0); echo $((n+1)) > {tmp_path}/count\n"
    body += '[ $n -lt 1 ] && echo "JobId=7 JobState=COMPLETING" || echo "JobId=7 JobState=PENDING Reason=BeginTime"'
    programs(tmp_path, monkeypatch, scontrol=body, sleep="exit 0")
    done, _ = slurm.call("sh", "-c", f"{slurm.START_NOW} 7")
    assert done
    show, sleep = ["scontrol", "--oneliner", "show", "job", "7"], ["sleep", "1"]
    pending = [show, ["scontrol", "update", "JobId=7", "StartTime=now"]]
    assert asked(tmp_path) == [show, sleep, *[*pending, sleep] * 9, *pending]


def test_what_slurm_refuses_is_reported(tmp_path, monkeypatch):
    programs(tmp_path, monkeypatch, scontrol="echo Access denied; exit 1", sbatch="echo no such account; exit 1")
    assert slurm.requeue("7", []) == (False, "Access denied")
    programs(tmp_path, monkeypatch, scontrol='[ "$1" = requeue ]')
    assert slurm.requeue("7") == (True, "it waits for two minutes: no such account")


def test_a_start_of_a_job_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    first = slurm.start_of_job()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert (first, slurm.start_of_job()) == ("7.0", "7.1")
