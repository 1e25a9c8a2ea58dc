# SPDX-License-Identifier: Apache-2.0
"""The first cause is named from evidence of many ranks, kernels and launchers; labelled logs are classified."""

import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aegis.labelled_logs import cases
from tests.cpu_speed import allowed
from zaya_plugin.aegis.diagnose.diagnosis import UNKNOWN, diagnose
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.diagnose.rules import Rules
from zaya_plugin.aegis.explain import explain, read_logs
from zaya_plugin.aegis.protocol import Diagnosis, row_of, to_json

RULES = Rules.load()
CASES = cases()
NONE = "none"


def seen(time: float, rule: str | None, node: str = "n1", rank: int | None = None, source: str = "rank", **values):
    return Evidence(time, node, source, f"{rule} at {time}", rank, rule, values)


def test_the_corpus_is_large_enough_and_covers_the_classes():
    assert len(CASES) >= 70 and len({case.cause for case in CASES}) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(len(case.files) > 1 for case in CASES) >= 25, "failures of several ranks, with cascades"


def test_labelled_logs_are_classified(tmp_path, capsys):
    """Prints the confusion matrix: a row a label, where it is not on the diagonal, and the sums."""
    table: Counter[tuple[str, str]] = Counter()
    places = []
    for case in CASES:
        (attempt,) = explain(case.write(tmp_path / case.name), RULES)
        found = attempt.result
        said = found.cause if found.evidence else NONE
        table[case.cause, said] += 1
        if said == case.cause and said != NONE:
            places.append((case.name, (case.node, case.rank), (found.node, found.rank)))
    right = sum(number for (label, said), number in table.items() if label == said)
    with capsys.disabled():
        print(f"\nconfusion matrix over {len(CASES)} labelled failures: {right} on the diagonal", end="")
        print("".join(f"\n  {label} was called {said}: {n}" for (label, said), n in table.items() if label != said))
    assert right == len(CASES)
    assert [place for place in places if place[1] != place[2]] == [], "node and rank"


def test_the_order_in_which_evidence_arrives_does_not_matter(tmp_path):
    for case in CASES[:12]:
        evidence = [each for log in read_logs(case.write(tmp_path / case.name), RULES) for each in log.evidence]
        random.Random(1).shuffle(evidence)
        assert diagnose(evidence, RULES).cause == case.cause


@pytest.mark.parametrize("rule", [rule.name for rule in RULES if rule.role == "cascade"])
def test_a_cascade_is_never_the_cause(rule):
    alone = diagnose([seen(1, rule, rank=3), seen(2, rule, rank=4)], RULES)
    assert alone.cause in (UNKNOWN, "hang") and alone.cascades.get(rule, 0) + len(alone.evidence) >= 2
    found = diagnose([seen(1, rule, rank=3), seen(50, "sigkill", "n2", 9, "exit", exit_code=-9)], RULES)
    assert (found.cause, found.node, found.rank, found.cascades) == ("sigkill", "n2", 9, {rule: 1})


def test_reset_lines_after_a_ras_error_are_no_second_fault():
    lines = [
        seen(10, "ras_ue", "n3", source="kernel"),
        *(seen(t, "gpu_reset", "n3", source="kernel") for t in (11, 12, 19)),
    ]
    found = diagnose([*lines, seen(11.5, "aca", "n3", source="kernel")], RULES)
    assert (found.cause, found.node, found.first, found.cascades) == ("ras_ue", "n3", 10, {})
    assert [each.rule for each in found.evidence] == ["ras_ue", "gpu_reset", "aca", "gpu_reset", "gpu_reset"]
    assert diagnose(lines[1:], RULES).cause == "gpu_reset", "alone it is all that is known"


def test_confirmations_of_another_node_or_hour_do_not_join():
    found = diagnose(
        [
            seen(1000, "ras_ue", "n3", source="kernel"),
            seen(1001, "gpu_reset", "n4", source="kernel"),
            seen(1500, "gpu_reset", "n3", source="kernel"),
        ],
        RULES,
    )
    assert len(found.evidence) == 1 and found.cascades == {"gpu_reset": 2}


