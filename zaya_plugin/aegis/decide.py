# SPDX-License-Identifier: Apache-2.0
"""The decision about a failure: one function of its diagnosis and of the run's history.

The run stops only when a restart cannot help: for a user's mistake, for the same cause three times without a new step,
and after too many failures without one. To stop wrongly costs all nodes until a person looks; to restart once too often
costs minutes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from zaya_plugin.aegis.cluster import Cluster
from zaya_plugin.aegis.diagnose import Diagnosis
from zaya_plugin.aegis.rules import Rule

SAME = 3  # failures of the same cause without a new step, upon which the run stops
LINK_SECONDS = 300.0  # two failures of a node's links within this time: exchange it
REPEAT_SECONDS = 86400.0  # a second failure of this kind on one node within a day: exchange it
DELAYS = (0.0, 0.0, 5.0, 10.0, 20.0, 40.0, 60.0)  # seconds before a start, by failures without a new step
LINKS = ("ionic_link", "bnxt_link", "mlx5_link", "ib_port_event", "link_down", "link_flap")
# What a checkpoint may cause, when the same happens at the same step again.
OF_STATE = ("traceback", "non_finite", "segfault", "abort", "memfault_user", "hip_illegal", "hsa_exception")
GONE = ("node_lost", "agent_lost", "unkillable")  # the node cannot be used in the next attempt
ENDED_BY_REQUEST = "ended_early"


@dataclass(frozen=True)
class Decision:
    """A decision.

    action: ride, restart, exchange, shrink, rollback, requeue, stop, watch or done.
    nodes_out: nodes that the run does not use any more. delay: seconds to wait first. to_step: the checkpoint to go back
    to. skip: the first and the last step whose data are left out. reason: one sentence.
    """

    action: str
    reason: str
    nodes_out: tuple[str, ...] = ()
    delay: float = 0.0
    to_step: int | None = None
    skip: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a line of the journal."""
        return asdict(self)


def decide(diagnosis: Diagnosis, cluster: Cluster, rule: Rule | None, alive: bool = False) -> Decision:
    """Return what is done about a diagnosis. rule: of its cause, None: it is unknown. alive: whether all ranks run."""
    action, severity = (rule.action, rule.severity) if rule else ("restart", "high")
    if diagnosis.cause == ENDED_BY_REQUEST and cluster.asked:
        return Decision("done", "The run was asked to end, and has saved")
    if alive and (rule is None or rule.role == "watch" or action == "watch"):
        return Decision("watch", f"{diagnosis.cause} ends no run")
    if alive and action == "ride":
        if diagnosis.cause in LINKS and cluster.spares and _flaps(diagnosis, cluster):
            return _exchange(
                diagnosis, cluster, f"a link of {diagnosis.node} was down twice within {LINK_SECONDS:.0f} s"
            )
        return Decision("ride", f"{diagnosis.cause} may end by itself within {rule.ride:.0f} s", delay=rule.ride)
    same = 1 + sum(failure.fingerprint == diagnosis.fingerprint for failure in cluster.barren)
    if stop := _stop(diagnosis, cluster, action, severity, same):
        return stop
    if diagnosis.cause == "agent_lost" and diagnosis.evidence and diagnosis.evidence[0].values.get("back"):
        return _restart(cluster, f"the agent of {diagnosis.node} was killed and is back")
    if diagnosis.cause in GONE:
        return _exchange(diagnosis, cluster, f"{diagnosis.cause} on {diagnosis.node}")
    if diagnosis.cause == "user_error":  # of a node that is new to a command that has trained elsewhere
        return _exchange(
            diagnosis, cluster, f"the command has trained before, and fails on the new node {diagnosis.node}"
        )
    if diagnosis.cause == "rerun_other_gpu" and not cluster.spares:
        where = "nodes change places" if len(cluster.nodes) > 1 else "ranks change devices"
        return Decision("restart", f"Megatron asks for another GPU: {where}", delay=_delay(cluster))
    if diagnosis.cause == "rerun_persistent":
        return _exchange_suspect(diagnosis, cluster)
    if action == "exchange":
        if diagnosis.confidence != "weak" or _repeats(diagnosis, cluster):
            return _exchange(diagnosis, cluster, f"{diagnosis.cause} on {diagnosis.node} ({diagnosis.confidence})")
        return _restart(cluster, f"{diagnosis.cause} on {diagnosis.node} is weak evidence, and the first")
    if action == "rollback":
        return _roll_back(diagnosis, cluster, f"{diagnosis.cause}: what was saved last may hold the damage")
    if diagnosis.cause in LINKS and (cluster.spares or _flaps(diagnosis, cluster)):
        return _exchange(diagnosis, cluster, f"a link of {diagnosis.node} was down for too long")
    if diagnosis.cause == "hang" and _repeats(diagnosis, cluster):
        return _exchange_group(diagnosis, cluster)
    if rule is not None and rule.repeats == "node" and _repeats(diagnosis, cluster):
        return _exchange(diagnosis, cluster, f"{diagnosis.cause} on {diagnosis.node} for the second time within a day")
    if same > 1 and diagnosis.cause in OF_STATE and _same_step(cluster):
        return _roll_back(diagnosis, cluster, f"{diagnosis.cause} at step {cluster.step} for the second time")
    return _restart(cluster, f"{diagnosis.cause}" + (f" on {diagnosis.node}" if diagnosis.node else ""))


