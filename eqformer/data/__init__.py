"""Documents to batches: sources, tokenizers, a token cache on disk, packing, resumable order, mixtures, prefetch."""

from ._chat import ChatTemplate as ChatTemplate, has_chat_template as has_chat_template
from ._corpus import Corpus as Corpus, Means as Means, open_corpus as open_corpus
from ._documents import (
    Document as Document,
    Source as Source,
    standard_library as standard_library,
    texts as texts,
)
from ._files import files as files
from ._hub import hub as hub
from ._loader import Loader as Loader
from ._mixture import Mixture as Mixture
from ._order import shuffled as shuffled
from ._packing import Documents as Documents, Windows as Windows
from ._pairs import paired as paired
from ._prefetch import Prefetch as Prefetch, prefetch as prefetch
from ._store import check_vocab as check_vocab, open_store as open_store, TokenStore as TokenStore
from ._tokenizer import (
    ByteTokenizer as ByteTokenizer,
    FileTokenizer as FileTokenizer,
    TextStream as TextStream,
    Tokenizer as Tokenizer,
    tokenizer_files as tokenizer_files,
)
