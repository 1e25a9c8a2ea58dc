# SPDX-License-Identifier: Apache-2.0
"""Write what docs/ takes from the code and from docs/evidence.yaml: `python -m tools.docs`. `--check` writes nothing: exit
status 1 where a file differs, or where code changed more than 30 days after the evidence for it.

The parts stand between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; PARTS names who makes each. rooms.svg,
llms.txt and first-day.ipynb are made whole. A change of a key, option, rule, docstring, import or of the evidence
changes them; tests/docs fails until this is run again.
"""

import argparse
import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path

from benchmarks import prediction_errors
from tools import evidence, first_day
from tools.imports import PACKAGES, REPO, import_graph, room_of

DOCS = REPO / "docs"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of \2 -->\n)", re.DOTALL)
LINK = re.compile(r"^- \[([^]]+)\]\(([\w-]+\.md)\)", re.MULTILINE)
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")


def cell(text: object) -> str:
    """Return text as a cell of a Markdown table."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [head, ("---",) * len(head), *[tuple(map(cell, row)) for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def keys() -> str:
    """Return the keys of a recipe: default, help, the Megatron argument or module that gets the value, and resume."""
    from zaya_plugin.config.schema import leaves, megatron_argument
    from zaya_plugin.ground.errors import as_typed

    rows = []
    for path, field in leaves():
        default = field.default if field.default is not MISSING else field.default_factory()
        choices = ", ".join(as_typed(choice) for choice in field.metadata["choices"])
        argument = megatron_argument(field)
        rows.append(
            (
                f"`{path}`",
                "must be given" if default == "???" else f"`{as_typed(default)}`",
                field.metadata["help"] + (f" ({choices})" if choices else ""),
                f"`--{argument.replace('_', '-')}`" if argument else f"`{field.metadata['reader'].rpartition('.')[2]}`",
                field.metadata["resume"].rule,
            )
        )
    return table(("key", "default", "what it is for", "goes to", "on a resume"), rows)


def resume() -> str:
    """Return what a resume does with a change, why, and the keys; keys that may change are left out."""
    from zaya_plugin.config.schema import OnResume, leaves

    paths: dict[OnResume, list[str]] = {}
    for path, field in leaves():
        paths.setdefault(field.metadata["resume"], []).append(f"`{path}`")
    order = sorted((rule for rule in paths if rule.why), key=lambda rule: ("refused", "kept", "warns").index(rule.rule))
    return table(("a change", "because", "keys"), [(rule.rule, rule.why, ", ".join(paths[rule])) for rule in order])


def rules() -> str:
    """Return the rules of `zaya plan check`; those that look at the same things are one row."""
    from zaya_plugin.plan.check import RULES

    names: dict[tuple[str, str, str], list[str]] = {}
    for rule in RULES:
        names.setdefault((rule.looks_at, rule.why, rule.source), []).append(f"`{rule.name}`")
    rows = [(", ".join(same), *about) for about, same in names.items()]
    return table(("rule", "what it looks at", "why", "source"), rows)


def commands() -> str:
    """Return a section a command: what it does, its options, its examples."""
    from zaya_plugin.commands.table import HEADINGS, parser_of

    parts = []
    for heading, rows in HEADINGS.items():
        parts.append(f"## {heading}\n")
        for command, (function, purpose) in rows.items():
            if not function:
                continue
            parser = parser_of(command)
            options = [
                (
                    " ".join(f"`{word}`" for word in action.option_strings or [action.metavar or action.dest]),
                    f"{(action.help or '') % {**vars(action), 'prog': parser.prog}}"
                    + (f" ({', '.join(map(str, action.choices))})" if action.choices else ""),
                )
                for action in parser._actions
                if action.dest != "help"
            ]
            description = "\n\n".join(" ".join(text.split()) for text in (parser.description or "").split("\n\n"))
            description = re.sub(r"\(docs/([\w-]+\.md)\)", r"([\1](\1))", description.replace("<", "&lt;"))
            parts += [f"### zaya {command}\n", f"{purpose[0].upper()}{purpose[1:]}.\n"]
            parts += [f"{description}\n"] * bool(description)
            parts.append(table(("option", "what it does"), options))
            parts += [f"```text\n{parser.epilog.strip()}\n```\n"] * bool(parser.epilog)
    return "\n".join(parts)


def checks() -> str:
    """Return the checks of doctor and verify, and the known problems, as tables."""
    from zaya_plugin.machines.checks import CHECKS
    from zaya_plugin.machines.machine_rules import MACHINE_RULES
    from zaya_plugin.machines.package_rules import PACKAGE_RULES

    measured = [
        (
            f"`{check.name}`",
            check.measures,
            check.verdict,
            check.remedy,
            ", ".join(f"`zaya {name}`" for name in check.commands),
        )
        for check in CHECKS.values()
    ]
    rules = (*PACKAGE_RULES, *MACHINE_RULES)
    known = [(f"`{rule.name}`", rule.severity, rule.why, rule.remedy, rule.thread) for rule in rules]
    return (
        f"## {len(measured)} checks\n\n"
        + table(
            ("check", "what it reads or measures", "slow or wrong", "on an MI300X, and what to do", "run by"), measured
        )
        + f"\n## {len(known)} known problems\n\n"
        + table(("name", "severity", "why it matters", "what to do", "described at"), known)
    )


def failures() -> str:
    """Return the classes of failures that the supervisor knows, with their counts."""
    from zaya_plugin.aegis.diagnose.rules import Rules

    rules = list(Rules.load())
    silent = sum(not rule.pattern for rule in rules)
    patterns = sum(len(rule.pattern) for rule in rules)
    codes = [(code, f"`{rule.name}`", rule.explain) for rule in rules for code in sorted(rule.exit_code, key=abs)]
    rows = [
        (
            f"`{rule.name}`",
            ", ".join(rule.source),
            f"{rule.role}, {rule.confidence}",
            rule.action,
            rule.explain,
            rule.fix,
        )
        for rule in rules
    ]
    head = ("class", "source", "role, confidence", "action", "meaning", "what a person does")
    return (
        f"{len(rules)} classes ({silent} without a line of a log), {patterns} patterns.\n\n"
        + table(head, rows)
        + "\n## Exit codes of a rank\n\n"
        + table(("code", "class", "meaning"), sorted(codes))
    )


def rule_keys() -> str:
    """Return the keys of a class of failures as a table: those of its dataclass, and what its docstring says of each."""
    from zaya_plugin.aegis.diagnose.rules import KEYS, Rule

    described = re.findall(r"^(\w+(?:, \w+)*): (.*?)(?=^\w|\Z)", inspect.getdoc(Rule) or "", re.MULTILINE | re.DOTALL)
    of_key = {key: text for names, text in described for key in names.split(", ")}
    return table(("key", "what it holds"), [(f"`{key}`", of_key[field.name]) for key, field in KEYS.items()])


def parameters() -> str:
    """Return every parameter of the model with its shape, and its name in transformers and in SGLang's layout."""
    from zaya_plugin.checkpoint.convert.tables import TABLE

    rows = [
        (f"`{ours}`", f"[{', '.join(shape.split())}]", f"`{native}`", f"`{legacy}`")
        for ours, native, legacy, shape in TABLE
    ]
    return table(("this package", "shape", "native (transformers)", "legacy (SGLang)"), rows)


