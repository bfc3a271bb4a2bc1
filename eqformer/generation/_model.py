"""The interface that generation needs of a model."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PyTree

from ..nn import Predictor, Tokens


@runtime_checkable
class Model(Protocol):
    """A model that generates: `nn.LanguageModel`, or any class with these of its methods."""

    @property
    def vocab(self) -> int: ...

    @property
    def max_seq(self) -> int | None: ...

    @property
    def start(self) -> int | None: ...

    def encode(
        self, ids: Int[Array, "batch seq"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree, Any]: ...

    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]: ...

    def decode(
        self, ids: Int[Array, "batch seq"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch vocab"], PyTree]: ...

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree: ...


@runtime_checkable
class PredictingModel(Model, Protocol):
    """A model that may have a multi-token predictor, with `Transformer.predict` and a cache for the predictor."""

    @property
    def predictor(self) -> Predictor | None: ...

    def predict(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq embed"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]: ...

    def init_predictor_cache(
        self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree: ...
