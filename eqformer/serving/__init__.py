"""A server of one model by the OpenAI protocol: an ASGI app over `text.TextEngine`, and its process."""

from ._responses import ToolCall as ToolCall, ToolCallParser as ToolCallParser
from ._server import make_app as make_app, serve as serve
from ._service import Limits as Limits, TextService as TextService
