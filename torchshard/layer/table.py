"""TableLayer: what every layer that looks rows up in a divided table does alike.

An embedding returns the rows, a bag of embeddings adds them up. What torch's embedding takes
as options, a padding row, a largest norm, gradients by frequency or sparse, is right here on
a part of the table.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.checks import expect_indices
from torchshard.distributed.groups import GroupLike
from torchshard.errors import LayoutError, ShapeError
from torchshard.initializer import Given, Initializer, Normal, ZeroRow
from torchshard.layer.base import ParallelLayer
from torchshard.layer.declaration import ParameterSpec
from torchshard.layout import Axis, Layout, Partial, Shard, Whole
from torchshard.packing import Packing
from torchshard.splits import TABLE, Dim, Splits
from torchshard.tensor import ShardedTensor


class TableLayer(ParallelLayer):
    """Base of layers that look up rows of a table, of which each rank holds a part.

    Over R ranks, on rank r, with `*` for any shape:

                    "vocabulary"                        "embedding_dim"
        ids         (*) whole                           (*) whole
        weight_r    (num_embeddings / R, dim)           (num_embeddings, dim / R)
        rows_r      (*, dim) of its own ids,            (*, dim / R) of all ids
                    zeros for the others
        y           whole                               shard, on the last dim

        forward     y = sum over ranks of f(rows_r)     y_r = f(rows_r)     no collective; with
                    all-reduce                          `max_norm` an all-reduce of norms
        backward    local                               local

    A subclass sets the options that it has as fields, calls `declare_table` at the end of its
    constructor, and computes f from `look_up(input)`. Since the ranks' results are added, f of a
    divided vocabulary must be linear in the rows: themselves, a sum, a mean.

    Args:
        group: The ranks; None is the model group.
        dim: 0 or "vocabulary"; 1, -1 or "embedding_dim"; None for no split.
        packing: What of the columns stays together.

    Attributes:
        padding_idx: Row that starts at zero and gets no gradient.
        max_norm: Largest norm that a row may have: rows that are looked up and exceed it are
            scaled down in place, as torch does.
        norm_type: The p of that norm.
        scale_grad_by_freq: Whether to divide a row's gradient by how often it is looked up.
        sparse: Whether the table's gradient is a sparse tensor.

    Example:
        >>> import torch, torchshard as ts
        >>> class ParallelBag(ts.TableLayer):
        ...     def __init__(self, num_embeddings, embedding_dim, dim=None, *, group=None):
        ...         super().__init__(group, dim)
        ...         self.declare_table(num_embeddings, embedding_dim)
        ...
        ...     def local_forward(self, input):
        ...         return self.look_up(input).mean(-2)
        >>> ParallelBag(9, 4, dim=0)(torch.tensor([[0, 8, 8], [1, 2, 3]])).shape
        torch.Size([2, 4])
    """

    splits: ClassVar[Splits] = TABLE
    weight: Tensor
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False

    def __init__(
        self, group: GroupLike = None, dim: Dim = None, packing: Packing | None = None
    ) -> None:
        super().__init__(group, dim)
        self._packing = packing or Packing()
        self.num_embeddings, self.embedding_dim = 0, 0
        if self.split == "vocabulary" and self._packing != Packing():
            raise LayoutError(
                f"{self._packing} with dim={dim!r}: a vocabulary is dealt out row by row. Only"
                " the columns, dim='embedding_dim', have units and blocks."
            )
        if self._packing.serves != 1:
            raise LayoutError(
                f"serves={self._packing.serves}: columns of a table serve no others."
                " Leave it out."
            )

    def declare_table(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        weight: Tensor | None = None,
        init: Initializer | None = None,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Declare the table, as the split says. Called at the constructor's end.

        Args:
            num_embeddings: Number of rows of the whole table.
            embedding_dim: Number of columns of the whole table.
            weight: The whole table to start from.
            init: The table's initialiser; None is torch's, standard normal. Then the padding
                row is set to zero.
            gather_output: Whether callers get a sharded output whole.
            device: As for torch.nn.Embedding.
            dtype: As for torch.nn.Embedding.

        Raises:
            LayoutError: If `padding_idx` is out of range, or the packing does not fit.
            ShapeError: If `weight` is not of shape (num_embeddings, embedding_dim).
        """
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = self._from_front(self.padding_idx)
        axes: dict[str, Axis] = {}
        layout: Whole | Shard = Whole()
        output: Layout = Whole()
        if self.split == "vocabulary":
            axes = {"vocabulary": Axis(num_embeddings)}
            layout, output = Shard(0, "vocabulary"), Partial()
        elif self.split == "embedding_dim":
            axes, own = self._packing.divided("dim", "embedding_dim", embedding_dim)
            layout, output = Shard(1, own), Shard(-1, own)
        shape = (num_embeddings, embedding_dim)
        spec = ParameterSpec(
            shape, layout, self._initializer(shape, weight, init or Normal())
        )
        self.declare(
            axes=axes,
            parameters={"weight": spec},
            inputs={"input": Whole()},
            output=output,
            gather_output=gather_output,
            device=device,
            dtype=dtype,
        )

    def _from_front(self, padding_idx: int | None) -> int | None:
        """Return `padding_idx` counted from the front."""
        if padding_idx is None:
            return None
        if not -self.num_embeddings <= padding_idx < self.num_embeddings:
            raise LayoutError(
                f"padding_idx={padding_idx} is out of range for"
                f" {self.num_embeddings} embeddings."
            )
        return padding_idx % self.num_embeddings

    def _initializer(
        self, shape: tuple[int, int], weight: Tensor | None, init: Initializer
    ) -> Initializer:
        if self.padding_idx is not None:
            init = ZeroRow(init, self.padding_idx)
        if weight is None:
            return init
        if weight.shape != shape:
            raise ShapeError(
                f"_weight has shape {tuple(weight.shape)}; expected {shape}."
            )
        return Given(weight, then=init)

    def look_up(self, input: Tensor) -> Tensor:
        """Return what this rank holds of the rows of `input`, (*, columns).

        Of a divided vocabulary those are whole rows for its own ids, zeros for the others;
        of divided columns, its columns of every row.

        Args:
            input: Row numbers of the whole table, of any shape, the same on every rank.

        Raises:
            TargetError: If a row number is out of range.
        """
        expect_indices(input, self.num_embeddings, "input")
        if self.split == "vocabulary":
            return self._own_rows(input)
        if self.split == "embedding_dim" and self.max_norm is not None:
            self._renormalize(input)
            return self._rows(input, self.padding_idx, None)
        return self._rows(input, self.padding_idx, self.max_norm)

    def _own_rows(self, input: Tensor) -> Tensor:
        """Return the rows of the ids that this rank owns, and zeros for the others."""
        start, stop = self.own("vocabulary")
        own = (input >= start) & (input < stop)
        padding_idx = None
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            padding_idx = self.padding_idx - start
        if self._counts_rows or start == stop:
            rows = self._rows(input[own] - start, padding_idx, self.max_norm)
            output = rows.new_zeros(*input.shape, self.embedding_dim)
            return output.masked_scatter(own.unsqueeze(-1), rows)
        # Foreign ids look up row 0 and are masked: no shape depends on the ids, so that no
        # device waits and a compiled graph stays whole.
        rows = self._rows(torch.where(own, input - start, 0), padding_idx, None)
        return torch.where(own.unsqueeze(-1), rows, 0)

    @property
    def _counts_rows(self) -> bool:
        """Whether an option would notice row 0 being looked up for foreign ids."""
        return self.max_norm is not None or self.scale_grad_by_freq or self.sparse

    @torch.no_grad()
    def _renormalize(self, input: Tensor) -> None:
        """Scale rows down to `max_norm`, by the norm over all ranks' columns."""
        ids = torch.unique(input)
        own_columns = self.weight[ids]
        rows = ShardedTensor.from_local(
            own_columns, ranges=self.ranges_of("weight"), group=self.group
        )
        norms = torch.linalg.vector_norm(rows, self.norm_type, dim=1, keepdim=True)
        # torch's own guard against division by zero
        scale = torch.where(norms > self.max_norm, self.max_norm / (norms + 1e-7), 1)
        self.weight[ids] = own_columns * scale

    def _rows(
        self, ids: Tensor, padding_idx: int | None, max_norm: float | None
    ) -> Tensor:
        return F.embedding(
            ids,
            self.weight,
            padding_idx,
            max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
