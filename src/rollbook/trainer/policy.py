"""What trainer and critic do alike with a loaded model."""

from __future__ import annotations

import copy
import dataclasses

from torch import Tensor, nn

from rollbook.modeling.load import LoadedModel
from rollbook.modeling.lora import adapter_tensors
from rollbook.trainer.packing import ModelInputs


def trainable(model: LoadedModel) -> dict[str, nn.Parameter]:
    """Parameters by Hugging Face name; tied ones once."""
    return {n: t for n, t in model.named_tensors().items() if isinstance(t, nn.Parameter) and t.requires_grad}


def frozen_copy(model: LoadedModel) -> LoadedModel:
    """The same weights at this moment, without gradients. With adapters, a copy of them on the same base."""
    if model.lora is not None:
        adapters = {name: t.detach().clone() for name, t in adapter_tensors(model).items()}
        return dataclasses.replace(model, stand_ins=adapters)
    module = copy.deepcopy(model.module).requires_grad_(False)
    return dataclasses.replace(model, module=module)


def predictor_states(model: LoadedModel, inputs: ModelInputs) -> Tensor:
    """[S, hidden]: for each action token, the state of the token before it in its own sequence."""
    hidden = model.hidden_states(inputs.input_ids[None], inputs.position_ids[None], packed=inputs.layout)
    return hidden[0].index_select(0, inputs.predictor_rows)
