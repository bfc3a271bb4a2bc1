"""The residual streams by the names that a person types."""

from ._collective_matmul import Overlap
from ._feature import ByFeature
from ._residual_stream import Stream, StreamKind
from ._tensor import ByToken, Replicated


STREAMS: dict[StreamKind, type[Stream]] = {"replicated": Replicated, "sequence": ByToken, "feature": ByFeature}


def stream_of(kind: StreamKind, overlap: Overlap = "none") -> Stream:
    """The stream of a kind, such as `"sequence"`."""
    return STREAMS[kind](overlap)
