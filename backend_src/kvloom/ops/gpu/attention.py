from kvloom.ops.gpu.decode_attention import decode_attention
def attend(q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale, out, *, max_queries, max_length, **options):
    decode_attention(q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale, out, max_length=max_length, **options)