def groups() -> str:
    """Return the options of every recipe group, with the first sentence of each and the command that uses it."""
    from zaya_plugin.config.train_help import GROUPS, comments, options

    rows = []
    for group in GROUPS:
        for option in options(group):
            command, *lines = comments(group, option)
            rows.append(
                (f"`{group}`", f"`{option}`", re.match(r".*?(?:[.:;](?= |$)|$)", " ".join(lines))[0].rstrip(":;"))
            )
    return table(("group", "option", "what it is"), rows)


def versions() -> str:
    """Return the versions of every operator, best first."""
    from hip_ops.versions import NO_FP32, NOT_RUN, VERSIONS

    def names(operator: str, wanted: tuple[str, ...]) -> str:
        return ", ".join(f"`{one}`" for one in VERSIONS[operator] if one in wanted)

    rows = [
        (
            f"`{name}`",
            names(name, tuple(one for one in known if one not in NOT_RUN)),
            names(name, NOT_RUN),
            names(name, NO_FP32.get(name, ())),
        )
        for name, known in VERSIONS.items()
    ]
    return table(("operator", "versions, best first", "by name only", "not in fp32"), rows)


def layouts() -> str:
    """Return what a rank holds and sends in a step of ZAYA1-base on 8 devices under several layouts, in GB."""
    from zaya_plugin.config.compose import compose
    from zaya_plugin.plan.memory import Optimizer, optimizer_bytes
    from zaya_plugin.plan.parallelism import Batch, ParallelSizes, local_parameters, sent_bytes
    from zaya_plugin.plan.recipe_plan import shape_of

    shape, rows = shape_of(compose(["experiment=zaya1_base", "data.path=none"])), []
    for name, sizes in (
        ("DP 8", {"data": 8}),
        ("CP 2, DP 4", {"data": 4, "context": 2}),
        ("EP 8", {"data": 8, "expert": 8}),
        ("TP 2, DP 4", {"data": 4, "tensor": 2}),
        ("PP 2, DP 4", {"data": 4, "pipeline": 2}),
        ("PP 2 x 4 virtual, DP 4", {"data": 4, "pipeline": 2, "virtual": 4}),
        ("PP 2, EP 4", {"data": 4, "pipeline": 2, "expert": 4}),
    ):
        layout = ParallelSizes(**sizes)
        batch = Batch(4096, micro_batches=64 // layout.data)
        held = sum(local_parameters(shape, layout).values()) / 1e9
        sent = {purpose: size / 1e9 for purpose, size in sent_bytes(shape, layout, batch).items()}
        idle = (layout.pipeline - 1) / (layout.virtual * batch.micro_batches + layout.pipeline - 1)
        figures = (2 * held, 4 * held, optimizer_bytes(shape, layout, Optimizer(muon=False), 2) / 1e9)
        rows.append(
            (
                name,
                *(f"{figure:.1f}" for figure in figures),
                *(
                    f"{sent[purpose]:.2f}" if sent[purpose] else ""
                    for purpose in ("gradients", "weights", "key_values", "dispatch", "activations", "stages", "tied")
                ),
                f"{100 * idle:.1f} %",
            )
        )
    head = (
        "layout",
        "weights",
        "gradients",
        "optimizer",
        "sent: gradients",
        "weights",
        "keys and values",
        "experts' rows",
        "attention's rows",
        "stages",
        "tied head",
        "idle",
    )
    return table(head, rows)


def recomputation() -> str:
    """Return what recomputation saves and costs for ZAYA1-base on eight H200s, 4 sequences of 4,096 tokens a device."""
    from zaya_plugin.config.compose import compose
    from zaya_plugin.plan.recipe_plan import choices_of

    words = ["stage.micro_batch_size=4", "stage.global_batch_size=32", "cluster.graphs=none"]
    recipe = compose(["experiment=zaya1_base", "cluster=h200_8", "data.path=none", *words])
    shown = (
        "nothing",
        "permute",
        "layernorm",
        "layernorm + permute",
        "moe",
        "core_attn",
        "20 whole layers",
        "40 whole layers",
    )
    rows = [
        (f"`{choice.recompute.name}`", f"{choice.plan.total / 2**30:.1f}", f"{choice.milliseconds:.1f}")
        for choice in choices_of(recipe, 8)
        if choice.recompute.name in shown
    ]
    return table(("recomputed", "GiB a device", "ms a micro-batch"), rows)


def _definition(module: str, name: str) -> tuple[ast.AST, str]:
    """Return the statement that defines a public name, and its file; follows `from ... import`."""
    package = max((package for package in PACKAGES.values() if f"{module}.".startswith(f"{package}.")), key=len)
    folder = next(folder for folder, named in PACKAGES.items() if named == package)
    path = REPO / folder / module.removeprefix(package).strip(".").replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if getattr(node, "name", None) == name:
            return node, path.relative_to(REPO).as_posix()
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Call):
            argument = node.value.args[0]  # rms_norm = formula(reference.rms_norm)
            return _definition(f"{module}.{ast.unparse(argument.value)}", argument.attr)
        if isinstance(node, ast.ImportFrom) and (
            alias := [one for one in node.names if (one.asname or one.name) == name]
        ):
            return _definition(node.module or "", alias[0].name)
    raise LookupError(f"{module}: no definition of {name}")


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    end = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    one_line = f"{node.name}({ast.unparse(node.args)}){end}"
    if len(one_line) <= 100:
        return one_line
    arguments = ast.unparse(node.args).replace(", ", ",\n    ")
    return f"{node.name}(\n    {arguments}\n){end}"


