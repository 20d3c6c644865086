"""TORCHSHARD_DEBUG=1 compares over the ranks whatever layers, losses and operations are given."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import groups
from torchshard.errors import GroupError
from torchshard.testing.ranks import run_ranks

CLASSES, FEATURES = 7, 4


def whole(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def odd(value, other):
    """`value`, but `other` on rank 1 alone."""
    return other if groups.get_rank() == 1 else value


def spoilt(*shape):
    """A tensor of which rank 1 has another last element."""
    x = whole(*shape)
    x.view(-1)[-1] += groups.get_rank() == 1
    return x


def ids(high, *shape):
    same = torch.zeros(*shape, dtype=torch.int64)
    same.view(-1)[-1] = odd(0, high - 1)
    return same


def shard(*shape, dim=-1):
    x = ts.distributed.scatter(whole(*shape), dim, grad="whole")
    return ts.ShardedTensor.from_local(x, dim)


def logits():
    return shard(5, CLASSES)


def column():
    return ts.nn.ParallelLinear(FEATURES, 6, dim=1)


def attention(**masks):
    layer = ts.nn.ParallelMultiheadAttention(6, 3, batch_first=True)
    x = whole(2, 4, 6)
    return layer(x, x, x, **masks)


def head(**given):
    layer = ts.nn.ParallelLinearCrossEntropyLoss(FEATURES, CLASSES)
    return layer(**{"input": whole(5, FEATURES), "target": ids(1, 5)} | given)


def face(**given):
    layer = ts.nn.ParallelArcFace(FEATURES, CLASSES)
    return layer(**{"input": whole(5, FEATURES), "target": ids(1, 5)} | given)


def drifted(layer, name):
    with torch.no_grad():
        layer.get_parameter(name).add_(odd(0.0, 1.0))
    return layer


def backward_of(y):
    y.backward(spoilt(*y.shape))


class Doubled(ts.MarkedLayer):
    """A forward written for one device."""

    def __init__(self):
        super().__init__()
        self.take_over(nn.Linear(FEATURES, 6), {"weight": 0, "bias": 0})

    def dense_forward(self, x, scale):
        return F.linear(x, self.weight, self.bias) * scale


PLACES = {
    "ids of an embedding": (
        "input of ParallelEmbedding",
        lambda: ts.nn.ParallelEmbedding(12, 4, dim=0)(ids(12, 5)),
    ),
    "ids of an embedding of columns": (
        "input of ParallelEmbedding",
        lambda: ts.nn.ParallelEmbedding(12, 4, dim=1)(ids(12, 5)),
    ),
    "input of a column": (
        "input of ParallelLinear",
        lambda: column()(spoilt(2, FEATURES)),
    ),
    "input with a gradient": (
        "input of ParallelLinear",
        lambda: column()(spoilt(2, FEATURES).requires_grad_()),
    ),
    "input of a row": (
        "input of ParallelLinear",
        lambda: ts.nn.ParallelLinear(6, 4, dim=0)(spoilt(2, 6)),
    ),
    "width of an input": (
        "input of ParallelLinear",
        lambda: column()(whole(2, odd(4, 5))),
    ),
    "dtype of an input": (
        "input of ParallelLinear",
        lambda: column()(whole(2, FEATURES).to(odd(torch.float32, torch.float64))),
    ),
    "gradient that one rank alone wants": (
        "input of ParallelLinear",
        lambda: column()(whole(2, FEATURES).requires_grad_(odd(True, False))),
    ),
    "convolution": (
        "input of ParallelConv2d",
        lambda: ts.nn.ParallelConv2d(2, 6, 3, dim=1)(spoilt(1, 2, 5, 5)),
    ),
    "key_padding_mask": (
        "key_padding_mask of ParallelMultiheadAttention",
        lambda: attention(key_padding_mask=ids(2, 2, 4).bool()),
    ),
    "attn_mask": (
        "attn_mask of ParallelMultiheadAttention",
        lambda: attention(attn_mask=ids(2, 4, 4).bool()),
    ),
    "need_weights": (
        "need_weights of ParallelMultiheadAttention",
        lambda: attention(need_weights=odd(True, False)),
    ),
    "input of a fused head": ("input of Par", lambda: head(input=spoilt(5, 4))),
    "target of a fused head": ("target of Par", lambda: head(target=ids(7, 5))),
    "input of a margin head": ("input of Par", lambda: face(input=spoilt(5, 4))),
    "target of a margin head": ("target of Par", lambda: face(target=ids(7, 5))),
    "target of F.cross_entropy": (
        "target of cross_entropy",
        lambda: F.cross_entropy(logits(), ids(CLASSES, 5)),
    ),
    "target of parallel_cross_entropy": (
        "target of parallel_cross_entropy",
        lambda: ts.nn.functional.parallel_cross_entropy(logits(), ids(CLASSES, 5)),
    ),
    "probabilities": (
        "target of cross_entropy",
        lambda: F.cross_entropy(logits(), spoilt(5, CLASSES)),
    ),
    "class weights": (
        "weight of cross_entropy",
        lambda: F.cross_entropy(logits(), ids(1, 5), spoilt(CLASSES)),
    ),
    "options of a loss": (
        "label_smoothing of cross_entropy",
        lambda: F.cross_entropy(logits(), ids(1, 5), label_smoothing=odd(0.0, 0.1)),
    ),
    "target of an accuracy": (
        "target of parallel_accuracy",
        lambda: ts.nn.functional.parallel_accuracy(logits(), ids(CLASSES, 5)),
    ),
    "target of the loss layer": (
        "target of ParallelCrossEntropyLoss",
        lambda: ts.nn.ParallelCrossEntropyLoss()(logits(), ids(CLASSES, 5)),
    ),
    "input of a marked layer": (
        "x of Doubled",
        lambda: Doubled()(spoilt(2, FEATURES), 2.0),
    ),
    "number given to a marked layer": (
        "scale of Doubled",
        lambda: Doubled()(whole(2, FEATURES), odd(2.0, 3.0)),
    ),
    "operand of a shard": ("other of mul", lambda: logits() * spoilt(CLASSES)),
    "operand that broadcasts": ("other of add", lambda: logits() + spoilt(5, 1)),
    "number beside a shard": ("other of mul", lambda: logits() * odd(2.0, 3.0)),
    "plain operand in front": ("input of add", lambda: spoilt(CLASSES) + logits()),
    "where": (
        "condition of where",
        lambda: torch.where(ids(2, CLASSES).bool(), logits(), 0.0),
    ),
    "masked_fill": (
        "mask of masked_fill",
        lambda: logits().masked_fill(ids(2, 5, 1).bool(), 0.0),
    ),
    "index": ("idx of __getitem__", lambda: logits()[ids(5, 3)]),
    "number of a slice": (
        "idx[0] of __getitem__",
        lambda: logits()[odd(1, 2) :, :],
    ),
    "weight of a product": (
        "weight of linear",
        lambda: F.linear(logits(), spoilt(3, 7)),
    ),
    "bias of a product": (
        "bias of linear",
        lambda: F.linear(logits(), whole(3, 7), spoilt(3)),
    ),
    "matmul": ("other of matmul", lambda: logits() @ spoilt(CLASSES, 3)),
    "einsum": (
        "argument 2 of einsum",
        lambda: torch.einsum("nc,cf->nf", logits(), spoilt(CLASSES, 3)),
    ),
    "weight of a norm": (
        "weight of layer_norm",
        lambda: F.layer_norm(logits(), (CLASSES,), spoilt(CLASSES), whole(CLASSES)),
    ),
    "bias of a norm": (
        "bias of layer_norm",
        lambda: F.layer_norm(logits(), (CLASSES,), whole(CLASSES), spoilt(CLASSES)),
    ),
    "table": ("weight of embedding", lambda: F.embedding(shard_of_ids(), spoilt(7, 3))),
    "cat": ("tensors[1] of cat", lambda: torch.cat([logits(), spoilt(1, CLASSES)])),
    "dim of a sum": ("dim of sum", lambda: logits().sum(odd(0, 1))),
    "parameter used outside": (
        "input of linear",
        lambda: F.linear(spoilt(2, FEATURES), column().weight),
    ),
    "whole parameter that drifted": (
        "parameter bias of ParallelLinear",
        lambda: drifted(ts.nn.ParallelLinear(6, 4, dim=0), "bias")(whole(2, 6)),
    ),
    "copy": ("x of copy", lambda: ts.distributed.copy(spoilt(3))),
    "scatter": ("x of scatter", lambda: ts.distributed.scatter(spoilt(3))),
    "gradient of a row": (
        "the gradient of backward of the reduce in ParallelLinear",
        lambda: backward_of(ts.nn.ParallelLinear(6, 4, dim=0)(whole(2, 6))),
    ),
    "gradient of what was gathered": (
        "the gradient of backward of the gather",
        lambda: backward_of(ts.distributed.gather(column()(whole(2, FEATURES)))),
    ),
}


def shard_of_ids():
    own = ts.distributed.scatter(torch.arange(7), 0, grad="whole")
    return ts.ShardedTensor.from_local(own, 0)


def message_of(call):
    with pytest.raises(GroupError) as error:
        call()
    return str(error.value)


def messages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSHARD_DEBUG", "1")
        found = {}
        for place, (_, call) in PLACES.items():
            try:
                found[place] = message_of(call)
            except BaseException as error:
                raise AssertionError(f"{place}: {error}") from error
        return found


def test_each_place_names_what_differs_on_every_rank():
    """Whatever is given whole: rank 1 alone has another value, and all ranks raise alike."""
    results = run_ranks(messages, 3, timeout_s=60)
    assert results[0] == results[1] == results[2]
    for place, (words, _) in PLACES.items():
        assert results[0][place].startswith(words), (place, results[0][place])
        assert "rank 1" in results[0][place]


def one_is_missing():
    layers = [column(), nn.ReLU(), ts.nn.ParallelLinear(6, 6, dim=0), nn.Identity()]
    return nn.Sequential(*odd(layers, layers[:1]))


def two_are_swapped():
    first, second = ts.nn.ParallelLinear(4, 4, dim=0), ts.nn.ParallelLinear(4, 4, dim=0)
    model = nn.Sequential(first, second)
    if groups.get_rank() == 1:
        model.forward = lambda x: first(second(x))
    return model


def another_size():
    return nn.Sequential(ts.nn.ParallelLinear(4, odd(6, 9), dim=1))


def another_class():
    return nn.Sequential(column(), odd(nn.ReLU(), nn.GELU()))


def another_dim():
    return nn.Sequential(ts.nn.ParallelLinear(4, 4, bias=False, dim=odd(0, 1)))


def another_option():
    norm = ts.nn.ParallelGroupNorm(3, 6, eps=odd(1e-5, 1e-3))
    return nn.Sequential(column(), norm)


def frozen_on_one():
    model = nn.Sequential(column())
    model[0].weight.requires_grad_(odd(True, False))
    return model


def frozen_elsewhere():
    model = nn.Sequential(nn.Linear(4, 4), column())
    model[0].weight.requires_grad_(odd(True, False))
    return model


def evaluated_on_one():
    return nn.Sequential(column()).train(odd(True, False))


STRUCTURES = {
    one_is_missing: "module '1' of the model differs between the ranks: rank 0: ReLU; rank 1:"
    " absent; rank 2: ReLU.",
    two_are_swapped: "The ranks' next collectives differ: rank 0: ParallelLinear '0'; rank 1:"
    " ParallelLinear '1'; rank 2: ParallelLinear '0'.",
    another_size: "option out_features of ParallelLinear '0' differs between the ranks: rank"
    " 0: 6; rank 1: 9; rank 2: 6.",
    another_class: "module '1' of the model differs between the ranks: rank 0: ReLU; rank 1:"
    " GELU; rank 2: ReLU.",
    another_dim: "option dim of ParallelLinear '0' differs between the ranks: rank 0: 0; rank"
    " 1: 1; rank 2: 0.",
    another_option: "option eps of ParallelGroupNorm '1' differs between the ranks: rank 0:"
    " 1e-05; rank 1: 0.001; rank 2: 1e-05.",
    frozen_on_one: "parameter weight of ParallelLinear '0' differs between the ranks: rank 0:"
    " (6, 4) in shards of [2, 2, 2] along dim 0, torch.float32, wants grad; rank 1: (6, 4) in"
    " shards of [2, 2, 2] along dim 0, torch.float32, frozen;",
    frozen_elsewhere: "module '0' of the model differs between the ranks: rank 0: Linear;"
    " weight (4, 4), torch.float32; bias (4,), torch.float32; rank 1: Linear; weight (4, 4),"
    " torch.float32, frozen; bias",
    evaluated_on_one: "training of ParallelLinear '0' differs between the ranks: rank 0: True;"
    " rank 1: False; rank 2: True.",
}


def structure_messages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSHARD_DEBUG", "1")
        return [message_of(partial(first_forward, make)) for make in STRUCTURES]


def first_forward(make):
    torch.manual_seed(0)
    make()(whole(2, 4))


def test_models_that_differ_are_named_at_their_first_forward():
    """A layer missing, swapped, of another size, class or option, frozen on one rank alone."""
    results = run_ranks(structure_messages, 3, timeout_s=60)
    assert results[0] == results[1] == results[2]
    for make, words in zip(STRUCTURES, results[0], strict=True):
        assert words.startswith(STRUCTURES[make]), (make.__name__, words)


def step():
    """Five collectives: a bias's broadcast, of the row and the loss, and for each column's input."""
    torch.manual_seed(0)
    model = nn.Sequential(
        column(), nn.GELU(), ts.nn.ParallelLinear(6, 4, dim=0), column()
    )
    x = whole(5, FEATURES).requires_grad_()
    F.cross_entropy(model(x), torch.tensor([0, 5, 2, 3, 3])).backward()
    return x.grad


def counted_steps():
    counts, grads = [], []
    with pytest.MonkeyPatch.context() as patch:
        for value in ("", "0", "1"):
            patch.setenv("TORCHSHARD_DEBUG", value)
            with CommDebugMode() as count:
                grads.append(step())
            counts.append(count.get_total_counts())
    return counts, all(torch.equal(grad, grads[0]) for grad in grads)


def test_without_the_variable_nothing_is_exchanged():
    """The step's own collectives and no more; with it the same numbers."""
    for counts, are_alike in run_ranks(counted_steps, 2):
        assert counts[:2] == [5, 5]
        assert counts[2] > 5
        assert are_alike


