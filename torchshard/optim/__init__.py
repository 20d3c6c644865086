"""Mirror of torch.optim: optimizers whose parameters, state or gradient are divided."""

from torchshard.optim.row_optimizer import step_in_backward
from torchshard.optim.zero import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer", "step_in_backward"]
