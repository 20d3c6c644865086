"""Every error that torchshard raises.

    TorchShardError
    ├── LayoutError (ValueError)        a declaration or a requested split is inconsistent
    ├── ShapeError (ValueError)         a tensor has a size that the layer does not accept
    ├── TargetError (IndexError)        an id or a class index is out of range
    ├── ShardedOpError (RuntimeError)   an operation would mix a dim that is spread over ranks
    ├── GroupError (RuntimeError)       groups and meshes are missing or do not fit
    ├── StateError (RuntimeError)       a state dict does not fit the layer
    ├── RankError (RuntimeError)        a rank of a launched group failed
    └── CheckError (AssertionError)     a sharded layer differs from its dense twin

Each takes one string, so that it pickles on its way from one rank to another. Imports
nothing.
"""


class TorchShardError(Exception):
    """Base of every error that torchshard raises on purpose."""


class LayoutError(TorchShardError, ValueError):
    """A declaration or a requested split is inconsistent."""


class ShapeError(TorchShardError, ValueError):
    """A tensor has a size that the layer does not accept."""


class TargetError(TorchShardError, IndexError):
    """An id or a class index is out of range."""


class ShardedOpError(TorchShardError, RuntimeError):
    """An operation would mix a dim that is spread over ranks.

    No TypeError: torch's operators turn one into NotImplemented, and `x == y` into False.
    """


class GroupError(TorchShardError, RuntimeError):
    """Groups and meshes are missing or do not fit."""


class StateError(TorchShardError, RuntimeError):
    """A state dict does not fit the layer."""


class RankError(TorchShardError, RuntimeError):
    """A rank of a launched group failed.

    Attributes:
        rank: The one that failed first; None where ranks did not finish in time.
    """

    rank: int | None = None


class CheckError(TorchShardError, AssertionError):
    """A sharded layer differs from its dense twin."""
