"""Families: numbers, straight-line constructor calls, presets. One file a family."""

from ._families import build as build, FAMILIES as FAMILIES, Family as Family, preset as preset, presets as presets
from ._gpt2 import build_gpt2 as build_gpt2, GPT2 as GPT2
from ._jaxformer import build_jaxformer as build_jaxformer, JAXformer as JAXformer
from ._llama import build_llama as build_llama, Llama as Llama
from ._mixtral import build_mixtral as build_mixtral, Mixtral as Mixtral
from ._published import load as load, read_numbers as read_numbers, save as save
from ._switch import build_switch as build_switch, GShard as GShard, Switch as Switch
