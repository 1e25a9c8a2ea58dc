# SPDX-License-Identifier: Apache-2.0
"""Generated command lines that no run can follow, from the schema and the tables of the checks; a seed gives the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from zaya_plugin.commands.table import COMMANDS
from zaya_plugin.config.environment import VARIABLES
from zaya_plugin.config.megatron_review import IMPOSSIBLE, OWNED_BY_KEY
from zaya_plugin.config.paths import PATHS
from zaya_plugin.config.schema import Recipe, get, leaves
from zaya_plugin.config.validate import EXCLUSIONS

FIELDS = dict(leaves())
ABSURD = ("inf", "-inf", "nan", "1e30", "-1e30", "1000000000000000", "1e400")
LISTS = (
    "data.blend=[x]",
    "data.blend=['0 x']",
    "data.blend=['nan x']",
    "data.blend=['1 x',y]",
    "optim.overrides=['']",
    "optim.overrides=['*.a']",
    "optim.overrides=['*.a lr_mult=-1']",
    "optim.overrides=['*.a optimizer=sgd']",
    "optim.overrides=['optimizer=muon']",
    "parallel.recompute_modules=[moe]",
    "profile.ranks=[-1]",
    "profile.ranks=[a]",
    "cluster.numa_nodes=[1048576]",
)
# Word, and the key that the message names where it is another.
CONTRADICTIONS = (
    ("stage.global_batch_size=10", ""),
    ("model.num_query_groups=3", "model.num_"),
    ("model.rotary_percent=0.01", ""),
    ("optim.lr_warmup_iters=100000", ""),
    ("optim.min_lr=1", ""),
    ("optim.lr_decay_iters=1", ""),
    ("parallel.tensor_model_parallel_size=3", ""),
    ("parallel.context_parallel_size=3", ""),
    ("parallel.expert_model_parallel_size=5", ""),
    ("parallel.recompute_granularity=full", "parallel.recompute_"),
    ("parallel.recompute_granularity=selective", "parallel.recompute_modules"),
    ("parallel.overlap_param_gather=true", ""),
    ("profile.step_end=1", ""),
    ("cluster.kernels=triton", ""),
    ("cluster.kernel_overrides={nothing: hip}", "cluster.kernel_overrides"),
    ("nproc=7", "stage.global_batch_size"),
)
ENVIRONMENT = (
    {"RANK": "0"},
    {"WORLD_SIZE": "0", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    {"WORLD_SIZE": "2", "RANK": "x", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "9", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    {"MASTER_PORT": "65536"},
    {"MASTER_PORT": "-1"},
    {"SLURM_PROCID": "0"},
    {"SLURM_PROCID": "4", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "many", "SLURM_LOCALID": "0"},
    *({name: "nonsense"} for name in VARIABLES),
)


OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID")
NO_PLACES = ("/dev/null", "/dev/null/x/y", "/proc/version/runs", f"/tmp/{'a' * 300}/x")


@dataclass(frozen=True)
class Line:
    """One command line. names: what its message must contain; environ: variables that are set."""

    words: tuple[str, ...]
    names: str = ""
    environ: dict[str, str] = field(default_factory=dict)


def train(seed: int, count: int) -> list[Line]:
    """Return lines of `zaya train`, of each kind about as many."""
    rng = random.Random(seed)
    kinds = (number, type_, unknown, excluded, contradiction, megatron, group, syntax, of_environment, list_)
    kinds += (variable, place)
    return [kinds[index % len(kinds)](rng) for index in range(count)]


def _line(word: str, names: str = "", *more: str) -> Line:
    return Line(("train", "experiment=cpu_demo", *more, word), names or word.partition("=")[0])


def number(rng: random.Random) -> Line:
    """A number out of its key's range."""
    numeric = [path for path, each in FIELDS.items() if str(each.type).split(" ")[0] in ("int", "float")]
    return _line(f"{rng.choice(numeric)}={rng.choice(ABSURD)}")


