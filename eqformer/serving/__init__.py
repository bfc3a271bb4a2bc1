"""A server of one model by the OpenAI protocol: an ASGI app of a language model or a text encoder, and its process."""

from ._embeddings import EMBEDDING_LIMITS as EMBEDDING_LIMITS, EmbeddingService as EmbeddingService
from ._server import make_app as make_app, serve as serve
from ._service import Limits as Limits, TextService as TextService
from ._tool_calls import ToolCall as ToolCall, ToolCallParser as ToolCallParser
