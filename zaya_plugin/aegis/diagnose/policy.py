# SPDX-License-Identifier: Apache-2.0
"""The decision about a failure: one function of its diagnosis, of the rules, and of the run's history in the journal.

The run stops only when a restart cannot help: for a user's mistake, for the same cause three times without a new step,
and after too many failures without one. To stop wrongly costs all nodes until a person reads it; to restart once too
often costs minutes.
"""

from __future__ import annotations

import math

from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.diagnose.rules import Rule, Rules
from zaya_plugin.aegis.protocol import Decision, Diagnosis

SAME_FAILURES = 3  # of one cause without a new step, upon which the run stops
LINK_SECONDS = 300.0  # two failures of a node's links within this time: exchange it
REPEAT_SECONDS = 86400.0  # a second failure of this kind on one node within a day: exchange it
DELAYS = (0.0, 0.0, 5.0, 10.0, 20.0, 40.0, 60.0)  # seconds before a start, by failures without a new step
ENDED_BY_REQUEST = "ended_early"
UNKNOWN_RULE = Rule("unknown", (), "watch", "high", "weak", "restart", "")


def decide(diagnosis: Diagnosis, cluster: Cluster, rules: Rules, alive: bool = False) -> Decision:
    """Return what is done about a diagnosis. alive: whether all ranks run."""
    cause, node = diagnosis.cause, diagnosis.node
    rule = rules.get(cause) or UNKNOWN_RULE
    if cause == ENDED_BY_REQUEST and cluster.asked:
        return Decision("done", "The run was asked to end, and has saved")
    if alive and "watch" in (rule.role, rule.action):
        return Decision("watch", f"{cause} ends no run")
    flaps = rule.affects == "link" and _flaps(diagnosis, cluster, rules)
    if alive and rule.action == "ride":
        if flaps and cluster.spares:
            return _exchange(diagnosis, cluster, f"a link of {node} was down twice within {LINK_SECONDS:.0f} s")
        return Decision("ride", f"{cause} may end by itself within {rule.ride:.0f} s", delay=rule.ride)
    same = 1 + sum(failure.fingerprint == diagnosis.fingerprint for failure in cluster.failures_without_progress)
    if stop := _stop(diagnosis, cluster, rule, same):
        return stop
    if agent_is_back(diagnosis):
        return _restart(cluster, f"the agent of {node} was killed and is back")
    if rule.affects == "node":
        return _exchange(diagnosis, cluster, f"{cause} on {node}")
    if cause == "user_error":  # of a node that is new to a command that has trained elsewhere
        return _exchange(diagnosis, cluster, f"the command has trained before, and fails on the new node {node}")
    if cause == "rerun_other_gpu" and not cluster.spares:
        places = "nodes change places" if len(cluster.nodes) > 1 else "ranks change devices"
        return Decision("restart", f"Megatron asks for another GPU: {places}", delay=_delay(cluster))
    if cause == "rerun_persistent":
        return _exchange_suspect(diagnosis, cluster)
    if rule.action == "exchange":
        if diagnosis.confidence != "weak" or _repeats(diagnosis, cluster):
            return _exchange(diagnosis, cluster, f"{cause} on {node} ({diagnosis.confidence})")
        return _restart(cluster, f"{cause} on {node} is weak evidence, and the first")
    if rule.action == "rollback":
        return _roll_back(diagnosis, cluster, f"{cause}: the last checkpoint may hold the damage", repeated=same > 1)
    if flaps or rule.affects == "link" and cluster.spares:
        return _exchange(diagnosis, cluster, f"a link of {node} was down for too long")
    if cause == "hang" and _repeats(diagnosis, cluster):
        return _exchange_group(diagnosis, cluster)
    if rule.repeats == "node" and _repeats(diagnosis, cluster):
        return _exchange(diagnosis, cluster, f"{cause} on {node} for the second time within a day")
    if same > 1 and rule.affects == "state" and _same_step(cluster):
        return _roll_back(diagnosis, cluster, f"{cause} at step {cluster.step} for the second time", repeated=True)
    return _restart(cluster, f"{cause}" + (f" on {node}" if node else ""))


def agent_is_back(diagnosis: Diagnosis) -> bool:
    """Whether a diagnosis is of an agent that was killed and has started again, on a node that can be used."""
    evidence = diagnosis.evidence
    return diagnosis.cause == "agent_lost" and bool(evidence) and bool(evidence[0].values.get("back"))


def _stop(diagnosis: Diagnosis, cluster: Cluster, rule: Rule, same: int) -> Decision | None:
    cause, failures = diagnosis.cause, len(cluster.failures_without_progress) + 1
    is_new_node = bool(diagnosis.node and cluster.used) and diagnosis.node not in cluster.used
    if cause == "user_error" and rule.action == "stop" and is_new_node and cluster.first_step is None:
        return None
    new_step = f"a step after {cluster.best}" if cluster.best else "any step"
    reasons = (
        (rule.action == "stop", f"{cause}: a restart does not help"),
        (
            rule.severity == "user" and cluster.step is None,
            f"{cause} before the first step of the attempt: the settings are too large",
        ),
        (rule.severity == "user" and same > 1, f"{cause} for the second time without a new step"),
        (
            cause == "rerun_application" and cluster.rollbacks,
            "the result was wrong again after a roll back: software or data, not a GPU",
        ),
        (
            same >= SAME_FAILURES and rule.severity != "policy",
            f"{diagnosis.fingerprint}: {same} times without {new_step}",
        ),
        (failures > cluster.restarts, f"{failures} failures without a new step (--restarts {cluster.restarts})"),
    )
    return next((Decision("stop", reason) for applies, reason in reasons if applies), None)


