# SPDX-License-Identifier: Apache-2.0
"""Compares the rules with those of amd-node-scraper and of NVIDIA's resiliency extension (NVRx), where they can be
imported: `python -m tests.aegis.compare_rules` prints the table that docs/fault-lab.md quotes.

Lines of failures are the samples of rules.yaml, near misses are its `near` lines, and causes are the first lines of the
labelled logs. All were chosen by this project: the table says what the others do not cover, and not how good ours are.
"""

import tempfile
from collections import Counter
from importlib import import_module, metadata
from pathlib import Path

from tests.aegis.labelled_logs import cases
from zaya_plugin.aegis.diagnose.diagnosis import UNKNOWN
from zaya_plugin.aegis.diagnose.rules import KERNEL, Rules
from zaya_plugin.aegis.explain import explain

GENERIC = "observed_exception"  # NVRx's row of any exception of Python


def peers() -> dict:
    """Return name and version -> a function of (source, line) that returns the names of the matching rows."""
    found = {}
    try:
        analyzer = import_module("nodescraper.plugins.inband.dmesg.dmesg_analyzer").DmesgAnalyzer
    except ImportError as error:
        print(f"amd-node-scraper is left out: {error}")
    else:

        def node_scraper(source: str, line: str) -> list[str]:  # it reads kernel logs alone
            return [each.message for each in analyzer.ERROR_REGEX if source == KERNEL and each.regex.search(line)]

        found[f"amd-node-scraper {metadata.version('amd-node-scraper')}"] = node_scraper
    try:
        registry = import_module("nvidia_resiliency_ext.attribution.restart_agent.l0.registry")
    except ImportError as error:
        print(f"nvidia-resiliency-ext is left out: {error}")
    else:
        version = metadata.version("nvidia-resiliency-ext")
        found[f"NVRx {version}"] = lambda source, line: [row.registry_id for row in registry.match_registry(line)]
    return found


def main() -> None:
    rules = Rules.load()

    def ours(source: str, line: str) -> list[str]:
        return [GENERIC if rule.name == "traceback" else rule.name for rule in rules.match(source, line)]

    wrong, right = [], []
    for rule in rules:
        if rule.pattern:
            wrong += [(rule.source[0], line, rule.role) for line in rule.samples]
            right += [(rule.source[0], line) for line in rule.near if not ours(rule.source[0], line)]
    roots = []  # the line that names the first cause, of each labelled failure
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            (attempt,) = explain(case.write(Path(folder) / case.name), rules)
            if attempt.result.cause not in (UNKNOWN, "traceback", "hang"):
                roots.append((attempt.result.evidence[0].source, attempt.result.evidence[0].text))
    clean = [case for case in cases() if case.cause == "none"]
    right += [
        (KERNEL if "dmesg" in name else "rank", line)
        for case in clean
        for name, text in case.files.items()
        for line in text.splitlines()
    ]
    print(
        "| rules | kernel lines named | other lines named | only as an exception | causes named | near misses named |"
    )
    print("|---|---|---|---|---|---|")
    for name, match in {"zaya_plugin": ours, **peers()}.items():
        named: Counter = Counter()
        for source, line, _ in wrong:
            rows = match(source, line)
            kind = "named" if set(rows) - {GENERIC} else "exception" if rows else "none"
            named[source == KERNEL, kind] += 1
        causes = [line for source, line in roots if set(match(source, line)) - {GENERIC}]
        false = [line for source, line in right if match(source, line)]
        kernel, other = (sum(named[where, kind] for kind in ("named", "exception", "none")) for where in (True, False))
        print(
            f"| {name} | {named[True, 'named']} of {kernel} | {named[False, 'named']} of {other} | "
            f"{named[True, 'exception'] + named[False, 'exception']} | {len(causes)} of {len(roots)} | "
            f"{len(false)} of {len(right)} |"
        )


if __name__ == "__main__":
    main()