def type_(rng: random.Random) -> Line:
    """A value of another type."""
    wrong = {
        "int": ("text", "1.5", "[1]", "''", "{a: 1}"),
        "float": ("text", "[1.0]", "''", "{a: 1}", "1.2.3"),
        "bool": ("maybe", "2", "[true]", "''", "0.5"),
        "list[str]": ("text", "1", "{a: 1}"),
        "list[int]": ("text", "1", "[text]", "{a: 1}"),
        "dict[str,": ("text", "1", "[a]"),
    }
    path = rng.choice([path for path, each in FIELDS.items() if _kind(each) in wrong or each.metadata["choices"]])
    if FIELDS[path].metadata["choices"] and _kind(FIELDS[path]) == "str":
        return _line(f"{path}={rng.choice(('nonsense', 'TRUE', '1', '[a]'))}")
    return _line(f"{path}={rng.choice(wrong[_kind(FIELDS[path])])}")


def _kind(each) -> str:
    return str(each.type).partition(" ")[0]


def unknown(rng: random.Random) -> Line:
    """A key with a mistake of typing."""
    path = rng.choice([path for path in FIELDS if not path.startswith(("megatron", "cluster.environment"))])
    at = rng.randrange(len(path))
    wrong = rng.choice((path[:at] + path[at + 1 :], path[:at] + rng.choice("xyz_") + path[at:], path + ".more"))
    if wrong in FIELDS or not wrong or wrong[0] in "._" or ".." in wrong:
        return unknown(rng)
    return _line(f"{rng.choice(('', '+'))}{wrong}=1", wrong.partition(".")[0])


def excluded(rng: random.Random) -> Line:
    """Two keys that exclude each other, from the table of the check."""
    recipe = Recipe()
    (key, value), others = rng.choice([each for each in EXCLUSIONS.items() if each[0] != ("cluster.device", "cuda")])
    other, only, _ = rng.choice(others)
    choices = FIELDS[other].metadata["choices"]
    if choices:
        wrong = rng.choice([choice for choice in choices if choice not in (only, "auto")])
    else:
        wrong = (not only) if isinstance(only, bool) else 2 if isinstance(only, int) else 0.001
    if (key, other) == ("cluster.deterministic", "parallel.nccl_ub") or get(recipe, key) != value:
        return _line(f"{other}={str(wrong).lower()}", other, f"{key}={str(value).lower()}")
    return _line(f"{other}={str(wrong).lower()}", "", f"{key}={str(value).lower()}")


def contradiction(rng: random.Random) -> Line:
    """A key that does not fit the demo's other keys."""
    return _line(*rng.choice(CONTRADICTIONS))


def megatron(rng: random.Random) -> Line:
    """An argument of Megatron that a key decides, that ZAYA cannot do, or that does not exist."""
    texts = (*OWNED_BY_KEY.values(), *IMPOSSIBLE.values(), "no_such_argument")
    name = rng.choice([name for text in texts for name in text.split()])
    return _line(f"megatron.{name}={rng.choice(('1', 'true', 'x'))}", name)


def group(rng: random.Random) -> Line:
    """A group or experiment that does not exist, or a group given as a mapping."""
    name = rng.choice(("model", "stage", "data", "optim", "parallel", "cluster", "logger", "experiment"))
    if name == "experiment":
        return Line(("train", f"experiment=no_{rng.randrange(99)}"), "experiment")
    value = rng.choice(("nothing", "{a: 1}", "[a]", "null", "a/b/c"))
    return _line(f"{name}={value}")


def syntax(rng: random.Random) -> Line:
    """A word that is no override."""
    text = "".join(rng.choice("ab={}[],'\"$:;()&|<> ") for _ in range(rng.randint(1, 12)))
    return _line(f"model.name={{{text}", "model.name") if rng.random() < 0.5 else _line("zz" + text, "zz")


def of_environment(rng: random.Random) -> Line:
    """Variables with no value of theirs, and those of an outer launcher that are incomplete or out of range."""
    environ = rng.choice(ENVIRONMENT)
    words = ("train", "experiment=cpu_demo", f"seed={rng.randrange(99)}", *rng.choice(((), ("dry_run=true",))))
    return Line(words, "environment", environ)


