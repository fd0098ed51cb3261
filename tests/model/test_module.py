"""Any module: where its layers are, what is tied, what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model import describe_model
from shardwise.model.splits import split_options
from shardwise.model.summary import describe_as_data
from shardwise.records import to_json


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Net(nn.Module):
    def __init__(self, width: int = 16, num_layers: int = 5, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_layers_embedding_and_head() -> None:
    net = Net()
    model = describe_model(net)
    assert (model.num_layers, model.hidden_size, model.quantization) == (5, 16, "F32")
    assert [t.name for t in model.embedding] == ["embed.weight"]
    assert [t.name for t in model.output] == ["norm.weight", "norm.bias", "head.weight"]
    assert model.num_params == sum(p.numel() for p in net.parameters())
    assert model.weight_bytes == 4 * model.num_params
    assert model.layers[3].flops_per_token == 2 * (2 * 16 * 64)
    assert {t.name.split(".")[1] for t in model.layers[3].tensors} == {"3"}


def test_a_tied_head_counts_once() -> None:
    net = Net(tied=True)
    model = describe_model(net)
    assert model.tied_embeddings
    assert model.num_params == sum(p.numel() for p in net.parameters())


def test_dtypes_and_the_meta_device() -> None:
    with torch.device("meta"):
        net = Net(width=32).to(torch.bfloat16)
    model = describe_model(net)
    assert model.quantization == "BF16"
    assert model.weight_bytes == 2 * model.num_params


def test_a_module_without_a_list_is_one_layer() -> None:
    model = describe_model(nn.Linear(8, 4))
    assert (model.num_layers, model.num_params) == (1, 36)
    assert not split_options(model)[0].possible


def test_the_largest_list_is_the_layers() -> None:
    net = nn.Module()
    net.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    net.large = nn.Sequential(*(Block(16) for _ in range(3)))
    model = describe_model(net)
    assert model.num_layers == 3
    assert len(model.embedding) == 18


def test_identity_follows_the_weights() -> None:
    torch.manual_seed(0)
    one = Net()
    two = Net()
    two.load_state_dict(one.state_dict())
    assert describe_model(one).revision_digest == describe_model(two).revision_digest
    with torch.no_grad():
        two.head.weight[0, 0] += 1
    assert describe_model(one).revision_digest != describe_model(two).revision_digest


def test_it_can_be_shown() -> None:
    assert to_json(describe_as_data(describe_model(Net())))


def test_a_module_without_parameters() -> None:
    with pytest.raises(ModelError, match="no parameters"):
        describe_model(nn.ReLU())


def test_a_diffusion_transformers_config_is_no_language_model() -> None:
    net = Net()
    net.config = {"num_layers": 5, "attention_head_dim": 8}
    model = describe_model(net)
    assert model.num_layers == 5
    assert model.kv_bytes_per_token() == 0
