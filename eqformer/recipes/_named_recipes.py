"""Built-in recipes by name, recipes in a user's Python file (`FILE.py:NAME`), and recipes in the JSON of run folders.

The depth of the recipe `speedrun` decides its width, heads, batch, learning rates and number of tokens.
"""

import dataclasses
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from .._annotation_checks import name_class
from .._files import dataclass_from_json, dataclass_to_json, read_json, read_utf8, UnknownKindError
from ..models import FAMILIES, preset, presets, SpeedrunConfig
from ..nn import Execution, Precision, RotaryScaling
from ..parallel import ParallelConfig
from ..training import Optimization
from ._recipe import add_flags, Mesh, Recipe


DEPTHS = (*range(1, 8), *range(8, 33, 2))
"""The depths of the recipe speedrun: its width, 64 channels for each layer, must divide into heads."""
TOKENS_PER_PARAMETER = 20.0
"""Training tokens (here bytes) for each parameter in matrices, as in Hoffmann et al. 2022 (arXiv 2203.15556)."""
TOKENS_AT_ONCE = 2**15  # Tokens of a microbatch; their activations fit in 80 GB at depth 12.


def count_matrix_parameters(depth: int) -> int:
    """Return the number of parameters in the matrices at a depth: each layer has 12 times the squared width."""
    return 12 * depth * (64 * depth) ** 2


