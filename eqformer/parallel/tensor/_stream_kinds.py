"""The residual streams by the names that a person types."""

from ._collective_matmul import Overlap
from ._feature import FeatureStream
from ._residual_stream import ResidualStream, StreamKind
from ._tensor import ReplicatedStream, SequenceStream


RESIDUAL_STREAMS: dict[StreamKind, type[ResidualStream]] = {
    "replicated": ReplicatedStream,
    "sequence": SequenceStream,
    "feature": FeatureStream,
}


def make_residual_stream(kind: StreamKind, overlap: Overlap = "none") -> ResidualStream:
    """The stream of a kind, such as `"sequence"`."""
    return RESIDUAL_STREAMS[kind](overlap)
