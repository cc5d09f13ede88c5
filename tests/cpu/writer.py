"""Writes random kernels, each from a seed: chains, broadcasts, reductions, products, masks, loops, branches.

Every number is a small integer, also in tiles of floats, so that results are exact whatever the order.
"""

import random
from dataclasses import dataclass, field

ROW = 8192
"""Elements of each argument that one program may touch."""

POINTERS = ("x_ptr", "y_ptr", "z_ptr", "h_ptr", "i_ptr", "j_ptr")
KIND = {"x_ptr": "f", "y_ptr": "f", "z_ptr": "f", "h_ptr": "f", "i_ptr": "i", "j_ptr": "i"}
TYPES = {"f": "tl.float32", "i": "tl.int32"}

_HELPERS = """
@triton.jit
def squash(x):
    return tl.minimum(tl.maximum(x, -32), 32)


@triton.jit(do_not_specialize=["n0", "n1", "n2", "stride"])
def program(x_ptr, y_ptr, z_ptr, h_ptr, i_ptr, j_ptr, n0, n1, n2, stride):
"""


@dataclass(frozen=True)
class Tile:
    """A variable: its shape as letters (MN, NM, M1, 1N, V, or S: a scalar), f or i, and for f a bound."""

    name: str
    shape: str
    kind: str
    bound: int = 32


