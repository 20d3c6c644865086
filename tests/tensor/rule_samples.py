"""A call or more of every operation that has a rule, by the name of the rule."""

import copy

import torch
import torch.nn.functional as F
from divided_calls import Sample
from torch import Tensor
from torchshard.tensor import RULES
from torchshard.tensor.attributes import PLAIN

EXEMPT = {
    **dict.fromkeys(PLAIN, "tells of the storage of the shard, whatever its size"),
    **dict.fromkeys(["__set__", "__format__"], "gives no tensor"),
    **dict.fromkeys(
        ["backward", "grad"], "runs in every sample, inside the comparison"
    ),
    **dict.fromkeys(["_foreach_norm", "_foreach_mul_"], "takes lists of parameters"),
    "_amp_foreach_non_finite_check_and_unscale_": "takes lists of gradients",
    "cuda": "needs a device",
    "log_sigmoid": "what torch calls F.logsigmoid, which is sampled",
    "__rmul__": "what Python calls `*` of a number",
    "size": "called in every comparison",
}
"""Rules without a sample, and why."""

SAME = """
    abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square
    reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sigmoid
    logit sign sgn floor ceil round trunc frac nan_to_num isnan isinf isfinite relu relu6
    leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardsigmoid hardswish
    hardshrink softshrink tanhshrink logical_not
    __neg__ __pos__ __abs__ float double half bfloat16 int long bool cpu clone contiguous
    detach zeros_like ones_like empty_like rand_like randn_like bernoulli dropout alpha_dropout
    rrelu sum mean norm amax amin max min var std var_mean std_mean any all prod
    count_nonzero nansum nanmean flatten t squeeze numel nelement __len__
    msort arcsin arccos arctan arcsinh arccosh arctanh erfinv lgamma digamma sinc i0 deg2rad rad2deg signbit linalg_norm
    """.split()
"""Functions of one tensor."""
PAIRS = """
    add sub subtract mul multiply div divide true_divide fmod remainder pow
    float_power rsub maximum minimum fmax fmin atan2 hypot eq ne lt le gt ge logical_and
    logical_or logical_xor isclose __add__ __radd__ __sub__ __rsub__ __mul__ __truediv__
    __rtruediv__ __rdiv__ __mod__ __pow__ __rpow__ __eq__ __ne__
    __lt__ __le__ __gt__ __ge__ equal allclose type_as view_as reshape_as expand_as
    mse_loss l1_loss huber_loss smooth_l1_loss kl_div binary_cross_entropy
    binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss
    pairwise_distance cosine_similarity xlogy copysign logaddexp logaddexp2
    """.split()
"""Functions of two tensors of one shape."""
ALONG = """
    softmax log_softmax logsumexp cumsum cumprod cummax cummin logcumsumexp sort argsort
    argmax argmin median nanmedian mode glu unsqueeze unbind normalize
    """.split()
"""Functions of a tensor and `dim`."""
_OTHERS_IN_PLACE = ["zero_", "bernoulli_", "uniform_", "normal_", "leaky_relu_", "elu_"]
_UNDIFFERENTIATED = "asinh_ acosh_ atanh_ arcsinh_ arccosh_ arctanh_".split()
_CAN_BE_CALLED = RULES.keys() & {*dir(Tensor), *dir(F)} - {*_UNDIFFERENTIATED}
IN_PLACE = [f"{name}_" for name in SAME if f"{name}_" in _CAN_BE_CALLED]
IN_PLACE += _OTHERS_IN_PLACE
PAIRS_IN_PLACE = [f"{name}_" for name in PAIRS if f"{name}_" in RULES]
PAIRS_IN_PLACE += "copy_ __iadd__ __isub__ __imul__ __itruediv__".split()
MATRICES = """
    triu tril inverse linalg_inv linalg_inv_ex det linalg_det logdet slogdet linalg_slogdet
    linalg_qr linalg_svdvals linalg_matrix_exp matrix_exp linalg_matrix_norm
    """.split()


def function(name):
    """The function of torch of that name."""
    if name.startswith("linalg_"):
        return getattr(torch.linalg, name.removeprefix("linalg_"))
    places = (F, Tensor, torch)
    return next(getattr(place, name) for place in places if name in dir(place))


