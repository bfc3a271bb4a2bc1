"""Training: losses, gradients, steps, optimizers, checkpoints and metrics; on a mesh, all by way of a `Plan`."""

from ._debug_nans import DebugNans as DebugNans
from ._evaluation import (
    planned_evaluation as planned_evaluation,
    planned_row_nats as planned_row_nats,
    Validation as Validation,
)
from ._first_non_finite import first_non_finite as first_non_finite, NonFinite as NonFinite
from ._gradients import make_gradient_function as make_gradient_function
from ._loop import (
    Callback as Callback,
    check_finite as check_finite,
    Checkpoints as Checkpoints,
    DivergedError as DivergedError,
    Every as Every,
    Log as Log,
    Progress as Progress,
    train as train,
)
from ._loss_spikes import LossSpikeError as LossSpikeError, Spikes as Spikes
from ._metrics import (
    bits_per_byte as bits_per_byte,
    JsonLines as JsonLines,
    MetricWriter as MetricWriter,
    MetricWriters as MetricWriters,
    TensorBoard as TensorBoard,
    throughput as throughput,
    WeightsAndBiases as WeightsAndBiases,
)
from ._optimization import Lora as Lora, Optimization as Optimization
from ._pictures import (
    picture_experts as picture_experts,
    picture_loads as picture_loads,
    picture_losses as picture_losses,
)
from ._planned_state import OwnRows as OwnRows, PlannedState as PlannedState, restore_model as restore_model
from ._step import (
    make_step as make_step,
    module_gradient_norms as module_gradient_norms,
    rebalanced as rebalanced,
    Step as Step,
)
from ._timing import Clock as Clock, Profile as Profile
from ._train_state import (
    init_state as init_state,
    is_on_host as is_on_host,
    state_shardings as state_shardings,
    TrainState as TrainState,
)
from .checkpoint._checkpointer import Checkpointer as Checkpointer, CheckpointError as CheckpointError
from .checkpoint._contents import run_metadata as run_metadata, saved_key as saved_key, versions as versions
from .losses._chunked_logits import chunk_size as chunk_size
from .losses._cross_entropy import (
    cross_entropy as cross_entropy,
    token_nats as token_nats,
    Vocabulary as Vocabulary,
)
from .losses._loss_aux import count_of as count_of, routing_metrics as routing_metrics, Tally as Tally
from .losses._loss_scale import LossScale as LossScale
from .losses._row_loss import row_loss as row_loss, row_nats as row_nats
from .losses._token_losses import (
    batch_tokens as batch_tokens,
    check_next_token as check_next_token,
    evaluation_sums as evaluation_sums,
    masked_batch as masked_batch,
    next_token_loss as next_token_loss,
)
from .optimizer._learning_rates import (
    constant as constant,
    Continuation as Continuation,
    continuation as continuation,
    default_warmup as default_warmup,
    RATES as RATES,
    Rates as Rates,
    rates as rates,
    Stretch as Stretch,
    stretched_rates as stretched_rates,
    switched as switched,
    warmup_cosine as warmup_cosine,
    warmup_stable_decay as warmup_stable_decay,
)
from .optimizer._optimizer import (
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
