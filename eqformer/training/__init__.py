"""Training: losses, gradients, steps, optimizers, checkpoints and metrics; on a mesh, all by way of a `Plan`."""

from ._checkpoint import (
    Checkpointer as Checkpointer,
    CheckpointError as CheckpointError,
)
from ._chunks import chunk_size as chunk_size
from ._clock import Clock as Clock
from ._debug_nans import DebugNans as DebugNans
from ._diverged import check_finite as check_finite, DivergedError as DivergedError
from ._evaluation import planned_evaluation as planned_evaluation, planned_row_nats as planned_row_nats
from ._first_non_finite import first_non_finite as first_non_finite, NonFinite as NonFinite
from ._gradients import make_gradient_function as make_gradient_function
from ._host_memory import is_on_host as is_on_host
from ._loop import (
    Callback as Callback,
    Checkpoints as Checkpoints,
    Every as Every,
    Log as Log,
    Progress as Progress,
    train as train,
)
from ._lora import Lora as Lora
from ._loss import (
    batch_tokens as batch_tokens,
    cross_entropy as cross_entropy,
    evaluation_sums as evaluation_sums,
    next_token_loss as next_token_loss,
    token_nats as token_nats,
    Vocabulary as Vocabulary,
)
from ._loss_scale import LossScale as LossScale
from ._masked import masked_batch as masked_batch
from ._metric_writers import (
    JsonLines as JsonLines,
    MetricWriter as MetricWriter,
    MetricWriters as MetricWriters,
    TensorBoard as TensorBoard,
    WeightsAndBiases as WeightsAndBiases,
)
from ._metrics import bits_per_byte as bits_per_byte, throughput as throughput
from ._next_token import check_next_token as check_next_token
from ._optimization import Optimization as Optimization
from ._optimizer import (
    adamw as adamw,
    global_norm as global_norm,
    MOMENTS as MOMENTS,
    muon as muon,
    Optimizer as Optimizer,
    optimizer as optimizer,
    OPTIMIZERS as OPTIMIZERS,
    sgd as sgd,
    trainable as trainable,
    Trained as Trained,
)
from ._own_rows import OwnRows as OwnRows
from ._picture_experts import picture_experts as picture_experts
from ._pictures import picture_loads as picture_loads, picture_losses as picture_losses
from ._planned_state import PlannedState as PlannedState, restore_model as restore_model
from ._profile import Profile as Profile
from ._rates import (
    constant as constant,
    RATES as RATES,
    Rates as Rates,
    rates as rates,
    switched as switched,
    warmup_cosine as warmup_cosine,
    warmup_stable_decay as warmup_stable_decay,
)
from ._row_loss import row_loss as row_loss, row_nats as row_nats
from ._run_metadata import run_metadata as run_metadata, saved_key as saved_key, versions as versions
from ._spikes import LossSpikeError as LossSpikeError, Spikes as Spikes
from ._step import (
    make_step as make_step,
    module_gradient_norms as module_gradient_norms,
    rebalanced as rebalanced,
    Step as Step,
)
from ._stretches import (
    Continuation as Continuation,
    continuation as continuation,
    default_warmup as default_warmup,
    Stretch as Stretch,
    stretched_rates as stretched_rates,
)
from ._tally import count_of as count_of, routing_metrics as routing_metrics, Tally as Tally
from ._train_state import (
    init_state as init_state,
    state_shardings as state_shardings,
    TrainState as TrainState,
)
from ._validation import Validation as Validation