def numbers(*shape, dtype=torch.float64):
    """Numbers between 0 and 1, never close to either."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    x = x.to(dtype)
    return x.requires_grad_(dtype.is_floating_point)


def integers(*shape, high=3):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, high, shape, generator=generator)


def _in_place(name):
    place = Tensor if name in dir(Tensor) else F
    return lambda x, *rest: getattr(place, name)(x * 1, *rest)


def _written(x, index):
    y = x * 1
    y[index] = 2.0
    return y


def _pools():
    for num_dims in (1, 2, 3):
        x = numbers(2, 3, *[4] * num_dims)
        for kind in ("max_pool", "avg_pool", "lp_pool"):
            extra = (2.0, 2) if kind == "lp_pool" else (2,)
            yield f"{kind}{num_dims}d", getattr(F, f"{kind}{num_dims}d"), (x, *extra)
        name = f"max_pool{num_dims}d_with_indices"
        yield name, getattr(F, name), (x, 2)
        for kind in ("avg", "max"):
            name = f"adaptive_{kind}_pool{num_dims}d"
            yield name, getattr(F, name), (x, 2)
        name = f"adaptive_max_pool{num_dims}d_with_indices"
        yield name, getattr(F, name), (x, 2)
        weight = numbers(3, 3, *[2] * num_dims)
        for name in (f"conv{num_dims}d", f"conv_transpose{num_dims}d"):
            yield name, getattr(F, name), (x, weight, numbers(3))


_NO_POOLS = [
    f"{kind}{num_dims}d_with_indices"
    for kind in ("avg_pool", "lp_pool", "adaptive_avg_pool")
    for num_dims in (1, 2, 3)
]
EXEMPT |= dict.fromkeys(_NO_POOLS, "no function of torch has this name")


def _recurrent():
    x, state = numbers(4, 3, 2), numbers(1, 3, 2)
    for name, gates in (("rnn_tanh", 1), ("rnn_relu", 1), ("gru", 3), ("lstm", 4)):
        weights = [numbers(2 * gates, 2), numbers(2 * gates, 2)]
        biases = [numbers(2 * gates), numbers(2 * gates)]
        hx = (state, state + 1) if name == "lstm" else state
        options = (True, 1, 0.0, True, False, False)
        call = getattr(torch._VF, name)
        yield name, call, (x, hx, [*weights, *biases], *options)
        cell, hx = f"{name}_cell", tuple(s[0] for s in hx) if name == "lstm" else hx[0]
        yield cell, getattr(torch._VF, cell), (x[0], hx, *weights, *biases)


def _other():
    x, y, cube = numbers(4, 3), numbers(4, 3) * 0.9, numbers(2, 4, 3)
    square = numbers(3, 3)
    yes, ids, labels = x.detach() > 0.5, integers(4, 3), integers(4)
    table, row = numbers(5, 3), numbers(3)
    for name in _UNDIFFERENTIATED:
        yield name, _in_place(name), (x.detach(),)
    for name in ("floor_divide", "heaviside"):
        yield name, function(name), (x.detach(), y.detach())
        yield f"{name}_", _in_place(f"{name}_"), (x.detach(), y.detach())
    for name in ("__floordiv__", "__rfloordiv__", "soft_margin_loss"):
        yield name, function(name), (x.detach(), y.detach())
    for name in ("relu6_", "hardswish_"):
        call = getattr(torch._C._nn, name)
        yield name, lambda x, f=call: f(x * 1), (x,)
    yield "__deepcopy__", lambda x: copy.deepcopy(x.detach()), (x,)
    yield "clamp", torch.clamp, (x, 0.2, 0.6)
    yield "clip", torch.clip, (x, 0.2, 0.6)
    for name in ("clamp_min", "clamp_max", "full_like"):
        yield name, function(name), (x, 0.5)
    for name in ("clamp_", "clip_"):
        yield name, _in_place(name), (x, 0.2, 0.6)
    for name in ("clamp_min_", "clamp_max_", "fill_"):
        yield name, _in_place(name), (x, 0.5)
    yield "threshold", torch.threshold, (x, 0.5, 2.0)
    yield "_threshold", F.threshold, (x, 0.5, 2.0)
    yield "threshold_", _in_place("threshold_"), (x, 0.5, 2.0)
    yield "lerp", torch.lerp, (x, y, 0.3)
    yield "lerp_", _in_place("lerp_"), (x, y, 0.3)
    for name in ("addcmul", "addcdiv"):
        yield name, function(name), (x, y, y)
        yield f"{name}_", _in_place(f"{name}_"), (x, y, y)
    yield "where", torch.where, (yes, x, y)
    yield "masked_fill", torch.masked_fill, (x, yes, 2.0)
    yield "masked_fill_", _in_place("masked_fill_"), (x, yes, 2.0)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        yield name, function(name), (yes, ~yes)
        yield f"{name}_", _in_place(f"{name}_"), (yes.int(), 1)
    for name in ("__and__", "__or__", "__xor__"):
        yield name, function(name), (yes, ~yes)
    yield "bitwise_not", torch.bitwise_not, (yes,)
    yield "bitwise_not_", _in_place("bitwise_not_"), (yes.int(),)
    yield "__invert__", Tensor.__invert__, (yes,)
    yield "to", Tensor.to, (x, torch.float32)
    yield "type", Tensor.type, (x, torch.float32)
    yield "alias", torch.ops.aten.alias, (x,)
    yield "vector_norm", torch.linalg.vector_norm, (x,)
    yield "linalg_vector_norm", torch.linalg.vector_norm, (x, 2, 1)
    yield "topk", torch.topk, (x, 2, 0)
    yield "topk", torch.topk, (x, 2, 1)
    yield "kthvalue", torch.kthvalue, (x, 2, 1)
    yield "aminmax", lambda x: torch.aminmax(x, dim=1), (x,)
    yield "max", torch.max, (x, 0)
    yield "sum", torch.sum, (x, 1)
    yield "linear", F.linear, (x, numbers(2, 3), numbers(2))
    for name in ("matmul", "mm", "linalg_matmul", "__matmul__"):
        yield name, function(name), (x, numbers(3, 2))
    yield "__rmatmul__", Tensor.__rmatmul__, (x, numbers(2, 4))
    yield "bmm", torch.bmm, (cube, numbers(2, 3, 2))
    yield "mv", torch.mv, (x, row)
    yield "dot", torch.dot, (row, row + 1)
    yield "vdot", torch.vdot, (row, row + 1)
    for name in ("outer", "ger"):
        yield name, function(name), (row, numbers(2))
    yield "addmm", torch.addmm, (numbers(4, 2), x, numbers(3, 2))
    yield "addmv", torch.addmv, (numbers(4), x, row)
    yield "addr", torch.addr, (x, numbers(4), row)
    yield "addbmm", torch.addbmm, (numbers(4, 2), cube, numbers(2, 3, 2))
    yield "baddbmm", torch.baddbmm, (numbers(2, 4, 2), cube, numbers(2, 3, 2))
    yield "bilinear", F.bilinear, (x, numbers(4, 2), numbers(5, 3, 2), numbers(5))
    yield "cdist", torch.cdist, (x, numbers(2, 3))
    yield "tensordot", torch.tensordot, (x, numbers(3, 2), 1)
    yield "einsum", lambda x, y: torch.einsum("ij,jk->ik", x, y), (x, numbers(3, 2))
    heads = numbers(2, 4, 3, 5)
    yield "scaled_dot_product_attention", F.scaled_dot_product_attention, (heads,) * 3
    yield "pad", F.pad, (x, (1, 2))
    image = numbers(2, 4, 4, 4)
    yield "pixel_shuffle", F.pixel_shuffle, (image, 2)
    yield "pixel_unshuffle", F.pixel_unshuffle, (image, 2)
    yield "channel_shuffle", F.channel_shuffle, (image, 2)
    shuffle = torch.native_channel_shuffle
    yield "native_channel_shuffle", shuffle, (image.detach(), 2)
    yield "interpolate", lambda x: F.interpolate(x, scale_factor=2), (image,)
    yield "linalg_matrix_power", torch.linalg.matrix_power, (numbers(2, 3, 3), 2)
    yield "matrix_power", torch.matrix_power, (square, 2)
    posed = numbers(2, 3, 3).detach()
    posed = (posed @ posed.mT + torch.eye(3)).requires_grad_()
    for name in ("linalg_cholesky", "linalg_cholesky_ex", "linalg_eigvalsh"):
        yield name, function(name), (posed,)
    yield "layer_norm", lambda x, *w: F.layer_norm(x, (3,), *w), (x, row, row)
    yield "rms_norm", lambda x, *w: F.rms_norm(x, (3,), *w), (x, row)
    moments = torch.zeros(4), torch.ones(4)
    moments = tuple(m.double() for m in moments)
    weight = numbers(4)
    yield "batch_norm", F.batch_norm, (numbers(2, 4, 3), *moments, weight, weight, True)
    yield "instance_norm", F.instance_norm, (numbers(2, 4, 3), None, None, weight)
    yield "group_norm", F.group_norm, (numbers(2, 4, 3), 2, weight, weight)
    yield "embedding", F.embedding, (ids, table)
    yield "embedding_bag", F.embedding_bag, (ids, table)
    yield "prelu", F.prelu, (x, row)
    yield "select", torch.select, (x, 1, 0)
    yield "flip", torch.flip, (x, (1,))
    yield "roll", torch.roll, (x, 1, 1)
    for name in ("chunk", "split", "tensor_split"):
        yield name, function(name), (x, 2, 1)
    yield "split_with_sizes", torch.split_with_sizes, (x, [1, 2], 1)
    yield "narrow", torch.narrow, (x, 1, 0, 2)
    yield "__getitem__", Tensor.__getitem__, (x, (slice(None), 1))
    yield "__getitem__", Tensor.__getitem__, (table, labels)
    yield "__setitem__", _written, (x, (slice(None), 1))
    yield "index_select", torch.index_select, (table, 0, labels)
    yield "take_along_dim", torch.take_along_dim, (x, ids, 1)
    yield "gather", torch.gather, (x, 1, ids)
    yield "nll_loss", F.nll_loss, (x, labels, row.detach())
    yield "cross_entropy", F.cross_entropy, (x, labels, row.detach())
    yield "margin_ranking_loss", F.margin_ranking_loss, (x, y, torch.sign(y.detach()))
    yield "multi_margin_loss", F.multi_margin_loss, (x, labels)
    yield "multilabel_margin_loss", F.multilabel_margin_loss, (x, ids - 1)
    yield "cosine_embedding_loss", F.cosine_embedding_loss, (x, y, labels * 0 + 1)
    yield "triplet_margin_loss", F.triplet_margin_loss, (x, y, x * y)
    log_probs = numbers(6, 4, 3).detach().log_softmax(-1).requires_grad_()
    lengths = torch.full((4,), 6), torch.full((4,), 2)
    yield "ctc_loss", F.ctc_loss, (log_probs, integers(4, 2, high=2) + 1, *lengths)
    yield "linear_cross_entropy", F.linear_cross_entropy, (x, numbers(5, 3), labels)
    for name in ("view", "reshape"):
        yield name, function(name), (x, (2, 2, 3))
    yield "unflatten", Tensor.unflatten, (x, 0, (2, 2))
    for name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis"):
        yield name, function(name), (cube, 0, 2)
    yield "permute", torch.permute, (cube, (2, 0, 1))
    yield "expand", Tensor.expand, (x, (2, 4, 3))
    yield "broadcast_to", torch.broadcast_to, (x, (2, 4, 3))
    for name in ("cat", "concat", "concatenate", "stack"):
        yield name, function(name), ([x, y], 1)
    yield "__get__", lambda x: x.mT, (x,)


def samples():
    """Yield the name of a rule and a call that has to reach it."""
    x, y, cube = numbers(4, 3), numbers(4, 3) * 0.9, numbers(2, 3, 3)
    calls = [(name, function(name), (x,)) for name in SAME]
    calls += [(name, function(name), (x, y)) for name in PAIRS]
    for name in ALONG:
        for dim in (0, 1):
            call = function(name)
            # glu halves a dim
            shape = (4, 2) if name == "glu" else (4, 3)
            calls.append(
                (name, lambda x, f=call, d=dim: f(x, dim=d), (numbers(*shape),))
            )
    calls += [(name, _in_place(name), (x,)) for name in IN_PLACE]
    calls += [(name, _in_place(name), (x, y)) for name in PAIRS_IN_PLACE]
    calls += [(name, function(name), (cube,)) for name in MATRICES]
    calls += [*_pools(), *_recurrent(), *_other()]
    for name, call, args in calls:
        yield name, Sample(name, call, args, {})