def _stop(diagnosis: Diagnosis, cluster: Cluster, action: str, severity: str, same: int) -> Decision | None:
    if action == "stop" and severity == "user" and diagnosis.cause == "user_error" and diagnosis.node and cluster.used:
        if cluster.first_step is None and diagnosis.node not in cluster.used:
            return None
    if action == "stop":
        return Decision("stop", f"{diagnosis.cause}: a restart does not help")
    if severity == "user" and cluster.step is None:
        return Decision("stop", f"{diagnosis.cause} before the first step of the attempt: the settings are too large")
    if severity == "user" and same > 1:
        return Decision("stop", f"{diagnosis.cause} for the second time without a new step")
    if diagnosis.cause == "rerun_application" and cluster.rollbacks:
        return Decision("stop", "the result was wrong again after a roll back: software or data, not a GPU")
    if same >= SAME and severity != "policy":
        new = f"a step after {cluster.best}" if cluster.best else "any step"
        return Decision("stop", f"{diagnosis.fingerprint}: {same} times without {new}")
    if len(cluster.barren) + 1 > cluster.restarts:
        return Decision(
            "stop", f"{len(cluster.barren) + 1} failures without a new step (--restarts {cluster.restarts})"
        )
    return None


def _restart(cluster: Cluster, why: str) -> Decision:
    return Decision("restart", f"{why}: restart in place", delay=_delay(cluster))


def _delay(cluster: Cluster) -> float:
    return DELAYS[min(len(cluster.barren), len(DELAYS) - 1)]


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
    return _restart(cluster, f"{why}: no other node is there")


def _exchange_suspect(diagnosis: Diagnosis, cluster: Cluster) -> Decision:
    """Megatron's verdict comes from the rank that repeated the step well: the node that asked for it is broken."""
    asked = [failure.node for failure in cluster.failures if failure.cause == "rerun_other_gpu" and failure.node]
    if not asked:
        return _restart(cluster, f"{diagnosis.cause}, and it is not known on which node the step was wrong")
    why = f"{diagnosis.cause}: another GPU than that of {asked[-1]} computes the right result"
    if asked[-1] in cluster.nodes:
        return _exchange(diagnosis, cluster, why, (asked[-1],))
    return Decision("restart", f"{why}; it is out, and the others train on", (asked[-1],), _delay(cluster))


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


def _roll_back(diagnosis: Diagnosis, cluster: Cluster, why: str) -> Decision:
    values = diagnosis.evidence[0].values if diagnosis.evidence else {}
    begin = values.get("first_step", values.get("step"))
    bad = begin if isinstance(begin, int) else None
    newest = cluster.before(None)
    # The evidence says from which step on a checkpoint may be spoiled; it was wrong if the same comes again.
    repeated = any(failure.fingerprint == diagnosis.fingerprint for failure in cluster.barren)
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


def _flaps(diagnosis: Diagnosis, cluster: Cluster) -> bool:
    now = diagnosis.first if diagnosis.first is not None else math.inf
    before = [*cluster.links, *((failure.time, failure.node) for failure in cluster.failures if failure.cause in LINKS)]
    return any(node == diagnosis.node and 0 < now - time <= LINK_SECONDS for time, node in before)


def _same_step(cluster: Cluster) -> bool:
    last = cluster.failures[-1] if cluster.failures else None
    return (
        last is not None
        and None not in (last.step, cluster.step)
        and abs(last.step - cluster.step) <= 1
        and (cluster.resume_step is None or cluster.step >= cluster.resume_step)
    )
