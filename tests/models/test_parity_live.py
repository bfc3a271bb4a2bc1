"""Random models of transformers, if it is installed: equal logits, and equal greedy text with each library's cache."""

import jax
import numpy as np
import pytest
from parity_helpers import close, EMBED, gpt2, HEADS, KV_HEADS, LAYERS, llama, MAX_LENGTH, MLP, run, SETTINGS, VOCAB

from eqformer import generation


pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")


def randomised(make, seed):
    """A model whose every parameter, norms and biases too, is drawn anew."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def arrays_of(model, prefix):
    return {f"{prefix}/weights/{name}": value.numpy() for name, value in model.state_dict().items()}


def assert_same_logits_and_text(theirs, ours, length):
    ids = np.random.default_rng(length).integers(1, VOCAB, (3, length))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
        written = theirs.generate(
            torch.tensor(ids[:, :5]),
            attention_mask=torch.ones(3, 5, dtype=torch.long),
            max_new_tokens=length - 5,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert close(run(ours, ids.astype(np.int32)), expected)
    assert not close(run(ours, np.flip(ids, 1).astype(np.int32)), expected, 1e-2)  # the comparison can fail
    greedy = generation.sampling(temperature=0)
    options = {"transforms": greedy, "max_new_tokens": length - 5, "key": jax.random.key(0)}
    assert np.array_equal(generation.generate(ours, ids[:, :5].tolist(), **options).ids, written.numpy())


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "biased", "tied"])
def test_llama(name):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        **SETTINGS[name],
    )
    theirs = randomised(lambda: transformers.LlamaForCausalLM(config), 11)
    assert_same_logits_and_text(theirs, llama(arrays_of(theirs, "biased" if name == "biased" else "llama"), name), 40)


def test_gpt2():
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=EMBED, n_layer=LAYERS, n_head=HEADS, n_positions=16)
    theirs = randomised(lambda: transformers.GPT2LMHeadModel(config), 12)
    assert_same_logits_and_text(theirs, gpt2(arrays_of(theirs, "gpt2")), 16)
