"""Generation: the length limit of every mode, the cache, and trinfer's own greedy and sampling loop.

limits.py   tokens that a call may reach
subclass.py the subclass through which transformers' generate comes here
loop.py     the loop, over a decode step of launches or the model's own forward
"""

from trinfer.generation.limits import Limits, tokens_that_fit
from trinfer.generation.subclass import Limited, attach, detach

__all__ = ["Limited", "Limits", "attach", "detach", "tokens_that_fit"]
