# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis explain` reads folders of logs as people have them, and says what happened first."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.aegis.diagnose.test_rules import realistic
from tests.aegis.journals import ONE_CRASH, failure
from tests.aegis.labelled_logs import COLLECTED, cases
from tests.cpu_speed import allowed
from zaya_plugin import cli
from zaya_plugin.aegis.diagnose.rules import Rules
from zaya_plugin.aegis.explain import STAMP, _seconds, explain, read_logs

RULES = Rules.load()
RESET = "RuntimeError: [pair.cc:537] Read error [10.0.0.2]:41234: Connection reset by peer\n"


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.utime(path, (COLLECTED, COLLECTED))
    return folder


def one(folder: Path):
    (attempt,) = explain(folder, RULES)
    return attempt.result


def test_the_command_names_cause_evidence_cascades_and_action(tmp_path, capsys):
    case = next(case for case in cases() if case.name == "uncorrectable_block")
    assert cli.main(["aegis", "explain", str(case.write(tmp_path))]) == 0
    told = re.sub("(?m)^  the supervisor: exchange: .*\n", "", capsys.readouterr().out)
    assert told == (
        "ras_ue_block on n2 (sure, fatal)\n"
        "  A block of the GPU, such as its memory (umc), reports an error that it could not correct.\n"
        "  evidence:\n"
        "    2026-11-22 10:00:01.120  n2 kernel  2026-11-22T10:00:01,120000+00:00 amdgpu 0000:dd:00.0: amdgpu: "
        "{3}socket: 4, die: 0, 1 new uncorrectable hardware errors detected in umc block\n"
        "    2026-11-22 10:00:01.300  n2 kernel  2026-11-22T10:00:01,300000+00:00 amdgpu 0000:dd:00.0: amdgpu: "
        "GPU reset begin!\n"
        "    2026-11-22 10:00:09.300  n2 kernel  2026-11-22T10:00:09,300000+00:00 amdgpu 0000:dd:00.0: amdgpu: "
        "GPU reset succeeded, trying to resume\n"
        "  followed by: 8 hip_launch, 8 watchdog_exit, 8 conn_reset\n"
        "  a person: Reboot the node and run `zaya verify --nodes`; if the error returns, have the GPU\n"
        "    replaced.\n"
    )


