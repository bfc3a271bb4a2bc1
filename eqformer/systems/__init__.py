"""Systems that published documents describe, rebuilt as exercises: nothing else in the package imports this room."""

from ._collectives import (
    PerRank as PerRank,
    reference_all_gather as reference_all_gather,
    reference_all_to_all as reference_all_to_all,
    reference_ppermute as reference_ppermute,
    reference_psum as reference_psum,
    reference_psum_scatter as reference_psum_scatter,
    ring_all_gather as ring_all_gather,
    ring_psum_scatter as ring_psum_scatter,
)
from ._cost_formulas import (
    attention_exchange_bytes as attention_exchange_bytes,
    best_embed_devices as best_embed_devices,
    best_gathered as best_gathered,
    ffn_activation_bytes as ffn_activation_bytes,
    ffn_gradient_bytes as ffn_gradient_bytes,
    gpipe_activations as gpipe_activations,
    gpipe_idle_share as gpipe_idle_share,
    transfer_seconds as transfer_seconds,
    weight_gathered_bytes as weight_gathered_bytes,
    weight_stationary_bytes as weight_stationary_bytes,
)
from ._weight_stationary import WeightStationary as WeightStationary
