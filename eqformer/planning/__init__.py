"""The costs of a run: parameters, operations, bytes held and sent, and the machine's measured speed."""

from ._accelerators import (
    Accelerator as Accelerator,
    ACCELERATORS as ACCELERATORS,
    copy_bandwidth as copy_bandwidth,
    for_platform as for_platform,
    matmul_peak as matmul_peak,
    mesh_peak as mesh_peak,
    Topology as Topology,
    topology as topology,
)
from ._bounds import (
    context_bytes as context_bytes,
    expert_bytes as expert_bytes,
    gather_bytes as gather_bytes,
    pipeline_bytes as pipeline_bytes,
    sharded_state_bytes as sharded_state_bytes,
    tensor_bytes as tensor_bytes,
)
from ._compile import (
    Compilation as Compilation,
    compilation_of as compilation_of,
    decode_shapes as decode_shapes,
    devices_of as devices_of,
    lowered_decode as lowered_decode,
    lowered_step as lowered_step,
    missing_compiler as missing_compiler,
)
from ._counted_bytes import counted_bytes as counted_bytes
from ._forecast import (
    decode_forecast as decode_forecast,
    DeviceMemory as DeviceMemory,
    Forecast as Forecast,
    forecast as forecast,
    scatter_padding as scatter_padding,
    Target as Target,
)
from ._held_bytes import (
    activation_bytes as activation_bytes,
    batch_shapes as batch_shapes,
    judge_formula as judge_formula,
    labelled_text_shapes as labelled_text_shapes,
    MARGIN as MARGIN,
    preference_shapes as preference_shapes,
    state_bytes as state_bytes,
    step_bytes as step_bytes,
    StepBytes as StepBytes,
    temporary_bytes as temporary_bytes,
    text_group_shapes as text_group_shapes,
    Verdict as Verdict,
)
from ._out_of_memory import (
    find_smaller_setups as find_smaller_setups,
    out_of_memory_report as out_of_memory_report,
    SmallerSetup as SmallerSetup,
    TrainingSetup as TrainingSetup,
)
from ._report import (
    communication_table as communication_table,
    compilation_table as compilation_table,
    forecast_table as forecast_table,
    format_decode_plans as format_decode_plans,
    format_search as format_search,
    gigabytes as gigabytes,
    held_table as held_table,
    parse_bytes as parse_bytes,
    plot_costs as plot_costs,
    ranking_table as ranking_table,
    sent_table as sent_table,
)
from ._roofline import (
    flops_per_token as flops_per_token,
    fp8_flops_per_token as fp8_flops_per_token,
    parameter_count as parameter_count,
    Roofline as Roofline,
    roofline as roofline,
    visible_keys as visible_keys,
)
from ._search import (
    abstract_mesh as abstract_mesh,
    Candidate as Candidate,
    DecodePlan as DecodePlan,
    enumerate_meshes as enumerate_meshes,
    PlanSearch as PlanSearch,
    Progress as Progress,
    Proposal as Proposal,
    search_decode_plans as search_decode_plans,
    search_plans as search_plans,
    ShapeRanking as ShapeRanking,
)
from ._sent_bytes import Sent as Sent, sent_bytes as sent_bytes, sum_by_cause as sum_by_cause