def _markdown(text: str) -> Iterator[str]:
    """Yield the lines of a docstring in Google's form as Markdown."""
    in_section = False
    for line in inspect.cleandoc(text).replace("<", "&lt;").splitlines():
        if heading := SECTION.match(line):
            in_section = True
            yield from (f"**{heading[1]}**", "")
        elif in_section and re.match(r"    \S", line):
            yield f"- {line.strip()}"
        else:
            in_section = in_section and (not line or line.startswith(" "))
            yield f"  {line.strip()}" if line.startswith("     ") else line


def api() -> str:
    """Return the public names of both packages with signature and docstring. Raises LookupError without a docstring."""
    parts = []
    for package in ("zaya_plugin", "hip_ops"):
        tree = ast.parse((REPO / package / "__init__.py").read_text())
        (exports,) = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPORTS"
        ]
        parts.append(f"## {package}\n")
        for name, place in exports.items():
            module, original = (f"hip_ops.{place}", name) if package == "hip_ops" else place.rpartition(".")[::2]
            node, file = _definition(module, original)
            if not (text := ast.get_docstring(node)):
                raise LookupError(f"{file}: {original} is public and has no docstring")
            shown = _signature(node).replace(original, name, 1)
            parts += [
                f"### {package}.{name}\n",
                f"```py\n{shown}\n```\n",
                *_markdown(text),
                f"\nDefined in `{file}`.\n",
            ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


@functools.cache
def room_graph() -> dict[str, set[str]]:
    """Return the imports between rooms, without those that follow from others."""
    edges: dict[str, set[str]] = {}
    for module, targets in import_graph().items():
        for target in targets:
            above, below = room_of(module) or "zaya_plugin", room_of(target) or "zaya_plugin"
            edges.setdefault(above, set())
            edges.setdefault(below, set())
            if above != below:
                edges[above].add(below)

    def beneath(room: str) -> set[str]:
        return edges[room].union(*map(beneath, edges[room]))

    return {room: {one for one in to if not any(one in beneath(other) for other in to)} for room, to in edges.items()}


def _heights(edges: dict[str, set[str]]) -> dict[str, int]:
    def height(room: str) -> int:
        return 1 + max(map(height, edges[room]), default=-1)

    return {room: height(room) for room in edges}


def rooms() -> str:
    """Return a table of the rooms from the roof down, with the first sentence of each docstring. Raises LookupError
    without one.
    """
    rows = []
    heights = _heights(room_graph())
    for room in sorted(heights, key=lambda room: (-heights[room], room)):
        folder = REPO / room if room in PACKAGES.values() or room == "patches" else REPO / "zaya_plugin" / room
        path = REPO / "patches" / "hooks.py" if room == "hooks" else folder.with_suffix(".py")
        path = path if path.is_file() else folder / "__init__.py"
        sentence = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].partition(". ")[0]
        if not sentence:
            raise LookupError(f"{path}: a room says in its docstring what it does")
        shown = path.parent if path.name == "__init__.py" else path
        rows.append((f"`{shown.relative_to(REPO)}`", sentence.rstrip(".")))
    return table(("room", "what it does"), rows)


