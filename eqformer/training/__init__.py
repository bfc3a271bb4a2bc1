"""Training: losses, gradients, steps, optimizers, checkpoints and metrics, on one device or on the mesh of a `Plan`."""

from ._debug_nans import DebugNans as DebugNans, first_non_finite as first_non_finite, NonFinite as NonFinite
from ._evaluation import (
    add_reference_nats as add_reference_nats,
    add_teacher as add_teacher,
    Evaluations as Evaluations,
    fingerprint as fingerprint,
    KtoStep as KtoStep,
    make_evaluation as make_evaluation,
    make_loss_evaluation as make_loss_evaluation,
    make_reference_nats as make_reference_nats,
    make_reward_evaluation as make_reward_evaluation,
    make_row_nats as make_row_nats,
    make_teacher_top_nats as make_teacher_top_nats,
    make_token_log_probs as make_token_log_probs,
    reference_arrays as reference_arrays,
    RowArrays as RowArrays,
    teacher_arrays as teacher_arrays,
    Validation as Validation,
)
from ._gradients import make_gradient_function as make_gradient_function
from ._loop import (
    Callback as Callback,
    check_finite as check_finite,
    Checkpoints as Checkpoints,
    DivergedError as DivergedError,
    Every as Every,
    Log as Log,
    LossSpikeError as LossSpikeError,
    LossSpikes as LossSpikes,
    Progress as Progress,
    StopSignals as StopSignals,
    train as train,
)
from ._metrics import (
    bits_per_byte as bits_per_byte,
    Clock as Clock,
    JsonLines as JsonLines,
    MetricWriter as MetricWriter,
    MetricWriters as MetricWriters,
    Profile as Profile,
    TensorBoard as TensorBoard,
    throughput as throughput,
    WeightsAndBiases as WeightsAndBiases,
)
from ._optimization import Lora as Lora, Optimization as Optimization
from ._pictures import (
    plot_evaluations as plot_evaluations,
    plot_expert_loads as plot_expert_loads,
    plot_experts as plot_experts,
    plot_losses as plot_losses,
    plot_rewards as plot_rewards,
)
from ._planned_state import PlannedState as PlannedState, ProcessRows as ProcessRows, restore_model as restore_model
from ._run_folder import RunFolder as RunFolder
from ._step import (
    make_step as make_step,
    module_gradient_norms as module_gradient_norms,
    rebalance_routers as rebalance_routers,
    Step as Step,
)
from ._train_state import (
    init_state as init_state,
    is_on_host as is_on_host,
    state_shardings as state_shardings,
    TrainState as TrainState,
)
from .checkpoint._checkpointer import Checkpointer as Checkpointer, CheckpointError as CheckpointError
from .checkpoint._contents import run_metadata as run_metadata, saved_key as saved_key, versions as versions
from .losses._block_diffusion import (
    block_diffusion_loss as block_diffusion_loss,
    check_block_diffusion as check_block_diffusion,
    noise_blocks as noise_blocks,
)
from .losses._cross_entropy import chunk_size as chunk_size, cross_entropy as cross_entropy
from .losses._distillation import (
    check_teacher as check_teacher,
    distillation_loss as distillation_loss,
    Divergence as Divergence,
    teacher_top_nats as teacher_top_nats,
)
from .losses._loss_aux import (
    loss_count as loss_count,
    LossAux as LossAux,
    LossScale as LossScale,
    routing_metrics as routing_metrics,
)
from .losses._policy import (
    group_advantages as group_advantages,
    GroupAdvantages as GroupAdvantages,
    policy_loss as policy_loss,
    PolicyLoss as PolicyLoss,
    token_log_probs as token_log_probs,
)
from .losses._row_losses import (
    classification_loss as classification_loss,
    contrastive_loss as contrastive_loss,
    VectorSimilarity as VectorSimilarity,
)
from .losses._token_losses import (
    batch_tokens as batch_tokens,
    check_next_token as check_next_token,
    evaluation_sums as evaluation_sums,
    kto_baseline as kto_baseline,
    mask_tokens as mask_tokens,
    next_token_loss as next_token_loss,
    preference_loss as preference_loss,
    PreferenceLoss as PreferenceLoss,
    row_loss as row_loss,
    row_nats as row_nats,
)
from .losses._vocabulary import token_nats as token_nats, Vocabulary as Vocabulary
from .optimizer._learning_rates import (
    constant as constant,
    Continuation as Continuation,
    continue_phases as continue_phases,
    default_warmup as default_warmup,
    phase_rates as phase_rates,
    RATES as RATES,
    Rates as Rates,
    rates as rates,
    SchedulePhase as SchedulePhase,
    switch_rates as switch_rates,
    warmup_cosine as warmup_cosine,
    warmup_stable_decay as warmup_stable_decay,
)
from .optimizer._moments import MOMENTS as MOMENTS
from .optimizer._named_optimizers import (
    adamw as adamw,
    muon as muon,
    normuon as normuon,
    optimizer as optimizer,
    OPTIMIZERS as OPTIMIZERS,
    schedule_free_adamw as schedule_free_adamw,
    sgd as sgd,
    soap as soap,
)
from .optimizer._optimizer import (
    global_norm as global_norm,
    GroupRates as GroupRates,
    Optimizer as Optimizer,
    trainable as trainable,
    Trained as Trained,
)
