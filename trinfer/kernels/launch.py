"""A launcher and its launch: counted, listed, and quick when arguments of one kind come again and again.

Checks, the choice of a configuration and Triton's own look-up cost more than the work of a small kernel, and
all of them follow from shapes, strides, dtypes and options. The second call of a kind is followed on its way;
later ones hand their tensors to the kernel that it came to.
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from trinfer.autotune import is_watched, on_forget, tuned
from trinfer.backend import Operations
from trinfer.kernels.op import spanned

P = ParamSpec("P")
R = TypeVar("R")
# a server meets some hundred; whoever meets more starts anew
_MOST_KINDS = 4096
# what is known of a kind that came once, and of one whose calls do more than launch
_ONCE, _NEVER = "once", "never"
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})

_counters: list[Counter[str]] = []
_lists: list[list[tuple[str, tuple[Tensor | None, ...]]]] = []


@contextlib.contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Count, by op name, the launches inside the `with` block that run as Triton; references do not count."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        # by identity: two counters that hold the same numbers are equal
        _counters[:] = [c for c in _counters if c is not counter]


@contextlib.contextmanager
def list_launches() -> Iterator[list[tuple[str, tuple[Tensor | None, ...]]]]:
    """The op names of the launches inside the `with` block, in order, with the tensors that each told of."""
    launches: list[tuple[str, tuple[Tensor | None, ...]]] = []
    _lists.append(launches)
    try:
        yield launches
    finally:
        _lists[:] = [entry for entry in _lists if entry is not launches]


def launched(name: str, *tensors: Tensor | None) -> None:
    """Tell everyone who counts or lists launches that the kernel of op `name` is about to run.

    `tensors` are those that it reads and writes from end to end, as far as they matter for its time.
    """
    _followed.name = name
    _count(name)
    for launches in _lists:
        launches.append((name, tensors))


def _count(name: str) -> None:
    for counter in _counters:
        counter[name] += 1


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """`kernel[grid]`, whose outcome the launcher around it may use again."""
    run = kernel[grid]
    return run if _followed.launches is None else functools.partial(_note, kernel, grid)


def _note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    compiled = kernel[grid](*arguments, **named)
    rest = kernel.arg_names[len(arguments) :]
    # Triton's interpreter gives None, its compilation on the side a promise that takes no grid, and its own
    # decorators add arguments that are not seen here
    if not hasattr(type(compiled), "__getitem__") or not all(name in named for name in rest):
        _followed.note(None)
    else:
        every = (*arguments, *(named[name] for name in rest))
        _followed.note(_Launch(_followed.name, compiled[(*grid, 1, 1)[:3]], every))


def launcher(function: Callable[P, R]) -> Callable[P, R]:
    """Make a launcher of a function that checks its arguments, makes its results and calls `launch`.

    From the third call with arguments of one kind on, the function itself is skipped: new results, the same
    kernel on the same grid. The kind is everything but the numbers in the tensors: shapes, strides, dtypes,
    alignment, device, which of them begin at one address, and all other arguments. A first call costs nothing
    more than to see that it is one, so that sizes which grow from call to call stay as they were.

    That is done only if this holds for the second call of the kind: one launch; every tensor that it takes is
    an argument of the function or one of its results, each of which is an argument itself or new memory; the
    function calls no other launcher, computes nothing with torch and reads no numbers of a tensor (`tolist`
    and `numpy` go unnoticed: a launcher must not call them); its other arguments are None, bool, int, float,
    str or dtype, also in tuples. A call whose result is an argument that others reach into, one while a
    search or a test watches choices, and one while someone lists launches go the long way. What else is on
    the long way, such as Triton's hooks before a run, is skipped with it; `autotune.forget()` starts anew.
    """
    chosen = tuned(function)
    memory: dict[tuple[Any, ...], _Known[R] | str] = {}

    def forget() -> None:
        # not cleared: a call that is under way keeps what it learns for itself
        nonlocal memory
        memory = {}

    on_forget(forget)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _followed.launches is not None:
            _followed.note(None)
        parts: list[Any] = []
        tensors: list[Tensor] = []
        values = (*args, tuple(kwargs), *kwargs.values())
        if is_watched() or _lists or not _describe(values, parts, tensors) or not tensors:
            return chosen(*args, **kwargs)
        addresses = [x.data_ptr() for x in tensors]
        _describe_addresses(addresses, parts)
        kind, kinds = tuple(parts), memory
        known = kinds.get(kind)
        if isinstance(known, _Known) and not (known.written and known.overlap(addresses)):
            return known.launch(tensors)
        if known is None:
            if len(kinds) >= _MOST_KINDS:
                kinds.clear()
            kinds[kind] = _ONCE
        if known is not _ONCE:
            return chosen(*args, **kwargs)
        result, made = _follow(chosen, args, kwargs)
        # another thread may have begun to watch
        if not is_watched():
            kinds[kind] = _NEVER if made is None else _learn(made, tensors, addresses, result)
        return result

    # the storage of a tensor on an AMD GPU says what Triton compiles for it, which costs too much to ask
    return chosen if torch.version.hip else call


def _describe(values: Iterable[Any], parts: list[Any], tensors: list[Tensor]) -> bool:
    """Add what a launch may depend on, and the tensors in order; False if some value is of no known kind."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            # with its type: 1 == 1.0 == True
            parts += (kind, value)
        elif kind is Tensor or kind is Parameter:
            parts += (value.shape, value.stride(), value.dtype, value.device)
            tensors.append(value)
        elif isinstance(value, tuple):
            parts += (kind, len(value))
            if not _describe(value, parts, tensors):
                return False
        else:
            return False
    return True


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _describe_addresses(addresses: list[int], parts: list[Any]) -> None:
    """Add what Triton asks of addresses, which tensors begin at the same one, and where Triton launches."""
    if _has_gpu():
        parts.append(torch.cuda.current_device())
    bits = 0
    for address in addresses:
        bits |= address
    if bits % 16:
        parts += [address % 16 for address in addresses]
    if len({*addresses}) < len(addresses):
        parts.append(tuple([addresses.index(address) for address in addresses]))


