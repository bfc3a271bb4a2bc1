"""Hostile configurations of VaultGemma are refused by the name of the attribute at fault."""

from typing import Any

import pytest
from test_attributes import numbers_of
from test_options import back
from test_published import RECORDED

from eqformer import models


CASE: dict[str, Any] = RECORDED["vaultgemma odd"]["config"]
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"hidden_activation": "swish9"}, "hidden_activation='swish9'"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ({"query_pre_attn_scalar": -1.5}, "query_pre_attn_scalar=-1.5"),
    ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0"),
    ({"final_logit_softcapping": -30.0}, "final_logit_softcapping=-30"),
    ({"sliding_window": 0}, "sliding_window=0"),
    ({"layer_types": ["full_attention", "conv", "sliding_attention"]}, "layer_types=.*each one of"),
    ({"layer_types": ["full_attention"]}, "layer_types=.*must have 3 items"),
    ({"head_dim": 0}, "head_dim=0"),
    ({"num_hidden_layers": "3"}, "num_hidden_layers='3'"),
    ({"attention_bias": "no"}, "attention_bias='no'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral'"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"vocab_size": None}, "vocab_size"),
    ({"vault_noise": 1.0}, "vault_noise=1.0"),
]


@pytest.mark.parametrize("attributes, words", HOSTILE, ids=lambda value: str(value)[:60])
def test_a_hostile_configuration_is_refused_by_name(attributes, words):
    with pytest.raises(ValueError, match=rf"^config.json: .*{words}"):
        numbers_of(CASE | attributes)


@pytest.mark.parametrize(
    "attributes, words", [({"head_dim": 9}, "head_dim|dim=9"), ({"num_key_value_heads": 4}, "kv_heads")]
)
def test_sizes_that_do_not_fit_are_refused(attributes, words):
    with pytest.raises(ValueError, match=words):
        models.shapes(numbers_of(CASE | attributes))


def test_the_recorded_configuration_is_read_and_written():
    """The control: without a hostile attribute nothing is refused."""
    assert back("vaultgemma", numbers_of(CASE)) == numbers_of(CASE)
