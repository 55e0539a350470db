"""Attention over pages, as a paged engine computes it: queries at hand, keys and values wherever the page table says.

    query        [rows, heads, query_tokens, key_dim]
    page table   row 0:  4  9  2  0        physical pages from the row's first token; 0, the sink, where none is bound
                 row 1:  7  1  0  0
    keys         [page_count, page_tokens, kv_heads, key_dim], any strides between tokens; values likewise, of their own width
    output       [rows, query_tokens, heads, value_dim]

`attend` serves decode and prefill chunks, grouped heads, windows, attention chunks and sinks; its queries are already in the pages,
which is what `CHUNK_READS` declares to whoever prices requests. Torch computes it on a CPU, Triton on a GPU.

What a query does not see has weight zero on both. Torch loads whole pages for it, bytes that nobody has written among them, so their
zeroing on hand-out is needed (row A5); the Triton programs load only what some query of their block sees.
"""

from kvtide.engine.attention.attend import CHUNK_READS, attend
from kvtide.engine.attention.rows import PagedRows, Reach, reach_of

__all__ = ["CHUNK_READS", "PagedRows", "Reach", "attend", "reach_of"]
