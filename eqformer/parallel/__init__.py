"""Mesh axes, layouts and transforms: one model over any number of devices."""

from ._collectives import COLLECTIVES as COLLECTIVES, STATE as STATE
from ._context_attention import (
    check_context as check_context,
    CONTEXT_METHODS as CONTEXT_METHODS,
    context_order as context_order,
    ContextAttention as ContextAttention,
    SplitCacheAttention as SplitCacheAttention,
    sum_rows as sum_rows,
    zigzag as zigzag,
    zigzag_inverse as zigzag_inverse,
)
from ._expert_exchange import choose_expert_method as choose_expert_method, Exchange as Exchange
from ._fully_sharded import (
    Gathered as Gathered,
    grad_proxy as grad_proxy,
    has_wider_grad as has_wider_grad,
    route_gradient as route_gradient,
)
from ._global_values import (
    gather_rows as gather_rows,
    replicate_rows as replicate_rows,
    sum_row_vectors as sum_row_vectors,
)
from ._layer_tables import keeps_split as keeps_split
from ._mesh import (
    AXES as AXES,
    axis_sizes as axis_sizes,
    AXIS_TYPES as AXIS_TYPES,
    BATCH_AXES as BATCH_AXES,
    CONTEXT as CONTEXT,
    EXPERT as EXPERT,
    FSDP as FSDP,
    init_sharded as init_sharded,
    Layout as Layout,
    lower_sharded as lower_sharded,
    make_mesh as make_mesh,
    partition_specs as partition_specs,
    PIPE as PIPE,
    REPLICA as REPLICA,
    shardings as shardings,
    TENSOR as TENSOR,
)
from ._placement import option_values as option_values, ParallelConfig as ParallelConfig, Placement as Placement
from ._plan import OnDevice as OnDevice, Plan as Plan
from ._processes import (
    check_alike as check_alike,
    connect as connect,
    is_first_process as is_first_process,
    numbers_from_first_process as numbers_from_first_process,
    on_all_processes as on_all_processes,
    on_first_process as on_first_process,
    Votes as Votes,
)
from ._ring import shift as shift
from ._shard_map import (
    filter_shard_map as filter_shard_map,
    vary as vary,
    vary_like as vary_like,
    varying_axes as varying_axes,
)
from ._sharded_model import ShardedModel as ShardedModel
from ._show_plan import (
    draw_array as draw_array,
    layout_table as layout_table,
    plot_layout as plot_layout,
    summary as summary,
)
from ._vocab_chunks import chunked_tables as chunked_tables
from .pipeline._pipeline import pipeline_gradients as pipeline_gradients
from .pipeline._pipelined_stack import (
    check_depth as check_depth,
    layer_order as layer_order,
    PipelinedStack as PipelinedStack,
)
from .pipeline._residuals import select_differentiable as select_differentiable
from .pipeline._schedule import (
    check_schedule as check_schedule,
    count_link_ticks as count_link_ticks,
    IDLE as IDLE,
    ring_placement as ring_placement,
    Schedule as Schedule,
    v_placement as v_placement,
)
from .pipeline._schedules import (
    dualpipe_v as dualpipe_v,
    gpipe as gpipe,
    interleaved as interleaved,
    looping as looping,
    make_schedule as make_schedule,
    one_f_one_b as one_f_one_b,
    pack_schedule as pack_schedule,
    SCHEDULES as SCHEDULES,
    zero_bubble as zero_bubble,
    zero_bubble_v as zero_bubble_v,
)
from .pipeline._simulate import (
    draw_timeline as draw_timeline,
    Entries as Entries,
    plot_timeline as plot_timeline,
    simulate as simulate,
    Simulation as Simulation,
    Timing as Timing,
)
from .tensor._collective_matmul import (
    all_gather_matmul as all_gather_matmul,
    matmul_reduce_scatter as matmul_reduce_scatter,
    OVERLAPS as OVERLAPS,
)
from .tensor._residual_stream import ResidualStream as ResidualStream, SplitNorm as SplitNorm
from .tensor._stream_kinds import (
    FeatureLinear as FeatureLinear,
    FeatureStream as FeatureStream,
    make_residual_stream as make_residual_stream,
    ReplicatedStream as ReplicatedStream,
    RESIDUAL_STREAMS as RESIDUAL_STREAMS,
    SequenceStream as SequenceStream,
)
from .tensor._tensor import (
    is_split as is_split,
    replicated_layers as replicated_layers,
    ReplicatedMixer as ReplicatedMixer,
    stream_maps as stream_maps,
    TensorParallelLayer as TensorParallelLayer,
    TensorParallelMixer as TensorParallelMixer,
)
from .tensor._vocabulary import SplitEmbedding as SplitEmbedding, SplitVocabulary as SplitVocabulary
