"""Every public call names an array of a wrong type, rank or size in its error, with and without the import hook."""

import inspect
import os
import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Int

import eqformer
from eqformer import generation, kernels, nn, training
from eqformer._annotation_checks import add_article, ArrayRule, checked, rules_of
from eqformer.training.optimizer import _optimizer


LONGEST = 400  # characters of an error
SIZES = {"embed": 8, "seq": 5, "kv_seq": 7, "batch": 2, "tokens": 10, "vocab": 12, "kv_heads": 2, "heads": 4}
# Files whose calls take whatever JAX takes: functions of numbers, what modules call of each other, and keys and rates.
UNCHECKED = (
    *(
        "_dtype",
        "_precision",
        "_lora",
        "_balance",
        "_indexer",
        "_platform",
    ),
    *("_optimizer", "_learning_rates", "_loss_aux", "_loop", "_contents", "_pictures"),
    "kernels._platform",
    "kernels._quantized_matmul",
)
UNCHECKED_CALLS = {
    *nn.ACTIVATIONS,
    *("BoundedActivation", "ScaledActivation", "XIELU"),
    "first_non_finite",
    "initial_state",
    "index_layer",
    "update_layer",
    "run_layers",
}


def public_calls() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """The name in errors, the call and its file, of public functions and of instances without fields."""
    for room in (nn, kernels, training, generation, eqformer):
        for name, thing in vars(room).items():
            if name.startswith("_") or inspect.ismodule(thing) or not callable(thing):
                continue
            if not inspect.isclass(thing):
                yield name, thing, thing.__module__
            elif not inspect.isabstract(thing) and issubclass(thing, eqx.Module):
                blank = object.__new__(thing)
                for method in ("__call__", "encode", "embed", "unembed", "predict", "product", "update"):
                    if method in dir(thing):
                        label = name if method == "__call__" else f"{name}.{method}"
                        yield label, getattr(blank, method), thing.__module__
                if hasattr(thing, "__argument_rules__"):
                    yield name, thing, thing.__module__


def array_like(rule: ArrayRule, kind: str | None = None, rank: int | None = None, changed: str = "") -> Any:
    """An array that fits the rule, but for its kind, its rank, or the size of the dim `changed`."""
    sizes = [SIZES.get(dim.lstrip("*#"), 3) + (dim == changed) for dim in rule.dims if dim != "..."]
    sizes = sizes if rank is None else [2] * rank
    kind = rule.kinds[0][2] if kind is None else kind
    if kind == "keys":
        return jax.random.split(jax.random.key(0), tuple(sizes)) if sizes else jax.random.key(0)
    return np.zeros(sizes, {"integers": np.int32, "floats": np.float32, "booleans": bool}[kind])