@dataclass
class Writer:
    """Writes one program; `tiles` are the variables in scope."""

    seed: int
    lines: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    depth: int = 1
    count: int = 0
    loops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.M = self.random.choice([1, 2, 4, 8, 16, 16, 32])
        self.N = self.random.choice([1, 2, 8, 16, 16, 32, 64]) if self.random.random() < 0.6 else self.M
        self.sizes = {"M": self.M, "N": self.N, "1": 1}

    # ---- text

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def fresh(self, prefix: str = "t") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def define(self, text: str, shape: str, kind: str, bound: int = 32) -> Tile:
        """A new variable; one whose numbers may become large is cut back."""
        if kind == "f" and bound > 1 << 15:
            text, bound = f"squash({text})", 32
        tile = Tile(self.fresh(), shape, kind, bound)
        self.line(f"{tile.name} = {text}")
        self.tiles.append(tile)
        return tile

    def pick(self, shapes: str = "MN M1 1N", kind: str = "fi") -> Tile:
        """A variable in scope, loaded if there is none; recent ones are taken more often."""
        found = [t for t in self.tiles if t.shape in shapes.split() and t.kind in kind]
        if not found or self.random.random() < 0.15:
            return self.load(self.random.choice(shapes.split()), self.random.choice(kind))
        tile = found[-1 - min(int(self.random.expovariate(0.5)), len(found) - 1)]
        if len(found) > 1 and self.random.random() < 0.2:
            # not used again: its array may be written over
            self.tiles.remove(tile)
        return tile

    # ---- addresses and masks

    def address(self, shape: str) -> str:
        """Distinct positions for the elements of a tile, all below ROW - 99."""
        if shape == "V":
            return self.random.choice(["v", f"{self.M * self.N - 1} - v", "v + n0"])
        rows, columns = ({"M": "m", "N": "n", "1": "0"}[letter] for letter in shape)
        if shape == "NM":
            rows, columns = "k", "l"
        height, width = self.sizes[shape[0]], self.sizes[shape[1]]
        forms = [
            f"{rows} * {width} + {columns}", f"{rows} * {width + 3} + {columns}",
            f"{rows} * stride + {columns}",
            f"{columns} * {height} + {rows}", f"{columns} * stride + {rows}",
            f"({height - 1} - {rows}) * {width} + ({width - 1} - {columns})",
            f"2 * ({rows} * {width} + {columns})",
        ]  # fmt: skip
        if width > 1:
            forms.append(f"{rows} * {width} + ({columns} ^ 1)")
        shift = self.random.choice(["", "", " + 5", " + n1", *(f" + {i}" for i in self.loops)])
        return self.random.choice(forms) + shift

    def mask(self, shape: str) -> str:
        if shape == "V":
            forms = ["v < n2 * 9", "v >= n1", "(v >= n0) & (v < 40)", "v % 3 == 1"]
        else:
            m, n = {"NM": ("k", "l")}.get(shape, ({"M": "m", "N": "n", "1": "n0"}[c] for c in shape))
            bounds = ["n0", "n1", "n2", "7", "n0 + n1", *self.loops]
            a, b = self.random.choice(bounds), self.random.choice(bounds)
            forms = [
                f"{m} < {a}", f"{n} < {a}", f"{n} >= {a}", f"({m} < {a}) & ({n} < {b})",
                f"({n} >= {a}) & ({n} < {b})", f"{m} >= {n}", f"{n} <= {m} + {a}", f"{m} + {n} < {a}",
                f"({m} < {a}) | ({n} >= {b})", f"~(({n} < {a}) & ({m} >= {b}))", f"{n} * stride < {a} * 9",
                f"({a} < {b}) & ({n} < {a})", f"{m} * {self.N} + {n} < {a} * 11", f"({n} + {a}) % 2 == 0",
                f"({n} != {a}) & ({m} < {b})",
            ]  # fmt: skip
        text = self.random.choice(forms)
        if shape in ("MN", "NM") and self.random.random() < 0.15:
            x = self.pick(shape, "i")
            text = f"({text}) & ({x.name} > {self.random.randint(-9, 9)})"
        return text

    # ---- statements

    def load(self, shape: str, kind: str) -> Tile:
        pointer = self.random.choice([p for p in POINTERS if KIND[p] == kind])
        if shape == "S":
            place = self.random.choice(["3", "n0", "n1 * 5"])
            return self.define(f"cast(tl.load({pointer} + {place}), {TYPES[kind]})", "S", kind)
        address = self.address(shape)
        if self.random.random() < 0.1 and shape == "MN":
            rows = self.pick("M1", "i")
            address = f"({rows.name} & 15) * {self.N} + n"
        masked = ""
        if self.random.random() < 0.6:
            other = str(self.random.randint(-5, 5))
            same = [t for t in self.tiles if t.shape == shape and t.kind == kind]
            if same and pointer != "h_ptr" and self.random.random() < 0.3:
                other = self.random.choice(same).name
            masked = f", mask={self.mask(shape)}, other={other}"
        return self.define(f"cast(tl.load({pointer} + ({address}){masked}), {TYPES[kind]})", shape, kind)

    def elementwise(self) -> None:
        kind = self.random.choice("ffi")
        a = self.pick("MN M1 1N V NM", kind)
        partners = {"MN": "MN M1 1N", "M1": "MN M1 1N", "1N": "MN M1 1N", "V": "V", "NM": "NM"}[a.shape]
        b = self.pick(partners, kind)
        shape = a.shape if a.shape == b.shape else "MN"
        x, y = a.name, b.name
        forms = {
            f"{x} + {y}": a.bound + b.bound, f"{x} - {y}": a.bound + b.bound, f"{x} * {y}": a.bound * b.bound,
            f"tl.maximum({x}, {y})": max(a.bound, b.bound), f"tl.minimum({x}, {y})": max(a.bound, b.bound),
            f"tl.where({x} < {y}, {x}, {y} + 1)": max(a.bound, b.bound) + 1,
        }  # fmt: skip
        if kind == "i":
            forms |= {f"({x} & {y})": 0, f"({x} ^ ({y} >> 2))": 0, f"({x} | {y})": 0, f"{x} - ({y} << 3)": 0}
        if kind == "f" and shape == "MN":
            forms[f"tl.where({self.mask('MN')}, {x}, {y})"] = max(a.bound, b.bound)
        text = self.random.choice(list(forms))
        self.define(text, shape, kind, forms[text])

    def unary(self) -> None:
        a = self.pick("MN M1 1N V NM")
        forms = [f"-{a.name}", f"tl.abs({a.name})", f"{a.name} * 3", f"{a.name} + n1", f"{a.name} * {a.name}"]
        text, bound = self.random.choice(forms), max(3, a.bound) * max(3, a.bound) + 9
        if a.kind == "f" and self.random.random() < 0.3:
            half = self.random.choice(["bfloat16", "float16"])
            text, bound = f"cast(cast(squash({a.name}), tl.{half}), tl.float32)", 32
        elif self.random.random() < 0.2:
            other = "i" if a.kind == "f" else "f"
            inner = a.name if a.kind == "f" else f"({a.name} & 31)"
            self.define(f"cast({inner}, {TYPES[other]})", a.shape, other)
            return
        self.define(text, a.shape, a.kind, bound)

    def reduce(self) -> None:
        fold = self.random.choice(["sum", "max", "min"])
        if self.random.random() < 0.25:
            a = self.pick("V MN")
            self.define(
                f"tl.{fold}({a.name})", "S", a.kind, a.bound * (self.M * self.N if fold == "sum" else 1)
            )
            return
        a, axis = self.pick("MN"), self.random.choice([0, 1])
        fold = "xor_sum" if a.kind == "i" and self.random.random() < 0.3 else fold
        bound = a.bound * ((self.N if axis else self.M) if fold == "sum" else 1)
        self.define(f"tl.{fold}({a.name}, {axis}, keep_dims=True)", "M1" if axis else "1N", a.kind, bound)

    def move(self) -> None:
        a = self.pick("MN NM V")
        if a.shape == "V" and self.M * self.N > 1 and self.random.random() < 0.5:
            b, c = self.fresh("s"), self.fresh("s")
            self.line(f"{b}, {c} = tl.split(tl.reshape({a.name}, ({self.M * self.N // 2}, 2)))")
            self.define(
                f"tl.reshape(tl.join({c} - 1, {b} + {c}), ({self.M * self.N},))", "V", a.kind, 2 * a.bound + 1
            )
        elif a.shape == "V":
            self.define(f"tl.reshape({a.name}, ({self.M}, {self.N}))", "MN", a.kind, a.bound)
        elif self.random.random() < 0.5:
            self.define(f"tl.trans({a.name})", a.shape[::-1], a.kind, a.bound)
        elif a.shape == "MN" and self.random.random() < 0.5:
            self.define(f"tl.reshape({a.name}, ({self.M * self.N},))", "V", a.kind, a.bound)
        elif self.random.random() < 0.5:
            self.define(f"tl.flip({a.name}, {self.random.choice([0, 1])})", a.shape, a.kind, a.bound)
        else:
            axis, reverse = self.random.choice([0, 1]), self.random.choice([False, True])
            text = f"tl.cumsum({a.name}, {axis}, reverse={reverse})"
            self.define(text, a.shape, a.kind, a.bound * max(self.M, self.N))

    def product(self) -> None:
        a, b = self.pick("MN", "f"), self.pick("NM", "f")
        left, right = f"squash({a.name})", f"squash({b.name})"
        if self.random.random() < 0.4:
            half = self.random.choice(["bfloat16", "float16"])
            left, right = f"cast({left}, tl.{half})", f"cast({right}, tl.{half})"
        elif a.bound <= 32 and b.bound <= 32:
            left, right = a.name, b.name
        acc = self.fresh("p")
        self.line(f"{acc} = tl.dot({left}, {right}, input_precision='ieee')")
        if self.M == self.N:
            c = a if self.random.random() < 0.4 else self.pick("MN", "f")
            start = self.random.choice([c.name, f"{c.name} * 2"])
            text = f"tl.dot({left}, {right}, {start}, input_precision='ieee')"
            self.define(text, "MN", "f", 2 * c.bound + (1 << 16))
        self.define(f"tl.sum({acc}, 1, keep_dims=True)", "M1", "f", 1 << 17)

    def store(self) -> None:
        a = self.pick("MN MN M1 1N V NM")
        pointer = self.random.choice([p for p in POINTERS if KIND[p] == a.kind])
        value = f"squash({a.name})" if a.kind == "f" else f"({a.name} & 31)"
        masked = f", mask={self.mask(a.shape)}" if self.random.random() < 0.5 else ""
        if a.kind == "i" and self.random.random() < 0.2:
            self.line(f"tl.atomic_add({pointer} + ({self.address(a.shape)}), {value}{masked})")
        else:
            self.line(f"tl.store({pointer} + ({self.address(a.shape)}), {value}{masked})")
        if self.random.random() < 0.2:
            self.line("tl.debug_barrier()")

    # ---- blocks

    def reassign(self, outer: list[Tile]) -> None:
        """Give variables from outside new values at the end of a block, some of them swapped."""
        targets = self.random.sample(outer, min(len(outer), self.random.randint(1, 3)))
        values = []
        for target in targets:
            same = [t for t in self.tiles if t.shape == target.shape and t.kind == target.kind]
            a, b = self.random.choice(same).name, self.random.choice(same).name
            text = self.random.choice([a, f"{a} + {b}", f"{a} - {b}", f"tl.maximum({a}, {b})"])
            if target.shape == "MN" and self.M == self.N and self.random.random() < 0.3:
                text = f"tl.trans({text})"
            # what a block carries stays bounded however often it runs
            values.append(f"squash({text})" if target.kind == "f" else text)
        self.line(f"{', '.join(t.name for t in targets)} = {', '.join(values)}")

    def carried(self) -> list[Tile]:
        return [t for t in self.tiles if t.kind == "i" or t.bound >= 32]

    def block(self, size: int, loop: str | None = None) -> None:
        """Statements in an inner scope."""
        kept, loops = list(self.tiles), self.loops
        self.depth += 1
        self.loops += (loop,) if loop else ()
        for tile in self.random.sample(kept, min(2, len(kept))) if loop else ():
            # an array from outside that every iteration reads anew
            self.define(f"{tile.name} + {loop}", tile.shape, tile.kind, tile.bound + 9)
        for _ in range(size):
            self.statement()
        outer = [t for t in kept if t in self.carried()]
        if outer:
            self.reassign(outer)
        else:
            self.line("pass")
        self.depth -= 1
        self.tiles, self.loops = kept, loops

    def loop(self) -> None:
        kind, size = (
            self.random.choice(["for", "for", "static", "while", "pointers"]),
            self.random.randint(1, 4),
        )
        if kind == "while":
            k = self.fresh("k")
            self.line(f"{k} = 0")
            self.line(f"while {k} < n1:")
            self.block(size)
            self.lines.append("    " * (self.depth + 1) + f"{k} += 1")
            return
        i = self.fresh("i")
        if kind == "pointers":
            p = self.fresh("p")
            self.line(f"{p} = x_ptr + ({self.address('MN')})")
        counts = {"static": "tl.static_range(2)"}.get(kind) or self.random.choice(
            ["range(n0)", "range(0, n2, 2)"]
        )
        self.line(f"for {i} in {counts}:")
        outside = list(self.tiles)
        if kind == "pointers":
            self.depth += 1
            name = self.fresh()
            self.line(f"{name} = tl.load({p}, mask={self.mask('MN')}, other=1)")
            self.depth -= 1
            self.tiles.append(Tile(name, "MN", "f"))
            self.block(size, i)
            self.tiles = outside
            self.lines.append("    " * (self.depth + 1) + f"{p} += {self.random.choice(['2', 'n1', '16'])}")
        else:
            self.block(size, i)

    def branch(self) -> None:
        if self.random.random() < 0.3:
            a = self.pick("S")
            self.line(f"if {a.name} > 0:")
        else:
            self.line(f"if n{self.random.randint(0, 2)} > {self.random.randint(0, 5)}:")
        self.block(self.random.randint(1, 3))
        if self.random.random() < 0.6:
            self.line("else:")
            self.block(self.random.randint(1, 3))

    def statement(self) -> None:
        choices = [self.elementwise] * 7 + [self.unary] + [self.reduce] * 3 + [self.move] * 3
        choices += [self.store] * 3 + [self.product] + [lambda: self.pick("MN")]
        if self.depth < 3:
            choices += [self.loop] * 2 + [self.branch] * 2
        self.random.choice(choices)()

    def text(self) -> str:
        """The source of the whole program."""
        self.line("row = tl.program_id(0) * 8192")
        for pointer in POINTERS:
            self.line(f"{pointer} += row")
        self.line(f"m = tl.arange(0, {self.M})[:, None]")
        self.line(f"n = tl.arange(0, {self.N})[None, :]")
        self.line(f"k = tl.arange(0, {self.N})[:, None]")
        self.line(f"l = tl.arange(0, {self.M})[None, :]")
        self.line(f"v = tl.arange(0, {self.M * self.N})")
        for shape, kind in (("MN", "f"), ("MN", "i"), ("1N", "f")):
            self.load(shape, kind)
        for _ in range(self.random.randint(6, 18)):
            self.statement()
        for tile in self.tiles[-6:]:
            value = f"squash({tile.name})" if tile.kind == "f" else tile.name
            pointer = "z_ptr" if tile.kind == "f" else "j_ptr"
            address = "9" if tile.shape == "S" else self.address(tile.shape)
            self.line(f"tl.store({pointer} + ({address}), {value})")
        return _HELPERS + "\n".join(self.lines) + "\n"
