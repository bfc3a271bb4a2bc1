"""Publishers' own `config.json` files are read, although they have attributes that transformers never reads.

Most files are copies from public repositories, some of them shortened or combined from several copies. The files of
EuroBERT and OLMo Hybrid are written as the publishers' conversion scripts write them. The cases of `make_families.py`
have only attributes of transformers' configurations.
"""

import json

import pytest
from test_published import FIXTURES
from test_published_configs import meaning

from eqformer import models


CONFIG_FILES = json.loads((FIXTURES / "config_files.json").read_text())
PRESETS = {name for family in models.FAMILIES.values() for name in family.presets}


def read(folder, attributes):
    """Return the config of a folder with this `config.json`."""
    (folder / "config.json").write_text(json.dumps(attributes))
    return models.read_config(folder)


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_a_published_config_file_is_read(name, tmp_path):
    config = read(tmp_path, CONFIG_FILES[name])
    if name in PRESETS:
        assert meaning(config) == meaning(models.preset(name))
    with pytest.raises(ValueError, match="does not know: gloom=3"):
        read(tmp_path, CONFIG_FILES[name] | {"gloom": 3})


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("starcoder2-3b", "mlp_type", "gated"),
        ("starcoder2-3b", "norm_type", "rms_norm"),
        ("k-exaone-236b-a23b", "first_last_k_dense_replace", 2),
        ("olmo-hybrid-7b", "linear_use_gate", False),
        ("pythia-6.9b", "rope_theta", 20_000),
        ("pythia-6.9b", "partial_rotary_factor", 0.5),
    ],
)
def test_a_publishers_attribute_that_would_be_another_model_is_refused(name, attribute, value, tmp_path):
    with pytest.raises(ValueError, match=f"{attribute}={value!r} is not supported for this family"):
        read(tmp_path, CONFIG_FILES[name] | {attribute: value})
