"""Rotary tables for rows that stand at positions of their own.

With "rope" and "yarn" Megatron ignores position ids: row i of a call gets row i of the table. In a call the embedding returns the table's rows at the
call's positions instead. Megatron asks it for a length first and passes that length on, so the length carries the call.
"""

from megatron.core import parallel_state

from espalier.megatron.calls import call_of


class _Length(int):
    """A table's length that knows the call it is for. `packed`: whether the rows go to latent attention."""
    call, packed = None, False


def attach(embedding):
    """Makes a rotary embedding return the rows of calls. Plain calls run its own methods."""
    own_length, own_table = embedding.get_rotary_seq_len, embedding.forward
    own_cached = getattr(embedding, "get_cached_cos_sin", None)

    def get_rotary_seq_len(inference_context, transformer, transformer_input, transformer_config, packed_seq_params=None, **more):
        call = call_of(packed_seq_params)
        if call is None:
            return own_length(inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **more)
        length = _Length(1 << (call.longest - 1).bit_length())  # few different lengths: the embedding keeps its last tables
        length.call, length.packed = call, packed_seq_params.qkv_format == "thd"
        return length

    def forward(length, *args, **more):
        if getattr(length, "call", None) is None:
            return own_table(length, *args, **more)
        table = own_table(int(length), 0, True)  # True, for packed rows: the table is not sharded over context parallel ranks
        if isinstance(table, tuple):  # yarn
            return _rows(table[0], length), *table[1:]
        return _rows(table, length)

    def get_cached_cos_sin(length, *args, **more):
        if getattr(length, "call", None) is None:
            return own_cached(length, *args, **more)
        return tuple(_rows(table, length) for table in own_cached(int(length), *args, **{**more, "packed_seq": True}))

    embedding.get_rotary_seq_len, embedding.forward = get_rotary_seq_len, forward
    if own_cached is not None:
        embedding.get_cached_cos_sin = get_cached_cos_sin


def _rows(table, length):
    """The table's rows at the call's positions. Under context parallelism a latent layer takes pieces r and 2 cp - 1 - r of a table itself; the
    call's rows are put there."""
    rows = table.index_select(0, length.call.positions)
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if ranks == 1 or not length.packed:
        return rows
    half = len(rows) // 2
    whole = rows.new_zeros(len(rows) * ranks, *rows.shape[1:])
    whole[rank * half:(rank + 1) * half] = rows[:half]
    whole[(2 * ranks - 1 - rank) * half:(2 * ranks - rank) * half] = rows[half:]
    return whole
