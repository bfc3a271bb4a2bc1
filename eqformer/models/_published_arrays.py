"""Arrays of a published model: their names in the family's table, decoded values, and codes for quantized maps."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  # lets numpy know bfloat16
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from .. import nn
from ._folder import FLOATS, Folder
from ._gguf_file import GGUF
from ._gguf_models import coded_of, plain_of, shape_of
from ._published_model import PublishedModel
from ._weight_rules import ResolvedRule, Shape, StoredShapes
from .formats import Blocks, Coded, Format, Grouped, QuantizedArray


_NO_CODES = ("BOOL", "I64")  # dtypes of masks and positions: no format stores codes of weights in them
MapFunction = Callable[[Callable[[Any], None], Iterable[Any]], Iterable[None]]
"""A function like `map`, which may share the calls among several threads."""
_NUMBERS_AT_ONCE, _ROWS = 1 << 17, 32  # numbers that a thread decodes at once; its rows are a multiple of `_ROWS`


class PublishedArrays:
    """The arrays of a model that is published in a folder, by the names that its family's table gives them.

    Raises a `ValueError` for a folder that has an array under two names, and for codes and scales that do not go
    together.
    """

    def __init__(self, source: Folder | GGUF, published: PublishedModel):
        """Map each array of the folder or file to its array in the family's table."""
        self.call, self._source = source.call, source
        self._stored: dict[str, str] = {}  # the name in the folder, by the name in the family's table
        self._coded: dict[str, Coded] = {}
        self._unread: list[str] = []
        self._states_format = published.format is not None
        for name, table_name in sorted(published.table_names(source.names).items()):
            if table_name is None:
                self._unread.append(name)
            elif (first := self._stored.setdefault(table_name, name)) != name:
                raise ValueError(
                    f"{self.call}: {first} and {name} are both {table_name}; the folder must have one of them."
                )
        self._folder: Folder | None = None
        if isinstance(source, GGUF):
            self._read_plain, self._plain_shape = (
                functools.partial(plain_of, source),
                functools.partial(shape_of, source),
            )
            coded = {table_name: coded_of(source, name) for table_name, name in self._stored.items()}
            self._coded = {table_name: array for table_name, array in coded.items() if array is not None}
        else:
            self._folder, self._read_plain, self._plain_shape = source, source.read, source.shape
            if published.format is not None:
                self._find_coded(source, published.format, published.dtype)

    @property
    def names(self) -> Set[str]:
        """Every array's name in the family's table."""
        return self._stored.keys()

    @property
    def shapes(self) -> StoredShapes:
        """Every array's shape, by its name in the family's table."""
        return {name: self.shape(name) for name in self._stored}

    @property
    def unread(self) -> str:
        """One line about the arrays that are left unread on purpose; empty if there are none."""
        if not self._unread:
            return ""
        counts = Counter(_model_part(name) for name in self._unread)
        listed = ", ".join(f"{part}. ({count})" for part, count in sorted(counts.items()))
        return f"{self.call}: arrays that are not part of the text model are left unread: {listed}."

    def stored_name(self, name: str) -> str:
        """Return an array's name in the folder."""
        return self._stored[name]

    def dtype(self, name: str) -> str:
        """Return an array's dtype by its JAX name; for a quantized array, the dtype to which it is decoded by
        default."""
        return self._coded[name].dtype if name in self._coded else self._source.dtype(self._stored[name])

    def shape(self, name: str) -> Shape:
        """Return an array's shape."""
        return self._coded[name].shape if name in self._coded else self._plain_shape(self._stored[name])

    def slices(self, name: str) -> Sequence[int]:
        """Return the indices of the first dim, whose entries are decoded one by one.

        Return an empty sequence for an array that is not quantized or has fewer than three dims, which is read at once.
        """
        shape = self.shape(name)
        return range(shape[0]) if name in self._coded and len(shape) > 2 else ()

    def holds_floats(self, name: str) -> bool:
        """Return whether a coded array holds plain floats, such as F16 in GGUF: its blocks hold one number."""
        form = self.form(name)
        return isinstance(form, Blocks) and form.numbers == 1

    def is_coded(self, name: str) -> bool:
        """Return whether an array is quantized, so that reading it takes time and memory."""
        return name in self._coded

    def read(
        self,
        name: str,
        dtype: str | None = None,
        index: int | None = None,
        map_function: MapFunction = map,
        buffer: Shaped[np.ndarray, "numbers"] | None = None,
    ) -> Shaped[np.ndarray, "..."]:
        """Return an array, mapped into memory or, if it is quantized, decoded.

        Args:
            name: The array's name in the family's table.
            dtype: The dtype of a decoded array; None: the array's own.
            index: The index of the first dim that is read alone; None: all.
            map_function: A function like `map`, by which the decoder runs on the array, some rows at a time.
            buffer: An array of `dtype` into which numbers are decoded, at least as large as the last two dims.
        """
        if name not in self._coded:
            return self._read_plain(self._stored[name])
        if index is None and (slices := self.slices(name)):
            return np.stack([self.read(name, dtype, number, map_function) for number in slices])
        coded = self._coded_at(name, index)
        rows, columns = reversed(coded.shape) if coded.form.transposed else coded.shape
        buffer = np.empty(rows * columns, dtype or coded.dtype) if buffer is None else buffer
        decoded = buffer[: rows * columns].reshape(rows, columns)

        def decode(some_rows: slice) -> None:
            # Numbers that are too large become infinite, as in the reference implementations.
            with np.errstate(over="ignore", invalid="ignore"):
                coded.form.decode(coded.parts, some_rows, decoded[some_rows])

        step = _ROWS * max(1, _NUMBERS_AT_ONCE // (_ROWS * columns))
        for _ in map_function(decode, [slice(start, min(start + step, rows)) for start in range(0, rows, step)]):
            pass
        return decoded.T if coded.form.transposed else decoded

    def read_ids(self, name: str, below: int) -> Shaped[np.ndarray, "..."]:
        """Return an array of whole numbers; raises a `ValueError` unless all are at least 0 and below `below`."""
        array = (
            self._read_plain(self._stored[name]) if self._folder is None else self._folder.read_any(self._stored[name])
        )
        is_whole = np.issubdtype(array.dtype, np.integer)
        if not is_whole or (array.size and not (array.min() >= 0 and array.max() < below)):
            raise ValueError(f"it is of {array.dtype}, and must hold whole numbers from 0 to {below - 1}")
        return array

    def unexplained(self, names: Iterable[str]) -> str:
        """Return the name and dtype of the first of these arrays whose dtype only quantized weights have.

        Return an empty text if there is no such array, if the folder states the format of its codes, and for a GGUF
        file.
        """
        if self._folder is None or self._states_format:
            return ""
        dtypes = {name: self._folder.dtype_in_file(self._stored[name]) for name in sorted(names)}
        coded = (f"{self._stored[name]} ({dtype})" for name, dtype in dtypes.items() if _is_code_dtype(dtype))
        return next(coded, "")

    def form(self, name: str) -> Format | None:
        """Return the format in which an array is quantized; None for an array that is not quantized."""
        return self._coded[name].form if name in self._coded else None

    def grouped_form(self, name: str) -> Grouped:
        """Return the format of an array that is known to be `Grouped`."""
        form = self._coded[name].form
        assert isinstance(form, Grouped)
        return form

    def scale_dtype(self, name: str) -> str:
        """Return the dtype of the scales of an array whose format is `Grouped`; uint8 if scales are exponents."""
        groups = self.grouped_form(name).groups
        if groups.scale_dtype is not None:
            return groups.scale_dtype
        dtype = self._coded[name].parts[groups.scale].dtype
        return "uint8" if dtype.itemsize == 1 else str(dtype)

    def read_codes(self, name: str, index: int | None, unit: tuple[int, int]) -> QuantizedArray:
        """Return the codes of an array whose format is `Grouped`, and a scale for each group of `unit` numbers.

        `unit` is the group's size along each of the last two dims. `index` is an index of the first dim; None: all.
        """
        if index is None and (slices := self.slices(name)):
            codes, scales, zeros = zip(*(self.read_codes(name, number, unit) for number in slices), strict=True)
            return QuantizedArray(np.stack(codes), np.stack(scales), None if zeros[0] is None else np.stack(zeros))
        return self.grouped_form(name).read_codes(self._coded_at(name, index).parts, unit)

    def _coded_at(self, name: str, index: int | None) -> Coded:
        coded = self._coded[name]
        if index is None:
            return coded
        parts = {suffix: part[index] for suffix, part in coded.parts.items()}
        return Coded(coded.form, parts, coded.shape[1:], coded.dtype)

    def _find_coded(self, folder: Folder, form: Format, dtype: str) -> None:
        """Replace the names of codes and scales by the name of the array that they encode."""
        codes = [name for name in self._stored if name.endswith(form.codes) and name not in self._coded]
        if form.dtypes:
            codes = [name for name in codes if folder.dtype_in_file(self._stored[name]) in form.dtypes]
        for name in codes:
            stem, stored = name.removesuffix(form.codes), self._stored[name]
            if missing := [suffix for suffix in form.required if stem + suffix not in self._stored]:
                raise ValueError(
                    f"{self.call}: {stored} holds codes of {form.name}, which mean nothing without {stem}{missing[0]}; "
                    "the folder must have both."
                )
            optional = [suffix for suffix in form.optional if stem + suffix in self._stored]
            suffixes = dict.fromkeys((form.codes, *form.required, *optional))
            parts = {suffix: folder.read_any(self._stored.pop(stem + suffix)) for suffix in suffixes}
            for suffix in form.ignored:
                self._stored.pop(stem + suffix, None)
            if (decoded := stem + form.decoded) in self._stored:
                raise ValueError(
                    f"{self.call}: {stored} and {decoded} are both {decoded}; the folder must have one of them."
                )
            try:
                self._coded[decoded] = Coded(form, parts, form.shape(parts), dtype)
            except ValueError as error:
                raise ValueError(f"{self.call}: {stored}, in {form.name}: {error}.") from None
            self._stored[decoded] = stored
        if form.also is not None:
            self._find_coded(folder, form.also, dtype)


def _is_code_dtype(dtype: str) -> bool:
    return dtype not in (*FLOATS, *_NO_CODES)


def _model_part(name: str) -> str:
    """Return the part of a model that an array is in: `visual`, `model.layers.61`, `model.encoder.vision_tower`."""
    words = name.split(".")
    if words[0] == "model" and words[1:2] in (["layers"], ["encoder"]):
        return ".".join(words[:3])
    return ".".join(words[: 2 if words[0] == "model" else 1])


def maps_by_weight(model: PyTree) -> dict[str, nn.LinearMap]:
    """Return every linear map of a model by the path of its weight; for a quantized map, the path before
    quantization."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=nn.is_map)
    return {f"{nn.path_name(path)}.weight": node for path, node in nodes if nn.is_map(node)}


def find_quantized_maps(
    arrays: PublishedArrays, rules: Sequence[ResolvedRule], shapes: nn.Transformer
) -> dict[str, nn.QuantizedLinear]:
    """Return the quantized maps that will hold the folder's codes, as shapes, by the path of the plain map's weight.

    Quantized weights outside of linear maps, such as embedding tables, are decoded. Raises a `ValueError` if no weight
    is quantized, if an array has a format that no map holds, and if only some layers of a stack are quantized.
    """
    plain = {path: linear for path, linear in maps_by_weight(shapes).items() if isinstance(linear, nn.DenseMap)}
    quantized: dict[str, nn.QuantizedLinear] = {}
    for rule in rules:
        names = rule.published_names()
        coded = [name for name in names if arrays.is_coded(name) and not arrays.holds_floats(name)]
        if not coded or not all(path in plain for path in rule.paths):
            continue
        if len(coded) < len(names):
            decoded = next(name for name in names if name not in coded)
            _refuse(
                arrays,
                coded[0],
                f"is stored in fewer bits and {decoded} is not, but all layers of a stack must have one format",
            )
        form = arrays.form(coded[0])
        if differing := next((name for name in coded if arrays.form(name) != form), None):
            _refuse(
                arrays,
                coded[0],
                f"and {arrays.stored_name(differing)} are stored in two formats, but a stack must have one",
            )
        if not isinstance(form, Grouped):
            _refuse(arrays, coded[0], "is stored in a block format that no linear map supports")
        scales = {arrays.scale_dtype(name) for name in names}
        if len(scales) > 1 and "uint8" in scales:
            _refuse(arrays, coded[0], "and other layers of its stack have scales of two kinds, exponents and floats")
        dtype = scales.pop() if len(scales) == 1 else str(nn.lossless_dtype(*scales))
        for leaf_index, path in enumerate(rule.paths):
            axis = rule.axis_of_last_dim(leaf_index)
            quantized[path] = _quantized_shapes(arrays, coded[0], form, axis, plain[path], dtype)
    if not quantized:
        raise ValueError(
            f"{arrays.call}: weights='quantized': none of its linear maps is stored in fewer bits; load it with "
            "weights='decoded', and nn.quantize the model."
        )
    return quantized


def with_quantized_maps(shapes: nn.Transformer, quantized: Mapping[str, nn.QuantizedLinear]) -> nn.Transformer:
    """Return the model's shapes with plain maps replaced by quantized maps, which are given by the plain weights'
    paths.

    A quantized map has the bias of the plain map.
    """

    def replace(path: tuple, node: object) -> object:
        return quantized.get(f"{nn.path_name(path)}.weight", node)

    return jax.tree_util.tree_map_with_path(replace, shapes, is_leaf=nn.is_map)


def plain_shapes(model: nn.Transformer) -> nn.Transformer:
    """Return the model with each quantized map replaced by a plain map that has only the shape of its weight."""

    def to_plain(linear: nn.LinearMap) -> nn.LinearMap:
        if not isinstance(linear, nn.QuantizedLinear):
            return linear
        return _with_bias(eqx.filter_eval_shape(nn.dense, linear), linear.bias)

    return nn.map_linears(to_plain, model)


def names_as_stored(
    arrays: PublishedArrays, rules: Sequence[ResolvedRule], model: nn.Transformer, call: str
) -> set[str]:
    """Return the names of the quantized arrays whose codes and scales the model holds.

    Raises a `ValueError` if the model holds other codes, or the decoded array. `rules` are the rules of the
    model's `plain_shapes`.
    """
    maps, stored_names = maps_by_weight(model), set[str]()
    for rule in rules:
        linears = [maps.get(path) for path in rule.paths]
        quantized = [linear for linear in linears if isinstance(linear, nn.QuantizedLinear)]
        for index, name in rule.arrays():
            if not arrays.is_coded(name):
                continue
            stored = arrays.stored_name(name)
            if len(quantized) < len(linears):
                raise ValueError(
                    f"{call}: {stored} is stored in fewer bits, and whole=True would mix it with the model's decoded "
                    "arrays; save the model without whole=True, or load it with weights='quantized'."
                )
            leaves = [leaf for linear in quantized for leaf in code_leaves(linear).values()]
            own_codes = [np.asarray(leaf[index] if index else leaf) for leaf in leaves]
            codes = read_map_codes(arrays, name, None, rule, quantized)
            if len(codes) != len(own_codes) or not all(map(np.array_equal, codes, own_codes)):
                raise ValueError(
                    f"{call}: the model's codes and scales differ from {stored}; nn.dequantize the model and save "
                    "it without whole=True."
                )
            stored_names.add(name)
    return stored_names


def code_leaves(linear: nn.QuantizedLinear) -> dict[str, Any]:
    """Return the codes, scales and zeros of a map, or their shapes, by field; without `zeros` if the map has none."""
    leaves = {"codes": linear.codes, "scales": linear.scales, "zeros": linear.zeros}
    return {field: leaf for field, leaf in leaves.items() if leaf is not None}


def read_map_codes(
    arrays: PublishedArrays, name: str, index: int | None, rule: ResolvedRule, maps: Sequence[nn.QuantizedLinear]
) -> list[Shaped[np.ndarray, "..."]]:
    """Return the part of each map's `code_leaves` that one published array holds, in the order of the maps.

    `index` selects one entry of the array's first dim; None reads all of them.
    """
    form, sizes = arrays.grouped_form(name), arrays.shape(name)[-2:]
    parts: list[Shaped[np.ndarray, "..."]] = []
    for leaf_index, linear in enumerate(maps):
        axis = rule.axis_of_last_dim(leaf_index)
        assert axis is not None
        has_one_group = form.groups.members[axis] is None
        unit = [1, 1]
        unit[axis] = sizes[axis] if has_one_group else linear.shape[-1] // linear.scales.shape[-1]
        published = arrays.read_codes(name, index, (unit[0], unit[1]))
        for array, leaves in zip(published, zip(*((m.codes, m.scales, m.zeros) for m in maps)), strict=True):
            if array is not None:
                parts.append(rule.with_shapes([leaf.shape for leaf in leaves]).to_leaf(array, leaf_index))
    return parts


def _quantized_shapes(
    arrays: PublishedArrays, name: str, form: Grouped, axis: int | None, linear: nn.DenseMap, dtype: str
) -> nn.QuantizedLinear:
    """Return the shapes of the map that holds an array's codes, to replace a plain map.

    Args:
        arrays: The published arrays.
        name: The array.
        form: The array's format.
        axis: The array's dim, counted from its end, that holds the map's last input dim.
        linear: The plain map.
        dtype: The dtype of the scales.
    """
    groups, shape, inputs = form.groups, linear.weight.shape, linear.inputs
    last, per_byte = shape[-1], nn.codes_in_a_byte(groups.form)
    if last % per_byte:
        _refuse(arrays, name, f"has an odd number of {inputs[-1]!r}, {last}, but two codes share a byte")
    if axis not in (-1, -2) or (per_byte > 1 and axis != (-2 if form.transposed else -1)):
        _refuse(arrays, name, f"stores {inputs[-1]!r} in another order, or packs codes along another dim into a byte")
    if (members := groups.members[axis]) is None:
        scale_inputs = (1,) * len(inputs)
    else:
        scale_inputs = (*shape[len(shape) - len(inputs) : -1], last // math.gcd(members, last))
    scale_shape = (*shape[: len(shape) - len(inputs)], *scale_inputs)

    def make(bias: Array | None) -> nn.QuantizedLinear:
        return nn.QuantizedLinear(
            inputs,
            linear.outputs,
            form=groups.form,
            codes=jnp.zeros((*shape[:-1], last // per_byte), jnp.uint8),
            scales=jnp.zeros(scale_shape, dtype),
            zeros=jnp.zeros(scale_shape, groups.zero_dtype or "uint8") if groups.has_zeros else None,
            bias=bias,
        )

    return eqx.filter_eval_shape(make, linear.bias)


def _with_bias(linear: nn.LinearMap, bias: object) -> nn.LinearMap:
    return eqx.tree_at(lambda m: m.bias, linear, bias, is_leaf=lambda leaf: leaf is None)


def _refuse(arrays: PublishedArrays, name: str, why: str) -> NoReturn:
    raise ValueError(
        f"{arrays.call}: weights='quantized': {arrays.stored_name(name)} {why}; load with weights='decoded'."
    )
