"""`patch`: a model whose calls pass some of their values through functions, which edit or replace them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from ._observer import insert_wrappers, Observer, Patch
from ._points import is_of_predictor, parse_path, Point


class PatchedModel(nn.LanguageModel):
    """A language model whose calls apply patches; made by `patch`."""

    inner: nn.LanguageModel
    points: tuple[Point, ...] = eqx.field(static=True)
    functions: tuple[Callable[..., Any], ...]

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The values that are replaced, each with its function."""
        return tuple(zip(self.points, self.functions, strict=True))

    # These properties return any pytree: `equinox.tree_at` reads them while placeholders stand in place of the modules.
    @property
    def embedding(self) -> PyTree:
        """The model's table of token embeddings."""
        return self.inner.embedding

    @property
    def stacks(self) -> PyTree:
        """The model's layers."""
        return self.inner.stacks

    @property
    def norm(self) -> PyTree:
        """The norm of the last layer's output."""
        return self.inner.norm

    @property
    def head(self) -> PyTree:
        """The map from hidden vectors to logits, or None."""
        return self.inner.head

    @property
    def compute_dtype(self) -> str:
        """The dtype of the residual stream."""
        return self.inner.compute_dtype

    @property
    def max_seq(self) -> int | None:
        """The number of positions that the model knows; None for any number."""
        return self.inner.max_seq

    @property
    def start(self) -> int | None:
        """The id that each text begins with where an encoder reads the prompt; None without an encoder."""
        return self.inner.start

    @property
    def parts(self) -> nn.ModelParts:
        """The optional parts that the model has."""
        return self.inner.parts

    def embed(self, ids: Int[Array, "*batch seq"], tokens: nn.Tokens) -> Float[Array, "*batch _ embed"]:
        """Return the input of the first stack."""
        with nn.observe_calls(Observer((), self.patches)):
            return self.inner.embed(ids, tokens)

    def encode(
        self, ids: Int[Array, "*batch seq"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the final norm's output, the new cache, and the aux of the stacks."""
        observer = Observer((), self.patches)
        with nn.observe_calls(observer):
            result = self.inner.encode(ids, tokens, cache)
        observer.check_applied("encode", [point for point in self.points if not _is_of_head(point)], tokens)
        return result

    def unembed(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return the logits of what `encode` returned."""
        observer = Observer((), self.patches)
        with nn.observe_calls(observer):
            logits = self.inner.unembed(hidden)
        observer.check_applied("unembed", filter(_is_of_head, self.points), None)
        return logits

    def init_cache(
        self, batch: int | Sequence[int], capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree:
        """Return an empty cache of the model; up to `rollback` last tokens of a row may be replaced later."""
        return self.inner.init_cache(batch, capacity, dtype, rollback=rollback)


def _is_of_head(point: Point) -> bool:
    """Return whether `unembed` computes a value, and not `encode`."""
    return f"{point.key}.".startswith("head.")


def patch(model: nn.LanguageModel, functions: Mapping[str, Callable[..., Any]]) -> PatchedModel:
    """Return a model like this one, whose calls replace some of their values by functions of the values.

    ```python
    patched = eqformer.patch(model, {"stacks[0][3].sublayers[1].layer": jnp.zeros_like})  # without the MLP of layer 3
    logits, _ = patched(ids)
    ```

    The patched model is a model: it generates, may be captured, jitted and differentiated, with respect to its weights
    and to arrays that a function holds as a pytree (`jax.tree_util.Partial`, an `equinox.Module`).

    A call that does not run a patched module raises an error: `unembed` for the head, `encode` for all other modules.
    One case is not checked, because the call cannot tell whether an earlier call was patched: with a cache and without
    a source, values of the encoder and of layers that attend to the encoder's output may come from the cache.

    Args:
        model: A language model, or a patched one, whose patches come first.
        functions: For each path, as `value_paths(model)` lists them, a function of the value that returns another value
            of the same shape and dtype. The function of a path through all layers, `stacks[0].blocks`, is called
            in each layer as `function(value, layer)`, with the layer's number as a traced integer.

    Raises:
        ValueError: For a path that names no value, with the nearest paths, or a value of the predictor, which a patched
            model does not run; from a call, for a function that returns another shape or dtype, and for a module that
            the call does not run.
    """
    earlier: tuple[Patch, ...] = ()
    if isinstance(model, PatchedModel):
        model, earlier = model.inner, model.patches
    points = tuple(parse_path(model, path, "patch(model, functions)") for path in functions)
    if predicted := [point.path for point in points if is_of_predictor(model, point)]:
        raise ValueError(
            f"patch(model, functions): {', '.join(map(repr, predicted))} belongs to the predictor, and a patched model "
            "has no predict; name modules that encode or unembed run."
        )
    # A plain function is part of the tree's structure, so that all leaves of a patched model are arrays.
    is_plain = lambda function: jax.tree.leaves(function) == [function]
    wrapped = [jax.tree_util.Partial(f) if is_plain(f) else f for f in functions.values()]
    inner = insert_wrappers(model, [point.key for point in points])
    assert isinstance(inner, nn.LanguageModel)
    points = (*(point for point, _ in earlier), *points)
    return PatchedModel(inner, points, (*(function for _, function in earlier), *wrapped))