class _Launch(NamedTuple):
    """A launch that was made."""

    name: str | None
    run: Callable[..., None]
    """Triton's launch of the compiled kernel on the grid."""
    arguments: tuple[Any, ...]
    """All of the kernel."""


class _Followed(threading.local):
    """The call that this thread follows, if it follows one."""

    launches: list[_Launch | None] | None = None
    """What it has launched; None for what cannot be used again, such as a call of another launcher."""
    name: str | None = None
    """The op that it has told of."""

    def note(self, launch: _Launch | None) -> None:
        if self.launches is not None:
            self.launches.append(launch)


_followed = _Followed()


def _follow(function: Callable[..., R], args: Any, kwargs: Any) -> tuple[R, _Launch | None]:
    """The result of a call, and its launch if nothing else was done with the numbers of tensors."""
    before, _followed.launches = _followed.launches, []
    _followed.name = None
    try:
        with _Met() as operations:
            result = function(*args, **kwargs)
        launches = _followed.launches
    finally:
        _followed.launches = before
    return result, launches[0] if len(launches) == 1 and not operations.any else None


class _Met(Operations):
    any = False

    def met(self, func: Any) -> None:
        self.any = True


class _Known(NamedTuple, Generic[R]):
    """What a call with arguments of a kind came to, without its tensors."""

    name: str | None
    """The op, if the launcher tells of its launches."""
    run: Callable[..., None]
    arguments: list[Any]
    """Those of the kernel, with None in the places of tensors."""
    places: list[tuple[int, int]]
    """(place among the arguments of the kernel, number among the tensors of a call and its results)"""
    results: list[Any]
    """What makes the memory of each, or the number of the tensor that it is, or None."""
    is_tuple: bool
    written: list[int]
    """The tensors that are results; no other may reach into their memory."""
    sizes: list[int]
    """Bytes that each tensor spans."""

    def overlap(self, addresses: list[int]) -> bool:
        """True if what is written reaches into others, so that the launcher has to look at it."""
        for number in self.written:
            begin, size = addresses[number], self.sizes[number]
            for other, others_size in zip(addresses, self.sizes, strict=True):
                if other != begin and other < begin + size and begin < other + others_size:
                    return True
        return False

    def launch(self, tensors: list[Tensor]) -> R:
        """Launch with other tensors of the kind."""
        results = [r() if callable(r) else r if r is None else tensors[r] for r in self.results]
        arguments, every = self.arguments.copy(), [*tensors, *results]
        for place, number in self.places:
            arguments[place] = every[number]
        if self.name is not None:
            _count(self.name)
        self.run(*arguments)
        return cast(R, tuple(results) if self.is_tuple else results[0])


def _learn(launch: _Launch, tensors: list[Tensor], addresses: list[int], result: R) -> _Known[R] | str:
    """What a call with these tensors came to, if only their memory and that of new results took part."""
    is_tuple = type(result) is tuple
    given: list[Any] = list(cast(Any, result)) if is_tuple else [result]
    numbers = {id(x): number for number, x in enumerate(tensors)}
    if not all(x is None or id(x) in numbers or _is_new(x, addresses) for x in given):
        return _NEVER
    results = [numbers[id(x)] if id(x) in numbers else _maker(x) for x in given]
    arguments, places = list(launch.arguments), []
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor):
            number = _number_of(value, [*tensors, *given])
            if number is None:
                return _NEVER
            arguments[place] = None
            places.append((place, number))
        elif type(value) not in _PLAIN:
            return _NEVER
    new = {len(addresses) + n for n, make in enumerate(results) if callable(make)}
    written = [number for number in results if isinstance(number, int)]
    # the kernel writes all results
    if not new | set(written) or not new <= {number for _, number in places}:
        return _NEVER
    sizes = [spanned(x) for x in tensors]
    return _Known(launch.name, launch.run, arguments, places, results, is_tuple, written, sizes)


def _number_of(x: Tensor, tensors: list[Any]) -> int | None:
    """Which of the tensors begins where x does: x itself or one as long if there are several."""
    there = [n for n, other in enumerate(tensors) if other is not None and other.data_ptr() == x.data_ptr()]
    return min(there, key=lambda n: (tensors[n] is not x, spanned(tensors[n]) != spanned(x)), default=None)


def _is_new(x: Any, addresses: list[int]) -> bool:
    """True for a tensor in memory that no argument begins in and that holds nothing else."""
    if not isinstance(x, Tensor) or x.data_ptr() in addresses:
        return False
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


def _maker(x: Tensor | None) -> Callable[[], Tensor] | None:
    if x is None:
        return None
    return functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