def test_of_equally_sure_causes_the_earliest_counts():
    ranks = [seen(100.6 - rank / 10, "hsa_exception", rank=rank) for rank in range(6)]
    found = diagnose(ranks, RULES)
    assert (found.rank, found.first, found.cascades) == (5, pytest.approx(100.1), {"hsa_exception": 5})


def test_a_sure_cause_counts_although_a_rank_reported_first():
    """A rank's line may be written before the kernel's: each machine and each buffer has its own delay."""
    found = diagnose([seen(100.0, "hsa_exception", rank=3), seen(100.4, "ras_ue", "n1", source="kernel")], RULES)
    assert (found.cause, found.confidence, found.cascades) == ("ras_ue", "sure", {"hsa_exception": 1})


def test_an_exit_code_joins_the_cause_of_its_rank_and_names_one_alone():
    traceback = seen(10, "traceback", rank=3, exception="ValueError", frame="opt/reader.py in next_batch")
    left = seen(9.5, None, rank=3, source="exit", exit_code=1)
    found = diagnose([left, traceback, seen(11, None, rank=4, source="exit", exit_code=-15)], RULES)
    assert (found.cause, found.rank, found.evidence, found.cascades) == (
        "traceback",
        3,
        [traceback, left],
        {"terminated": 1},
    )
    assert diagnose([left], RULES).cause == "rank_failed"
    assert diagnose([seen(1, None, rank=0, source="exit", exit_code=2)], RULES).severity == "user"
    assert diagnose([seen(1, None, rank=0, source="exit", exit_code=0)], RULES) == Diagnosis()


def test_the_process_of_an_out_of_memory_kill_is_a_rank():
    found = diagnose(
        [
            seen(10, "oom_kill", "n2", source="kernel", pid=24668, process="python3"),
            seen(10.1, None, "n2", 13, "exit", exit_code=-9, pid=24668),
            seen(10.2, "conn_reset", "n1", 3),
        ],
        RULES,
    )
    assert (found.cause, found.node, found.rank, found.cascades) == ("oom_kill", "n2", 13, {"conn_reset": 1})
    assert found.fingerprint == "oom_kill"


def watchdogs(numbers: dict[int, int], at: float = 700.0) -> list[Evidence]:
    found = []
    for rank, number in numbers.items():
        node = f"n{rank // 8 + 1}"
        found += [seen(at, "watchdog", node, rank), seen(at, "watchdog_last", node, rank, enqueued=number)]
    return found


def test_the_rank_with_the_lowest_last_enqueued_number_hangs():
    lines = watchdogs({rank: 1580 if rank == 11 else 1582 for rank in range(16)})
    found = diagnose(lines, RULES)
    assert (found.cause, found.node, found.rank) == ("hang", "n2", 11) and found.cascades["watchdog"] == 16
    told = [*lines, seen(50, "hang", "n1", 0, "progress")]
    assert diagnose(told, RULES).rank == 11, "whoever reports the hang is not the one that hangs"
    assert diagnose(watchdogs(dict.fromkeys(range(16), 1582)), RULES).rank is None
    missing = seen(60, "missing_rank", "n4", 25, "agent")
    found = diagnose([missing, *told], RULES)
    assert (found.node, found.rank, found.first) == ("n4", 25, 50)


def test_a_link_that_went_down_ten_minutes_before_the_time_outs_is_the_cause():
    down = seen(100, "ionic_link", "n2", source="kernel", device="enp97s0")
    found = diagnose([down, *watchdogs({0: 5, 1: 4}, at=701)], RULES)
    assert (found.cause, found.node, found.confidence) == ("ionic_link", "n2", "likely")
    long_ago = diagnose([down, *watchdogs({0: 5, 1: 4}, at=5000)], RULES)
    assert long_ago.cause == "ionic_link", "better than nothing"


