"""Mirror of torch.amp: a gradient scaler that skips a step on all ranks or on none."""

from __future__ import annotations

import torch
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.distributed.groups import GroupLike, resolve_group
from torchshard.row_updates import expect_whole_gradients


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose overflow on one rank's shard skips the step on all.

    Each rank looks for infinities in the gradients that it holds. Without an exchange, the rank
    with an overflow in its shard would skip the step and lower its scale alone, and the ranks'
    models would drift apart. One all-reduce of a scalar for each optimizer and step.

    Args:
        device: As for `torch.amp.GradScaler`, like the next five.
        init_scale: First scale.
        growth_factor: Factor of growth.
        backoff_factor: Factor after a skipped step.
        growth_interval: Steps without overflow until the scale grows.
        enabled: Whether the scaler does anything.
        group: The ranks; None is the model group.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: GroupLike = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.group = resolve_group(group)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale, and share whether an infinity was found. Both of torch's paths come here."""
        held = (x for group in optimizer.param_groups for x in group["params"])
        expect_whole_gradients(held, "GradScaler")
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = inv_scale.device
        here = [flag.to(device) for flag in found.values()]
        anywhere = torch.stack(here).amax() if here else torch.zeros((), device=device)
        anywhere = collectives.all_reduce(anywhere, self.group, "max")
        devices = found or {device: anywhere}
        return {where: anywhere.to(where) for where in devices}
