"""Rules of the architecture, checked on the source: the imports of each room, and the words that a room may use."""

import ast
import functools
import inspect
import pathlib
import re

import pytest

from eqformer import nn
from eqformer.models import FAMILIES
from eqformer.parallel import COLLECTIVES as NAMES


ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "eqformer"
ROOMS = {
    "kernels": set(),
    "program": set(),
    "nn": {"kernels"},
    "data": set(),
    "models": {"nn", "parallel"},
    "parallel": {"nn", "kernels", "program"},
    "generation": {"nn"},
    "text": {"nn", "kernels", "data", "models", "parallel", "training", "generation"},
    "evaluation": {"generation", "text"},
    "serving": {"generation", "text", "data", "interpretability"},
    "interpretability": {"nn", "kernels"},
    "training": {"nn", "kernels", "program", "parallel"},
    "planning": {"nn", "kernels", "program", "parallel", "training"},
    "recipes": {
        *("nn", "kernels", "data", "models", "parallel", "training", "planning", "generation", "text", "evaluation"),
    },
    "systems": {"nn", "kernels", "program", "parallel", "planning"},
}
# Folders of a room that know nothing of the room's other files, which import from them.
INNER_FOLDERS = ("training/checkpoint", "training/losses", "training/optimizer")
SENDING = {"psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "ppermute", "pshuffle", "all_to_all"}
COLLECTIVES = {*SENDING, "axis_index"}
SENDER = "parallel/_collectives.py"  # where each collective gets its name
SHARDING = {"PartitionSpec", "NamedSharding", "Mesh", "shard_map", "with_sharding_constraint"}
PLACING = "models/_load.py"  # its arrays go straight to where a plan wants them
PREPARING = "_prepare.py"  # sets variables of JAX and XLA, when it is called
# Chips and compilers, which `kernels` alone knows of what `nn` computes.
CHIPS = re.compile(
    r"(?i)\b(xla|tpus?|gpus?|cuda|cudnn|nvidia|hopper|mosaic|pallas|triton|libtpu|v5e|v5p|v6e|tpu7x|[ah]100)\b"
)
NAMED_AS_FLAGS = "nn/_execution.py"  # whose words for attentions are those of flags
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parse(source: str) -> ast.Module:
    """Parse a file once for all rules that read the file."""
    return ast.parse(source)


@functools.cache
def walk(tree: ast.AST) -> list[ast.AST]:
    """List the nodes of a file's tree once for all rules that read the file."""
    return list(ast.walk(tree))


@pytest.fixture(scope="module", autouse=True)
def forgotten_trees():
    """Let the trees of all files go after the last rule."""
    yield
    walk.cache_clear()
    parse.cache_clear()


def names_in(tree: ast.AST) -> set[str]:
    """Every identifier and attribute that a file uses or imports."""
    names = set()
    for node in walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update(alias.name.split(".")[-1] for alias in node.names)
    return names


def imported(tree: ast.AST, folder: tuple[str, ...] = ()) -> list[str]:
    """What a file in `folder` of the package imports from the package: `nn.experts._dispatch`, or `nn` for a room."""
    found = []
    for node in walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name.split(".")[1:] for name in node.names if name.name.startswith("eqformer.")]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            if node.level:
                module = [*folder[: len(folder) + 1 - node.level], *module]
            elif module[:1] != ["eqformer"]:
                continue
            else:
                module = module[1:]
            found += [module] if module else [[name.name] for name in node.names]
    return [".".join(parts) for parts in found]


def rooms_imported(tree: ast.AST, folder: tuple[str, ...]) -> set[str]:
    """Rooms of eqformer that a file in `folder` imports from, its own left out."""
    return {name.split(".")[0] for name in imported(tree, folder)} & (ROOMS.keys() - set(folder[:1]))


def private_files_imported(tree: ast.AST, folder: tuple[str, ...] = ()) -> list[str]:
    """Files of another room that a file imports by their own names, and not by what the room lists."""
    names = [name for name in imported(tree, folder) if name.split(".")[:1] != list(folder[:1])]
    return sorted(name for name in names if re.fullmatch(r"[a-z]+(\.[a-z]+)*\._.*", name))


def files_of_room_imported(tree: ast.AST, folder: tuple[str, ...], inner: str) -> list[str]:
    """Return the imports of a file in the folder `inner` of a room that are of the same room and not of that folder."""
    module = inner.replace("/", ".")
    names = [name for name in imported(tree, folder) if name.split(".")[0] == folder[0]]
    return sorted(name for name in names if not f"{name}.".startswith(f"{module}."))


