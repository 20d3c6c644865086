"""check_layer catches every known way of getting a sharded layer wrong, and says what it is."""

import copy
import dataclasses
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torchshard.distributed import collectives
from torchshard.errors import CheckError, RankError
from torchshard.layer.passage import Place
from torchshard.testing import (
    Case,
    Checked,
    Floats,
    Integers,
    check_cases,
    check_layer,
    run_ranks,
)

from layer_zoo import ParallelEmbedding, ParallelLinear, ParallelScaleShift


class DenseScaleShift(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, input):
        return input * self.weight + self.bias


class DenseGain(nn.Module):
    """One whole number that scales all features."""

    def __init__(self, features):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, input):
        return input * self.gain


class Gain(ts.ParallelLayer):
    def __init__(self, features, *, group=None):
        super().__init__(group)
        self.declare(
            axes={"features": ts.Axis(features)},
            parameters=self.declared(),
            inputs={"input": ts.Shard(-1, "features")},
            output=ts.Shard(-1, "features"),
        )

    def declared(self):
        return {}

    def local_forward(self, input):
        return input * self.gain


class GainWithoutAllReduce(Gain):
    """Reads a whole parameter as an attribute, not through `self.shared`."""

    def declared(self):
        return {"gain": ts.ParameterSpec((), ts.Whole(), ts.Constant(1.0))}


class DenseGainWithin(nn.Module):
    """The number is a submodule's, where no declaration knows of it."""

    first = staticmethod(torch.ones)

    def __init__(self, features):
        super().__init__()
        self.inner = nn.ParameterList([self.first(())])

    def forward(self, input):
        return input * self.inner[0]


class GainWithin(Gain):
    first = staticmethod(torch.ones)

    def __init__(self, features):
        super().__init__(features)
        self.inner = nn.ParameterList([self.first(())])

    def local_forward(self, input):
        return input * self.inner[0]


class DenseRandomGainWithin(DenseGainWithin):
    first = staticmethod(torch.randn)


class RandomGainWithin(GainWithin):
    first = staticmethod(torch.randn)


class BiasBeforeReduce(ParallelLinear):
    def local_forward(self, input):
        return F.linear(input, self.weight, self.bias)

    def finish(self, output):
        return output


class BiasOnRank0(ParallelLinear):
    """Gives the same values, but rank 1's replica of the bias gets no gradient."""

    def finish(self, output):
        bias = self.bias if self.group.rank == 0 else self.bias.detach()
        return output + bias


class DenseGated(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * hidden, features))

    def forward(self, input):
        gate, up = F.linear(input, self.weight).chunk(2, -1)
        return F.silu(gate) * up


class GatedInOneSegment(ts.ParallelLayer):
    """Right shapes, wrong rows: gate and up are interleaved by hidden unit."""

    def __init__(self, features, hidden, *, group=None):
        super().__init__(group)
        rows = ts.Shard(0, ts.Segment("hidden", 2))
        self.declare(
            axes={"hidden": ts.Axis(hidden)},
            parameters={
                "weight": ts.ParameterSpec((2 * hidden, features), rows, ts.Normal())
            },
            inputs={"input": ts.Whole(-1, features)},
            output=ts.Shard(-1, "hidden"),
        )

    def local_forward(self, input):
        gate, up = F.linear(input, self.weight).chunk(2, -1)
        return F.silu(gate) * up


class Changed(ParallelLinear):
    """A linear layer whose declaration a subclass changes."""

    def declare(self, *, parameters, **declared):
        super().declare(**self.changed({**declared, "parameters": parameters}))


class FanOfTheShard(Changed):
    def changed(self, declared):
        weight = declared["parameters"]["weight"]
        local_fan = weight.shape[1] // self.group.size
        declared["parameters"]["weight"] = dataclasses.replace(
            weight, init=ts.kaiming_uniform(local_fan)
        )
        return declared


class BiasDrawnFirst(Changed):
    def changed(self, declared):
        declared["parameters"] = dict(reversed(declared["parameters"].items()))
        return declared


class DrawsItsShard(ts.Initializer):
    def fill(self, shard, part):
        shard.uniform_(-1, 1)


class StreamOfTheShard(Changed):
    def changed(self, declared):
        weight = declared["parameters"]["weight"]
        declared["parameters"]["weight"] = dataclasses.replace(
            weight, init=DrawsItsShard()
        )
        return declared


class RandomButNotSaid(DrawsItsShard):
    @property
    def is_random(self):
        return False


