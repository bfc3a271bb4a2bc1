"""Checkpoints of older versions, in which a block had a field for each role, load into blocks of sublayers.

An older version wrote the checkpoints in `fixtures/checkpoints` after two steps of each recipe below, together with the
losses of the next two steps. In that version, blocks were no tuples of sublayers, and sinks and norms after the
rotation were fields of the attention itself.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from haste import same_trees
from nn_reference import randomised
from resumed_runs import copy

from eqformer import Batch, models, nn, training
from eqformer.training.checkpoint._contents import match_saved_names


FIXTURES = Path(__file__).parent.parent / "fixtures" / "checkpoints"
KEY = jax.random.key(7)
VOCAB, ROWS, SEQ = 19, 2, 6
GEMMA4: dict[str, Any] = {"window_layers": (0, 1), "window": 4, "head_dim": 4, "global_head_dim": 4}
GEMMA4 |= {"global_kv_heads": 1, "experts": 3, "top_k": 2, "expert_mlp": 4, "reading_layers": 1, "max_seq": 32}
CONFIGS: dict[str, Any] = {
    "llama": models.LlamaConfig(vocab=VOCAB, embed=8, layers=2, heads=2, kv_heads=1, mlp=12, max_seq=32),
    "gpt2": models.GPT2Config(vocab=VOCAB, embed=8, layers=2, heads=2, max_seq=32, dropout=0.3),
    "gemma4": models.Gemma4Config(VOCAB, 8, 2, 2, 1, 12, **GEMMA4, input_mlp=4, input_vocab=VOCAB),
    "t5": models.T5Config(VOCAB, 8, 2, 2, 12, head_dim=4, ranges=4, farthest=8),
    "cohere": models.CohereConfig(vocab=VOCAB, embed=8, layers=2, heads=2, kv_heads=1, mlp=12, max_seq=32),
    "falcon_h1": models.FalconH1Config(
        vocab=VOCAB,
        embed=8,
        layers=2,
        heads=2,
        kv_heads=1,
        mlp=12,
        head_dim=4,
        net_heads=2,
        net_kv_heads=1,
        net_head_dim=4,
        net_v_dim=4,
        max_seq=32,
    ),
    "gpt_oss": models.GPTOSSConfig(
        VOCAB,
        8,
        2,
        2,
        1,
        4,
        window_layers=(0,),
        window=4,
        experts=3,
        top_k=2,
        head_dim=4,
        scaling=None,
        max_seq=32,
    ),
    "hunyuan_v1_dense": models.HunyuanConfig(VOCAB, 8, 2, 2, 1, 12, head_dim=4, max_seq=32),
}


def batch(name: str, number: int) -> Batch:
    """Return the batch of a step, with a source for an encoder."""
    ids = np.random.default_rng(number).integers(0, VOCAB, (3, ROWS, SEQ)).astype(np.int32)
    return Batch(
        ids=ids[0],
        targets=ids[1],
        weights=np.ones((ROWS, SEQ), np.float32),
        examples=np.arange(ROWS, dtype=np.int32) + ROWS * number,
        source_ids=ids[2] if name == "t5" else None,
    )


def build(name: str, key: jax.Array) -> nn.Transformer:
    """Return the model before the first step."""
    return models.FAMILIES[name].build(CONFIGS[name], key=key)


def initial_state(name: str, model: nn.Transformer) -> training.TrainState:
    """Return the state before the first step."""
    return training.init_state(model, optimizer_of(name, model))


def optimizer_of(name: str, model: Any) -> training.Optimizer:
    """Return the optimizer of a recipe."""
    return (training.muon if name == "llama" else training.adamw)(model, rate=training.constant(0.05))


def recipe(name: str) -> tuple[training.TrainState, training.Step]:
    """Return the state before the first step, and the step."""
    state = initial_state(name, eqx.filter_jit(build)(name, jax.random.key(3)))
    return state, training.make_step(training.next_token_loss, optimizer_of(name, state.model))


def write_fixture(name: str, folder: Path) -> None:
    """Write a recipe's checkpoint after two steps and, beside it, the losses of the next two."""
    state, step = recipe(name)
    losses = []
    for number in range(4):
        if number == 2:
            with training.Checkpointer(folder / name) as checkpointer:
                checkpointer.save(state, 2, {"name": name})
        state, metrics = step(state, batch(name, number), KEY)
        losses.append(float(metrics["loss"]))
    with zipfile.ZipFile(FIXTURES / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((folder / name).rglob("*")):
            archive.write(path, path.relative_to(folder / name).as_posix())
    (FIXTURES / f"{name}.json").write_text(json.dumps({"losses": losses[2:]}) + "\n")


@pytest.mark.by_default("llama", "gemma4", "t5")
@pytest.mark.parametrize("name", CONFIGS)
def test_each_array_has_one_former_name(name, tmp_path):
    zipfile.ZipFile(FIXTURES / f"{name}.zip").extractall(tmp_path)
    state = eqx.filter_eval_shape(lambda key: initial_state(name, build(name, key)), KEY)
    checkpointer = training.Checkpointer(tmp_path)
    checkpointer.check(state)
    checkpointer.check({"model": state.model}, partial=True)
    assert not any("sublayers" in leaf or "branches" in leaf for leaf in checkpointer.leaves())
    reordered = eqx.tree_at(lambda s: s.model.stacks[0].blocks, state, nn.SuperBlock((state.model.stacks[0].blocks,)))
    with pytest.raises(training.CheckpointError, match="is in the checkpoint and not in the model"):
        checkpointer.check(reordered)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.grid) for name in CONFIGS if name != "llama")]
)
def test_training_goes_on_from_an_older_checkpoint(name, tmp_path):
    zipfile.ZipFile(FIXTURES / f"{name}.zip").extractall(tmp_path)
    model = randomised(eqx.filter_eval_shape(lambda key: build(name, key), KEY), deviation=1.0)
    state = eqx.filter_jit(initial_state)(name, model)
    step = training.make_step(training.next_token_loss, optimizer_of(name, state.model))
    with training.Checkpointer(tmp_path) as checkpointer:
        restored, metadata = checkpointer.restore(state)
        model = checkpointer.restore({"model": state.model}, partial=True)[0]["model"]
    assert metadata["name"] == name and same_trees(model, restored.model)
    losses = []
    for number in (2, 3):
        restored, metrics = step(restored, batch(name, number), KEY)
        losses.append(float(metrics["loss"]))
    expected = json.loads((FIXTURES / f"{name}.json").read_text())["losses"]
    assert losses == pytest.approx(expected, rel=1e-5)
    state = copy(state, jax.devices()[0])  # where a restored state is, so that the step is compiled once
    fresh = [float(step(state, batch(name, 2), KEY)[1]["loss"])]  # the control: the loss before any step
    assert fresh != pytest.approx(expected[:1], rel=1e-3)


