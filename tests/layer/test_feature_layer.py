"""FeatureLayer carries what it was not written for: two inputs, and groups with inputs first."""

import math

import pytest
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torchshard.testing import Case, Floats, check_layer, run_ranks


class ParallelBilinear(ts.FeatureLayer):
    def __init__(
        self, in1_features, in2_features, out_features, dim=None, *, unit=1, device=None
    ):
        super().__init__(None, dim, ts.Packing(unit))
        init = ts.Uniform(1 / math.sqrt(in1_features))
        self.declare_features(
            {"input1": in1_features, "input2": in2_features},
            out_features,
            (out_features, in1_features, in2_features),
            init=init,
            bias_init=init,
            takes_none=False,  # torch multiplies no empty shard here
            device=device,
        )

    def local_forward(self, input1, input2):
        return F.bilinear(input1, input2, self.own_weight, self.own_bias)


class ParallelConvTranspose(ts.FeatureLayer):
    def __init__(self, in_channels, out_channels, size, groups, dim=None, device=None):
        super().__init__(None, dim)
        shape = (in_channels, out_channels // groups, size)
        fan_in = shape[1] * size
        self.declare_features(
            {"input": in_channels},
            out_channels,
            shape,
            init=ts.kaiming_uniform(fan_in),
            bias_init=ts.fan_in_uniform(fan_in),
            weight_dims=(1, 0),
            features_dim=-2,
            groups=groups,
            takes_none=False,
            device=device,
        )

    def local_forward(self, input):
        return F.conv_transpose1d(
            input, self.own_weight, self.own_bias, groups=self.own_groups
        )


class ConvTranspose(nn.ConvTranspose1d):
    def __init__(self, in_channels, out_channels, size, groups):
        super().__init__(in_channels, out_channels, size, groups=groups)


def bilinear(**sharding):
    return Case(
        ParallelBilinear,
        nn.Bilinear,
        args=(10, 5, 8),
        sharding=sharding,
        inputs=[Floats((3, 10)), Floats((3, 5))],
    )


def transposed(*sizes, **sharding):
    return Case(
        ParallelConvTranspose,
        ConvTranspose,
        args=sizes,
        sharding=sharding,
        inputs=[Floats((2, sizes[0], 4))],
    )


CASES = [
    bilinear(dim=1),
    bilinear(dim="column", unit=2),
    bilinear(dim=0),
    bilinear(dim="row", unit=2),
    transposed(6, 9, 2, 1, dim=1),
    transposed(6, 9, 2, 1, dim=0),
    transposed(10, 15, 3, 5, dim=1),
    transposed(10, 15, 3, 5),
    # on 3 and 4 ranks, some hold nothing
    transposed(6, 2, 2, 1, dim=1),
    transposed(2, 9, 2, 1, dim=0),
    transposed(4, 6, 3, 2, dim=1),
    bilinear(dim=1, unit=4),
    bilinear(dim=0, unit=5),
]


def every_case_equals_dense():
    for case in CASES:
        check_layer(case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bilinear_and_transposed_layers_equal_torchs(world_size):
    """Output, every gradient, a step, state, at uneven sizes, and on ranks with no features."""
    run_ranks(every_case_equals_dense, world_size)
