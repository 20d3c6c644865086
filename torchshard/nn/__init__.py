"""Mirror of torch.nn: the finished layers of `layer_zoo`, and functional forms.

The layers are found on first use, since `layer_zoo` itself imports torchshard.
"""

from __future__ import annotations

from typing import Any

from torchshard.nn import functional, init, utils

__all__ = ["functional", "init", "utils"]


def __getattr__(name: str) -> Any:
    import layer_zoo

    if name in layer_zoo.__all__:
        return getattr(layer_zoo, name)
    raise AttributeError(
        f"torchshard.nn has no layer {name!r}. It has {', '.join(layer_zoo.__all__)}."
    )


def __dir__() -> list[str]:
    import layer_zoo

    return sorted([*__all__, *layer_zoo.__all__])
