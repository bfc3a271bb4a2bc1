"""Generation of ids from a model's distributions over the next token: sampling, drafts, streams, log-probabilities."""

from ._block_engine import BlockEngine as BlockEngine
from ._blocks import BlockStream as BlockStream, generate_blocks as generate_blocks, stream_blocks as stream_blocks
from ._decode import MAX_ALTERNATIVES as MAX_ALTERNATIVES
from ._denoise import BlockOrder as BlockOrder
from ._engine import Engine as Engine
from ._generate import generate as generate, Generation as Generation, stream as stream, TokenStream as TokenStream
from ._model import Model as Model, unstack_for_platform as unstack_for_platform, unstack_layers as unstack_layers
from ._prompts import fit_to_positions as fit_to_positions
from ._request_engine import RequestEngine as RequestEngine
from ._requests import Request as Request, Result as Result
from ._samplers import (
    BatchOptions as BatchOptions,
    BlockSampler as BlockSampler,
    EngineOptions as EngineOptions,
    IdStream as IdStream,
    NextTokenSampler as NextTokenSampler,
    Sampler as Sampler,
    sampler_of as sampler_of,
    SamplerOptions as SamplerOptions,
    ScoreOptions as ScoreOptions,
)
from ._score_blocks import score_blocks as score_blocks
from ._score_tokens import score_tokens as score_tokens, TokenScores as TokenScores
from ._speculative import DraftStatistics as DraftStatistics
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