def picture() -> str:
    """Return the rooms as SVG: a room imports those to which its lines lead, and what these import."""
    edges = room_graph()
    heights, width, gap = _heights(edges), 116, 64
    layers = [sorted(room for room in edges if heights[room] == height) for height in range(max(heights.values()) + 1)]
    across, middle = max(map(len, layers)) * (width + 24) + 24, {}
    for height, layer in reversed([*enumerate(layers)]):
        parents = {room: [middle[above][0] for above in edges if room in edges[above]] for room in layer}
        layer.sort(key=lambda room: (sum(parents[room]) / len(parents[room]) if parents[room] else 0, room))
        for place, room in enumerate(layer):
            middle[room] = across * (place + 0.5) / len(layer), (len(layers) - 1 - height) * gap + 32
    style = (
        "text{font:14px sans-serif;text-anchor:middle;fill:#1b1b1b}rect{fill:#eef3fb;stroke:#4c6a9b}"
        "path{fill:none;stroke:#8492a6}@media(prefers-color-scheme:dark){text{fill:#e8e8e8}rect{fill:#22304a;"
        "stroke:#86a5d8}path{stroke:#66758c}}"
    )
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {len(layers) * gap}" role="img">']
    lines += ["<title>The rooms of zaya_plugin and their imports</title>", f"<style>{style}</style>"]
    for room in sorted(edges):
        x, y = middle[room]
        for target in sorted(edges[room]):
            to_x, to_y = middle[target]
            lines.append(
                f'<path d="M{x:.0f} {y + 16:.0f}C{x:.0f} {y + 48:.0f} {to_x:.0f} {to_y - 48:.0f} {to_x:.0f} {to_y - 16:.0f}"/>'
            )
    for room in sorted(edges):
        x, y = middle[room]
        lines.append(f'<rect x="{x - width / 2:.0f}" y="{y - 16:.0f}" width="{width}" height="32" rx="6"/>')
        lines.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{room}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def llms() -> str:
    """Return llms.txt (llmstxt.org): the pages of index.md under its headings, each with its first sentence."""
    head, *sections = (DOCS / "index.md").read_text().split("\n## ")
    title, summary = (" ".join(part.split()) for part in head.split("\n\n")[:2])
    lines = [title, "", f"> {summary}"]
    for section in sections:
        lines += ["", f"## {section.splitlines()[0]}", ""]
        for name, file in LINK.findall(section):
            opening = " ".join((DOCS / file).read_text().split("\n\n")[1].split())
            lines.append(f"- [{name}]({file}): {re.match(r'.*?[.](?= |$)|.*', opening)[0]}")
    return "\n".join(lines) + "\n"