def variable(rng: random.Random) -> Line:
    """A variable for the ranks that their launcher sets, or that is no variable."""
    name = rng.choice((*OF_RANKS, "1X", "A-B", "OMP_NUM_THREADS"))
    return _line(f"cluster.environment.{name}={rng.choice(('-1', 'x', '0'))}", f"cluster.environment.{name}")


def place(rng: random.Random) -> Line:
    """A directory of the run that cannot be made; the dry run says so too."""
    key, more = rng.choice(("run_dir", "checkpoint.path")), rng.choice(((), ("dry_run=true",)))
    if rng.random() < 0.2:
        return _line(f"{rng.choice(PATHS)}=runs/{'a' * 256}", "", *more)
    return _line(f"{key}={rng.choice(NO_PLACES)}", key, *more)


def list_(rng: random.Random) -> Line:
    """A list with an entry that is refused."""
    return _line(rng.choice(LISTS))


def others(seed: int, count: int) -> list[Line]:
    """Return lines of the commands without a recipe: missing and unknown options, wrong numbers, missing files."""
    rng = random.Random(seed)
    names = [tuple(command.split()) for command in COMMANDS if command.startswith(("data ", "checkpoint "))]
    names.append(("checkpoint", "nothing"))
    values = ("", "-1", "nan", "x", "1e30", "/proc/1/mem", "/dev/null/x", "nowhere", "\x01", "=", "ü", "a" * 5000)
    options = (
        "--output",
        "--steps",
        "--workers",
        "--tokenizer",
        "--count",
        "--max-bytes",
        "--files",
        "--nothing",
        "-q",
    )
    lines = []
    for number in range(count):
        if number % 16 == 0:
            lines.append(_supervised(rng))
            continue
        words = [rng.choice(options) + rng.choice(("=", " ")) + rng.choice(values) for _ in range(rng.randint(1, 3))]
        words = [part for word in words for part in (word.split(" ", 1) if " " in word else [word])]
        lines.append(Line((*rng.choice(names), *words, "/no/such/place")))
    return lines


def _supervised(rng: random.Random) -> Line:
    """A line of `zaya aegis` or of a command on a model with an option that is refused before anything is started."""
    words, options = rng.choice(
        (
            (("verify", "--nodes", "--output", "out/verify.json", "--dry-run"), NODES),
            (("aegis", "run", "--dry-run"), SUPERVISOR),
            (("aegis", "report"), ("/dev/null/x", "/proc", "/proc/version")),
            (("aegis", "status"), ("/dev/null/x", "/proc", "/proc/version")),
            (("verify",), ("--only=", "--only=nothing", "--device=gpu", "--bundle=/proc/version")),
            (("bench", "step"), ("--steps=0", "--steps=1e30", "--warmup=1000000000000", "--random-tokens=1")),
        )
    )
    option = rng.choice(options)
    command = ("--", "zaya", "train", "experiment=cpu_demo") if words[:2] == ("aegis", "run") else ()
    return Line((*words, option, *command), option.partition("=")[0] if option.startswith("--") else "")


NODES = (
    *("--seconds=nan", "--seconds=0", "--slower=2", "--min=gemm_tflops=nan", "--min=nothing=3", "--min=", "--nodes="),
    *("--nodes=a[", "--nodes=a[1-999999999]", "--nodes=a[9-1]", "--launcher=", "--launcher=ssh", "--launcher='"),
)
SUPERVISOR = (
    *("--nodes=0", "--nodes=1000000000000", "--spares=-1", "--min-nodes=2", "--grace=nan", "--grace=inf", "--node=a b"),
    *("--restarts=1e30", "--ranks-per-node=1000000", "--decider=[::1:5", "--decider=x:0", "--output=/dev/null/x"),
    *("--hook=no_such_program", "--kernel-log=/dev/null/x", "--rules=/dev/null/x", "--rules=/proc/version"),
)