class OwnBias(ts.ParallelLayer):
    def __init__(self, features, *, group=None):
        super().__init__(group)
        self.declare(
            axes={},
            parameters={
                "bias": ts.ParameterSpec((features,), ts.Whole(), RandomButNotSaid())
            },
            inputs={"input": ts.Whole(-1, features)},
            output=ts.Whole(),
        )

    def local_forward(self, input):
        return input + self.bias


class DenseBias(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(features).uniform_(-1, 1))

    def forward(self, input):
        return input + self.bias


class UndeclaredInput(Changed):
    """The input's gradient stays one rank's partial."""

    def changed(self, declared):
        return {**declared, "inputs": {}}


class UndeclaredOutput(Changed):
    """Returns a shard as if it were whole."""

    def changed(self, declared):
        return {**declared, "output": ts.Whole()}


class Renamed(Changed):
    def changed(self, declared):
        bias = declared["parameters"].pop("bias")
        declared["parameters"] = {**declared["parameters"], "shift": bias}
        return declared


class VocabularyByRank(ParallelEmbedding):
    """Starts at rank x local size, which is another rank's row where shards are uneven."""

    def own(self, axis):
        length = len(self.weight)
        return self.group.rank * length, (self.group.rank + 1) * length


class DenseSoftmax(nn.Module):
    def __init__(self, features):
        super().__init__()

    def forward(self, input):
        return input.softmax(-1)


class LocalSoftmax(Gain):
    def local_forward(self, input):
        return input.softmax(-1)


class OneReduceTooMany(ParallelLinear):
    def finish(self, output):
        collectives.all_reduce(output.detach(), self.group)
        return super().finish(output)


class WritesToItsInput(ParallelScaleShift):
    def local_forward(self, input):
        return super().local_forward(input)

    def forward(self, input):
        output = super().forward(input)
        input.data.add_(1)
        return output


class WritesToItsIds(ParallelEmbedding):
    def local_forward(self, input):
        rows = super().local_forward(input)
        input.data.zero_()
        return rows


class CopiesForgetTheOutput(ParallelLinear):
    def __getstate__(self):
        passage = copy.copy(self._passage)
        passage.outputs = (Place(ts.Whole(), None),)
        return {**self.__dict__, "_passage": passage}


class CopiesForgetTheSpecs(ParallelLinear):
    def __getstate__(self):
        specs = {
            name: ts.ParameterSpec(spec.shape, ts.Whole(), spec.init).placed(name, None)
            for name, spec in self.specs.items()
        }
        return {**self.__dict__, "_specs": specs}