def _restart(cluster: Cluster, why: str) -> Decision:
    return Decision("restart", f"{why}: restart in place", delay=_delay(cluster))


def _delay(cluster: Cluster) -> float:
    return DELAYS[min(len(cluster.failures_without_progress), len(DELAYS) - 1)]


def _exchange(diagnosis: Diagnosis, cluster: Cluster, why: str, nodes: tuple[str, ...] = ()) -> Decision:
    """Leave out `nodes` (the diagnosis's): for spares, with fewer nodes, in another job, or else not at all."""
    nodes = nodes or ((diagnosis.node,) if diagnosis.node in cluster.nodes else ())
    if not nodes:
        return _restart(cluster, f"{why}, on no node of the attempt")
    left = len(cluster.nodes) - len(nodes) + len(cluster.spares)
    size = next((size for size in cluster.sizes if size <= left), 0)
    if size >= len(cluster.nodes):
        return Decision("exchange", f"{why}: exchanged for a spare", nodes, _delay(cluster))
    if size:
        return Decision("shrink", f"{why}: no spare is left, {size} nodes train on", nodes, _delay(cluster))
    if cluster.requeue:
        return Decision("requeue", f"{why}: {left} nodes are left, too few; SLURM starts the job again", nodes)
    return _restart(cluster, f"{why}: no other node is available")


def _exchange_suspect(diagnosis: Diagnosis, cluster: Cluster) -> Decision:
    """Megatron's verdict comes from the rank that repeated the step well: the node that asked for it is broken."""
    suspects = [failure.node for failure in cluster.failures if failure.cause == "rerun_other_gpu" and failure.node]
    if not suspects:
        return _restart(cluster, f"{diagnosis.cause}, and it is not known on which node the step was wrong")
    why = f"{diagnosis.cause}: another GPU than that of {suspects[-1]} computes the right result"
    if suspects[-1] in cluster.nodes:
        return _exchange(diagnosis, cluster, why, (suspects[-1],))
    return Decision("restart", f"{why}; it is out, and the others train on", (suspects[-1],), _delay(cluster))


def _exchange_group(diagnosis: Diagnosis, cluster: Cluster) -> Decision:
    """A hang that came again: the node of the rank that did not arrive, with all that share its copy of the model."""
    if diagnosis.node not in cluster.nodes:
        return _restart(cluster, "the ranks hang again, and none of them can be named")
    first = cluster.nodes.index(diagnosis.node) // cluster.group * cluster.group
    group = cluster.nodes[first : first + cluster.group]
    if diagnosis.confidence != "sure" and 1 < len(group) <= len(cluster.spares):
        return _exchange(
            diagnosis, cluster, f"a hang of rank {diagnosis.rank} again, not clear which node of its group", group
        )
    return _exchange(diagnosis, cluster, f"rank {diagnosis.rank} on {diagnosis.node} hangs again")


def _roll_back(diagnosis: Diagnosis, cluster: Cluster, why: str, repeated: bool) -> Decision:
    """Go back to a checkpoint before the damage. repeated: whether the same failure came before without a new step."""
    values = diagnosis.evidence[0].values if diagnosis.evidence else {}
    begin = values.get("first_step", values.get("step"))
    bad = begin if isinstance(begin, int) else None
    newest = cluster.before(None)
    # The evidence says from which step on a checkpoint may be spoiled; it was wrong if the same failure comes again.
    to_step = cluster.before(newest if bad is None or repeated and newest is not None and newest < bad else bad)
    skip = values.get("skip")
    skip = (int(skip[0]), int(skip[1])) if isinstance(skip, (list, tuple)) and len(skip) == 2 else None
    if to_step is None:
        return Decision("restart", f"{why}; there is no earlier checkpoint", delay=_delay(cluster), skip=skip)
    return Decision("rollback", f"{why}: back to step {to_step}", (), _delay(cluster), to_step, skip)


def _repeats(diagnosis: Diagnosis, cluster: Cluster) -> bool:
    """Whether the same has happened before, on the same node where one is named."""
    now = diagnosis.first if diagnosis.first is not None else math.inf
    return any(
        failure.cause == diagnosis.cause and failure.node == diagnosis.node and now - failure.time < REPEAT_SECONDS
        for failure in cluster.failures
    )


def _flaps(diagnosis: Diagnosis, cluster: Cluster, rules: Rules) -> bool:
    """Whether a link of the node was down before, within LINK_SECONDS."""
    now = diagnosis.first if diagnosis.first is not None else math.inf
    before = cluster.rides + [
        (failure.time, failure.node)
        for failure in cluster.failures
        if (rules.get(failure.cause) or UNKNOWN_RULE).affects == "link"
    ]
    return any(node == diagnosis.node and 0 < now - time <= LINK_SECONDS for time, node in before)


def _same_step(cluster: Cluster) -> bool:
    last = cluster.failures[-1] if cluster.failures else None
    return (
        last is not None
        and None not in (last.step, cluster.step)
        and abs(last.step - cluster.step) <= 1
        and (cluster.resume_step is None or cluster.step >= cluster.resume_step)
    )