def test_arrays_that_moved_into_parts_of_an_attention_keep_their_names_where_they_stayed():
    """Norms before the rotation stay; sinks and norms after it moved, in blocks of today and of before."""
    block, layer = "model.stacks.0.blocks.", "model.stacks.0.blocks.sublayers.0.layer."
    ends = ("sinks", "query_norm.weight", "key_norm.weight")
    moved = ("scores.sinks", "rotary.query_norm.weight", "rotary.key_norm.weight")
    for former in (f"{block}mixer.layer.", layer):
        saved = [former + end for end in ends]
        names = match_saved_names(saved, {layer + end for end in moved})
        assert names == {layer + new: name for new, name in zip(moved, saved)}
        stayed = match_saved_names(saved, {layer + "scores.sinks", *(layer + end for end in ends[1:])})
        assert [*stayed] == [layer + "scores.sinks", *(layer + end for end in ends[1:])]


def test_a_field_of_a_mixer_may_have_the_name_of_a_former_field_of_a_block():
    block, saved = "stacks.0.blocks.", ["stacks.0.blocks.mixer.scalar", "stacks.0.blocks.mixer.cross.weight"]
    assert match_saved_names(saved, set()) == {name: name for name in saved}
    wanted = {f"{block}sublayers.0.scalar", f"{block}sublayers.0.cross.weight"}
    assert set(match_saved_names(saved, wanted)) == wanted