class DenseCentre(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.register_buffer("mean", torch.randn(features))

    def forward(self, input):
        return input - self.mean


class CopiesForgetTheBuffer(ts.ParallelLayer):
    def __init__(self, features, *, group=None):
        super().__init__(group)
        mean = ts.ParameterSpec((features,), ts.Shard(0, "features"), ts.Normal())
        self.declare(
            axes={"features": ts.Axis(features)},
            parameters={},
            buffers={"mean": mean},
            inputs={"input": ts.Shard(-1, "features")},
            output=ts.Shard(-1, "features"),
        )

    def __getstate__(self):
        return {**self.__dict__, "_specs": {}}

    def local_forward(self, input):
        return input - self.mean


class NearlyRight(ParallelLinear):
    def finish(self, output):
        return super().finish(output) + 1e-9


def column(layer, **options):
    return Case(
        layer,
        nn.Linear,
        args=(5, 7),
        sharding={"dim": 1},
        inputs=[Floats((4, 5))],
        **options,
    )


def row(layer, **options):
    return Case(
        layer,
        nn.Linear,
        args=(7, 5),
        sharding={"dim": 0},
        inputs=[Floats((4, 7), shard=1)],
        **options,
    )


def rows(layer):
    ids = Integers(7, (3, 4))
    return Case(layer, nn.Embedding, args=(7, 5), sharding={"dim": 0}, inputs=[ids])


def features(layer, dense):
    return Case(layer, dense, args=(7,), inputs=[Floats((3, 7), shard=1)])


NUMBER = r"[\d.e+-]+"
DIFFERS = (
    rf" differs by {NUMBER} at \([\d, ]*\), where the dense layer has {NUMBER}; allowed"
)
WRONG = {
    "a whole parameter's gradient is not summed": (
        features(GainWithoutAllReduce, DenseGain),
        "output and gradients: gradient of gain" + DIFFERS,
    ),
    "the same, of a parameter that is not declared": (
        features(GainWithin, DenseGainWithin),
        "output and gradients: gradient of inner.0" + DIFFERS,
    ),
    "an undeclared parameter differs between the ranks": (
        features(RandomGainWithin, DenseRandomGainWithin),
        "whole parameters alike: inner.0 against rank 0's" + DIFFERS,
    ),
    "so does a declared one that is drawn unsaid": (
        Case(OwnBias, DenseBias, args=(5,), inputs=[Floats((3, 5))]),
        "whole parameters alike: bias against rank 0's" + DIFFERS,
    ),
    "the bias is added before the reduce": (
        row(BiasBeforeReduce),
        "output and gradients: output 0" + DIFFERS,
    ),
    "a replica gets no gradient on one rank": (
        row(BiasOnRank0),
        "output and gradients: gradient of bias is missing on rank 1, while other ranks"
        " have it",
    ),
    "packed segments are in the wrong order": (
        Case(GatedInOneSegment, DenseGated, args=(3, 5), inputs=[Floats((4, 3))]),
        "output and gradients: output 0" + DIFFERS,
    ),
    "the initialiser sees the shard's fan": (
        row(FanOfTheShard),
        "initial values: weight" + DIFFERS,
    ),
    "the initialiser draws in another order": (
        row(BiasDrawnFirst),
        r"initial values: (weight|bias)" + DIFFERS,
    ),
    "the initialiser draws the shard alone": (
        row(StreamOfTheShard),
        "initial values: the random stream does not stand where the dense layer leaves it",
    ),
    "the vocabulary starts at rank x local size": (
        rows(VocabularyByRank),
        "output and gradients: output 0" + DIFFERS,
    ),
    "softmax is local": (
        features(LocalSoftmax, DenseSoftmax),
        "output and gradients: output 0" + DIFFERS,
    ),
    "the input's gradient is not summed": (
        column(UndeclaredInput),
        "output and gradients: gradient of input 0" + DIFFERS,
    ),
    "a shard is returned as whole": (
        column(UndeclaredOutput),
        r"output and gradients: output 0 has shape \(4, [43]\), the dense layer's \(4, 7\)",
    ),
    "there is a collective too many": (
        row(OneReduceTooMany, collectives=(1, 0)),
        "number of collectives: 2 collectives forward and 0 backward, expected 1 and 0",
    ),
    "there is a collective less than the case says": (
        column(ParallelLinear, collectives=(0, 2)),
        "number of collectives: 0 collectives forward and 1 backward, expected 0 and 2",
    ),
    "the input is written to": (
        Case(WritesToItsInput, DenseScaleShift, args=(7,), inputs=[Floats((3, 7))]),
        "output and gradients: the caller's input after the call" + DIFFERS,
    ),
    "the ids are written to": (
        rows(WritesToItsIds),
        "output and gradients: the caller's input after the call" + DIFFERS,
    ),
    "copies lose the layout of the output": (
        column(CopiesForgetTheOutput),
        r"copies: output 0 has shape \(4, [43]\), the dense layer's \(4, 7\)",
    ),
    "copies lose the layout of the parameters": (
        column(CopiesForgetTheSpecs),
        r"copies: gradient of weight has shape \([43], 5\), the dense layer's \(7, 5\)",
    ),
    "copies lose the layout of a buffer": (
        features(CopiesForgetTheBuffer, DenseCentre),
        r"copies: mean has shape \([43],\), the dense layer's \(7,\)",
    ),
    "the state keys are not the dense layer's": (
        Case(
            Renamed,
            nn.Linear,
            args=(5, 7),
            inputs=[Floats((4, 5))],
        ),
        r"initial values: its state has the keys \['shift', 'weight'\], the dense layer's"
        r" \['bias', 'weight'\]",
    ),
    "it is off in the ninth place": (
        row(NearlyRight),
        "output and gradients: output 0 differs by 1e-09",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layer_is_caught(name):
    """On two ranks each mistake raises CheckError, with the case, the rank and the check."""
    case, text = WRONG[name]
    with pytest.raises(RankError) as raised:
        run_ranks(check_cases, 2, [case], timeout_s=30)
    head = r"CheckError: " + re.escape(str(case)) + r", rank \d of 2, "
    assert re.search(head + text, str(raised.value)), str(raised.value)


def test_only_ranks_reveal_it():
    """Alone, a layer whose mistake is between ranks passes: the group of one is dense."""
    for name in ["softmax is local", "the bias is added before the reduce"]:
        check_layer(WRONG[name][0])


class WrongOnRank1(ParallelLinear):
    def finish(self, output):
        output = super().finish(output)
        return output + 1 if self.group.rank == 1 else output


def test_a_failure_on_one_rank_does_not_hang_the_others():
    """The launch ends, and names the rank that failed."""
    with pytest.raises(RankError) as raised:
        run_ranks(check_cases, 3, [row(WrongOnRank1)], timeout_s=60)
    text = str(raised.value)
    assert "check_cases: rank 1 of 3 failed first." in text
    assert "rank 1 of 3, output and gradients: output 0 differs by 1 at" in text


NAMES = [
    "initial values",
    "whole parameters alike",
    "state",
    "meta device",
    "output and gradients",
    "step",
    "expanded gradient",
    "frozen parameters",
    "copies",
    "autocast",
    "number of collectives",
]


def test_the_report():
    """Every check is listed by name, with the worst difference that it met."""
    cases = [column(ParallelLinear), rows(ParallelEmbedding)]
    for reports in run_ranks(check_cases, 2, cases):
        for report in reports:
            assert [checked.name for checked in report] == NAMES
            assert all(isinstance(checked, Checked) for checked in report)
            exact = {checked.name: checked.difference for checked in report}
            assert exact["initial values"] == exact["state"] == 0.0
            assert 0.0 <= exact["output and gradients"] <= 1e-10
            assert 0.0 <= exact["autocast"] <= 0.1


def test_the_report_of_a_compiled_layer():
    """`compiled=True` adds one check."""
    report = check_layer(column(ParallelLinear), compiled=True)
    assert [checked.name for checked in report] == [*NAMES, "compile"]


def test_a_case_says_what_it_is():
    """Its text is the layer's call, with the shapes that it is fed."""
    case = Case(
        ParallelEmbedding,
        args=(7, 5),
        options={"_weight": torch.ones(7, 5)},
        sharding={"dim": 0},
        inputs=[Integers(7, (3, 4)), torch.ones(2)],
        keywords={"scale": 2},
    )
    assert str(case) == (
        "ParallelEmbedding(7, 5, _weight=tensor(7, 5), dim=0) of (3x4, tensor(2,), scale=2)"
    )


def a_layer_is_its_own_dense_twin():
    cases = [
        dataclasses.replace(column(ParallelLinear), dense=None),
        dataclasses.replace(row(FanOfTheShard), dense=None),
    ]
    check_layer(cases[0])
    with pytest.raises(AssertionError, match="initial values: weight differs"):
        check_layer(cases[1])


def test_without_a_dense_twin_the_layer_in_a_group_of_one_is_it():
    """Values, gradients and first values are compared with the layer's own on one rank."""
    run_ranks(a_layer_is_its_own_dense_twin, 2)


def test_a_seed_draws_other_numbers():
    """Inputs, initial values and cotangents change with it, and the layer is right at each."""
    cases = [
        dataclasses.replace(column(ParallelLinear), seed=seed) for seed in (0, 1, 2)
    ]
    drawn = [case.draw(torch.float64).args[0] for case in cases]
    generator = torch.Generator().manual_seed(20)
    first = torch.randn(drawn[0].shape, generator=generator, dtype=torch.float64)
    assert torch.equal(drawn[0], first)
    assert not torch.equal(drawn[1], drawn[2])
    assert len({case.seed_for(use) for case in cases for use in (11, 20, 999)}) == 9
    used = [set(seeds_used(case)) for case in cases]
    assert len(set.union(*used)) == sum(map(len, used)) >= 3 * 6


def seeds_used(case):
    """Yield every seed that a check of `case` sets, its own generators' included."""
    wrapped = mock.patch.object(torch, "manual_seed", wraps=torch.manual_seed)
    numbered = mock.patch.object(Case, "seed_for", autospec=True)
    with wrapped as whole, numbered as seed_for:
        seed_for.side_effect = lambda case, use: 1000 * case.seed + use
        check_layer(case)
    asked = {1000 * case.seed + call.args[1] for call in seed_for.call_args_list}
    assert {call.args[0] for call in whole.call_args_list} <= asked
    return asked


class DenseNamed(nn.Module):
    def forward(self, input):
        return {"twice": [2 * input], "name": "twice"}


class WrongNamed(ts.ParallelLayer):
    def __init__(self, *, group=None):
        super().__init__(group)
        self.declare(
            axes={}, parameters={}, inputs={"input": ts.Whole()}, output=ts.Whole()
        )

    def local_forward(self, input):
        return {"twice": [3 * input], "name": "twice"}


class DenseSilent(nn.Module):
    def forward(self, input):
        return "nothing"


def test_outputs_in_dicts_and_lists_are_compared():
    """And an output without any tensor proves nothing, which is said."""
    wrong = Case(WrongNamed, DenseNamed, inputs=[Floats((2, 3))])
    with pytest.raises(CheckError, match="output 0 differs by"):
        check_layer(wrong)
    silent = Case(WrongNamed, DenseSilent, inputs=[Floats((2, 3))])
    with pytest.raises(CheckError, match="returns no tensor"):
        check_layer(silent)