def pooled():
    """A head that pools the ranks' own samples, of different numbers, and its loss."""
    head = ts.nn.ParallelLinear(FEATURES, CLASSES, dim=1)
    head.gather_batch = True
    criterion = ts.nn.ParallelCrossEntropyLoss(gather_target=True)
    num_own = 2 + groups.get_rank()
    x = torch.randn(num_own, FEATURES, generator=torch.Generator().manual_seed(num_own))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSHARD_DEBUG", "1")
        criterion(head(x.requires_grad_()), torch.arange(num_own)).backward()
        width = message_of(lambda: head(whole(2, odd(FEATURES, 5))))
        with torch.no_grad():  # facts, and what is local, a rank may ask alone
            y = head(x)
            if groups.get_rank() == 0:
                repr(y), y.shape, y.abs().cpu(), y.to_local()
            y.sum(-1)
    return width


def test_samples_of_ones_own_are_no_difference():
    """Under `gather_batch` and `gather_target` sizes of a sample are compared, not samples."""
    words = "input of ParallelLinear differs between the ranks: rank 0: (*, 4), torch.float32"
    assert all(text.startswith(words) for text in run_ranks(pooled, 2))


def compiled_step():
    torch.manual_seed(0)
    model = nn.Sequential(column(), nn.GELU(), ts.nn.ParallelLinear(6, 4, dim=0))
    x = whole(5, FEATURES).requires_grad_()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSHARD_DEBUG", "1")
        mine, want = (
            torch.autograd.grad(run(x).square().sum(), [x])[0]
            for run in (compiled, model)
        )
    return torch.equal(mine, want)


def test_compiled_graphs_leave_the_checks_out():
    """The graph is whole, and its numbers are those of the eager model."""
    assert all(run_ranks(compiled_step, 2))
