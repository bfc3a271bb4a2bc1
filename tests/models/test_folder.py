"""Damaged or contradictory folders raise one error, before any array is used."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from haste import same_trees
from safetensors.numpy import save_file
from test_published import RECORDED, write

from eqformer import models
from eqformer.models._folder import ADAPTER, Folder, INDEX, SINGLE


NAME = "llama plain"
ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MORE = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def raw(header: object, data: bytes = bytes(8), length: int | None = None) -> bytes:
    """A file of this header, which says of itself how long it is, or something else."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


FILES = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "no header": struct.pack("<Q", 0),
    "a header longer than the file": raw({"a": ONE}, length=10**6),
    "a header of 2^63 bytes": raw({"a": ONE}, length=2**63),
    "a header of 2^64 - 1 bytes": raw({"a": ONE}, length=2**64 - 1),
    "a header that is no JSON": raw(b"{'a': 1}"),
    "a header that is no UTF-8": raw(b'{"\xff": 1}'),
    "a header that is a list": raw([ONE]),
    "a header cut short": raw(json.dumps({"a": ONE}).encode()[:-2]),
    "no dtype": raw({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "no shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [2]}}),
    "an unknown dtype": raw({"a": ONE | {"dtype": "F99"}}),
    "another dtype's size": raw({"a": ONE | {"dtype": "F64"}}),
    "offsets behind the end": raw({"a": ONE | {"data_offsets": [8, 16]}}),
    "offsets far behind the end": raw({"a": ONE | {"data_offsets": [2**60, 2**60 + 8]}}),
    "offsets in reverse": raw({"a": ONE | {"data_offsets": [8, 0]}}),
    "negative offsets": raw({"a": ONE | {"data_offsets": [-8, 0]}}),
    "three offsets": raw({"a": ONE | {"data_offsets": [0, 4, 8]}}),
    "offsets that are no numbers": raw({"a": ONE | {"data_offsets": ["0", "8"]}}),
    "overlapping offsets": raw({"a": ONE, "b": MORE | {"data_offsets": [4, 12]}}, bytes(12)),
    "the same bytes twice": raw({"a": ONE, "b": ONE}),
    "a hole between arrays": raw({"a": ONE, "b": MORE | {"data_offsets": [12, 20]}}, bytes(20)),
    "bytes that are nobody's": raw({"a": ONE}, bytes(16)),
    "a byte too few": raw({"a": ONE}, bytes(7)),
    "a shape of another size": raw({"a": ONE | {"shape": [3]}}),
    "a negative shape": raw({"a": ONE | {"shape": [-2]}}),
    "a shape that is no number": raw(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}'),
    "a shape that is text": raw({"a": ONE | {"shape": ["2"]}}),
    "a shape beyond all sizes": raw({"a": ONE | {"shape": [2**62, 2**62]}}),
    "a name that comes twice": raw(
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        bytes(16),
    ),
    "metadata that is no text": raw({"a": ONE, "__metadata__": {"format": 1}}),
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_it_says(name, tmp_path):
    (tmp_path / SINGLE).write_bytes(FILES[name])
    with pytest.raises(ValueError, match=rf"{SINGLE}: "):
        Folder(tmp_path)


def test_the_same_file_unharmed_is_read(tmp_path):
    (tmp_path / SINGLE).write_bytes(raw({"a": ONE, "b": MORE}, np.arange(4, dtype=np.float32).tobytes()))
    folder = Folder(tmp_path)
    assert folder.names == {"a", "b"} and folder.read("b").tolist() == [2, 3] and folder.dtype("a") == "float32"


@pytest.mark.parametrize("dtype, size", [("I32", 2), ("U8", 8), ("BOOL", 8)])
def test_what_is_no_float_is_refused_when_it_is_asked_for(dtype, size, tmp_path):
    header = {"mask": {"dtype": dtype, "shape": [size], "data_offsets": [0, 8]}, "b": MORE}
    (tmp_path / SINGLE).write_bytes(raw(header, bytes(16)))
    folder = Folder(tmp_path)
    assert folder.names == {"mask", "b"} and folder.read("b").tolist() == [0, 0]
    for ask in (folder.read, folder.dtype):
        with pytest.raises(ValueError, match=rf"{SINGLE}: mask is of {dtype}; weights are F64, F32, F16, BF16"):
            ask("mask")


def test_masks_of_older_folders_are_passed_over_whatever_their_dtype(tmp_path):
    """Old GPT-2s hold the causal mask of each layer, as bytes or truths, and what is put where it hides."""
    arrays = write(tmp_path, "gpt2 plain")
    want = models.load(tmp_path)
    for dtype in (np.uint8, np.bool_, np.float32):
        masks = {f"transformer.h.{layer}.attn.bias": np.tri(8, dtype=dtype)[None, None] for layer in range(2)}
        masks |= {"transformer.h.0.attn.masked_bias": np.asarray(-10_000).astype(np.int32)}
        save_file(arrays | masks, tmp_path / SINGLE)
        assert same_trees(models.load(tmp_path), want)
    save_file(arrays | {"transformer.h.0.attn.mask": np.tri(8, dtype=np.uint8)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"not in the model: transformer.h.0.attn.mask \(1\)"):
        models.load(tmp_path)
    name = "transformer.wpe.weight"
    save_file(arrays | {name: arrays[name].astype(np.int32)}, tmp_path / SINGLE)
    for dtype in (None, "float32"):
        with pytest.raises(ValueError, match=rf"{name} \(I32\) holds codes, but config.json has no quantiz"):
            models.load(tmp_path, dtype=dtype)


def two_files(folder: Path) -> dict[str, str]:
    """Two files and their index's map, not yet written."""
    for number in (1, 2):
        save_file({f"array {number}": np.ones(2, np.float32)}, folder / f"model-{number}.safetensors")
    return {f"array {number}": f"model-{number}.safetensors" for number in (1, 2)}


INDICES = {
    "a file outside": (
        lambda m: {"weight_map": m | {"array 1": "../model-1.safetensors"}},
        "not a safetensors file",
    ),
    "a path from the root": (lambda m: {"weight_map": m | {"array 1": "/etc/passwd"}}, "not a safetensors file"),
    "a file in a folder": (
        lambda m: {"weight_map": m | {"array 1": "sub/model-1.safetensors"}},
        "not a safetensors file",
    ),
    "a pickle": (lambda m: {"weight_map": m | {"array 1": "pytorch_model.bin"}}, "not a safetensors file"),
    "a file that is not there": (lambda m: {"weight_map": m | {"array 1": "model-3.safetensors"}}, "is missing"),
    "an array that no file has": (lambda m: {"weight_map": m | {"array 3": "model-1.safetensors"}}, "array 3"),
    "an array in the other file": (lambda m: {"weight_map": m | {"array 1": "model-2.safetensors"}}, "array 1"),
    "no map": (lambda m: {}, "no weight_map"),
    "a map that is a list": (lambda m: {"weight_map": list(m)}, "no weight_map"),
    "a file that is a number": (lambda m: {"weight_map": m | {"array 1": 1}}, "no weight_map"),
    "a list": (lambda m: [m], "no JSON object"),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_is_not_what_it_says(name, tmp_path):
    index, words = INDICES[name]
    (tmp_path / INDEX).write_text(json.dumps(index(two_files(tmp_path))))
    with pytest.raises(ValueError, match=words):
        Folder(tmp_path)


@pytest.mark.parametrize(
    "text,words",
    [
        ('{"weight_map": {"array 1": "model-1.safetensors", "array 1": "model-2.safetensors"}}', "array 1 twice"),
        ('{"weight_map": ', "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("\xff", "cannot be read as JSON"),
    ],
)
def test_an_index_that_cannot_be_read(text, words, tmp_path):
    two_files(tmp_path)
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{INDEX}: .*{words}"):
        Folder(tmp_path)


def test_an_array_in_two_files(tmp_path):
    file_of = two_files(tmp_path)
    save_file({name: np.ones(2, np.float32) for name in file_of}, tmp_path / "model-2.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": file_of}))
    with pytest.raises(ValueError, match=r"model-2.safetensors: .* disagree on array 1"):
        Folder(tmp_path)


def indexed(folder: Path, single: str = SINGLE, add: float = 0.0) -> dict[str, np.ndarray]:
    """A single file and two shards with an index, whose last array is another by `add`; the single file's arrays."""
    arrays = {name: np.arange(4, dtype=np.float32) for name in ("a", "b", "c")}
    parts = {"model-1-of-2.safetensors": ["a", "b"], "model-2-of-2.safetensors": ["c"]}
    save_file(arrays, folder / single)
    for file, names in parts.items():
        save_file({name: arrays[name] + add * (name == "c") for name in names}, folder / file)
    file_of = {name: file for file, names in parts.items() for name in names}
    (folder / f"{single}.index.json").write_text(json.dumps({"weight_map": file_of}))
    return arrays


@pytest.mark.parametrize("single", [SINGLE, ADAPTER])
def test_a_single_file_beside_shards(single, tmp_path):
    """The single file is read, as by transformers, where both hold the same; nothing is dropped without a word."""
    arrays = indexed(tmp_path, single)
    shards = sorted(tmp_path.glob("*-of-2.safetensors"))
    folder = Folder(tmp_path, single)
    assert folder.names == arrays.keys() and folder.read_any("c").base is not None
    unread = () if single == ADAPTER else ("weight files that are not read: model-1-of-2.safetensors, model-2-of-2",)
    assert [note.split(": ", 1)[1][: len(words)] for note, words in zip(folder.notes, unread, strict=True)] == [*unread]
    indexed(tmp_path, single, add=2.0**-20)
    told = (
        rf"load\(.*{single} and the files that {single}.index.json names hold different arrays \(c\), .* move {single}"
    )
    with pytest.raises(ValueError, match=told):
        Folder(tmp_path, single)
    save_file({"a": arrays["a"], "d": arrays["b"]}, tmp_path / single)
    with pytest.raises(ValueError, match=r"different arrays \(b, c, d\)"):
        Folder(tmp_path, single)
    save_file({name: array.astype("float16") for name, array in arrays.items()}, tmp_path / single)
    with pytest.raises(ValueError, match=r"different arrays \(a, b, c\)"):
        Folder(tmp_path, single)
    (tmp_path / single).unlink()
    assert Folder(tmp_path, single).notes == () and Folder(tmp_path, single).read("c")[0] == np.float32(2.0**-20)
    # transformers removes old shards when it saves one file, and leaves their index.
    save_file(arrays, tmp_path / single)
    for shard in shards:
        shard.unlink()
    (note,) = Folder(tmp_path, single).notes
    assert note.endswith(f"the files that {single}.index.json names are gone; {single} is read.")
    (tmp_path / single).unlink()
    with pytest.raises(ValueError, match="model-1-of-2.safetensors: the file is missing"):
        Folder(tmp_path, single)


def test_weight_files_that_are_not_read_are_told(tmp_path):
    """Whatever else of weights is in the folder is named in one line; states of a training run are no weights."""
    write(tmp_path, NAME)
    want = models.load(tmp_path)  # a warning would be an error
    for name in ("optimizer.pt", "training_args.bin", "rng_state_0.pth", "tokenizer.json", ".model.safetensors.part"):
        (tmp_path / name).write_bytes(b"")
    models.load(tmp_path)
    others = ("adapter_model.safetensors", "consolidated.safetensors", "model-00003-of-00002.safetensors")
    for name in (*others, "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
    told = rf"weight files that are not read: {', '.join(others)}, pytorch_model.bin; load_adapter reads adapters\.$"
    with pytest.warns(UserWarning, match=told) as lines:
        assert same_trees(models.load(tmp_path), want)
    assert len(lines) == 1
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ValueError, match="no model.safetensors and .*not read .*consolidated.safetensors"):
        models.load(tmp_path)


def test_folders_without_weights(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        models.load(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(FILES["a pickle"])
    with pytest.raises(ValueError, match=r"no model.safetensors .*Pickled weights .* never read"):
        models.load(tmp_path)


def changed(**attributes):
    """A configuration with some attributes changed, those of None left out."""
    given = RECORDED[NAME]["config"] | attributes
    return {name: value for name, value in given.items() if value is not None}


CONFIGS = {
    "another family": (changed(model_type="lama"), "model_type='lama' is not known; the families are .*llama"),
    "no family": (changed(model_type=None), "no 'model_type'"),
    "an attribute missing": (changed(hidden_size=None), "no 'hidden_size'"),
    "an attribute that nobody knows": (changed(window_of_doom=3), "does not know: window_of_doom=3"),
    "an attribute that is not supported": (changed(hidden_act="helix"), "hidden_act='helix' is not supported"),
    "a kind of rotary positions": (changed(rope_parameters={"rope_type": "helix"}), "rope_type='helix'"),
    "a rotary attribute": (changed(rope_parameters={"rope_type": "linear", "factor": 2.0, "twist": 1}), "twist"),
    "another size": (changed(intermediate_size=30), r"mlp.*: it has shape \(\d+, \d+\), and the model's is"),
    "more layers": (changed(num_hidden_layers=4), r"not in the folder: model.layers.3"),
    "fewer layers": (changed(num_hidden_layers=2), r"not in the model: model.layers.2"),
    "a rotary number missing": (changed(rope_parameters={"rope_type": "linear"}), "config.json: .*'linear' needs 'fac"),
    "rotary attributes that are text": (
        changed(rope_parameters="linear"),
        "config.json: .*='linear': it must be an obj",
    ),
    "heads that turn in part": (
        changed(rope_parameters={"partial_rotary_factor": 0.5}),
        "not know: partial_rotary_fac",
    ),
    "no layers": (changed(num_hidden_layers=0), "num_hidden_layers=0: it must be a whole number of at least 1"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_does_not_fit(name, tmp_path):
    config, words = CONFIGS[name]
    write(tmp_path, NAME)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        models.load(tmp_path)