def speedrun_recipe(
    depth: int = 2, *, tokens_per_parameter: float = TOKENS_PER_PARAMETER, tokens: float | None = None
) -> Recipe:
    """A byte-level model with the layers of nanoGPT speedruns, for NorMuon; --depth N decides all sizes (default 2).

    The model is trained on `tokens` tokens, by default `tokens_per_parameter` for each parameter in the matrices.
    Raises a `ValueError` for a depth that is not in `DEPTHS`.
    """
    # Width and heads: nanochat's aspect ratio of 64 (github.com/karpathy/nanochat, scripts/base_train.py) and heads of
    # 128 channels, which fill a GPU's tiles. Below depth 8, heads have 64 channels, so that most widths have several.
    head_dim = 64 if depth < 8 else 128
    embed = 64 * depth
    if depth not in DEPTHS:
        nearest = sorted(sorted(DEPTHS, key=lambda fit: abs(fit - depth))[:2])
        raise ValueError(
            f"speedrun_recipe(depth={depth}): the depths are 1 to 7, and the even numbers from 8 to {DEPTHS[-1]}, "
            "because the width, 64 channels for each layer, must divide into heads; take "
            f"{' or '.join(map(str, nearest))}."
        )
    # Horizon (the number of training tokens): a constant number of tokens for each parameter of the matrices.
    tokens = tokens_per_parameter * count_matrix_parameters(depth) if tokens is None else tokens
    # Batch: the critical batch grows with the horizon as a power law (arXiv 2505.13738; nanochat's exponent is 0.38
    # from depth 12 on). Here the exponent of 3/4 goes through two points: 1,024 tokens for a horizon of a million,
    # where a larger batch was worse, and a quarter of a million tokens at depth 12.
    batch_tokens = 2 ** round(math.log2(1024 * (tokens / 1e6) ** 0.75))
    # Rows: deeper models use longer contexts. In three of four layers, a token sees a quarter of a row (nanochat).
    seq = min(2048, max(256, 2 ** math.ceil(math.log2(128 * depth))))
    batch = max(1, batch_tokens // seq)
    steps = max(1, round(tokens / (batch * seq)))
    # Learning rates: nanochat's rates at depth 12. The same rates should suit all depths, because updates of hidden
    # matrices have the spectral norm sqrt(outputs / inputs) (arXiv 2310.17813), and the head's rate is divided by the
    # width (muP, arXiv 2203.03466). At depth 2, with 4,096 tokens a step and the widths 64 and 128, 0.02 was the best
    # of the rates 0.005, 0.01, ..., 0.08. The rate grows with the square root of the tokens of a step: with 256 tokens,
    # 0.005 was the best rate at depths 1 and 2, and with 1,024 tokens, 0.01 was best at depth 3 (docs/learning.md).
    optimizer = Optimization(
        name="normuon",
        learning_rate=0.02 * min(1.0, math.sqrt(batch * seq / 4096)),
        rates="warmup-stable-decay",
        weight_decay=0.1,
        cautious=True,
        decay_tables=False,
        update_size="spectral",
        embedding_rate=10.0,
        head_rate=0.3 * 768 / embed,
    )
    is_large = depth >= 8
    return Recipe(
        model=SpeedrunConfig(
            256, embed, depth, embed // head_dim, embed // head_dim, 4 * embed, head_dim=head_dim, window=seq // 4
        ),
        steps=steps,
        seq=seq,
        batch=batch,
        optimizer=optimizer,
        precision=Precision("float32", "bfloat16") if is_large else Precision(),
        checkpoint_every=max(200, steps // 10),
        validate_every=max(100, steps // 20),
        sample_every=max(200, steps // 4),
        plan=ParallelConfig(zero=1, microbatches=max(1, batch * seq // TOKENS_AT_ONCE)),
    )


def describe_speedrun(recipe: Recipe) -> str:
    """Return the sizes, the number of tokens and the learning rates of a recipe with a speedrun model, in two lines."""
    model, optimizer = recipe.model, recipe.optimizer
    assert isinstance(model, SpeedrunConfig)
    parameters, tokens = 12 * model.layers * model.embed**2, recipe.steps * recipe.batch * recipe.seq
    window = "" if model.window is None else f", windows of {model.window}"
    return (
        f"depth {model.layers}: width {model.embed}, {model.heads} heads of {model.head_size}{window}; "
        f"{parameters:,} parameters in matrices\n"
        f"           {recipe.steps:,} steps of {recipe.batch} x {recipe.seq} tokens, {tokens:,} in all "
        f"({tokens / parameters:.3g} a parameter); {optimizer.name} at {optimizer.learning_rate:g}, embeddings at "
        f"{optimizer.learning_rate * optimizer.embedding_rate:.3g}, head at "
        f"{optimizer.learning_rate * optimizer.head_rate:.3g}"
    )


# Settings of nanochat (github.com/karpathy/nanochat, scripts/base_train.py and nanochat/optim.py), except that here the
# momenta do not change during the run; docs/learning.md has the losses.
_AS_NANOCHAT = Optimization(
    name="normuon",
    learning_rate=0.02,
    rates="warmup-stable-decay",
    momentum=0.9,
    b1=0.8,
    weight_decay=0.28,
    cautious=True,
    decay_tables=False,
    update_size="spectral",
    vector_rate=0.25,
    clip=None,
)


def default_recipe() -> Recipe:
    """A byte-level LFM2 of 0.5 million parameters, on the sources of Python's standard library.

    NorMuon trains it with 4 rows a step; docs/learning.md compares these choices with others.
    """
    return _small_batches("lfm2-byte-500k", 1700, Optimization(name="normuon", learning_rate=5.5e-3))


def llama_recipe() -> Recipe:
    """A byte-level Llama of 0.8 million parameters: its 4 equal layers and 16 rows can be split over every mesh."""
    return Recipe(model=preset("llama-byte-1m"), steps=320, optimizer=_AS_NANOCHAT)


def moe_recipe() -> Recipe:
    """A mixture of eight experts, two for each token: 0.8 of its 2.6 million parameters are active."""
    return _small_batches("mixtral-byte-3m", 1280, dataclasses.replace(_AS_NANOCHAT, decay_share=0.65))


def adamw_recipe() -> Recipe:
    """The model of the recipe llama, trained by AdamW, which needs more than twice the steps: 800."""
    return Recipe(model=preset("llama-byte-1m"))


def _small_batches(model: str, steps: int, optimizer: Optimization) -> Recipe:
    """Return a recipe of 4 rows a step; its validation reads as many tokens as validations with 16 rows do."""
    return Recipe(
        model=preset(model),
        steps=steps,
        batch=4,
        optimizer=optimizer,
        log_every=20,
        checkpoint_every=400,
        validate_every=400,
        validation_batches=64,
        sample_every=400,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "default": default_recipe,
    "llama": llama_recipe,
    "moe": moe_recipe,
    "adamw": adamw_recipe,
    "speedrun": speedrun_recipe,
}


_FULL_REMAT = Execution(remat="full")
_ADAMW = Optimization(name="adamw", learning_rate=3e-4)
_ADAMW_8BIT = Optimization(name="adamw", learning_rate=3e-4, moments="8bit")


def _large_recipe(
    model: str,
    mesh: Mesh,
    batch: int,
    seq: int,
    execution: Execution = _FULL_REMAT,
    optimizer: Optimization = _ADAMW,
    **choices: Any,
) -> Recipe:
    return Recipe(
        model=preset(model),
        batch=batch,
        seq=seq,
        optimizer=optimizer,
        precision=Precision("float32", "bfloat16"),
        execution=execution,
        mesh=mesh,
        plan=ParallelConfig(zero=3, **choices),
    )


_SPLIT_BY_TOKEN: dict[str, Any] = {"residual": "sequence"}

# Recipes that train published models on many accelerators, by the names of the model and the accelerators: each has the
# topology to plan for, and the recipe. The recipes are planned and compiled (docs/accelerators-planning.md), and were
# never run. All train by AdamW, with float32 parameters and products in bfloat16. Where float32 moments do not fit,
# moments have 8 bits and are in host memory.
LARGE: dict[str, tuple[str, Recipe]] = {
    "llama-3-8b-v5e-256": ("v5e:16x16", _large_recipe("llama-3-8b", Mesh(fsdp=256), 256, 4096)),
    "llama-3-8b-h100-8": ("h100:8", _large_recipe("llama-3-8b", Mesh(fsdp=8), 16, 4096)),
    "llama-3-8b-h100-64": ("h100:8x8", _large_recipe("llama-3-8b", Mesh(fsdp=64), 128, 4096, Execution())),
    "llama-3-70b-v5p-512": ("v5p:8x8x8", _large_recipe("llama-3-70b", Mesh(fsdp=512), 512, 8192)),
    "llama-3-70b-h100-128": (
        "h100:8x16",
        _large_recipe("llama-3-70b", Mesh(fsdp=16, tensor=8), 32, 8192, **_SPLIT_BY_TOKEN),
    ),
    "llama-3.1-405b-v5p-2048": (
        "v5p:8x16x16",
        _large_recipe("llama-3.1-405b", Mesh(fsdp=256, tensor=8), 512, 8192, **_SPLIT_BY_TOKEN),
    ),
    "mixtral-8x7b-v5p-128": ("v5p:4x4x8", _large_recipe("mixtral-8x7b", Mesh(fsdp=16, expert=8), 128, 4096)),
    "deepseek-v3-v5p-2048": ("v5p:8x16x16", _large_recipe("deepseek-v3", Mesh(fsdp=32, expert=64), 2048, 4096)),
    "deepseek-v3-tpu7x-512": ("tpu7x:8x8x8", _large_recipe("deepseek-v3", Mesh(fsdp=32, expert=32), 1024, 4096)),
    "deepseek-v3-h100-256": (
        "h100:8x32",
        _large_recipe(
            "deepseek-v3", Mesh(fsdp=8, expert=32), 256, 4096, optimizer=_ADAMW_8BIT, optimizer_memory="pinned_host"
        ),
    ),
    "qwen3-30b-a3b-h100-64": ("h100:8x8", _large_recipe("qwen3-30b-a3b", Mesh(fsdp=8, expert=8), 256, 4096)),
}


def find_recipe(name: str, depth: int | None = None) -> Recipe:
    """Return the recipe of a name: in `RECIPES`, in `LARGE`, in a user's file (`FILE.py:NAME`), or a preset's name.

    The recipe of a preset trains that model by AdamW in 800 steps. `depth` is the depth of the recipe `speedrun`.
    Raises a `ValueError` for an unknown name, and for a `depth` with any other recipe.
    """
    if depth is not None:
        if name != "speedrun":
            raise ValueError(
                f"--depth {depth} --recipe {name}: only the recipe speedrun has a depth that decides its other sizes; "
                "give --recipe speedrun, or --model.layers."
            )
        try:
            return speedrun_recipe(depth)
        except ValueError as error:
            raise ValueError(add_flags(str(error), {"--depth": depth})) from error
    if name in RECIPES:
        return RECIPES[name]()
    if name in LARGE:
        return LARGE[name][1]
    if user_file(name) is not None:
        return load_user_recipe(name)
    if name in presets():
        return Recipe(model=preset(name))
    raise ValueError(
        f"--recipe {name}: there is no such recipe. The recipes are {', '.join(RECIPES)}; each preset of "
        "eqformer.models is a recipe, too (AdamW, 800 steps). For a recipe of your own, give FILE.py:NAME. Recipes for "
        f"many machines are {', '.join(LARGE)}."
    )


_MODULES: dict[str, ModuleType] = {}
"""Modules of users' files, by the file's text: each text runs once, so that a family in it is registered once."""

_KINDS = {
    kind.__name__: kind
    for kind in (
        Recipe,
        *(type(field.default) for field in dataclasses.fields(Recipe) if dataclasses.is_dataclass(field.default)),
        *(family.config for family in FAMILIES.values()),
        *RotaryScaling.__subclasses__(),
    )
}
_KINDS["Choices"] = ParallelConfig  # The name of ParallelConfig in folders of older runs.


def user_file(name: str) -> Path | None:
    """Return the Python file of a recipe's name; None if the name is not `FILE.py:NAME`."""
    parts = _split_name(name)
    return None if parts is None else parts[0]


def short_name(name: str) -> str:
    """Return the default name of a run's folder: `tiny` for the recipe `path/to/file.py:tiny`."""
    parts = _split_name(name)
    if parts is None:
        return name
    return parts[0].stem if parts[1] == "recipe" else parts[1]


def load_user_recipe(name: str) -> Recipe:
    """Call the function in a user's file that returns a recipe; raises a `ValueError` if there is no such function."""
    function = load_user_function("--recipe", name, "recipe")
    recipe = function()
    if not isinstance(recipe, Recipe):
        call = f"{getattr(function, '__name__', name)}()"
        raise ValueError(f"--recipe {name}: {call} returned {name_class(recipe)}; return a recipes.Recipe.")
    return recipe


def load_user_function(flag: str, name: str, result: str) -> Callable[..., Any]:
    """Run a user's file, and return a function that the file defines.

    Raises a `ValueError` for a missing file or function.

    Args:
        flag: The flag that named the function; errors begin with this flag.
        name: The file and the function, as `FILE.py:NAME`.
        result: A noun for the function's result, such as "recipe"; also the function's name if there is no `:NAME`.
    """
    parts = _split_name(name, result)
    if parts is None:
        raise ValueError(f"{flag} {name}: this names no function; give FILE.py:NAME of a function in a Python file.")
    file, function_name = parts
    if not file.is_file():
        raise ValueError(f"{flag} {name}: there is no file {file}; give FILE.py:NAME of a function in a Python file.")
    try:
        module = load_module(file)
    except Exception as error:
        reason = f"running {file} raised {type(error).__name__}: {error}"
        raise ValueError(f"{flag} {name}: {reason}; correct the file.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        defined = sorted(
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        )
        raise ValueError(
            f"{flag} {name}: {file} has no function {function_name!r} that returns the {result}; the file defines "
            f"{', '.join(defined) or 'no function'}: give {file}:NAME."
        )
    return function


def load_module(file: Path) -> ModuleType:
    """Run a user's file and return its module; the same text is run only once in a process."""
    text = read_utf8(file)
    if text not in _MODULES:
        spec = importlib.util.spec_from_file_location(f"own_recipe_{len(_MODULES)}", file.absolute())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # Dataclasses look their module up there.
        spec.loader.exec_module(module)
        _MODULES[text] = module
    return _MODULES[text]


def user_classes(file: Path) -> dict[str, type]:
    """Return the dataclasses that a file defines, by name, if this process has already run the file; else none."""
    module = _MODULES.get(read_utf8(file)) if file.is_file() else None
    classes = [] if module is None else [value for value in vars(module).values() if isinstance(value, type)]
    return {
        kind.__name__: kind
        for kind in classes
        if dataclasses.is_dataclass(kind) and module is not None and kind.__module__ == module.__name__
    }


def _split_name(name: str, default: str = "recipe") -> tuple[Path, str] | None:
    """Return the file and the function of `FILE.py:NAME`, or of `FILE.py` with the default as the function."""
    match = re.fullmatch(r"(.+\.py)(?::(\w+))?", name)
    return None if match is None else (Path(match[1]), match[2] or default)


def from_json(value: Any, classes: Mapping[str, type] = MappingProxyType({})) -> Any:
    """Return the recipe that `dataclass_to_json` wrote; `classes` are the classes of the user's file, by name.

    Raises a `ValueError` for a class or a field that this version does not know.
    """
    return dataclass_from_json(value, {**_KINDS, **classes}, "recipe.json")


def read_recipe(path: Path, classes: Mapping[str, type] = MappingProxyType({})) -> tuple[str, Recipe]:
    """Return the name and the recipe in a `recipe.json`, which is data: no code of the folder is run.

    Some recipes have values of classes that the user's file defines; the folder has a copy of that file. Raises a
    `ValueError` for such a recipe, unless this process has run the same code, by `--recipe FILE.py:NAME` or by
    `trust_recipe`. `classes` are further known classes, by name.
    """
    try:
        return _read_recipe(path, classes)
    except UnknownKindError as error:
        if not (source := _source_beside(path)).exists():
            raise
        raise ValueError(
            f"{path}: the class {error.kind} of this recipe is defined by the code in {source}, and code from a run's "
            f"folder is run only if you say so: read the file and, if you trust it, name the folder {path.parent} and "
            "add --trust-recipe."
        ) from error


def _read_recipe(path: Path, classes: Mapping[str, type]) -> tuple[str, Recipe]:
    content = read_json(path)
    with _name_file_in_errors(path):
        recipe = from_json(content["recipe"], {**user_classes(_source_beside(path)), **classes})
        if not isinstance(content["name"], str):
            raise TypeError(f"name is {content['name']!r:.100}")
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe is {recipe!r:.100}")
        return content["name"], recipe


def trust_recipe(path: Path, note: Callable[[str], None]) -> None:
    """Run the code beside a `recipe.json` if that code defines classes of the recipe, after a `note` that says so."""
    source = _source_beside(path)
    if not path.is_file() or not source.is_file():
        return
    try:
        _read_recipe(path, {})
    except UnknownKindError:
        note(f"running the code in {source}, as --trust-recipe says")
        load_module(source)


def needs_code(recipe: Recipe) -> bool:
    """Return whether a recipe has values of classes that only a user's file defines."""
    try:
        from_json(dataclass_to_json(recipe))
    except UnknownKindError:
        return True
    return False


@contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Turn errors of a file's content into a `ValueError` that names the file."""
    try:
        yield
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: this is not a recipe that a run wrote ({type(error).__name__}: {error}).") from error


def _source_beside(path: Path) -> Path:
    """Return the path at which a run's folder has its copy of the user's file, beside `recipe.json`."""
    return path.with_suffix(".py")
