"""Documents to batches: sources, tokenizers, a token cache on disk, packing, resumable order, mixtures, prefetch."""

from ._chat_template import (
    ChatTemplate as ChatTemplate,
    find_replies as find_replies,
    has_chat_template as has_chat_template,
    read_special_tokens as read_special_tokens,
)
from ._completion_rows import (
    batch_completions as batch_completions,
    batch_labelled as batch_labelled,
    batch_preferences as batch_preferences,
    LabelledPacking as LabelledPacking,
    PairPacking as PairPacking,
)
from ._conversations import (
    Conversation as Conversation,
    ConversationEncoder as ConversationEncoder,
    conversations as conversations,
    detect_form as detect_form,
    EncodedExample as EncodedExample,
    labelled as labelled,
    LossOn as LossOn,
    MarkedSpan as MarkedSpan,
    preferences as preferences,
    PromptCompletion as PromptCompletion,
    read_example as read_example,
    read_label as read_label,
    RowEncoder as RowEncoder,
    split_preference as split_preference,
)
from ._corpus import Corpus as Corpus, open_corpus as open_corpus, ValidationMeans as ValidationMeans
from ._documents import (
    Document as Document,
    hub as hub,
    standard_library as standard_library,
    texts as texts,
    TextSource as TextSource,
)
from ._files import files as files
from ._loader import (
    Loader as Loader,
    Mixture as Mixture,
    Packing as Packing,
    Prefetch as Prefetch,
    prefetch as prefetch,
    shuffle_indices as shuffle_indices,
)
from ._packing import batch_pairs as batch_pairs, DocumentPacking as DocumentPacking, WindowPacking as WindowPacking
from ._stored_rows import open_stored_rows as open_stored_rows, StoredRows as StoredRows
from ._text_rows import (
    batch_labelled_texts as batch_labelled_texts,
    batch_text_groups as batch_text_groups,
    labelled_texts as labelled_texts,
    LabelledText as LabelledText,
    LabelledTextEncoder as LabelledTextEncoder,
    LabelledTextPacking as LabelledTextPacking,
    list_label_names as list_label_names,
    read_labelled_text as read_labelled_text,
    read_text_group as read_text_group,
    text_groups as text_groups,
    TextGroupEncoder as TextGroupEncoder,
    TextGroupPacking as TextGroupPacking,
)
from ._token_store import check_vocab as check_vocab, open_store as open_store, TokenStore as TokenStore
from ._tokenizer import (
    ByteTokenizer as ByteTokenizer,
    check_same_ids as check_same_ids,
    EncodedText as EncodedText,
    FileTokenizer as FileTokenizer,
    find_mask_id as find_mask_id,
    MASK_TOKENS as MASK_TOKENS,
    PromptTokenizer as PromptTokenizer,
    TextStream as TextStream,
    Tokenizer as Tokenizer,
    tokenizer_files as tokenizer_files,
)