def test_a_link_that_came_back_loses_to_any_other_cause():
    down = seen(100, "ionic_link", "n2", source="kernel", device="enp97s0")
    up = seen(104, "ionic_link", "n2", source="kernel", device="enp97s0", recovered=True)
    later = seen(300, "traceback", "n1", 3)
    assert diagnose([down, up, later], RULES).cause == "traceback"
    assert diagnose([down, later], RULES).cause == "ionic_link"
    assert diagnose([down, up], RULES).cause == "ionic_link"
    other = seen(104, "ionic_link", "n2", source="kernel", device="enp2s0", recovered=True)
    assert diagnose([down, other, later], RULES).cause == "ionic_link", "another port came back"
    elsewhere = seen(104, "ionic_link", "n1", source="kernel", recovered=True)
    assert diagnose([down, elsewhere, later], RULES).cause == "ionic_link", "a port of another node came back"
    late = seen(100 + RULES["ionic_link"].ride + 1, "ionic_link", "n2", source="kernel", recovered=True)
    assert diagnose([down, late, later], RULES).cause == "ionic_link", "longer than RCCL waits"


def test_what_may_end_by_itself_does_not_outweigh_an_earlier_exception():
    """When a node's process ends, its links may go down too."""
    lines = [seen(100, "traceback", "n1", 3), seen(105, "link_down", "n1", source="counter")]
    assert diagnose(lines, RULES).cause == "traceback"
    assert diagnose([*lines, seen(99, "link_down", "n2", source="counter")], RULES).node == "n2"


def test_what_the_run_survived_is_not_the_cause():
    alarm = seen(100, "oom_kill", "n1", source="kernel", pid=1)
    step = Evidence(400, "n1", "progress", "step 700", 0, values={"step": 700})
    failure = seen(500, "sigkill", "n1", 3, "exit", exit_code=-9)
    assert diagnose([alarm, step, failure], RULES).cause == "sigkill"
    assert diagnose([alarm, failure], RULES).cause == "oom_kill"


def test_a_class_with_a_count_needs_this_number_of_lines_of_one_node():
    def lockups(*where):
        return [seen(time, "soft_lockup", node, source="kernel") for time, node in where]

    last = seen(95, "traceback", rank=3)
    assert diagnose([*lockups((0, "n1"), (40, "n1"), (80, "n1")), last], RULES).cause == "soft_lockup"
    assert diagnose([*lockups((0, "n1"), (40, "n2"), (80, "n1")), last], RULES).cause == "traceback"
    assert diagnose([*lockups((0, "n1"), (400, "n1"), (800, "n1")), last], RULES).cause == "traceback"


def test_what_is_only_watched_is_named_when_nothing_else_is_there():
    lines = [seen(1, "throttle", source="kernel"), seen(2, "ras_ce", source="kernel")]
    found = diagnose(lines, RULES)
    assert (found.cause, found.role, found.cascades) == ("throttle", "watch", {})
    assert diagnose([*lines, seen(3, "conn_reset", rank=0)], RULES).cause == UNKNOWN
    assert diagnose([], RULES) == Diagnosis() and diagnose([seen(1, "no_such_row")], RULES) == Diagnosis()


@pytest.mark.parametrize(
    "first, second, same",
    [
        (("ras_ue", "n1", None), ("ras_ue", "n1", None), True),
        (("ras_ue", "n1", None), ("ras_ue", "n2", None), False),
        (("memfault_user", "n1", 3), ("memfault_user", "n2", 3), True),
        (("memfault_user", "n1", 3), ("memfault_user", "n1", 4), False),
        (("enospc", "n1", 3), ("enospc", "n2", 9), True),
        (("sigkill", "n1", 3), ("sigkill", "n2", 3), False),
    ],
)
def test_the_same_failure_again_has_the_same_fingerprint(first, second, same):
    prints = [diagnose([seen(1, rule, node, rank)], RULES).fingerprint for rule, node, rank in (first, second)]
    assert (prints[0] == prints[1]) is same


