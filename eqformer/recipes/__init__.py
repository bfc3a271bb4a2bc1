"""A run: its recipe, its folder and its loop, from texts or chats to a folder that `eqformer.load` reads.

A recipe holds all settings of a run. The built-in recipes have names. A user's own recipe is a Python function that
returns a `Recipe`.
"""

from . import _report, _setup, _texts
from ._named_recipes import (
    DEPTHS as DEPTHS,
    describe_speedrun as describe_speedrun,
    find_recipe as find_recipe,
    LARGE as LARGE,
    load_user_function as load_user_function,
    needs_code as needs_code,
    RECIPES as RECIPES,
    short_name as short_name,
    speedrun_recipe as speedrun_recipe,
    trust_recipe as trust_recipe,
    user_file as user_file,
)
from ._recipe import (
    Contrastive as Contrastive,
    Distillation as Distillation,
    fields_of as fields_of,
    flags_of as flags_of,
    Labels as Labels,
    Masking as Masking,
    Mesh as Mesh,
    Metrics as Metrics,
    name_flags_in_errors as name_flags_in_errors,
    Recipe as Recipe,
    Spikes as Spikes,
    Text as Text,
)
from ._recipe_step import (
    lower_training_step as lower_training_step,
    plan_decode_step as plan_decode_step,
    plan_training_step as plan_training_step,
    RecipeStep as RecipeStep,
)
from ._report import Screen as Screen
from ._reward_trainer import train_on_rewards as train_on_rewards
from ._rewards import RewardOptions as RewardOptions
from ._run_directory import RunDirectory as RunDirectory, schedule_phases as schedule_phases
from ._scaling import (
    choose_depth as choose_depth,
    count_run_flops as count_run_flops,
    fit_power_law as fit_power_law,
    fit_scaling as fit_scaling,
    measure_text as measure_text,
    plot_rates as plot_rates,
    plot_scaling as plot_scaling,
    PowerLaw as PowerLaw,
    run_scaling as run_scaling,
    scaling_recipes as scaling_recipes,
    ScalingFit as ScalingFit,
    ScalingPoint as ScalingPoint,
    write_scaling as write_scaling,
)
from ._setup import check as check
from ._texts import published_recipe as published_recipe
from ._trainer import train as train, TrainedRun as TrainedRun


report = _report
setup = _setup
texts = _texts
