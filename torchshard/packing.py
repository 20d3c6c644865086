"""What of a divided dim stays together: units, packed blocks, and units that serve others.

a projection to q, k and v of 8 and twice 2 heads of 64, in one weight:
Packing(unit=64, blocks=(512, 128, 128), serves=(1, 4, 4))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchshard.errors import LayoutError
from torchshard.layout import Axis, Segment, covering


@dataclass(frozen=True)
class Packing:
    """How the indices of a divided dim belong together.

    `blocks` are laid end to end in the dim, and every rank gets its share of each: q, k and
    v of one projection, gate and up of another. A `unit` stays on one rank: a head. A unit
    that `serves` n units of the layer's other blocks, or of another layer, is held by every
    rank that holds one of those: key/value heads of grouped queries. Its gradient is summed
    over the ranks that hold it.

    Args:
        unit: How many indices stay together; or the number for each block.
        blocks: A number of equal blocks, or their sizes.
        serves: How many units a unit serves; or the number for each block.
    """

    unit: int | Sequence[int] = 1
    blocks: int | Sequence[int] = 1
    serves: int | Sequence[int] = 1

    def divided(
        self, axis: str, name: str, size: int
    ) -> tuple[dict[str, Axis], tuple[Segment, ...]]:
        """Return the axes and the segments of a dim of `size` indices.

        Args:
            axis: What the axis is called; a second kind of block gets a number behind it.
            name: The argument that gives the size, for errors.
            size: Size of the whole dim.

        Raises:
            LayoutError: If the blocks do not make up `size`, or a unit does not divide its
                block.

        Example:
            >>> Packing(unit=2, blocks=3).divided("out", "out_features", 24)[1][0]
            Segment(axis='out', unit=2)
        """
        axes: dict[str, Axis] = {}
        names: dict[tuple[int, int], str] = {}
        segments = []
        for number, (block, unit, serves) in enumerate(self._blocks(name, size)):
            if unit < 1 or block % unit:
                where = f"{name}={size}"
                if block != size:
                    where = f"block {number} of {where}, which has {block} indices"
                raise LayoutError(
                    f"unit={unit} does not divide {where}. Expected units of equal size."
                )
            kind = (block // unit, serves)
            if kind not in names:
                names[kind] = f"{axis}_{len(names)}" if names else axis
                axes[names[kind]] = _axis(*kind)
            segments.append(Segment(names[kind], unit))
        return axes, tuple(segments)

    def _blocks(self, name: str, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield size, unit and number of units served of each block."""
        sizes = self._sizes(name, size)
        units = _for_each("unit", self.unit, len(sizes))
        serves = _for_each("serves", self.serves, len(sizes))
        yield from zip(sizes, units, serves, strict=True)

    def _sizes(self, name: str, size: int) -> list[int]:
        if isinstance(self.blocks, int):
            if self.blocks < 1 or size % self.blocks:
                raise LayoutError(
                    f"blocks={self.blocks} does not divide {name}={size}. Expected a number"
                    " of equal blocks, or their sizes."
                )
            return [size // self.blocks] * self.blocks
        if sum(self.blocks) != size or min(self.blocks, default=0) < 0:
            raise LayoutError(
                f"blocks={tuple(self.blocks)} do not add up to {name}={size}. Expected the"
                " sizes of the packed parts."
            )
        return list(self.blocks)


def _for_each(name: str, value: int | Sequence[int], count: int) -> list[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    if len(values) != count:
        raise LayoutError(
            f"{name}={tuple(values)} has {len(values)} numbers for {count} blocks. Expected"
            " one for each, or one number for all."
        )
    return values


def _axis(num_units: int, serves: int) -> Axis:
    if serves < 1:
        raise LayoutError(
            f"serves={serves} is less than 1. Expected how many units each unit serves."
        )
    return (
        Axis(num_units) if serves == 1 else covering(Axis(num_units * serves), serves)
    )
