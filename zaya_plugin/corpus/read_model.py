# SPDX-License-Identifier: Apache-2.0
"""How many random reads a run asks of its storage. Plain arithmetic.

ZAYA1-8B technical report (arXiv 2605.05365), appendix B: IOPS = sigma G s b / (P t), with G sequences of s tokens of b bytes
each t seconds and pages of P bytes; the amplification sigma is about 1 + m P / (s b), because each of the m stretches that a
sequence is read from touches one page more than its bytes fill. sigma is 1 to 2 for well-packed data, 2 to 8 for fragments.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedRun:
    """sequence_length s in tokens, global_batch_size G in sequences, step_seconds t, iops_budget in reads/s of the storage,
    page_bytes P. The defaults are ZAYA1's stage 1 (appendix B)."""

    sequence_length: int = 4096
    global_batch_size: int = 4096
    step_seconds: float = 2.5
    iops_budget: float = 70_000.0
    page_bytes: int = 4096


def stretches(sequence_length: int, tokens: int, documents: int, packed: bool = False) -> float:
    """m: stretches of a file that a sequence comes from. Documents are drawn in random order, so each begins a new one."""
    return 1.0 if packed else 1.0 + sequence_length * documents / tokens


def amplification(run: PlannedRun, token_bytes: int, m: float) -> float:
    """sigma."""
    return 1 + m * run.page_bytes / (run.sequence_length * token_bytes)


def reads_per_second(run: PlannedRun, token_bytes: int, sigma: float) -> float:
    """IOPS of the whole job when no page is in a cache."""
    pages = run.global_batch_size * run.sequence_length * token_bytes / run.page_bytes
    return sigma * pages / run.step_seconds


def least_step_seconds(run: PlannedRun, token_bytes: int, sigma: float) -> float:
    """The step time at which reads use up the budget."""
    return reads_per_second(run, token_bytes, sigma) * run.step_seconds / run.iops_budget


def report(run: PlannedRun, rows: list[tuple[str, int, int, int, bool]]) -> str:
    """A table for a terminal.

    Args:
        rows: name, tokens, documents, bytes of a token, and whether the documents are packed bins.
    """
    head = (
        f"reads of a run with {run.global_batch_size:,} sequences of {run.sequence_length:,} tokens each {run.step_seconds:g} s, "
        f"pages of {run.page_bytes:,} bytes, a budget of {run.iops_budget:,.0f} reads/s:"
    )
    lines = [head, f"  {'':28} {'m':>8} {'sigma':>7} {'reads/s':>12} {'of budget':>10} {'least step':>11}"]
    for name, tokens, documents, token_bytes, packed in rows:
        m = stretches(run.sequence_length, tokens, documents, packed)
        sigma = amplification(run, token_bytes, m)
        iops = reads_per_second(run, token_bytes, sigma)
        least = least_step_seconds(run, token_bytes, sigma)
        lines.append(f"  {name:28} {m:8.2f} {sigma:7.3f} {iops:12,.0f} {iops / run.iops_budget:10.1%} {least:9.3f} s")
    return "\n".join(lines)
