"""Small sets of named parameters with gradients, as the model and the gradient buffers hand them to
the optimizer."""

from types import SimpleNamespace

import pytest
import torch

SHAPES = {
    "embedding.word_embeddings.weight": (40, 8),
    "decoder.layers.0.input_layernorm.weight": (8,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (24, 8),
    "decoder.layers.0.self_attention.linear_qkv.bias": (24,),
    "decoder.layers.0.mlp.linear_fc1.weight": (2, 12, 8),
    "decoder.layers.0.mlp.linear_fc1.bias": (2, 12),
    "output_layer.weight": (40, 8),
}
DECAYED = {
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "output_layer.weight",
}


@pytest.fixture
def make_params():
    def make(dtype=torch.float32, grad_dtype=None, shapes=SHAPES, seed=1):
        generator = torch.Generator().manual_seed(seed)
        params = []
        for name, shape in shapes.items():
            param = torch.nn.Parameter(
                torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            )
            param.sharding = SimpleNamespace(name=name, shape=shape)
            kept = grad_dtype or (
                torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
            )
            param.main_grad = torch.zeros(shape, dtype=kept)
            params.append(param)
        return params

    return make


@pytest.fixture
def fill_grads():
    """Writes the gradients of one step into main_grad, in place as backward does, and returns them
    in float64."""

    def fill(params, seed, size=1.0):
        generator = torch.Generator().manual_seed(1000 + seed)
        for param in params:
            values = size * torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.main_grad.copy_(values)
        return [param.main_grad.to(torch.float64, copy=True) for param in params]

    return fill


@pytest.fixture
def decayed_names():
    return DECAYED
