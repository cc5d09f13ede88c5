"""Where the time of a decode step goes: time and bytes of every kernel, against the rate of memory."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trinfer import backend, graphs
from trinfer.kernels import list_launches
from trinfer.kernels.op import nbytes
from trinfer.rewrite.plan import Row, aligned, html_table

HEADER = ("kernel", "launches", "us", "share", "MB", "GB/s", "of memory bound")


@dataclass(frozen=True)
class KernelTime:
    """All launches of one op in a step: microseconds and bytes together.

    `nbytes` counts weights, hidden states and the valid keys and values; 0 for what reads next to nothing.
    """

    op: str
    launches: int
    us: float
    nbytes: int


@dataclass(frozen=True, repr=False)
class Profile:
    """The kernels of one decode step, the slowest first; prints as a table, `draw` makes a picture.

    `read_gbps` is what a plain sum reads from memory on this device: a kernel that only reads can be as fast.
    """

    title: str
    kernels: tuple[KernelTime, ...]
    read_gbps: float

    @property
    def us(self) -> float:
        """Microseconds of a step."""
        return sum(kernel.us for kernel in self.kernels)

    @property
    def share_of_bound(self) -> float:
        """Time that reading all bytes at `read_gbps` would take, as a share of the step."""
        return sum(kernel.nbytes for kernel in self.kernels) / self.read_gbps / 1e3 / self.us

    def rows(self) -> Iterator[Row]:
        """Cells of the table."""
        total = KernelTime(
            "step", sum(k.launches for k in self.kernels), self.us, sum(k.nbytes for k in self.kernels)
        )
        for k in (*self.kernels, total):
            rate = k.nbytes / k.us / 1e3
            numbers = (f"{k.us:.1f}", f"{k.us / self.us:.1%}", f"{k.nbytes / 1e6:.2f}")
            bound = (f"{rate:.1f}", f"{rate / self.read_gbps:.1%}") if k.nbytes else ("", "")
            yield (k.op, str(k.launches), *numbers, *bound)

    def __str__(self) -> str:
        heading = f"{self.title}; memory reads {self.read_gbps:.1f} GB/s"
        return f"{heading}\n\n{aligned(HEADER, list(self.rows()))}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heading = f"<p>{self.title}; memory reads {self.read_gbps:.1f} GB/s</p>"
        return heading + html_table(HEADER, list(self.rows()))

    def draw(self, path: str | Path | None = None) -> Any:
        """A matplotlib figure: a bar a kernel, and how much of it the bytes would take; saved to `path`."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 1 + 0.45 * len(self.kernels)), layout="constrained")
        axes = figure.add_subplot()
        names = [f"{k.op} x {k.launches}" for k in self.kernels]
        axes.barh(names, [k.us for k in self.kernels], color="lightsteelblue", label="measured")
        floors = [k.nbytes / self.read_gbps / 1e3 for k in self.kernels]
        axes.barh(names, floors, height=0.4, color="tab:blue", label="its bytes at the rate of memory")
        axes.invert_yaxis()
        axes.set_xlabel("microseconds of a step")
        axes.set_title(self.title, fontsize="medium")
        axes.legend()
        if path is not None:
            figure.savefig(path, dpi=100, metadata={"Software": None})
        return figure


def profile_step(model: nn.Module, decoder: Any, rows: int, tokens: int, repeats: int = 5) -> Profile:
    """Time the launches of a decode step of `rows` sequences behind `tokens` tokens each; medians of repeats.

    Args:
        model: the model that `decoder` decodes.
        decoder: a `step.Decoder`.
    """
    cache = decoder.store.lend(rows, tokens + repeats + 2)
    decoder.begin(model, cache, rows)
    ids = torch.ones(rows, tokens, dtype=torch.int64, device=decoder.workspace.token.device)
    decoder.prefill(ids, ids, None, None, tokens + repeats + 1)
    with list_launches() as launches:
        decoder.launch(0, False)()
    runs = graphs.profile(decoder.launch(0, False), repeats)
    names = [name for name, _ in launches]
    if any(len(run) != len(names) for run in runs):
        raise RuntimeError(
            f"a step made {len(names)} launches and {sorted({len(run) for run in runs})} were timed"
        )
    totals: dict[str, list[float]] = {}
    for index, (name, tensors) in enumerate(launches):
        total = totals.setdefault(name, [0, 0.0, 0])
        total[0] += 1
        total[1] += statistics.median(run[index][1] for run in runs)
        total[2] += _bytes(name, tensors, tokens)
    kernels = [KernelTime(name, int(n), us, int(size)) for name, (n, us, size) in totals.items()]
    kernels.sort(key=lambda kernel: -kernel.us)
    title = (
        f"{type(model).__name__}, one step of {rows} x {tokens} tokens on {backend.device_slug(ids.device)}"
    )
    return Profile(title, tuple(kernels), backend.read_gbps(ids.device))


def _bytes(name: str, tensors: tuple[Any, ...], tokens: int) -> int:
    if name != "decode_attention":
        return nbytes(*tensors)
    q, keys, values, *others = tensors
    # of the cache only what is valid is read
    return nbytes(q, keys[:, :, :tokens], values[:, :, :tokens], *others[2:3])