def script() -> str:
    """Return the example of a loop of one's own, without its licence line."""
    return f"```python\n{(REPO / 'examples' / 'train_three_steps.py').read_text().partition(chr(10))[2]}```\n"


PARTS: dict[str, Callable[[], str]] = {
    "keys": keys,
    "resume": resume,
    "rules": rules,
    "prediction_errors": prediction_errors.tables,
    "commands": commands,
    "checks": checks,
    "groups": groups,
    "versions": versions,
    "layouts": layouts,
    "recomputation": recomputation,
    "failures": failures,
    "rule_keys": rule_keys,
    "parameters": parameters,
    "api": api,
    "rooms": rooms,
    "script": script,
}


def pages(older: Mapping[str, list[str] | None] | None = None) -> dict[Path, str]:
    """Return every file of docs/ with generated parts, as it should be. older: of the evidence, to be marked."""
    parts = PARTS | {"evidence": lambda: evidence.tables(evidence.load(), older or {})}
    texts = {DOCS / "rooms.svg": picture()}
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        if PART.search(text):
            texts[path] = PART.sub(lambda part: part[1] + parts[part[2]]() + part[3], text)
    return {**texts, DOCS / "llms.txt": llms(), DOCS / "first-day.ipynb": first_day.notebook()}


def outdated() -> list[str]:
    """Return the files that differ from what is generated, but for marks of age: commits that change neither page nor
    data change those too.
    """
    return [
        path.relative_to(REPO).as_posix()
        for path, text in pages().items()
        if not path.is_file() or path.read_text().replace(evidence.MARK, "") != text
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; list what differs, and old evidence")
    check = parser.parse_args().check
    older = evidence.older_rows(evidence.load())
    if check:
        expired, differ = evidence.report(older), outdated()
        for name in differ:
            print(f"{name}: differs. Fix: python -m tools.docs")
        return int(bool(expired or differ))
    for path, text in pages(older).items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(f"{path.relative_to(REPO)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
