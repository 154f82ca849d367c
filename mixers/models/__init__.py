"""Language models around any mixer: `CausalLM` in torch alone, `swap` for models that exist, `dsf.models.hf` for both.

`dsf.models.hf` (DsfConfig, DsfForCausalLM, registered with transformers' Auto classes) is loaded when it is imported.
"""

from dsf.mixers.models.causal_lm import Block, CausalLM, CausalOutput
from dsf.mixers.models.config import SIZES, ModelConfig, sized
from dsf.mixers.models.graphed import Graphed
from dsf.mixers.models.parts import next_labels
from dsf.mixers.models.rotary import RotaryAttention
from dsf.mixers.models.states import ModelState
from dsf.mixers.models.swapping import Swapped, load_swapped, swap
from dsf.mixers.models.weights import decay_groups, undecayed_names

__all__ = [
    "SIZES", "Block", "CausalLM", "CausalOutput", "Graphed", "ModelConfig", "ModelState", "RotaryAttention", "Swapped",
    "decay_groups", "load_swapped", "next_labels", "sized", "swap", "undecayed_names",
]  # fmt: skip