def fitting(rules: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Arguments that fit, as far as these tests can tell."""
    arguments: dict[str, Any] = dict.fromkeys(required)
    for name, rule in rules.items():
        if rule.arrays:
            arguments[name] = array_like(rule.arrays[0])
        elif nn.Tokens in rule.classes and name in required:
            arguments[name] = nn.positions_like((2, 5))
        elif eqformer.Batch in rule.classes:
            ids = np.zeros((2, 5), np.int32)
            arguments[name] = eqformer.Batch(ids, ids, np.ones((2, 5), np.float32), np.arange(2, dtype=np.int32))
    return arguments


def wrong_arrays(name: str, rules: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is wrong, and an array that is, for one argument of a call."""
    rule = rules[name].arrays[0]
    kinds = {kind for array in rules[name].arrays for *_, kind, _ in array.kinds}
    for kind in ("floats", "integers"):
        if kind not in kinds and not (kind == "integers" and "keys" in kinds and not rule.dims):
            yield kind, array_like(rule, kind)
    if len(rules[name].arrays) > 1:
        return
    if rule.dims and rule.variadic is None:
        yield "one dim more", array_like(rule, rank=len(rule.dims) + 1)
    if len(rule.dims) - (rule.variadic is not None) > 0:
        yield "no dims", array_like(rule, rank=0)
    for dim in rule.dims:
        others = [other for other in rules if other != name and any(dim in each.dims for each in rules[other].arrays)]
        if dim[0] not in "#_." and others:
            yield f"another {dim}", array_like(rule, changed=dim)


def complaints() -> tuple[list[str], int]:
    """Calls that take a wrong array, or tell it by another error or at length; and how many arrays were tried."""
    complained, tried = [], 0
    for label, call, owner in public_calls():
        try:
            signature = inspect.signature(call)
        except (ValueError, TypeError):
            continue
        rules = typing.cast(dict, getattr(call, "__argument_rules__", None)) or rules_of(signature)
        if owner.endswith(UNCHECKED) or label in UNCHECKED_CALLS or not rules:
            continue
        parameters = signature.parameters.values()
        required = [each.name for each in parameters if each.default is each.empty and each.kind < 4 and each.kind != 2]
        for name in [name for name, rule in rules.items() if rule.arrays]:
            for what, wrong in wrong_arrays(name, rules):
                tried += 1
                try:
                    call(**(fitting(rules, required) | {name: wrong}))
                    complained.append(f"{label}({name}), {what}: taken")
                except Exception as error:
                    told, text = isinstance(error, ValueError), str(error)
                    shown = text.startswith((f"{label}(", f"{label.partition('.')[0]}(")) and re.search(
                        rf"\b{name}\b|\bx\b", text
                    )
                    if not told or not shown or len(text) > LONGEST:
                        complained.append(f"{label}({name}), {what}: {type(error).__name__}: {text[:200]}")
    return complained, tried


def test_every_public_call_names_a_wrong_array():
    complained, tried = complaints()
    assert complained == [] and tried > 250


def model() -> nn.Transformer:
    """Two layers of attention."""
    block = lambda key: nn.Block(nn.Residual(nn.Attention(embed=8, heads=2, head_dim=4, key=key)))
    table = nn.Embedding(vocab=12, embed=8, key=jax.random.key(0))
    return nn.Transformer(table, (nn.Stack(block, 2, key=jax.random.key(1)),), nn.RMSNorm("embed", embed=8))


def test_trees_that_do_not_fit_are_told():
    """Of a stack's weights, caches and what is trained, whose shapes no annotation has."""
    whole, ids = model(), jnp.zeros((2, 5), jnp.int32)
    weight = lambda m: m.stacks[0].blocks.mixer.layer.output.weight
    tokens, cache = nn.right_padded(jnp.array([5, 3]), 5), whole.init_cache(2, 8)
    trained = lambda pick: _optimizer.trained_parameters(whole, pick)
    stack_rule = "blocks.sublayers[0].layer.output.weight has shape (8, 2, 4), but .* 2 layers .* equinox.tree_at"
    table = {
        f"Stack(x): {stack_rule}": lambda: eqx.tree_at(weight, whole, weight(whole)[0])(ids),
        "Linear: its weight has the shape (4, 8) in a layer": lambda: eqx.tree_at(
            lambda m: m.stacks[0].blocks.mixer.layer.query.weight, whole, jnp.zeros((2, 4, 8))
        )(ids),
        "Transformer(cache): its keys of shape (2, 3, 2, 8, 4) .* has (2,) rows; make": lambda: whole(
            ids, tokens, whole.init_cache(3, 8)
        ),
        "caches, but cache is a KVCache; make the cache by init_cache": lambda: whole(ids, tokens, cache[0]),
        "Transformer(tokens of type .*): it must be of the class Tokens; make one, as Tokens(positions)": lambda: whole(
            ids, typing.cast(nn.Tokens, ids)
        ),
        "Optimizer(trained=...): it picks stacks[0].numbers, int32 of shape (2,), which has no gradient": lambda: (
            trained(lambda m: eqx.filter(m, eqx.is_array))
        ),
        "Optimizer(trained=...): for a Transformer the function must return a tree like the model": lambda: trained(
            jax.tree.leaves
        ),
        "generate(lengths=[1.5, 2]): it holds float64; give integers": lambda: generation.generate(
            whole, ids, lengths=typing.cast(list, [1.5, 2]), max_new_tokens=2, key=jax.random.key(0)
        ),
        "generate(end_of_text=1.5): it holds float64; give integers": lambda: generation.generate(
            whole, ids, end_of_text=typing.cast(int, 1.5), max_new_tokens=2, key=jax.random.key(0)
        ),
    }
    for rule, call in table.items():
        with pytest.raises(ValueError, match=re.escape(rule).replace(r"\.\*", ".*")) as caught:
            call()
        assert len(str(caught.value)) <= LONGEST
    whole(ids, tokens, cache)
    assert trained(training.trainable).stacks[0].numbers is None


def test_a_call_without_the_check_is_found(monkeypatch):
    """The control: a function whose annotations nothing checks, and the same one checked."""

    def plain(x: Int[jax.Array, "batch seq"]) -> None:
        """Do nothing."""

    monkeypatch.setattr(generation, "plain", plain, raising=False)
    assert {each.partition(")")[0] for each in complaints()[0]} == {"plain(x"}
    monkeypatch.setattr(generation, "plain", checked(plain))
    assert complaints()[0] == []


@pytest.mark.quick
def test_names_of_classes_have_the_right_article():
    with_an = ("int", "AttentionMixer", "MLP", "RMSNorm", "LFM2Config", "ExpertChoiceRouter", "UnknownNorm")
    with_a = ("list", "Linear", "NoneType", "GPT2Config", "UnionType", "UMT5Config", "UserNorm", "SpeedrunConfig")
    assert [add_article(name) for name in (*with_an, *with_a)] == [
        *(f"an {name}" for name in with_an),
        *(f"a {name}" for name in with_a),
    ]


def test_a_plain_field_of_a_wrong_type_is_told_as_shortly():
    """Of a batch, jaxtyping writes the annotations of all fields."""
    ids = np.zeros((2, 5), np.int32)
    arrays = (ids, ids, np.ones((2, 5), np.float32), np.arange(2, dtype=np.int32))
    for plain, wanted in (({"documents": "two"}, "a whole number"), ({"group": 1.5}, "a whole number")):
        with pytest.raises(ValueError, match=rf"Batch\({[*plain][0]}=.*give {wanted}\.$"):
            eqformer.Batch(*arrays, **typing.cast(dict, plain))
    assert eqformer.Batch(*arrays, group=2, documents=None).group == 2


@pytest.mark.grid
def test_every_public_call_names_a_wrong_array_without_the_import_hook():
    folder = pathlib.Path(__file__).parent
    code = "import test_calls; complained, tried = test_calls.complaints(); print(complained, tried > 250)"
    environment = os.environ | {"PYTHONPATH": f"{folder}:{folder.parent}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[] True", done.stdout + done.stderr


def attention(kv_heads: int = 2) -> nn.Attention:
    return nn.Attention(embed=8, heads=4, kv_heads=kv_heads, head_dim=2, key=jax.random.key(0))


X, TOKENS = jnp.zeros((2, 5, 8)), nn.positions_like((2, 5))
# Calls that a user gets wrong, and what each message says: module, argument, dims, both sizes.
WRONG_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "wrong rank": (
        lambda: attention()(X[0, 0]),
        "Attention(x of shape (8,)): it must have the dims (*batch, seq, embed), at least 2 of them; add the missing "
        "dims, as x[None].",
    ),
    "wrong dim": (
        lambda: attention()(X[..., :6]),
        "Attention(x of shape (2, 5, 6)): with the weights of this Attention it has shape (2, 5, 8), its dims being "
        "(*batch, seq, embed); give it that shape.",
    ),
    "wrong dtype": (
        lambda: attention()(X.astype("int32")),
        "Attention(x of int32 and shape (2, 5, 8)): it must hold floats, with the dims (*batch, seq, embed); cast it, "
        "as x.astype('float32'), or give the array that is meant.",
    ),
    "swapped arguments": (
        lambda: attention()(typing.cast(Any, TOKENS), typing.cast(Any, X)),
        "Attention(x of type Tokens): it must be an array of floats, with the dims (*batch, seq, embed); give each "
        "argument by its name, if two are swapped.",
    ),
    "missing batch axis": (
        lambda: attention()(X, nn.Tokens(jnp.arange(5))),
        "Attention(tokens.positions of shape (5,)): with x of shape (2, 5, 8) it has shape (2, 5), its dims being "
        "(*batch, seq); give it that shape.",
    ),
    "wrong head count": (
        lambda: attention()(X, TOKENS, attention(kv_heads=4).init_cache((2,), capacity=8)),
        "Attention(cache.keys of shape (2, 4, 8, 2)): with the weights of this Attention it has shape (2, 2, 8, 2), "
        "its dims being (*batch, kv_heads, kv_seq, head_dim); give it that shape.",
    ),
    "cache too short": (
        lambda: attention()(X, TOKENS, attention().init_cache((2,), capacity=4)),
        "Attention(tokens, cache): tokens.positions of shape (2, 5) reach position 4, but kv_seq of the cache is 4, "
        "for the positions 0 to 3; make the cache by init_cache(..., capacity) with a capacity of at least 5.",
    ),
    "ids of floats": (
        lambda: nn.Embedding(vocab=12, embed=8, key=jax.random.key(0))(jnp.zeros((2, 5))),
        "Embedding(ids of float32 and shape (2, 5)): it must hold integers, with the dims (*batch, seq); cast it, as "
        "ids.astype('int32'), or give the array that is meant.",
    ),
    "mask of another length": (
        lambda: attention()(X, nn.Tokens(jnp.zeros((2, 4), jnp.int32))),
        "Attention(tokens.positions of shape (2, 4)): with x of shape (2, 5, 8) it has shape (2, 5), its dims being "
        "(*batch, seq); give it that shape.",
    ),
    "no PRNG key": (
        lambda: nn.Attention(embed=8, heads=2, head_dim=4, key=typing.cast(Any, None)),
        "Attention(key none): it must be an array of keys, with the dims (); make one by jax.random.key(seed).",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_has_a_short_message(name):
    call, message = WRONG_CALLS[name]
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
