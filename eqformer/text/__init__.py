"""Text in, text out: a model together with its tokenizer, its chat template and the ids that end a text."""

from ._companions import (
    EmbeddingHead as EmbeddingHead,
    load_conversation_encoder as load_conversation_encoder,
    load_tokenizer as load_tokenizer,
    read_chat_template as read_chat_template,
    read_mask_id as read_mask_id,
    read_pooling as read_pooling,
)
from ._generate_texts import (
    ChatOptions as ChatOptions,
    Completion as Completion,
    GenerateOptions as GenerateOptions,
    StreamedText as StreamedText,
)
from ._grammars import Grammar as Grammar
from ._llm import build_kernels as build_kernels, LLM as LLM, prepare_to_decode as prepare_to_decode
from ._load import (
    export_run as export_run,
    is_run as is_run,
    load as load,
    load_llm as load_llm,
    load_run_classifier as load_run_classifier,
    load_run_encoder as load_run_encoder,
    load_run_model as load_run_model,
    load_run_tokenizer as load_run_tokenizer,
    make_llm as make_llm,
)
from ._prompt_file import complete_file as complete_file, count_prompts as count_prompts, FileSummary as FileSummary
from ._rollouts import read_prompts as read_prompts, Reward as Reward, Rollouts as Rollouts, Sample as Sample
from ._text_classifier import (
    Classification as Classification,
    load_classifier as load_classifier,
    read_label_names as read_label_names,
    reads_token_types as reads_token_types,
    TextClassifier as TextClassifier,
    TokenLabel as TokenLabel,
)
from ._text_encoder import load_encoder as load_encoder, SIMILARITIES as SIMILARITIES, TextEncoder as TextEncoder
from ._text_engine import (
    TextEngine as TextEngine,
    TextPiece as TextPiece,
    TextRequest as TextRequest,
    TextResult as TextResult,
)