def test_json_is_for_programs(tmp_path, capsys):
    write(tmp_path, {"rank3.log": "2026-11-22 10:00:00 RuntimeError: HIP error: invalid device function\n"})
    assert cli.main(["aegis", "explain", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["attempt"], row["cause"], row["rank"], row["severity"]) == (None, "hip_arch", 3, "user")
    assert row["action"] == "stop" and "hip_arch" in row["reason"] and row["first"] == 1795341600


def test_a_class_is_explained_and_all_are_listed(capsys):
    assert cli.main(["aegis", "explain", "--rule", "ring_timeout"]) == 0
    text = capsys.readouterr().out
    assert "A queue of the GPU did not finish its work in time" in text and "exchange the node when" in text
    assert "AMD's code  311" in text and "root, high, likely" in text
    assert cli.main(["aegis", "explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(RULES)
    assert (
        cli.main(["aegis", "explain", "--rule", "soft_lockup"]) == 0 and "3 lines in 600 s" in capsys.readouterr().out
    )


def test_rows_of_the_user_count(tmp_path, capsys):
    rules = "- {name: mine, source: rank, role: root, severity: user, confidence: sure, action: stop, explain: It is mine., "
    logs = write(tmp_path / "logs", {"rank1.log": "2026-11-22 10:00:00 out of cheese\n"})
    (tmp_path / "mine.yaml").write_text(rules + "pattern: out of cheese}")
    assert cli.main(["aegis", "explain", str(logs), "--rules", str(tmp_path / "mine.yaml")]) == 0
    assert "mine rank 1 (sure, user)" in capsys.readouterr().out
    assert cli.main(["aegis", "explain", str(logs)]) == 0
    assert capsys.readouterr().out == "no row of the rules names a line\n"


@pytest.mark.parametrize(
    "words, told",
    [
        (["nowhere"], "DIR=nowhere: does not exist"),
        (["--rule", "ring"], "--rule=ring: no such class of failures"),
        ([".", "--rules", "no.yaml"], "--rules=no.yaml: No such file or directory. Fix: correct the path"),
    ],
)
def test_mistakes_are_reported_without_a_traceback(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["aegis", "explain", *words]) == 2
    assert told in capsys.readouterr().err


def test_each_attempt_of_a_supervised_run_has_its_own_cause(tmp_path, capsys):
    write(
        tmp_path,
        {
            "attempt_1/rank0.log": "2026-11-22 10:00:01 " + RESET,
            "attempt_1/rank1.log": "2026-11-22 10:00:00 HIP error: an illegal memory access was encountered\n",
            "attempt_2/rank0.log": "2026-11-22 10:20:09 " + RESET,
            "attempt_2/rank1.log": "2026-11-22 10:20:09 " + RESET,
            "n4/dmesg.log": "2026-11-22T10:20:08,000000+00:00 amdgpu 0000:0a:00.0: amdgpu: device lost from bus!\n",
            "attempt_3/rank0.log": "2026-11-22 10:40:00 iteration 9/ 10 | done\n",
            "journal.jsonl": '{"kind": "diagnosis", "cause": "device lost from bus"}\n',
        },
    )
    found = [(each.number, each.result.cause, each.result.node, each.result.rank) for each in explain(tmp_path, RULES)]
    assert found == [(1, "hip_illegal", None, 1), (2, "gpu_lost", "n4", None), (3, "unknown", None, None)]
    assert cli.main(["aegis", "explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "attempt 2: gpu_lost on n4" in text and "attempt 3: no row of the rules names a line" in text


@pytest.mark.parametrize(
    "line, seconds",
    [
        ("2026-11-22T11:00:00,120000+01:00 amdgpu", 1795341600.12),
        ("2026-11-22T04:30:00-0530 x", 1795341600.0),
        ("[2026-11-22 10:00:00] iteration", 1795341600.0),
        ("2026-11-22 10:00:00.250 [INFO]", 1795341600.25),
        ("  time      : 2026-11-22_10:00:00", 1795341600.0),
        ("[Sun Nov 22 10:00:00 2026] amdgpu", 1795341600.0),
        ("[rank3]:[E1122 10:00:00.500000000 ProcessGroupNCCL.cpp:632]", 1795341600.5),
        ("[rank3]:[E808 04:21:41.160918398 ProcessGroupNCCL.cpp:655]", 1786162901.160918398),
        ("Nov 22 10:00:00 n3 kernel: amdgpu", 1795341600.0),
        ("[ 8390.785329] amdgpu", 8390.785329),
        ("<6>[   12.000001] amdgpu", 12.000001),
        ("2026-13-45 99:00:00 x", None),
    ],
)
def test_times_of_many_kinds_are_one_clock(line, seconds):
    stamp = STAMP.search(line)
    assert _seconds(stamp, 2026) == (None if seconds is None else pytest.approx(seconds, abs=1e-6))


def test_seconds_since_the_machine_was_started_end_with_the_file(tmp_path):
    lines = "[ 1000.000000] amdgpu: device lost from bus!\n[ 1060.000000] something else\n"
    write(tmp_path, {"n2/dmesg.txt": lines})
    (log,) = read_logs(tmp_path, RULES)
    assert [each.time for each in log.evidence] == [COLLECTED - 60] and log.node == "n2" and log.source == "kernel"


@pytest.mark.parametrize(
    "name, text, source, node, rank",
    [
        ("n3/dmesg.log", "x", "kernel", "n3", None),
        ("dmesg-n3.log", "x", "kernel", "n3", None),
        ("node-17_kern.log", "x", "kernel", "node-17", None),
        ("all/frontier07210.txt", "[ 8390.785329] amdgpu: device lost from bus!", "kernel", "frontier07210", None),
        ("rank12.log", "x", "rank", "", 12),
        ("logs/n2/rank_12.err", "x", "rank", "n2", 12),
        ("n2_rank12.log", "x", "rank", "n2", 12),
        ("launch_x1/none_ab12/attempt_0/3/stderr.log", "x", "rank", "", 3),
        ("slurm-1234.out", "x", "slurm", "", None),
        ("job.txt", "srun: error: n2: task 3: Killed", "slurm", "", None),
        ("torchrun.log", "x", "agent", "", None),
        ("console.log", "x", "rank", "", None),
    ],
)
def test_files_are_known_by_name_and_content(tmp_path, name, text, source, node, rank):
    (log,) = read_logs(write(tmp_path, {name: text + "\n"}), RULES)
    assert (log.source, log.node, log.rank) == (source, node, rank)


def test_the_host_of_a_common_kernel_log_is_in_its_lines(tmp_path):
    line = "Nov 22 10:00:0{} n{} kernel: amdgpu: {}\n"
    text = line.format(1, 3, "GPU reset begin!") + line.format(2, 5, "device lost from bus!")
    found = one(write(tmp_path, {"messages": text}))
    assert (found.cause, found.node, found.cascades) == ("gpu_lost", "n5", {"gpu_reset": 1})


def test_copied_files_with_new_dates_do_not_hide_the_cause(tmp_path):
    """After `scp` every file is as old as the copy: only the times in the lines count then."""
    write(
        tmp_path,
        {"n1/dmesg.log": "2026-11-22T10:00:00,000000+00:00 amdgpu: device lost from bus!\n", "rank0.log": RESET},
    )
    for path in tmp_path.rglob("*.log"):
        os.utime(path, (COLLECTED + 90 * 86400,) * 2)
    found = one(tmp_path)
    assert (found.cause, found.cascades) == ("gpu_lost", {"conn_reset": 1})
    assert [each.time for log in read_logs(tmp_path, RULES) for each in log.evidence] == [1795341600, 1795341600]


def test_any_bytes_in_a_folder_are_read(tmp_path):
    noise = random.Random(7).randbytes(300_000)
    files = {
        "rank0.log": noise + b"\nRuntimeError: No HIP GPUs are available\n" + noise,
        "rank1.log": b"x" * 3_000_000 + b" No HIP GPUs are available",
        "rank2.log": b"\x1b[31m" * 100_000 + b"\n",
        "empty.log": b"",
        "n1/dmesg.log": b"[99999999999999999999.1] \xff\n[ 1.5] x\n2026-99-99T00:00:00 x\n" + noise,
        "model.pt": noise,
        "very/deep/folder/rank7.log": b"\0" * 100_000,
    }
    began = time.process_time()
    found = one(write(tmp_path, files))
    assert (found.cause, found.rank) == ("hip_no_device", 0)
    assert time.process_time() - began < allowed(2), "seconds for 4 MB of noise"
    (long,) = [log for log in read_logs(tmp_path, RULES) if log.name == "rank1.log"]
    assert (long.lines, long.evidence) == (1, []), "what follows the first 2,000 characters of a line is no line"
    (tmp_path / "unreadable.log").symlink_to(tmp_path / "gone.log")
    assert one(tmp_path).cause == "hip_no_device"


REPLAY = r"""
import re, sys, time
from pathlib import Path
from zaya_plugin.aegis.explain import read_logs
from zaya_plugin.aegis.diagnose.diagnosis import diagnose
from zaya_plugin.aegis.diagnose.rules import Rules
began = time.process_time()
rules = Rules.load()
logs = read_logs(Path(sys.argv[1]), rules)
found = diagnose([each for log in logs for each in log.evidence], rules)
print(sum(log.lines for log in logs), time.process_time() - began)
print(int(re.search(r'VmHWM:\s+(\d+)', open('/proc/self/status').read())[1]) // 1024, found.cause, found.node, found.rank)
"""


@pytest.mark.parametrize("ranks, lines", [(64, 300), pytest.param(1024, 1200, marks=pytest.mark.slow)])
def test_logs_of_1024_ranks_are_replayed_within_one_core_and_300_MB(tmp_path, ranks, lines, capsys):
    """Target: 20,000 lines a second. Every rank ends with the lines of a failed collective."""
    text = realistic(lines)
    end = [
        "[rank{0}]:[E1122 10:10:01.69 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=57, OpType=ALLREDUCE, NumelIn=1, NumelOut=4, Timeout(ms)=600000) ran for 600038 milliseconds",
        "[rank{0}]:[E1122 10:10:01.69 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank {0}]  failure detected "
        "by watchdog at work sequence id: 57 PG status: last enqueued work: {1}, last completed work: 56",
        "RuntimeError: Connection reset by peer",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
    ]
    for rank in range(ranks):
        own = "\n".join([*text, *end]).replace("{0}", str(rank)).replace("{1}", "57" if rank == 37 else "58")
        write(tmp_path, {f"n{rank // 8}/rank{rank}.log": own + "\n"})
    done = subprocess.run([sys.executable, "-c", REPLAY, str(tmp_path)], capture_output=True, text=True, check=True)
    number, seconds, memory, cause, node, rank = done.stdout.split()
    assert int(number) == ranks * (lines + len(end)) and (cause, node, rank) == ("hang", "n4", "37")
    rate = int(number) / float(seconds)
    with capsys.disabled():
        print(f"\n{number} lines of {ranks} ranks: {rate:,.0f} lines a second of one core, {memory} MB")
    assert 1 / rate < allowed(1 / 20_000) and int(memory) < 300


def test_only_classes_that_rules_name_are_explained(tmp_path):
    for case in cases():
        for log in read_logs(case.write(tmp_path / case.name), RULES):
            assert all(each.rule in RULES or each.source == "progress" for each in log.evidence)
            assert not any(re.search(r"[\x00-\x1f]", each.text) for each in log.evidence)


def test_the_journal_of_a_supervised_run_knows_more_than_its_logs(tmp_path, capsys):
    folder = tmp_path / "aegis"
    for number in (1, 2):
        (folder / f"attempt_{number}").mkdir(parents=True)
        (folder / f"attempt_{number}" / "rank9.log").write_text("step 1\n")
    rows = [*ONE_CRASH, *failure(290, 289, "node_lost", "exchange", 110, 288, generation=3)]
    (folder / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "diagn')
    first, second, third = explain(tmp_path, RULES)
    assert (first.result.cause, first.result.node, first.result.rank) == ("sigkill", "n2", 9)
    assert (first.action, first.reason) == ("restart", "sigkill: restart") and second.result.evidence == []
    assert (third.number, third.result.cause, third.action) == (3, "node_lost", "exchange")
    assert cli.main(["aegis", "explain", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "attempt 1: sigkill on n2 rank 9 (sure, high)" in out and "the supervisor: restart: sigkill: restart" in out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "journal.jsonl").write_text((folder / "journal.jsonl").read_text())
    assert [one.number for one in explain(tmp_path, RULES)] == [1, 2]  # two runs: the logs alone
