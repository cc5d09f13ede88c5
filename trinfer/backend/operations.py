"""Torch operations, watched while launches are recorded or learned: what runs those again runs no others."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# they leave nothing to run again
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Operations(TorchDispatchMode):
    """Calls `met` for every torch operation inside the `with` block that reads or writes numbers of a tensor:
    all but allocations and views. `tolist` and `numpy` read without an operation.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_memory = func._schema.name.partition("::")[2] in ALLOCATIONS
        if not (makes_memory or func.is_view):
            self.met(func)
        result = func(*args, **(kwargs or {}))
        # in inference mode `contiguous` and its like are seen whole, and may have copied
        if func.is_view and not all(_share_memory(args, view) for view in _flat(result)):
            self.met(func)
        return result

    def met(self, func: Any) -> None:
        """What to do about an operation; called before it runs, about a copy after it."""
        raise NotImplementedError


def _flat(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def _share_memory(args: Any, view: Tensor) -> bool:
    memory = view.untyped_storage().data_ptr()
    return any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == memory for x in args)