def test_the_fingerprint_of_an_exception_is_its_kind_and_place_and_no_number():
    def at(rank, line, frame="opt/reader.py in next_batch"):
        one = Evidence(1, "n1", "rank", f"ValueError: expected {line}", rank, "traceback")
        return diagnose(
            [Evidence(**vars(one) | {"values": {"exception": "ValueError", "frame": frame}})], RULES
        ).fingerprint

    assert at(3, 4095) == at(7, 4094) == "traceback ValueError at opt/reader.py in next_batch"
    assert at(3, 4095) != at(3, 4095, "opt/model.py in forward")


def test_a_diagnosis_survives_the_journal():
    found = diagnose([seen(10, "ras_ue", "n3", source="kernel"), seen(11, "gpu_reset", "n3", source="kernel")], RULES)
    row = json.loads(json.dumps(to_json(found)))
    assert row["kind"] == "diagnosis" and row_of(row) == found


def test_slurm_does_not_blame_the_node_that_writes():
    found = diagnose(
        [seen(1, "time_limit", "n1", source="slurm"), seen(2, "step_cancelled", "n1", source="slurm")], RULES
    )
    assert (found.cause, found.node, found.severity) == ("time_limit", None, "policy")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.builds(
            Evidence,
            st.floats(-1e6, 2e9),
            st.sampled_from(["n1", "n2", ""]),
            st.sampled_from(["kernel", "rank", "exit", "progress", "slurm"]),
            st.text(max_size=5),
            st.one_of(st.none(), st.integers(0, 9)),
            st.one_of(st.none(), st.sampled_from([rule.name for rule in RULES] + ["no_such_row"])),
            st.dictionaries(
                st.sampled_from(["exit_code", "pid", "enqueued", "step", "recovered", "count"]),
                st.integers(-20, 300),
                max_size=3,
            ),
        ),
        max_size=12,
    )
)
def test_no_evidence_breaks_the_diagnosis(evidence):
    found = diagnose(evidence, RULES)
    assert found.cause == UNKNOWN or RULES[found.cause].role != "cascade"
    assert found.evidence == [] or set(map(id, found.evidence)) <= set(map(id, evidence))
    json.dumps(to_json(found))


def test_evidence_of_a_large_run_is_diagnosed_quickly():
    lines = list(itertools.chain(*(watchdogs({rank: 9}) for rank in range(1024))))
    lines += [seen(690 + rank / 1024, "conn_reset", f"n{rank // 8 + 1}", rank) for rank in range(1024)]
    lines += [seen(650 + at, "bnxt_link", f"n{at}", source="kernel") for at in range(16)]
    began = time.process_time()
    found = diagnose([*lines, seen(640, "ras_ue", "n77", source="kernel")], RULES)
    assert (found.cause, found.node, found.cascades["conn_reset"]) == ("ras_ue", "n77", 1024)
    assert time.process_time() - began < allowed(1)


def test_the_corpus_holds_no_text_that_only_the_test_machine_has():
    for path in sorted((Path(__file__).parents[1] / "corpus").glob("*.txt")):
        assert path.read_text().isascii()


def test_a_message_like_that_of_a_mistake_is_none_if_its_rank_leaves_with_another_code():
    line = seen(10.0, "user_error", rank=0)
    assert diagnose([line, seen(11.0, None, rank=0, source="exit", exit_code=2)], RULES).cause == "user_error"
    asked = [line, seen(9.9, "loss_spike", "n2", 1), seen(11.0, None, rank=0, source="exit", exit_code=76)]
    assert diagnose(asked, RULES).cause == "loss_spike"
    assert diagnose([line, seen(11.0, None, rank=0, source="exit", exit_code=1)], RULES).cause == "rank_failed"


def test_a_fingerprint_holds_no_secret():
    line = Evidence(1.0, "n1", "rank", "RuntimeError: password=hunter22 refused", 0, "traceback")
    said = diagnose([line], RULES)
    assert said.cause == "traceback" and "hunter22" not in said.fingerprint
