"""The rewriting pass: make a plan of a model (pure data), apply it, undo it.

`apply` and `undo` live in `trinfer.rewrite.apply`, which needs the kernels and so Triton; a plan does not.
"""

from trinfer.rewrite.find import make_plan
from trinfer.rewrite.plan import Kept, Plan, Step

__all__ = ["Kept", "Plan", "Step", "make_plan"]
