"""What becomes of each module of a model: named by its row, read from its code, or known by its class."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from trinfer.architectures import ARCHITECTURES, Arch
from trinfer.rewrite import generic, match, read_moe, whole
from trinfer.rewrite.plan import Kept, Step


def find_swaps(model: nn.Module, arch: Arch | None, read: generic.Reading) -> tuple[list[Step], list[Kept]]:
    """Swaps and kept parts: what the row names, what was read, then every plain torch module left over."""
    found = _Findings(model)
    if arch is None:
        found.kept.update((entry.path, entry) for entry in read.kept)
    for row in rows_of(arch):
        found.parts(_named_by_row(model, row))
    for path in read.untouched:
        found.keep(path, "moe.enabled=False")
        found.covered.update(_below(model, path))
    found.read([*read.moe.items(), *_rest(model, arch, read, found.taken)])
    found.layers(_layers(model, arch))
    for path, was, why in _left_to_the_model(model, arch):
        found.kept.setdefault(path, Kept(path, was, why))
    found.plain({path: role for row in rows_of(arch) for path, role in _roles(model, row).items()})
    order = [path for path, _ in model.named_modules()]
    swaps = [found.swaps[path] for path in order if path in found.swaps]
    return swaps, [found.kept[path] for path in order if path in found.kept]


class _Findings:
    """What becomes of each module of a model, by path; `covered` are those that nothing calls any more."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.swaps: dict[str, Step] = {}
        self.kept: dict[str, Kept] = {}
        self.covered: set[str] = set()

    @property
    def taken(self) -> set[str]:
        """Modules that have been decided about."""
        return {*self.swaps, *self.kept, *self.covered}

    def keep(self, path: str, why: str) -> None:
        """Leave a module as it is."""
        self.kept[path] = Kept(path, type(self.model.get_submodule(path)).__name__, why)

    def swap(self, path: str, found: match.Found, why: str) -> None:
        """Give a module a new forward."""
        was = type(self.model.get_submodule(path)).__name__
        self.swaps[path] = Step(path, was, found.text, why, found.forward, found.record)

    def parts(self, named: Iterable[tuple[str, nn.Module, match.Reader, str]]) -> None:
        """What a row names."""
        for path, module, reader, why in named:
            refusal = match.obstacle(module, reader.arch.foreign) or match.bypassed(module, reader.bypasses)
            found = refusal or reader(module)
            if isinstance(found, str):
                self.keep(path, found)
                continue
            self.swap(path, found, why)
            if reader.bypasses:
                self.covered.update(_below(self.model, path))

    def read(self, parts: Iterable[tuple[str, match.Found | str]]) -> None:
        """What was read from the code of modules."""
        for path, found in parts:
            if isinstance(found, str):
                if path not in self.kept:
                    self.keep(path, found)
                continue
            self.kept.pop(path, None)
            self.swap(path, found, found.why)
            if found.forward in generic.BYPASSING:
                self.covered.update(_below(self.model, path))

    def layers(self, layers: Iterable[tuple[str, nn.Module, Arch]]) -> None:
        """Whole layers; their parts stay swapped, for calls that they cannot take."""
        for path, module, row in layers:
            found = whole.layer(module, row)
            if isinstance(found, str):
                self.keep(path, f"{found}: {_around_the_parts(module, row)}")
            else:
                self.swap(path, found, f"row {row.model_type}: whole layer")

    def plain(self, roles: dict[str, str]) -> None:
        """Every plain torch module that is left over."""
        for path, module in self.model.named_modules():
            if path in self.covered or path in self.swaps:
                continue
            entry = _plain(path, module, roles.get(path, ""))
            if isinstance(entry, Step):
                self.swaps[path] = entry
                self.kept.pop(path, None)
            elif entry is not None:
                self.kept.setdefault(path, entry)


def _below(model: nn.Module, path: str) -> Iterator[str]:
    """Paths of everything inside the module at `path`."""
    return (f"{path}.{name}" for name, _ in model.get_submodule(path).named_modules() if name)


def names_residual(row: object) -> bool:
    """True for a row that names the dense branch of a residual layer and the linear of the shares."""
    return isinstance(row, Arch) and bool(row.dense_branch and row.coefficient)


def _rest(
    model: nn.Module, arch: Arch | None, read: generic.Reading, taken: set[str]
) -> Iterator[tuple[str, match.Found | str]]:
    """What was read of the parts that no row names."""
    if arch is not None and names_residual(arch):
        for layer in _children(model, _join(backbone(model, arch), arch.layers)):
            if _find(model, f"{layer}.{arch.experts}") is not None:
                path = f"{layer}.{arch.mlp}"
                yield path, read_moe.read_residual(model.get_submodule(path), arch, read.probes)
    if arch is None or arch.experts:
        yield from read.rest(model, taken)


