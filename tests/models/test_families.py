"""Presets have the published numbers of parameters, and configs build models of their sizes."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from eqformer import LEGEND
from eqformer.models import (
    build,
    Classifier,
    FAMILIES,
    GPT2Config,
    JAXformerConfig,
    LlamaConfig,
    preset,
    presets,
    Rule,
    shapes,
)
from eqformer.models._weight_rules import layer_groups
from eqformer.nn import Attention, Block, dims, LatentAttention, Residual, Rotary, SuperBlock, YarnScaling
from eqformer.planning import parameter_count


# Parameters of the published checkpoints, counted from their files by their publishers.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama4-scout": 107_769_861_120,
    "llama4-maverick": 400_711_848_960,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "smollm3-3b": 3_075_098_624,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # Of the text models alone; 64 rows of the table, for images, are not in the counts of 3_880_099_328 and so on.
    "gemma3-4b": 3_880_099_328 + 64 * 2560,
    "gemma3-12b": 11_765_788_416 + 64 * 3840,
    "gemma3-27b": 27_009_002_240 + 64 * 5376,
    "granite-3.0-2b": 2_533_531_648,
    "granite-3.0-8b": 8_170_848_256,
    "granite-3.1-2b": 2_533_531_648,
    "granite-3.1-8b": 8_170_848_256,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm4-9b": 9_400_279_040,
    "glm4-32b": 32_566_081_536,
    "phi3-mini-4k": 3_821_079_552,
    "phi3-mini-128k": 3_821_079_552,
    "phi3.5-mini": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "phi4": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
    "command-r": 34_980_831_232,
    "command-r-plus": 103_810_674_688,
    # Counted by transformers' classes of the published configurations, without predictors of further tokens.
    "ernie4.5-0.3b": 360_748_032,
    "ernie4.5-21b-a3b": 21_825_437_888,
    "ernie4.5-300b-a47b": 299_484_163_264,
    "exaone4-1.2b": 1_279_391_488,
    "exaone4-32b": 32_003_216_384,
    "glm-4.5-air": 106_852_251_264,
    "glm-4.5": 352_797_829_024,
    "hunyuan-7b": 7_504_568_320,
    "hunyuan-a13b": 80_393_183_232,
    "minimax-m2": 228_689_764_864,
    "nanochat-d20": 560_988_160,
    "nanochat-d32": 1_879_048_192,
    "seed-oss-36b": 36_151_104_512,
    "ministral3-3b": 3_429_006_336,
    "ministral3-8b": 8_489_553_920,
    "ministral3-14b": 13_506_073_600,
    "mistral4-119b": 118_972_826_624,
    "mistral-large4": 1_050_118_202_912,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_930_560,
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    "bert-base-uncased": 109_514_298,
    "bert-large-uncased": 335_174_458,
    "minilm-l6": 22_744_506,
    "minilm-l12": 33_391_290,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "xlm-roberta-base": 278_295_186,
    "xlm-roberta-large": 560_142_482,
    "distilbert-base-uncased": 66_985_530,
    "mpnet-base": 109_518_527,
    "nomic-embed-text-v1.5": 137_354_304,
    "gte-multilingual-base": 306_210_496,
    "eurobert-210m": 310_266_624,
    "eurobert-610m": 755_625_600,
    "eurobert-2.1b": 2_403_092_736,
    "muse-glimmer-30b": 27_854_780_928,
    "kimi-linear-48b-a3b": 49_122_681_728,
    "kimi-k2": 1_026_408_232_448,
    "deepseek-v3.2": 671_877_944_064,
    "glm-5": 743_911_218_432,
    "bamba-9b": 9_780_235_392,
    "granite-4.0-micro": 3_402_836_480,
    "granite-4.0-h-micro": 3_191_396_096,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    "falcon-h1-0.5b": 521_411_104,
    "falcon-h1-7b": 7_585_654_880,
    "falcon-h1-34b": 33_642_516_224,
    # With the biases of the choice of experts, which transformers counts apart.
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "mamba2-130m": 128_989_632,
    "mamba2-370m": 368_346_624,
    "mamba2-780m": 780_161_280,
    "mamba2-1.3b": 1_343_757_312,
    "mamba2-2.7b": 2_702_599_680,
    "mamba-codestral-7b": 7_285_403_648,
}
PUBLISHED |= {"pythia-70m": 70_426_624, "pythia-160m": 162_322_944, "pythia-410m": 405_334_016}
PUBLISHED |= {"pythia-1b": 1_011_781_632, "pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960}
PUBLISHED |= {"pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320, "gpt-neox-20b": 20_554_567_680}
PUBLISHED |= {"starcoder2-3b": 3_030_371_328, "starcoder2-7b": 7_173_923_840, "starcoder2-15b": 15_957_889_024}
PUBLISHED |= {"command-r7b": 8_028_033_024, "command-a": 111_057_580_032}
PUBLISHED |= {"granite-3.0-1b-a400m": 1_334_628_352, "granite-3.0-3b-a800m": 3_298_793_472}
PUBLISHED |= {"glm-4-9b": 9_399_951_360, "olmo-1b": 1_176_764_416, "olmo-7b": 6_888_095_744}
# Counted by transformers' classes of the published configurations.
PUBLISHED |= {"dots.llm1": 142_774_381_696, "k-exaone-236b-a23b": 236_571_156_352, "trinity-mini": 26_123_974_400}
PUBLISHED |= {"solar-open-100b": 102_651_799_552, "cwm-32b": 32_581_097_472, "flex-olmo-7x7b": 33_270_665_216}
PUBLISHED |= {"jais-2-8b": 8_090_401_280, "olmo-hybrid-7b": 7_430_870_688}
PUBLISHED |= {"deepseek-v4-flash": 284_332_240_471}
PUBLISHED |= {"minimax-m3": 426_174_572_928, "glm-5.3-flash": 313_326_828_862}
PUBLISHED |= {"stablelm-3b-4e1t": 2_795_443_200, "stablelm-2-1.6b": 1_644_515_328, "stablelm-2-12b": 12_143_185_920}
PUBLISHED |= {"lfm3-1.7b": 1_728_801_536, "mellum2-12b-a2.5b": 12_149_923_072}
PUBLISHED |= {"vaultgemma-1b": 1_038_741_120}
PUBLISHED |= {"mimo-v2-flash": 308_778_780_864, "laguna-xs.2": 33_189_975_808}
PUBLISHED |= {"step-3.7-flash": 196_956_130_368, "internlm3-8b": 8_804_241_408}
PUBLISHED |= {"phi-3.5-moe": 41_873_153_344, "ling3-flash": 124_414_211_552}
PUBLISHED |= {"tinystories-33m": 68_514_048, "gpt-neo-125m": 125_198_592, "gpt-neo-1.3b": 1_315_575_808}
PUBLISHED |= {"gpt-neo-2.7b": 2_651_307_520, "gpt-j-6b": 6_050_882_784}
PUBLISHED |= {"codegen-350m": 356_712_448, "codegen-2b": 2_779_356_160, "codegen-6b": 7_064_213_504}
PUBLISHED |= {"codegen-16b": 16_032_155_648, "tiny-starcoder-py": 164_144_128, "santacoder": 1_124_886_528}
PUBLISHED |= {"starcoderbase-1b": 1_137_207_296, "starcoderbase-3b": 3_043_311_104}
PUBLISHED |= {"starcoderbase-7b": 7_327_263_232, "starcoder": 15_517_456_384}
PUBLISHED |= {"opt-125m": 125_239_296, "opt-350m": 331_196_416, "opt-1.3b": 1_315_758_080}
PUBLISHED |= {"opt-2.7b": 2_651_596_800, "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280}
PUBLISHED |= {"opt-30b": 29_974_540_288, "opt-66b": 65_719_701_504}
PUBLISHED |= {"phi-1.5": 1_418_270_720, "phi-2": 2_779_683_840}
PUBLISHED |= {"minitron-4b": 4_190_509_056, "minitron-8b": 8_271_699_968}
PUBLISHED |= {"nemotron-4-15b": 15_628_775_424, "nemotron-4-340b": 341_029_195_776}
PUBLISHED |= {"falcon-7b": 6_921_720_704, "falcon-40b": 41_303_293_952, "falcon-180b": 178_557_088_768}
PUBLISHED |= {"falcon2-11b": 11_102_822_400, "falcon-rw-1b": 1_311_625_216, "falcon-rw-7b": 7_516_020_736}
PUBLISHED |= {"bloom-560m": 559_214_592, "bloom-1b1": 1_065_314_304, "bloom-1b7": 1_722_408_960}
PUBLISHED |= {"bloom-3b": 3_002_557_440, "bloom-7b1": 7_069_016_064, "bloom": 176_247_271_424}
PUBLISHED |= {"mpt-7b": 6_649_286_656, "mpt-7b-8k": 6_649_286_656, "mpt-7b-storywriter": 6_649_286_656}
PUBLISHED |= {"mpt-30b": 29_957_200_896}
PUBLISHED |= {"exaone-3.0-7.8b": 7_818_448_896, "exaone-3.5-2.4b": 2_405_327_360, "exaone-3.5-32b": 32_003_200_000}
PUBLISHED |= {"hyperclovax-seed-think-14b": 14_748_112_896, "iquest-coder-v1-40b": 39_794_283_520}
PUBLISHED |= {"command-a-plus": 218_254_938_112, "north-mini-code-1.0": 30_484_303_872}
PUBLISHED |= {"a.x-k1": 518_983_063_808, "flint": 39_785_287_456}  # of transformers' default sizes
PUBLISHED |= {"exaone-3.5-7.8b": 7_818_448_896, "ministral-8b": 8_019_808_256}
PUBLISHED |= {"minicpm3-4b": 4_073_875_968, "youtu-llm-2b": 1_961_560_064}
PUBLISHED |= {"sarvam-30b": 32_152_650_368, "sarvam-105b": 106_031_767_424}
PUBLISHED |= {"sdar-8b": 8_190_735_360}  # as many as Qwen3 8B, from which it was trained
PUBLISHED |= {"afm-4.5b": 4_619_184_640, "helium-1-preview-2b": 2_172_643_840, "glm-4.7-flash": 29_943_393_920}
# Summed from the released arrays' shapes without the zeros behind rates; the publishers state 2.78 trillion.
PUBLISHED |= {"kimi-k3": 2_779_484_476_000}
# Transformers' count for its default sizes with one table of n-grams; the publishers' sizes were not compared.
PUBLISHED |= {"qwen4-exp": 108_347_421_824}
# With the layers' scalars, which transformers does not count, and for Apertus two of four.
PUBLISHED |= {"apertus-8b": 8_053_338_240, "apertus-70b": 70_599_864_640}
PUBLISHED |= {"gemma4-e2b": 4_628_569_379, "gemma4-e4b": 7_463_013_418}
PUBLISHED |= {"gemma4-26b-a4b": 25_233_141_790, "gemma4-31b": 30_697_345_340}
# Without the vector of the id behind an image, of which either half has one.
PUBLISHED |= {"t5gemma2-270m": 368_424_192, "t5gemma2-1b": 1_697_782_016, "t5gemma2-4b": 7_089_110_016}
PUBLISHED |= {"t5gemma-2b-2b": 5_596_853_760, "t5gemma-9b-2b": 12_292_375_296, "t5gemma-9b-9b": 20_333_401_088}
PUBLISHED |= {"t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096}
PUBLISHED |= {"flan-t5-small": 76_961_152, "flan-t5-base": 247_577_856, "flan-t5-large": 783_150_080}
PUBLISHED |= {"flan-t5-xl": 2_849_757_184, "flan-t5-xxl": 11_135_332_352}

# Of unlike layers, or of periods and layers left over: docs/families.md says of these that no pipeline carries them.
SEVERAL_STACKS = (
    "a.x-k1",
    "flint",
    "kimi-k3",
    "north-mini-code",
    "bamba-9b",
    "ling3-",
    "deepseek-",
    "ernie4.5-21b",
    "ernie4.5-300b",
    "gemma3-1b",
    "gemma3-4b",
    "gemma3-27b",
    "gemma4-e",
    "glm-4.5",
    "glm-4.7-",
    "dots.",
    "k-exaone-",
    "trinity-",
    "granite-4.0-h-",
    "glm-5",
    "kimi",
    "nemotron",
    "laguna-",
    "qwen4-exp",
    "sarvam-",
    "step-3.7-",
    "lfm2-",
    "lfm3-",
    "mistral-large4",
    "mimo-v2-",
    "minimax-m3",
    "modernbert-",
    "t5gemma2-1b",
    "t5gemma2-4b",
)


@functools.cache
def shapes_of(name_or_numbers):
    return shapes(name_or_numbers)


def _one_a_file(names):
    """Return the names; the smallest of each file of families runs by default."""
    file_of = {name: family.config.__module__ for family in FAMILIES.values() for name in family.presets}
    smallest = {file_of[name]: name for name in sorted(names, key=lambda name: -PUBLISHED[name])}
    return [pytest.param(name, marks=[] if name in smallest.values() else pytest.mark.grid) for name in names]


@pytest.mark.parametrize("name", _one_a_file(PUBLISHED))
def test_a_preset_has_the_published_number_of_parameters(name):
    shapes = shapes_of(name)
    assert parameter_count(shapes) == PUBLISHED[name]
    assert (len(shapes.stacks) > 1) == name.startswith(SEVERAL_STACKS)


def test_one_row_of_a_table_less_is_counted():
    smaller = dataclasses.replace(preset("llama-3-8b"), vocab=preset("llama-3-8b").vocab - 1)
    assert parameter_count(shapes_of(smaller)) == PUBLISHED["llama-3-8b"] - 2 * 4096


def test_every_large_preset_is_counted():
    published = {family: names for family, its in FAMILIES.items() if its.model_type for names in [its.presets]}
    assert {name for names in published.values() for name in names if "-byte-" not in name} == set(PUBLISHED)


FIRST_OF_FILES = {family.config.__module__: family.name for family in [*FAMILIES.values()][::-1]}.values()


def _families():
    """Return the names of all families; one of each file runs by default."""
    return [pytest.param(name, marks=[] if name in FIRST_OF_FILES else pytest.mark.grid) for name in FAMILIES]


@pytest.mark.parametrize("family", _families())
def test_every_family_has_a_preset_under_one_million_parameters(family):
    counts = [parameter_count(shapes_of(name)) for name in FAMILIES[family].presets if "-byte-" in name]
    assert min(counts) < 1_000_000 < parameter_count(shapes_of("gpt2"))


def dims_of(model):
    return {dim for names in jax.tree.leaves(dims(model)) if isinstance(names, str) for dim in names.split()}


SMALL = {next(name for name in FAMILIES[family].presets if "-byte-" in name) for family in FIRST_OF_FILES}


@pytest.mark.parametrize(
    "preset", [name if name in SMALL else pytest.param(name, marks=pytest.mark.grid) for name in presets()]
)
def test_every_dim_of_a_model_is_in_the_legend(preset):
    """By default a small model of each file of families, whose shapes are known from above."""
    assert {"vocab", "embed", "layers"} <= dims_of(shapes_of(preset)) <= {*LEGEND, "_"}


def test_a_dim_of_ones_own_is_not_in_it():
    class Mine(eqx.Module):
        table: Float[Array, "embed colours"]

    assert dims_of(Mine(jnp.ones((2, 3)))) - {*LEGEND} == {"colours"}


def test_preset_names_are_unique_and_found():
    assert len(presets()) == sum(len(family.presets) for family in FAMILIES.values())
    assert presets()["gpt2"] is preset("gpt2")


def test_an_unknown_preset_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"preset\('llama-3-7b'\): no such preset; the nearest names are .*llama-3-8b"):
        preset("llama-3-7b")


@pytest.mark.parametrize(
    "config", [GPT2Config(9, 10, 1, 3), JAXformerConfig(9, 10, 1, 1, heads=3, latent=4, rope_dim=2)]
)
def test_heads_must_divide_the_width(config):
    with pytest.raises(ValueError, match=r"embed=10, heads=3\): heads must divide embed"):
        shapes_of(config)


def test_key_heads_must_divide_heads():
    with pytest.raises(ValueError, match=r"heads=8, kv_heads=3\).*take one of \[1, 2, 4, 8\]"):
        shapes_of(LlamaConfig(9, 16, 1, heads=8, kv_heads=3, mlp=8))


def _attention(block):
    assert isinstance(block, Block) and isinstance(block.mixer, Residual)
    assert isinstance(block.mixer.layer, LatentAttention)
    return block.mixer.layer


def test_the_last_layer_of_a_jaxformer_block_has_no_rotary_position():
    numbers = JAXformerConfig(9, 16, blocks=2, layers_per_block=3, heads=2, latent=4, rope_dim=2)
    period = shapes_of(numbers).stacks[0].blocks
    assert isinstance(period, SuperBlock)
    assert [_attention(block).rotary for block in period.blocks] == [Rotary(2, 10_000.0, interleaved=True)] * 2 + [None]
    key_rope = _attention(period.blocks[0]).key_rope
    assert key_rope is not None and key_rope.shape == (2, 2, 16)


def test_a_preset_of_any_size_is_laid_out_without_allocating_it():
    names = dims(shapes_of("llama-3.1-405b"))
    assert names.stacks[0].blocks.mixer.layer.query.weight == "layers heads head_dim embed"
    assert names.stacks[0].blocks.feed_forward.layer.down.weight == "layers embed mlp"
    assert names.head.weight == "vocab embed"


def test_residual_projections_start_smaller_in_deeper_models():
    def spread(layers, key):
        block = build(LlamaConfig(16, 32, layers, heads=4, kv_heads=2, mlp=64), key=key).stacks[0].blocks
        assert isinstance(block, Block) and isinstance(block.mixer, Residual)
        assert isinstance(block.mixer.layer, Attention)
        return block.mixer.layer.output.matrix().std()

    deep, shallow = jax.jit(lambda key: (spread(8, key), spread(2, key)))(jax.random.key(1))
    assert float(deep) == pytest.approx(float(shallow) / 2, rel=0.05)


def _paths(table, model):
    """The paths of the rules that say something of a model."""
    layers = [(part, where(model)) for part, where, _ in layer_groups(model)]
    return {
        (rule.part, rule.path)
        for rule in table
        for part, holder in (layers if "{layer}" in rule.name else [(rule.part, model)])
        if part == rule.part and rule.leaves(holder)
    }


@pytest.mark.grid
def test_every_rule_of_weights_is_of_some_model():
    """A rule whose path leads nowhere is passed over, so that biases need no conditions: none leads nowhere always.

    By default each family is loaded and saved, which finds weights without a rule.
    """
    found, llama = set(), FAMILIES["llama"]
    for family in FAMILIES.values():
        for name in family.presets:
            found |= _paths(family.weights, shapes_of(name)) if "-byte-" in name else set()
    classifiers = {family.classifier: family for family in [*FAMILIES.values(), llama] if family.classifier is not None}
    for table, family in classifiers.items():
        for classifies_tokens in (False, True):
            model = shapes(next(iter(family.presets)), classifier=Classifier(3, classifies_tokens))
            found |= _paths((*family.weights, *table.weights), model)
    tables = [*(family.weights for family in FAMILIES.values()), *(table.weights for table in classifiers)]
    assert {(rule.part, rule.path) for table in tables for rule in table} == found


def test_a_rule_whose_path_leads_nowhere_is_seen():
    rule, model = FAMILIES["llama"].weights[0], shapes_of("llama-byte-1m")
    assert _paths([rule], model) == {(rule.part, rule.path)}
    assert _paths([dataclasses.replace(rule, path="embeding.weight")], model) == set()


def test_a_rule_that_needs_or_lacks_a_part_says_nothing_of_other_layers():
    model = shapes_of("qwen3-next-byte-500k")
    layers: list[Any] = [where(model) for _, where, _ in layer_groups(model)]
    has = [hasattr(layer.mixer.layer, "log_rate") for layer in layers]
    path, part = "mixer.layer.output.weight", "mixer.layer.log_rate"
    needs, lacks = Rule("x.{layer}", path, needs=part), Rule("x.{layer}", path, lacks=part)
    assert [bool(needs.leaves(layer)) for layer in layers] == has and len(set(has)) == 2
    assert [not lacks.leaves(layer) for layer in layers] == has
    assert all(Rule("x.{layer}", path).leaves(layer) for layer in layers)


def test_norms_after_a_rotation_are_refused_with_scalings_that_change_lengths():
    llama4 = preset("llama4-byte-500k")
    with pytest.raises(
        ValueError, match=r"Llama4Config\(qk_norm=True, scaling=YarnScaling\(.*this scaling changes their lengths"
    ):
        dataclasses.replace(llama4, scaling=YarnScaling(2.0, 64))  # pyright: ignore[reportCallIssue]
    dataclasses.replace(llama4, scaling=YarnScaling(2.0, 64), qk_norm=False)  # pyright: ignore[reportCallIssue]
