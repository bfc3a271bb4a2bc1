"""Sampling: what turns a model's distributions over the next token into text."""

from ._drafts import Drafted as Drafted
from ._generate import generate as generate, Generation as Generation
from ._model import Model as Model
from ._prompts import within_positions as within_positions
from ._stream import Stream as Stream, stream as stream
from ._transforms import (
    Chain as Chain,
    chain as chain,
    History as History,
    MinP as MinP,
    RepetitionPenalty as RepetitionPenalty,
    sampling as sampling,
    Temperature as Temperature,
    TopK as TopK,
    TopP as TopP,
    Transform as Transform,
)
from ._unstacked import for_platform as for_platform, unstacked as unstacked