def _named_by_row(model: nn.Module, arch: Arch) -> Iterator[tuple[str, nn.Module, match.Reader, str]]:
    root = backbone(model, arch)
    why = f"row {arch.model_type}"
    for layer in _children(model, _join(root, arch.layers)):
        for name, reader in match.readers(arch):
            path = f"{layer}.{name}"
            module = _find(model, path)
            if module is not None and match.computes(module):
                yield path, module, reader, f"{why}: {reader.role}"
    final = _join(root, arch.final_norm)
    if arch.final_norm and arch.norms and (module := _find(model, final)) is not None:
        yield final, module, match.norm_reader(arch), f"{why}: final norm"


def _layers(model: nn.Module, arch: Arch | None) -> Iterator[tuple[str, nn.Module, Arch]]:
    for row in rows_of(arch):
        for path in _children(model, _join(backbone(model, row), row.layers)):
            yield path, model.get_submodule(path), row


def _plain(path: str, module: nn.Module, role: str) -> Step | Kept | None:
    """A swap of one torch module by its exact class; None for containers and what computes nothing here."""
    found = match.plain(module)
    if found is None:
        is_container = any(True for _ in module.children()) or not match.computes(module)
        return None if is_container else Kept(path, type(module).__name__, "no kernel for this class")
    refusal = found if isinstance(found, str) else match.obstacle(module)
    if refusal:
        return Kept(path, type(module).__name__, refusal)
    assert not isinstance(found, str)
    return Step(path, type(module).__name__, found.text, role or found.why, found.forward, found.record)


def _roles(model: nn.Module, arch: Arch) -> dict[str, str]:
    """What the row says of single modules outside the layers, by path."""
    root = backbone(model, arch)
    named = {
        "token embedding": arch.embedding,
        "position embedding": arch.positions,
        "token type embedding": arch.token_types,
        "embedding norm": arch.embedding_norm,
    }
    paths = {_join(root, path): role for role, path in named.items() if path} | {arch.head: "head"}
    return {path: f"row {arch.model_type}: {role}" for path, role in paths.items()}


def _left_to_the_model(model: nn.Module, arch: Arch | None) -> Iterator[tuple[str, str, str]]:
    """(path, class, why) of modules that keep a forward of torch ops around the kernels."""
    apart = "attention and whole MLPs stay the model's own code"
    if arch is None:
        what = f"no row for model_type {model_type(model)!r} in trinfer.ARCHITECTURES"
        yield "", type(model).__name__, f"{what}: its parts were read one by one"
    for row in rows_of(arch):
        yield from _left_by_row(model, row, apart)


def _left_by_row(model: nn.Module, arch: Arch, apart: str) -> Iterator[tuple[str, str, str]]:
    root = backbone(model, arch)
    tables = _join(root, arch.embedding.rpartition(".")[0])
    whys = {}
    if arch.rotary_table:
        whys[_join(root, arch.rotary_table)] = "cos and sin are made once per forward, in torch"
    if arch.positions:
        whys[tables] = "adds its tables in torch"
    if not any(True for _ in _layers(model, arch)):
        whys[""] = f"row {arch.model_type} looks for layers at {_join(root, arch.layers)!r}: {apart}"
    for path, why in whys.items():
        module = _find(model, path)
        if module is not None:
            yield path, type(module).__name__, why


def _around_the_parts(layer: nn.Module, arch: Arch) -> str:
    """What a layer itself does, and where it differs from its row."""
    names = [name for name, _ in match.readers(arch)]
    missing = [name for name in names if _find(layer, name) is None]
    named = {name.split(".")[0] for name in (*names, arch.gate, arch.up, arch.down, arch.activation)}
    children = [name for name, child in layer.named_children() if match.computes(child)]
    strange = [name for name in children if name not in named]
    differs = f"has no {', '.join(missing)}; " if missing else ""
    if strange:
        differs += f"has {', '.join(strange)}, which the row does not name, swapped module by module; "
    hands_on = arch.attention_adds_residual or arch.mlp_adds_residual or not arch.mlp
    glue = "hands hidden states from part to part" if hands_on else "adds the residuals"
    return f"{differs}{glue} in torch"


def rows_of(arch: Arch | None) -> Iterator[Arch]:
    """The row of a model, then that of its decoder."""
    while arch is not None:
        yield arch
        arch = arch.decoder


def row_of(seen: Any) -> Arch | None:
    """The row for a model with this configuration."""
    row = ARCHITECTURES.get(getattr(seen, "model_type", ""))
    return row.resolved(seen) if row else None


def model_type(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", "")


def backbone(model: nn.Module, arch: Arch) -> str:
    return arch.backbone if _find(model, arch.backbone) is not None else ""


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _children(model: nn.Module, path: str) -> Iterator[str]:
    parent = _find(model, path)
    for name, _ in parent.named_children() if parent is not None else ():
        yield f"{path}.{name}"
