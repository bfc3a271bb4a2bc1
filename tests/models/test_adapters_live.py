"""peft loads the adapters that eqformer saves, with the same logits; needs torch, transformers and peft."""

import jax.numpy as jnp
import pytest
from family_weights import ids_of
from test_adapters import based, with_factors
from test_published import close, run, write

from eqformer import models, nn


pytestmark = [
    pytest.mark.hf,
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error:Found missing adapter keys"),
]
torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

CASES = {
    "llama yarn": [nn.Linear],
    "phi3 window": ["query", "value", "gate", "down"],
    "gpt2 plain": ["key", "output", "sublayers[1].layer.up"],
    "gemma2 alternating": [nn.Attention, "up"],
    "deepseek_v3 plain": ["value_up", "query", "latent_down", "output"],
    "qwen2_moe some dense": ["query", "shared.layer.up", "shared.gate"],
}


@pytest.mark.parametrize("name", CASES)
def test_peft_gives_our_logits(name, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    write(base, name)
    model, _, _ = based(name)
    adapted = with_factors(model, CASES[name], rank=2, alpha=3.0)
    models.save_adapter(adapted, tmp_path / "adapter", like=base)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    ids = ids_of(model.vocab)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), use_cache=False).logits.numpy()
    tokens = jnp.asarray(ids, jnp.int32)
    assert close(run(adapted, tokens), expected, 1e-4)
    assert not close(run(model, tokens), expected, 1e-2)
