"""Published families to transformers and back, where it is installed: fresh weights, logits, decoding, state dicts."""

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import pytest
from family_weights import ids_of, source_of, weight
from safetensors.numpy import save_file
from test_attributes import numbers_of, PUBLISHED
from test_published import close, decoded, ENCODERS, FIXTURES, float32s, RECORDED, run
from test_published_configs import meaning

from eqformer import models
from eqformer.models._folder import Folder


pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")


sys.path.append(str(FIXTURES))

import unlisted  # noqa: F401


def opened(folder: Path):
    """The model that transformers reads there; nothing is missing, left over or of another shape."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(loading.values()), loading
    return model.eval()


def made(folder: Path, name: str):
    """A case's model with weights other than the fixtures', saved by transformers."""
    (folder / "drawn").mkdir()
    arrays = {key: weight(f"fresh {key}", shape) for key, shape in RECORDED[name]["shapes"].items()}
    save_file(arrays, folder / "drawn" / "model.safetensors", metadata={"format": "pt"})
    (folder / "drawn" / "config.json").write_text(json.dumps(RECORDED[name]["config"]))
    model = opened(folder / "drawn")
    model.save_pretrained(folder / "theirs")
    return model


def logits_of(model, ids):
    with torch.no_grad():
        if not model.config.is_encoder_decoder:
            return model(torch.tensor(ids), use_cache=False).logits.numpy()
        source, mask = map(torch.tensor, source_of(ids))
        given = {"attention_mask": mask, "decoder_input_ids": torch.tensor(ids)}
        return model(source, **given, use_cache=False).logits.numpy()


def unlike(one, other) -> set[str]:
    """Names under which two models' states differ."""
    one, other = one.state_dict(), other.state_dict()
    return {
        name for name in {*one, *other} if not (name in one and name in other and torch.equal(one[name], other[name]))
    }


@pytest.mark.parametrize("name", RECORDED)
def test_from_transformers_and_back(name, tmp_path):
    theirs, ids = made(tmp_path, name), ids_of(RECORDED[name]["config"]["vocab_size"])
    ours, want = models.load(tmp_path / "theirs"), logits_of(theirs, ids)
    assert close(run(ours, jnp.asarray(ids, jnp.int32)), want, float32s(name))
    if name.split()[0] not in ENCODERS:
        assert close(decoded(ours, ids), want, float32s(name)) and not close(decoded(ours, ids[::-1]), want, 1e-2)
    # Some families' padding token is by default one that the small vocabulary has not, and then nothing loads.
    attributes = {"pad_token_id": RECORDED[name]["config"].get("pad_token_id")}
    numbers = models.read_config(tmp_path / "theirs")
    models.save(ours, tmp_path / "back", config=numbers, attributes=attributes, shard_bytes=20_000)
    back = opened(tmp_path / "back")
    assert unlike(theirs, back) == set() and (logits_of(back, ids) == want).all()


def test_an_encoders_vectors_are_those_of_transformers(tmp_path):
    theirs, ids = made(tmp_path, "modernbert biased"), ids_of(61)
    ours = models.load(tmp_path / "theirs")
    encoder: Any = eqx.tree_at(lambda m: m.norm, ours, ours.norm.norm)  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    with torch.no_grad():
        want = theirs.model(torch.tensor(ids)).last_hidden_state.numpy()
    found = encoder.encode(jnp.asarray(ids, jnp.int32))[0]
    assert close(found, want) and not close(ours.encode(jnp.asarray(ids, jnp.int32))[0], want, 1e-2)


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(family):
    chosen = {"num_experts_per_tok": 2} if family == "deepseek_v2" else {}  # whose default is of no use
    said = transformers.AutoConfig.for_model(family, **chosen).to_dict() | {"model_type": family}
    want, unlike = meaning(numbers_of(said)), set()
    for name in said.keys() - {"model_type", "max_position_embeddings"}:  # the longest rows change nothing
        with contextlib.suppress(ValueError):  # of attributes that must be said
            if meaning(numbers_of({key: value for key, value in said.items() if key != name})) != want:
                unlike.add(name)
    assert unlike == set()


def test_a_changed_number_is_seen(tmp_path):
    """The comparison of state dicts is of bits, and by name."""
    theirs = made(tmp_path, "llama plain")
    ours = models.load(tmp_path / "theirs")
    other = ours.embedding.weight.at[3, 4].set(jnp.nextafter(ours.embedding.weight[3, 4], 1.0))
    changed = eqx.tree_at(lambda m: m.embedding.weight, ours, other)
    models.save(changed, tmp_path / "back", like=tmp_path / "theirs")
    assert unlike(theirs, opened(tmp_path / "back")) == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("name", RECORDED)
def test_in_bfloat16_those_arrays_stay_float32_that_do_in_transformers(name, tmp_path):
    made(tmp_path, name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    wide = {_published(name) for name, x in theirs.state_dict().items() if x.dtype == torch.float32}
    kept = {name for name in wide if not name.endswith(("gate.weight", "gate.wg.weight"))}  # routers' are as asked for
    numbers, ours = models.read_config(tmp_path / "theirs"), models.load(tmp_path / "theirs", dtype="bfloat16")
    models.save(ours, tmp_path / "ours", config=numbers)
    folder = Folder(tmp_path / "ours")
    biases = {name for name in folder.names if name.endswith("e_score_correction_bias")}  # MiniMax-M2's here alone
    assert {name for name in folder.names if folder.dtype(name) == "float32"} == kept | biases
    assert bool(biases) == any(name.endswith("correction_bias") for name in RECORDED[name]["shapes"])


def _published(name: str) -> str:
    """The name in a folder of what transformers gives another while it runs."""
    return re.sub(r"^model(?=\..*\.mixer\.)", "backbone", name.replace("gate.moe", "moe"))
