"""Mirror of torch.nn: the finished layers of `layer_zoo`, and functional forms.

The layers are found on first use, since `layer_zoo` itself imports torchshard.
"""

from __future__ import annotations

from typing import Any

from torchshard.compatibility import RegisterParallelDim
from torchshard.nn import functional, init, utils

__all__ = ["RegisterParallelDim", "functional", "init", "utils"]

_OLDER_NAMES = {"ParallelCrossEntropy": "ParallelCrossEntropyLoss"}
"""TorchShard's second names for layers."""


def __getattr__(name: str) -> Any:
    import layer_zoo

    current = _OLDER_NAMES.get(name, name)
    if current in layer_zoo.__all__:
        return getattr(layer_zoo, current)
    raise AttributeError(
        f"torchshard.nn has no layer {name!r}. It has {', '.join(layer_zoo.__all__)}."
    )


def __dir__() -> list[str]:
    import layer_zoo

    return sorted([*__all__, *_OLDER_NAMES, *layer_zoo.__all__])