def unnamed_collectives(tree: ast.AST) -> set[str]:
    """Functions of `jax.lax` that send something, called or imported as such."""
    found = set()
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("jax.lax", "lax"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("jax.lax", "jax._src.lax.parallel"):
            found.update(alias.name for alias in node.names)
    return found & SENDING


def collectives_named(tree: ast.AST) -> set[str]:
    """The names that a file gives to collectives: first in `send.psum(...)` and others, and in `Ring(...)`."""
    found = set()
    for node in walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            first = node.args[:1] if function.startswith("send.") or function == "Ring" else []
            found.update(value.value for value in first if isinstance(value, ast.Constant))
    return found


def complaints(path: pathlib.Path, source: str) -> list[str]:
    """What a file of the package does that its room does not allow."""
    folder = path.relative_to(PACKAGE).parts[:-1]
    room = folder[0] if folder else path.stem
    tree, found = parse(source), []
    if source.count("\n") > 500:
        found.append("longer than 500 lines")
    if path.name != "__init__.py" and not path.name.startswith("_"):
        found.append("a public file: only __init__.py is, and it lists the room's names")
    if foreign := rooms_imported(tree, folder) - ROOMS.get(room, set(ROOMS)):
        found.append(f"imports from {sorted(foreign)}")
    inner = next((inner for inner in INNER_FOLDERS if "/".join(folder).startswith(inner)), None)
    if inner and (outer := files_of_room_imported(tree, folder, inner)):
        found.append(f"imports {outer} of its own room: {inner} stands by itself")
    # `systems` rebuilds published layouts from the inner parts of `parallel`.
    private = [name for name in private_files_imported(tree, folder) if room != "systems" or name[:9] != "parallel."]
    if private:
        found.append(f"imports private files {private}: let their room list what they have")
    names = names_in(tree)
    if room not in ("parallel", "systems") and (used := names & COLLECTIVES):
        found.append(f"uses collectives {sorted(used)}")
    if path != PACKAGE / SENDER and (used := unnamed_collectives(tree)):
        found.append(f"sends without a name: {sorted(used)}; call them by {SENDER}")
    if unlisted := collectives_named(tree) - {*NAMES}:
        found.append(f"sends by names {sorted(unlisted)} that {SENDER} does not list")
    placing = path == PACKAGE / PLACING
    if room in ("nn", "models", "data", "generation") and not placing and (used := names & SHARDING):
        found.append(f"speaks of sharding: {sorted(used)}")
    of_environment = set() if path == PACKAGE / PREPARING else {"environ"}
    if used := names & {"print", "argparse", "tyro", "pickle", *of_environment}:
        found.append(f"uses {sorted(used)}, which belongs to scripts or nowhere")
    if any(isinstance(node, ast.Global) for node in walk(tree)):
        found.append("keeps module-level mutable state")
    calls = {ast.unparse(node.func) for node in walk(tree) if isinstance(node, ast.Call)}
    if room == "models" and "id" in calls:  # an identity is lost as soon as a tree is mapped; a path is not
        found.append("finds leaves by id(): name them by their paths (flatten_model)")
    if room == "nn" and path != PACKAGE / NAMED_AS_FLAGS and (used := {*CHIPS.findall(source)}):
        found.append(f"names the chips or compilers {sorted(used)}")
    families = "|".join(FAMILIES)
    code = {name.lower() for name in names if re.fullmatch(families, name.lower())}
    if room != "models" and code:
        found.append(f"names the families {sorted(code)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_keeps_to_its_room(path):
    assert complaints(path, path.read_text()) == []


@pytest.mark.parametrize(
    "room,source,word",
    [
        ("nn", "from ..models import build", "imports from ['models']"),
        ("data", "from eqformer.nn import Linear", "imports from ['nn']"),
        ("training", "from .. import generation", "imports from ['generation']"),
        ("parallel", "from ..nn._dtype import at_least_float32", "private files ['nn._dtype']"),
        ("models", "import eqformer.nn._lora", "private files ['nn._lora']"),
        ("models/families", "from ...nn.experts._moe import MoE", "private files ['nn.experts._moe']"),
        ("nn/experts", "from ...data import load", "imports from ['data']"),
        ("nn", "import jax\njax.lax.psum(1, 'x')", "collectives ['psum']"),
        ("parallel", "import jax\njax.lax.psum(1, 'x')", "without a name: ['psum']"),
        ("parallel/tensor", "from jax.lax import all_gather", "without a name: ['all_gather']"),
        ("parallel", "send.pmax('my own', x, TENSOR)", "names ['my own']"),
        ("models", "from jax.sharding import PartitionSpec", "sharding"),
        ("nn", "print('hello')", "print"),
        ("training", "import os\nos.environ['A']", "environ"),
        ("nn", "state = None\ndef f():\n    global state", "mutable state"),
        ("planning", "def f(model): return Llama", "families ['llama']"),
        ("models", "leaves = {id(leaf): leaf for leaf in tree}", "by id()"),
        ("nn", "\n" * 501, "500 lines"),
        ("nn/attention", "# On TPUs it is faster.", "chips or compilers ['TPUs']"),
        ("nn", "call = by_platform(cuda=run)", "chips or compilers ['cuda']"),
        ("kernels", "from ..nn import Linear", "imports from ['nn']"),
        ("training/losses", "from .._step import make_step", "imports ['training._step'] of its own room"),
        ("training/optimizer", "from ..losses._loss_aux import LossFn", "training/optimizer stands by itself"),
        ("training", "from ..recipes import Recipe", "imports from ['recipes']"),
        ("recipes", "from ..interpretability import capture", "imports from ['interpretability']"),
        ("evaluation", "from ..recipes import Recipe", "imports from ['recipes']"),
        ("program", "from ..parallel import STATE", "imports from ['parallel']"),
    ],
)
def test_the_architecture_test_can_fail(room, source, word):
    assert any(word in complaint for complaint in complaints(PACKAGE / room / "_example.py", source))


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").rglob("*.py")), ids=lambda path: path.name)
def test_a_script_imports_what_rooms_list(path):
    assert private_files_imported(parse(path.read_text())) == []
    assert private_files_imported(parse("from eqformer.nn.experts._dispatch import slots_per_expert")) == [
        "nn.experts._dispatch"
    ]


def test_each_listed_name_is_that_of_a_collective():
    sources = {path: path.read_text() for path in FILES if path.parts[-2:] != ("parallel", "_collectives.py")}
    assert {name for name in NAMES if not any(f'"{name}"' in source for source in sources.values())} == set()
    page = " ".join((ROOT / "docs" / "parallel-communication.md").read_text().split("## Names")[1].split())
    assert {name for name in NAMES if name not in page} == set()


# Words that have another meaning here, or none, by the folders whose names may not have them: the schedule is a
# pipeline's (learning rates are `rates`), sinks are the softmax's (metrics have a `MetricWriter`).
TAKEN = {"eqformer": {"told", "tells"}, "eqformer/training": {"schedule", "sink"}, "scripts": {"sink", "told", "tells"}}


def misnamed(folder: str, source: str) -> set[str]:
    """Names that a file defines with a word that is taken."""
    taken = {word for place, words in TAKEN.items() if folder.startswith(place) for word in words}
    found = set()
    for node in walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    found = {name.removeprefix("schedule_free_") for name in found}  # The method of Defazio et al. has this name.
    words_of = lambda name: {word.removesuffix("s") for word in name.lower().split("_")} | {*name.lower().split("_")}
    return {name for name in found if words_of(name) & taken}


def test_words_have_one_meaning():
    for path in [*FILES, *sorted((ROOT / "scripts").rglob("*.py"))]:
        assert misnamed(path.parent.relative_to(ROOT).as_posix(), path.read_text()) == set(), path
    assert misnamed("eqformer/training", "def schedule(schedule_free_sgd): sinks = told = 1") == {
        "schedule",
        "sinks",
        "told",
    }
    assert misnamed("eqformer/parallel", "def make_schedule(sinks): return sinks") == set()


# In a pipeline layers lie in another order than that of the model. Outside of `parallel`, `plan.shard` and
# `plan.unshard` say all there is to say.
LAYER_ORDER = re.compile(r"(?i)(pipeline|ring|reading)_order|(pipeline|ring) order")


def test_the_order_of_a_pipelines_layers_is_invisible_outside_parallel():
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "changelog.md"]
    code = [*FILES, *(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    outside = [path for path in code if path.parent.parts[-1] != "tests" and "parallel" not in path.parts]
    for path in [*outside, *pages]:
        assert not LAYER_ORDER.search(path.read_text()), path
    assert LAYER_ORDER.search((PACKAGE / "parallel" / "pipeline" / "_pipelined_stack.py").read_text())  # it can fail


# Other rooms ask a module for its contract, an abstract class, so that anybody's own module serves as well. The few
# questions for a class are about formats that publish it, or exercises that are made for it.
CONCRETE = {
    name
    for name in dir(nn)
    if inspect.isclass(kind := getattr(nn, name)) and kind.__module__.startswith("eqformer.nn.")
    if not inspect.isabstract(kind) and not getattr(kind, "__abstractvars__", ()) and kind is not nn.Module
}


def switches(source: str) -> list[str]:
    """Return the questions `isinstance(..., kind)` for a class of `nn` that is no contract."""
    calls = [node for node in walk(parse(source)) if isinstance(node, ast.Call)]
    asked = [call.args[1] for call in calls if ast.unparse(call.func) == "isinstance" and len(call.args) == 2]
    words = lambda kinds: re.findall(r"\w+", ast.unparse(kinds))
    return [ast.unparse(kinds) for kinds in asked if CONCRETE & {*words(kinds)}]


def test_rooms_ask_for_contracts_and_not_for_classes():
    counted = {path: switches(path.read_text()) for path in FILES if path.relative_to(PACKAGE).parts[0] != "nn"}
    questions = [f"{path.name}: {kinds}" for path, asked in counted.items() for kinds in asked]
    assert len(questions) <= 15, questions
    assert switches("isinstance(x, nn.Stack | nn.Mixer), isinstance(y, nn.Mixer)") == ["nn.Stack | nn.Mixer"]


# Folders in plain words: no content-free local names, no docstring that opens as a riddle. "." is the files that belong
# to no room. The list grows to all rooms.
PLAIN = (
    ".",
    "data",
    "evaluation",
    "generation",
    "interpretability",
    "kernels",
    "models",
    "nn",
    "parallel",
    "planning",
    "program",
    "recipes",
    "serving",
    "systems",
    "text",
    "training",
)
VAGUE = {
    *("found", "given", "one", "ones", "own", "its", "said", "held", "left", "there", "each", "whole", "rest", "kept"),
    *("told", "seen", "made", "place", "places", "thing", "things", "what", "that", "those", "these", "it", "then"),
    *("such", "same", "other", "others", "nothing", "here", "both", "many", "more", "less"),
}
RIDDLE = re.compile(r"(What|That of|Those of|The same|Itself|Yes|No|Nothing|Of|Where|How|Whether one|As)\b")


def vague_names(tree: ast.AST) -> list[str]:
    """Return local names without content in functions of more than five lines."""
    functions = [node for node in walk(tree) if isinstance(node, ast.FunctionDef)]
    names = {
        f"{node.id} in {function.name}"
        for function in functions
        if (function.end_lineno or 0) - function.lineno > 5
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.lstrip("_") in VAGUE
    }
    return sorted(names)


def riddles(tree: ast.AST) -> list[str]:
    """Return docstrings that begin with a relative clause or a pronoun instead of a noun or a verb."""
    documented = (ast.FunctionDef, ast.ClassDef, ast.Module)
    docstrings = [ast.get_docstring(node) for node in walk(tree) if isinstance(node, documented)]
    return [text.splitlines()[0] for text in docstrings if text and RIDDLE.match(text)]


@pytest.mark.parametrize("folder", [*PLAIN, "../scripts"])
def test_names_and_docstrings_are_plain(folder):
    for path in sorted(PACKAGE.glob("*.py" if folder == "." else f"{folder}/**/*.py")):
        tree = parse(path.read_text())
        assert (vague_names(tree), riddles(tree)) == ([], []), path


def test_the_check_of_plain_words_can_fail():
    body = "\n".join(f"    x{i} = {i}" for i in range(6))
    tree = parse(f'def f():\n    """What is left of it."""\n    found = 1\n{body}\n    return found')
    assert vague_names(tree) == ["found in f"] and riddles(tree) == ["What is left of it."]
    assert riddles(parse('"""Notes on x."""')) == [] == vague_names(parse("def f():\n    found = 1"))


MAX_ARGUMENTS = 16


def wide_signatures(tree: ast.AST) -> list[str]:
    """Return the functions that take more than so many arguments, `self` not counted."""
    wide = []
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            wide += [node.name] * (sum(argument.arg != "self" for argument in arguments) > MAX_ARGUMENTS)
    return wide


def test_no_signature_has_too_many_arguments():
    wide = {path.relative_to(PACKAGE).as_posix() for path in FILES if wide_signatures(parse(path.read_text()))}
    assert wide == set()
    names = ", ".join(f"x{number}" for number in range(MAX_ARGUMENTS))
    sources = [f"def f(self, {names}): pass", f"def g(self, {names}, *, y): pass"]
    assert wide_signatures(parse("\n".join(sources))) == ["g"]


def unencoded(tree: ast.AST) -> list[int]:
    """Lines that read or write text without saying in which encoding: the machine's settings would decide."""
    found = []
    for node in walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = (*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode"))
        words = [argument.value for argument in given if isinstance(argument, ast.Constant)]
        is_text = not any(isinstance(word, str) and re.fullmatch("[rwaxb+]*b[rwaxb+]*", word) for word in words)
        if name in ("read_text", "write_text") or (name == "open" and is_text and ast.unparse(node.func) != "os.open"):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("folder", ["eqformer", "scripts"])
def test_text_is_in_one_encoding(folder):
    found = {str(path): unencoded(parse(path.read_text())) for path in sorted((ROOT / folder).rglob("*.py"))}
    assert len(found) > 20 and {path: lines for path, lines in found.items() if lines} == {}
    calls = "p.read_text()", "open(p)", "p.open('a')", "p.write_text(x)", "p.open('rb')", "open(p, encoding='utf-8')"
    assert unencoded(parse("\n".join([*calls, "os.open(p, 0)"]))) == [1, 2, 3, 4]


# Files that read what belongs to Python, to installed packages or to this process, by ways that wait for a pipe.
READING_OTHERWISE = {
    "eqformer/_files.py",
    "eqformer/_prepare.py",
    "eqformer/data/_documents.py",
    "eqformer/data/_stored_rows.py",
    "eqformer/data/_token_store.py",
    "eqformer/planning/_compile.py",
    "scripts/benchmark.py",
    "scripts/benchmarks/_folders.py",
}
READS = {"memmap", "fromfile", "json.load", "json.loads", "np.load"}


def unbounded_reads(tree: ast.AST) -> list[int]:
    """Lines that read a file or parse JSON by other functions than those of `_files.py`, which hold the limits."""
    lines = []
    for node in walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            name = function.rpartition(".")[2]
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            words = [value.value for value in values if isinstance(value, ast.Constant)]
            writes = any(isinstance(word, str) and re.fullmatch("[awx]b?[+]?", word) for word in words)
            opens = name == "open" and function != "os.open" and not writes
            reads = name in ("read_text", "read_bytes") and isinstance(node.func, ast.Attribute)
            if opens or reads or READS & {name, function}:
                lines.append(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize("folder", ["eqformer", "scripts"])
def test_files_are_read_with_limits(folder):
    paths = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / folder).rglob("*.py"))}
    lines = {name: unbounded_reads(parse(path.read_text())) for name, path in paths.items()}
    assert {name for name, its in lines.items() if its} == READING_OTHERWISE & paths.keys()
    calls = "p.read_text()", "open(p)", "p.open('rb')", "json.loads(x)", "np.memmap(p)", "p.open('a')", "parse_json(x)"
    assert unbounded_reads(parse("\n".join(calls))) == [1, 2, 3, 4, 5]


def test_the_top_level_holds_what_it_should_and_nothing_else():
    allowed = {"pyproject.toml", "eqformer", "tests", "scripts", "docs", "README.md", "LICENSE"}
    made_by_tools = {"build", "dist", "runs", "eqformer.egg-info", "__pycache__"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found - made_by_tools == allowed


def listed_names(source: str) -> list[str]:
    """What a room's `__init__.py` exports by the rules of typing: `X as X`, and private files assigned to a name.

    Type checkers of those who install the package take any other import for private (`_x as x` is one).
    """
    found, files = [], set()
    for node in parse(source).body:
        if isinstance(node, ast.ImportFrom):
            aliases = [alias for alias in node.names if alias.asname is not None]
            assert all(alias.asname == alias.name for alias in aliases), ast.unparse(node)
            found += [alias.name for alias in aliases]
            files |= {alias.name for alias in node.names if alias.asname is None}
        elif isinstance(node, ast.Assign):
            found += [ast.unparse(target) for target in node.targets]
            files -= {ast.unparse(node.value)}
    assert not files, f"imported and not listed: {sorted(files)}"
    assert len(found) == len(set(found)) and not any(re.match("_[^_]", name) for name in found), found
    return found


def test_public_names_are_listed_once_and_documented():
    assert all(listed_names(init.read_text()) for init in sorted(PACKAGE.glob("*/__init__.py")))
    for source in ("from ._a import b as c", "from ._a import b", "from . import _a as a", "from ._a import _b as _b"):
        with pytest.raises(AssertionError):
            listed_names(source)
    undocumented = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in FILES
        for node in parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert undocumented == []
